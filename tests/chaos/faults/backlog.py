"""Event streams that are full, lose their consumer group, or are deleted."""

from __future__ import annotations

import signal
import time

import httpx

from metaban.store.keys import LEARNERS, NamespaceKeys
from tests.chaos.clients import Client, Event, SentEvents
from tests.chaos.deployment import Deployment, wait_until
from tests.chaos.run import Run
from tests.chaos.store_audit import backlog, call, load_record, read_store

BACKLOG_LIMIT = 40


def fill_backlog(run: Run) -> None:
    """Fill the streams without workers until events are refused with 503; a worker later applies all of them."""
    sent = SentEvents()
    rounds = 0
    with run.deployment(workers=1, settings={"METABAN_BACKLOG_LIMIT": str(BACKLOG_LIMIT)}) as deployment:
        deployment.start()
        client = Client(sent, deployment.urls, run.rng)
        while run.going() or not rounds:
            deployment.workers[0].kill()
            refused = _until_refused(run, deployment, client, round_number=rounds)
            waiting = backlog(deployment.valkey.client, _keys(deployment))
            run.expect(waiting > BACKLOG_LIMIT, f"{waiting} events wait where {BACKLOG_LIMIT} in each partition may")
            deployment.workers[0].start()
            for event in refused:
                client.send([event])
            rounds += 1
        client.close()
        run.audit_store(deployment, sent)
    run.expect(sent.refused, "nothing was ever refused")
    run.note(f"{sent.refused} refused with 503 and Retry-After in {rounds} rounds")


def _until_refused(run: Run, deployment: Deployment, client: Client, *, round_number: int) -> list[Event]:
    """Fill every partition; returns the refused events."""
    keys = _keys(deployment)
    refused: dict[int, Event] = {}
    number = 0
    with httpx.Client(base_url=deployment.urls()[0], timeout=30) as http:
        while len(refused) < keys.partitions:
            number += 1
            user = f"u{round_number}-{number % 24}"
            partition = keys.partition_of(user)
            if partition in refused:
                continue
            for event in client.events_of(client.recommend(user)):
                answer = http.post("/feedback", json=event.body())
                event.sends += 1
                if answer.status_code == httpx.codes.ACCEPTED:
                    event.acknowledged_at = time.monotonic()
                    continue
                run.expect(
                    answer.status_code == 503 and answer.headers.get("Retry-After", "").isdigit(),
                    f"a full backlog was answered with {answer.status_code}, {dict(answer.headers)}",
                )
                refused.setdefault(partition, event)
                if refused[partition] is not event:
                    event.void = True
                length = int(call(deployment.valkey.client, "XLEN", keys.events(partition)))
                run.expect(length == BACKLOG_LIMIT, f"refused with {length} of {BACKLOG_LIMIT} events waiting")
                client.sent.tally(refused=1)
    return list(refused.values())


def destroy_groups(run: Run) -> None:
    """XGROUP DESTROY under load: the group is created again; every event is applied once."""
    sent = SentEvents()
    destroyed = 0
    with run.deployment(workers=2) as deployment:
        deployment.start()
        client = deployment.valkey.client
        with run.load(deployment, sent, pace_s=0.002):
            wait_until(lambda: len(sent.acknowledged()) > 20, "clients are at work")
            keys = _keys(deployment)
            while run.going() or destroyed < 5:
                key = keys.events(run.rng.randrange(keys.partitions))
                destroyed += int(call(client, "XGROUP", "DESTROY", key, LEARNERS))
                time.sleep(run.rng.uniform(0, 0.2))
        run.expect(all(node.alive for node in deployment.workers), "a worker ended when its group was destroyed")
        run.row.kills += destroyed
        run.audit_store(deployment, sent)
    run.note(f"{destroyed} groups destroyed")


def empty_store(run: Run) -> None:
    """FLUSHALL: all processes report it, no reward is acknowledged, and a restart begins with an empty store."""
    sent = SentEvents(may_lose=True)
    with run.deployment(servers=2, workers=2) as deployment:
        deployment.start()
        client = Client(sent, deployment.urls, run.rng)
        before = [event for number in range(20) for event in client.events_of(client.recommend(f"u{number % 5}"))]
        for event in before:
            client.send([event])
        asked = client.recommend("u0")
        deployment.valkey.client.flushall()
        _expect_alarms(run, deployment, asked.decision_id)
        wait_until(lambda: not any(node.alive for node in deployment.workers), "the workers end")
        said = [node.child.status for node in deployment.workers if node.child]
        run.expect(said == [1, 1], f"the workers ended with {said}")
        contents = read_store(deployment.valkey.client)
        run.expect(not contents.users and not contents.waiting, "users or events are back after FLUSHALL")
        for node in deployment.servers:
            node.send(signal.SIGTERM)
        wait_until(lambda: not any(node.alive for node in deployment.servers), "the servers stop")
        deployment.start()
        after = SentEvents()
        second_client = Client(after, deployment.urls, run.rng)
        for number in range(20):
            for event in second_client.events_of(second_client.recommend(f"u{number % 5}")):
                second_client.send([event])
        for one in (client, second_client):
            one.close()
        run.audit_store(deployment, after)


def _expect_alarms(run: Run, deployment: Deployment, decision_id: str) -> None:
    urls = deployment.urls()
    wait_until(
        lambda: {httpx.get(f"{url}/health/ready").status_code for url in urls} == {503}, "the servers are not ready"
    )
    for url in urls:
        old = httpx.post(f"{url}/feedback", json={"decision_id": decision_id, "reward": 0.5})
        run.expect(old.status_code in (404, 503), f"a reward of before FLUSHALL got {old.status_code}")
        # A decision may still be made without the store, but no reward may be acknowledged.
        arms = [{"id": "a", "features": [0.0, 0.1, 0.2]}, {"id": "b", "features": [0.3, 0.1, 0.2]}]
        asked = httpx.post(f"{url}/recommend", json={"user_id": "u1", "arms": arms})
        run.expect(asked.status_code in (200, 503), f"a question after FLUSHALL got {asked.status_code}")
        if asked.status_code == 200:
            body = {"decision_id": asked.json()["decision_id"], "reward": 0.5}
            new = httpx.post(f"{url}/feedback", json=body)
            refused = new.status_code == 404 or (new.status_code == 503 and "Retry-After" in new.headers)
            run.expect(refused, f"a reward after FLUSHALL got {new.status_code}: {new.text[:200]}")


def _keys(deployment: Deployment) -> NamespaceKeys:
    record = load_record(deployment.valkey.client)
    if record is None:
        raise RuntimeError("there is no namespace")
    return record.keys
