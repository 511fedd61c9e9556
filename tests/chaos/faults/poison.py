"""Events that cannot be applied: invalid entries, and an event that kills its worker."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from metaban.store.events.event import RewardEvent
from metaban.store.keys import NamespaceKeys
from tests.chaos.clients import Client, Event, SentEvents
from tests.chaos.deployment import Deployment, wait_until
from tests.chaos.run import Run
from tests.chaos.store_audit import FOREIGN, call, load_record, read_store

#: Attempts on an event alone before it becomes a dead letter.
ATTEMPTS = b"5"
#: Seconds within which the other events should be applied.
PROGRESS_AIM_S = 5.0


def add_invalid_entries(run: Run) -> None:
    """Invalid entries between events become dead letters at once; the events are applied."""
    sent = SentEvents()
    slowest, put_in = 0.0, 0
    with run.deployment(workers=2) as deployment:
        deployment.start()
        client = Client(sent, deployment.urls, run.rng)
        with run.load(deployment, sent):
            wait_until(lambda: len(sent.acknowledged()) > 20, "clients are at work")
            keys = _keys(deployment)
            while run.going() or put_in < len(_foreign(0)):
                fields = _foreign(put_in)[put_in % len(_foreign(0))]
                user = f"neighbour-{run.rng.randrange(8)}"
                flat = [part for pair in fields.items() for part in pair]
                call(deployment.valkey.client, "XADD", keys.events(keys.partition_of(user)), "*", *flat)
                arrived = time.monotonic()
                put_in += 1
                events = client.events_of(client.recommend(user))
                client.send(events)
                _wait_learned(deployment, events)
                slowest = max(slowest, time.monotonic() - arrived)
        client.close()
        run.audit_store(deployment, sent)
        dead = read_store(deployment.valkey.client).dead
        run.expect(len(dead) == put_in, f"{put_in} foreign entries, {len(dead)} dead letters")
        run.expect(all(fields.get(b"dead_reason") for fields in dead), "a dead letter has no reason")
    run.note(f"{put_in} invalid entries became dead letters; the slowest valid event was applied after {slowest:.1f} s")


def send_killing_event(run: Run) -> None:
    """An event that kills its worker becomes a dead letter after 5 attempts alone; other events are applied."""
    sent = SentEvents()
    dead_after: list[float] = []
    neighbours_after: list[float] = []
    with run.deployment(workers=2) as deployment:
        deployment.start()
        client = Client(sent, deployment.urls, run.rng)
        deployment.keep()
        while run.going() or not dead_after:
            learned_s, dead_s = _one_poison(run, deployment, client, len(dead_after))
            neighbours_after.append(learned_s)
            dead_after.append(dead_s)
        for worker in deployment.workers:
            worker.environment.clear()
            worker.kill()
        client.close()
        run.audit_store(deployment, sent)
    run.aim(neighbours_after, PROGRESS_AIM_S, "neighbours learned")
    run.note(f"the poison became a dead letter after {_listed(dead_after)} s")


def _one_poison(run: Run, deployment: Deployment, client: Client, number: int) -> tuple[float, float]:
    keys = _keys_after_first(deployment, client)
    # All of one partition, so that they are delivered together.
    users = [f"p{number}-{place}" for place in range(200)]
    users = [user for user in users if keys.partition_of(user) == number % keys.partitions][:12]
    asked = [client.recommend(user, k=1) for user in users]
    [poison], *others = [client.events_of(one) for one in asked]
    poison.poison = True
    for worker in deployment.workers:
        worker.environment["METABAN_FAILPOINTS"] = f"worker-learn:{poison.arm_id}=1"
        worker.kill()
    wait_until(lambda: all(worker.alive for worker in deployment.workers), "the workers are back")
    # First in its stream, where it delays most events.
    client.send([poison, *(event for events in others for event in events)])
    arrived = time.monotonic()
    neighbours = [event for events in others for event in events]
    _wait_learned(deployment, neighbours)
    learned_s = time.monotonic() - arrived
    store = deployment.valkey.client

    def letters() -> list[dict[bytes, bytes]]:
        return [fields for fields in read_store(store).dead if fields.get(b"id") == poison.event_id.encode()]

    wait_until(letters, "the poison becomes a dead letter")
    dead_s = time.monotonic() - arrived
    [letter] = letters()
    run.expect(letter[b"dead_reason"], "the dead letter of the poison has no reason")
    # The attempt that gave it up was counted too.
    tries = int(letter[b"dead_attempts"])
    run.expect(tries in (int(ATTEMPTS), int(ATTEMPTS) + 1), f"the poison became a dead letter after {tries} attempts")
    return learned_s, dead_s


def _wait_learned(deployment: Deployment, events: Sequence[Event]) -> None:
    def learned() -> bool:
        contents = read_store(deployment.valkey.client)
        known = {(user.user_id, sample.arm_id) for user in contents.users.values() for sample in user.samples}
        return all((event.user_id, event.arm_id) in known for event in events)

    wait_until(learned, "the neighbours are learned")


def _foreign(number: int) -> list[dict[bytes, bytes]]:
    """Many kinds of invalid entries."""
    event = RewardEvent(
        event_id=f"{FOREIGN.decode()}-{number}",
        decision_id="nobody's",
        user_id="nobody",
        arm_id="none",
        features=np.zeros(7, dtype=np.float32),
        reward=0.5,
        propensity=0.5,
        epoch=0,
        decided_ms=0,
        received_ms=0,
    ).encode()
    return [
        {b"hello": b"world"},
        {b"\xff\x00": b"\xff" * 100},
        event,  # another number of inputs
        {**event, b"x": b"123"},
        {**event, b"r": b"nan"},
        {**event, b"u": b"\xff\xfe"},
        {name: value for name, value in event.items() if name != b"r"},
        {**event, b"f": b"999"},
    ]


def _keys(deployment: Deployment) -> NamespaceKeys:
    record = load_record(deployment.valkey.client)
    if record is None:
        raise RuntimeError("there is no namespace")
    return record.keys


def _keys_after_first(deployment: Deployment, client: Client) -> NamespaceKeys:
    client.send(client.events_of(client.recommend("first")))
    return _keys(deployment)


def _listed(times: Sequence[float]) -> str:
    return ", ".join(f"{took:.1f}" for took in times)
