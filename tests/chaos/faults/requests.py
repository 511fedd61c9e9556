"""A server that stops under load, and extreme inputs."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections import Counter
from functools import partial
from itertools import count
from urllib.parse import urlsplit

import numpy as np

from metaban.store.client.connection import connect
from metaban.store.decisions.decisions import DecisionRecord
from metaban.store.events.event import RewardEvent
from metaban.store.events.stream import EventStream
from tests.chaos.clients import Client, Event, GivenUp, SentEvents
from tests.chaos.deployment import Deployment, wait_until
from tests.chaos.proxy import NetworkFaults, Proxy
from tests.chaos.run import Run
from tests.chaos.store_audit import call, load_record, read_store, wait_drained

#: Clients that send requests, each on a new connection.
LOAD_CLIENTS = 12

#: Makes requests long enough that many are in progress when the server stops.
DELAY_S = 0.02
#: Threads that only connect and send health checks.
KNOCKERS = 3
KNOCK_TIMEOUT_S = 20.0
KNOCK = b"GET /health/live HTTP/1.1\r\nHost: chaos\r\nConnection: close\r\n\r\n"
#: Largest number of a request, and largest float32.
HUGE, HUGEST = 1e30, 3.0e38


def stop_servers(run: Run) -> None:
    """SIGTERM under load: accepted connections are answered, later ones refused.

    Connections that the system holds when the listener closes were never accepted, and are reset: at most one of each
    client at each stop.
    """
    sent = SentEvents()
    stops = 0
    seen: Counter[str] = Counter()
    with (
        run.deployment(servers=1, workers=1) as deployment,
        Proxy(deployment.folder / "p.sock", deployment.valkey.socket, run.rng) as proxy,
    ):
        deployment.store_url = proxy.url
        deployment.start()
        proxy.faults = NetworkFaults(delay_s=DELAY_S)
        server = deployment.servers[0]
        with run.load(deployment, sent, clients=LOAD_CLIENTS, pace_s=0.0, repeated=0.0, keep_connections=False):
            while run.going() or not stops:
                _wait_answers(sent, 10)
                knocks = [_connect_until_refused(server.url, seen) for _ in range(KNOCKERS)]
                time.sleep(run.rng.uniform(0, 0.3))
                server.send(signal.SIGTERM)
                for knock in knocks:
                    knock.join()
                wait_until(lambda: not server.alive, "the server stops")
                status = server.child.status if server.child else None
                run.expect(status == 0, f"the server ended with {status}")
                stops += 1
                server.start()
                server.wait_ready()
        proxy.faults = NetworkFaults()
        answered = seen.pop("answered", 0)
        dropped = seen + sent.dropped
        for what, times in dropped.items():
            allowed = stops * (LOAD_CLIENTS + KNOCKERS) if "reset by peer" in what else 0
            run.expect(times <= allowed, f"{times} requests were dropped: {what}")
        run.audit_store(deployment, sent)
    run.note(f"{stops} stops under load, {answered + len(sent.events):,} answered, {dropped.total()} dropped")


def _connect_until_refused(url: str, seen: Counter[str]) -> threading.Thread:
    """Connect until connections are refused; record how each connection ended."""
    address = (urlsplit(url).hostname, urlsplit(url).port)

    def work() -> None:
        while True:
            try:
                with socket.create_connection(address, timeout=KNOCK_TIMEOUT_S) as connection:
                    connection.sendall(KNOCK)
                    answer = b"".join(iter(lambda: connection.recv(65_536), b""))
                whole = answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"}")
                seen["answered" if whole else f"an answer of {len(answer)} bytes"] += 1
            except ConnectionRefusedError:
                return
            except OSError as error:
                seen[f"{type(error).__name__}: {error}"] += 1

    thread = threading.Thread(target=work, name="knocker", daemon=True)
    thread.start()
    return thread


def _wait_answers(sent: SentEvents, more: int) -> None:
    before = len(sent.acknowledged())
    wait_until(lambda: len(sent.acknowledged()) >= before + more, "clients are at work")


def send_extremes(run: Run) -> None:
    """Extreme rewards and features: no state that is not finite is published, and other users are not affected."""
    sent = SentEvents()
    sign = count()
    refused = 0
    with run.deployment(workers=2) as deployment:
        deployment.start()
        client = Client(sent, deployment.urls, run.rng)
        client.send(client.events_of(client.recommend("calm0")))
        rounds = 0
        while run.going() or rounds < 12:
            rounds += 1
            for place in range(4):
                client.send(client.events_of(client.recommend(f"calm{place}")))
            for user, size in (("huge", HUGE), ("tiny", 1e-30), ("mixed", run.rng.choice((1e-30, 1.0, 1e15, HUGE)))):
                try:
                    asked = client.recommend(user, features=partial(_alternating, size, sign))
                except GivenUp:
                    refused += 1  # 422: the learner has no finite score
                    continue
                events = client.events_of(asked)
                for event in events:
                    # Alternating extremes, all different.
                    event.reward = event.reward * 1e-9 if next(sign) % 2 else 1 - event.reward * 1e-9
                client.send(events)
            if rounds % 4 == 0:
                wait_drained(deployment.valkey.client)
                _write_extreme_event(deployment, client, run.rng.choice((HUGEST, -HUGEST, 1e20)))
        client.close()
        run.audit_store(deployment, sent)
        contents = read_store(deployment.valkey.client)
        quarantined = contents.counters.get("quarantined", 0)
        number = contents.epoch_number
    run.note(f"{rounds} rounds, {refused} requests refused, {quarantined} learners put back, epoch {number}")


def _alternating(size: float, sign: count[int]) -> float:
    return size if next(sign) % 2 else -size


def _write_extreme_event(deployment: Deployment, client: Client, size: float) -> None:
    """Write an event with features up to the largest float32 into the stream; no request could have them."""
    asked = client.recommend("smuggler", k=1)
    [event] = client.events_of(asked)
    record = load_record(deployment.valkey.client)
    if record is None:
        raise RuntimeError("there is no namespace")
    decision = DecisionRecord.decode(call(deployment.valkey.client, "GET", record.keys.decision(asked.decision_id)))
    signs = np.where(np.arange(decision.features.shape[1]) % 2, 1, -1)
    made = RewardEvent(
        event_id=event.event_id,
        decision_id=event.decision_id,
        user_id=event.user_id,
        arm_id=event.arm_id,
        features=(signs * size).astype(np.float32),
        reward=event.reward,
        propensity=decision.items[0].propensity,
        epoch=decision.epoch,
        decided_ms=decision.created_ms,
        received_ms=decision.created_ms,
        phi=decision.phi[0],
    )
    asyncio.run(_enqueue(deployment, made))
    _acknowledge(event)


async def _enqueue(deployment: Deployment, event: RewardEvent) -> None:
    redis = connect(deployment.store_url)
    try:
        record = load_record(deployment.valkey.client)
        if record is not None:
            await EventStream(redis, record.keys, dedupe_window_s=3_600, backlog_limit=1_000).enqueue([event])
    finally:
        await redis.aclose()


def _acknowledge(event: Event) -> None:
    event.sends += 1
    event.acknowledged_at = time.monotonic()
