"""Events that nobody can learn: entries that are none, and one that kills whoever tries."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from store.events import RewardEvent
from store.keys import NamespaceKeys
from tests.chaos.auditor import FOREIGN, call, load_record, read_books
from tests.chaos.deployment import Deployment, wait_until
from tests.chaos.ledger import Client, Event, Ledger
from tests.chaos.run import Run

#: Attempts on an event alone before it is given up.
ATTEMPTS = b"5"
#: Seconds within which the neighbours of a poisonous event should be learned.
PROGRESS_AIM_S = 5.0


def put_in_foreign_entries(run: Run) -> None:
    """Entries that are no events, in the middle of others: buried at once with a reason, and the others go on."""
    ledger = Ledger()
    slowest, put_in = 0.0, 0
    with run.deployment(workers=2) as deployment:
        deployment.start()
        client = Client(ledger, deployment.urls, run.rng)
        with run.load(deployment, ledger):
            wait_until(lambda: len(ledger.acknowledged()) > 20, "clients are at work")
            keys = _keys(deployment)
            while run.going() or put_in < len(_foreign(0)):
                fields = _foreign(put_in)[put_in % len(_foreign(0))]
                user = f"neighbour-{run.rng.randrange(8)}"
                flat = [part for pair in fields.items() for part in pair]
                call(deployment.valkey.client, "XADD", keys.events(keys.partition_of(user)), "*", *flat)
                arrived = time.monotonic()
                put_in += 1
                events = client.events_of(client.ask(user))
                client.tell(events)
                _wait_learned(deployment, events)
                slowest = max(slowest, time.monotonic() - arrived)
        client.close()
        run.close_books(deployment, ledger)
        dead = read_books(deployment.valkey.client).dead
        run.expect(len(dead) == put_in, f"{put_in} foreign entries, {len(dead)} dead letters")
        run.expect(all(fields.get(b"dead_reason") for fields in dead), "a dead letter has no reason")
    run.note(f"{put_in} foreign entries buried; the slowest neighbour was learned after {slowest:.1f} s")


def kill_whoever_learns(run: Run) -> None:
    """An event that kills its worker: buried after 5 attempts alone, while others are learned."""
    ledger = Ledger()
    buried_after: list[float] = []
    neighbours_after: list[float] = []
    with run.deployment(workers=2) as deployment:
        deployment.start()
        client = Client(ledger, deployment.urls, run.rng)
        deployment.keep()
        while run.going() or not buried_after:
            learned_s, buried_s = _one_poison(run, deployment, client, len(buried_after))
            neighbours_after.append(learned_s)
            buried_after.append(buried_s)
        for worker in deployment.workers:
            worker.environment.clear()
            worker.kill()
        client.close()
        run.close_books(deployment, ledger)
    run.aim(neighbours_after, PROGRESS_AIM_S, "neighbours learned")
    run.note(f"the poison buried after {_listed(buried_after)} s")


def _one_poison(run: Run, deployment: Deployment, client: Client, number: int) -> tuple[float, float]:
    keys = _keys_after_first(deployment, client)
    # All of one partition, so that they are delivered together.
    users = [f"p{number}-{place}" for place in range(200)]
    users = [user for user in users if keys.partition_of(user) == number % keys.partitions][:12]
    asked = [client.ask(user, k=1) for user in users]
    [poison], *others = [client.events_of(one) for one in asked]
    poison.poison = True
    for worker in deployment.workers:
        worker.environment["METABAN_FAILPOINTS"] = f"worker-learn:{poison.arm_id}=1"
        worker.kill()
    wait_until(lambda: all(worker.alive for worker in deployment.workers), "the workers are back")
    # The poison is first in its stream, where it does most harm.
    client.tell([poison, *(event for events in others for event in events)])
    arrived = time.monotonic()
    neighbours = [event for events in others for event in events]
    _wait_learned(deployment, neighbours)
    learned_s = time.monotonic() - arrived
    store = deployment.valkey.client

    def letters() -> list[dict[bytes, bytes]]:
        return [fields for fields in read_books(store).dead if fields.get(b"id") == poison.event_id.encode()]

    wait_until(letters, "the poison is buried")
    buried_s = time.monotonic() - arrived
    [letter] = letters()
    run.expect(letter[b"dead_reason"], "the poison was buried without a reason")
    # One more was counted when it was given up.
    tries = int(letter[b"dead_attempts"])
    run.expect(tries in (int(ATTEMPTS), int(ATTEMPTS) + 1), f"the poison was buried after {tries} attempts")
    return learned_s, buried_s


def _wait_learned(deployment: Deployment, events: Sequence[Event]) -> None:
    def learned() -> bool:
        books = read_books(deployment.valkey.client)
        known = {(user.user_id, sample.arm_id) for user in books.users.values() for sample in user.samples}
        return all((event.user_id, event.arm_id) in known for event in events)

    wait_until(learned, "the neighbours are learned")


def _foreign(number: int) -> list[dict[bytes, bytes]]:
    """Entries of many kinds that are no events of this namespace."""
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
        event,  # of another number of inputs
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
    client.tell(client.events_of(client.ask("first")))
    return _keys(deployment)


def _listed(times: Sequence[float]) -> str:
    return ", ".join(f"{took:.1f}" for took in times)
