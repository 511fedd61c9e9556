"""Streams that are full, that lose their readers, or that are gone."""

from __future__ import annotations

import signal
import time

import httpx

from store.keys import LEARNERS, NamespaceKeys
from tests.chaos.auditor import backlog, call, load_record, read_books
from tests.chaos.deployment import Deployment, wait_until
from tests.chaos.ledger import Client, Event, Ledger
from tests.chaos.run import Run

BACKLOG_LIMIT = 40


def fill_backlog(run: Run) -> None:
    """Without workers, until events are refused with 503; nothing is trimmed, and a worker learns all of it later."""
    ledger = Ledger()
    rounds = 0
    with run.deployment(workers=1, settings={"METABAN_BACKLOG_LIMIT": str(BACKLOG_LIMIT)}) as deployment:
        deployment.start()
        client = Client(ledger, deployment.urls, run.rng)
        while run.going() or not rounds:
            deployment.workers[0].kill()
            refused = _until_refused(run, deployment, client, round_number=rounds)
            waiting = backlog(deployment.valkey.client, _keys(deployment))
            run.expect(waiting > BACKLOG_LIMIT, f"{waiting} events wait where {BACKLOG_LIMIT} in each partition may")
            deployment.workers[0].start()
            for event in refused:
                client.tell([event])
            rounds += 1
        client.close()
        run.close_books(deployment, ledger)
    run.expect(ledger.refused, "nothing was ever refused")
    run.note(f"{ledger.refused} refused with 503 and Retry-After in {rounds} rounds")


def _until_refused(run: Run, deployment: Deployment, client: Client, *, round_number: int) -> list[Event]:
    """Fill every partition; the events that found no room."""
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
            for event in client.events_of(client.ask(user)):
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
                client.ledger.tally(refused=1)
    return list(refused.values())


def destroy_groups(run: Run) -> None:
    """XGROUP DESTROY under load: the group is made anew, and nothing is learned twice or left out."""
    ledger = Ledger()
    destroyed = 0
    with run.deployment(workers=2) as deployment:
        deployment.start()
        client = deployment.valkey.client
        with run.load(deployment, ledger, pace_s=0.002):
            wait_until(lambda: len(ledger.acknowledged()) > 20, "clients are at work")
            keys = _keys(deployment)
            while run.going() or destroyed < 5:
                key = keys.events(run.rng.randrange(keys.partitions))
                destroyed += int(call(client, "XGROUP", "DESTROY", key, LEARNERS))
                time.sleep(run.rng.uniform(0, 0.2))
        run.expect(all(node.alive for node in deployment.workers), "a worker ended when its group was destroyed")
        run.row.kills += destroyed
        run.close_books(deployment, ledger)
    run.note(f"{destroyed} groups destroyed")


def empty_store(run: Run) -> None:
    """FLUSHALL: everybody says so, no reward is acknowledged any more, and a restart begins anew."""
    ledger = Ledger(may_lose=True)
    with run.deployment(servers=2, workers=2) as deployment:
        deployment.start()
        client = Client(ledger, deployment.urls, run.rng)
        before = [event for number in range(20) for event in client.events_of(client.ask(f"u{number % 5}"))]
        for event in before:
            client.tell([event])
        asked = client.ask("u0")
        deployment.valkey.client.flushall()
        _expect_alarms(run, deployment, asked.decision_id)
        wait_until(lambda: not any(node.alive for node in deployment.workers), "the workers end")
        said = [node.child.status for node in deployment.workers if node.child]
        run.expect(said == [1, 1], f"the workers ended with {said}")
        books = read_books(deployment.valkey.client)
        run.expect(not books.users and not books.waiting, "users or events are back after FLUSHALL")
        for node in deployment.servers:
            node.send(signal.SIGTERM)
        wait_until(lambda: not any(node.alive for node in deployment.servers), "the servers stop")
        deployment.start()
        after = Ledger()
        anew = Client(after, deployment.urls, run.rng)
        for number in range(20):
            for event in anew.events_of(anew.ask(f"u{number % 5}")):
                anew.tell([event])
        for one in (client, anew):
            one.close()
        run.close_books(deployment, after)


def _expect_alarms(run: Run, deployment: Deployment, decision_id: str) -> None:
    urls = deployment.urls()
    wait_until(
        lambda: {httpx.get(f"{url}/health/ready").status_code for url in urls} == {503}, "the servers are not ready"
    )
    for url in urls:
        old = httpx.post(f"{url}/feedback", json={"decision_id": decision_id, "reward": 0.5})
        run.expect(old.status_code in (404, 503), f"a reward of before FLUSHALL got {old.status_code}")
        # A decision may still be answered, from memory; what nobody can learn must not be acknowledged.
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
