"""Processes that are killed or stalled under load."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from store.keys import LEARNERS
from tests.chaos.auditor import call, load_record
from tests.chaos.deployment import AppendFsync, Deployment, Node, wait_until
from tests.chaos.ledger import Ledger
from tests.chaos.nursery import Child
from tests.chaos.run import Run

WORKER_FAILPOINTS = ("worker-after-read", "worker-before-apply", "worker-after-apply")
SERVER_FAILPOINTS = ("server-before-enqueue", "server-after-enqueue")
#: Longer than a worker may be silent before its events are taken over.
STALL_S = 6.0
#: What a stopped worker has sent is executed within this, most likely; if not, there is less to see.
ON_THE_WAY_S = 0.1
#: Longest time between two kills.
PAUSE_S = 0.6
#: Events without which a fault has not been under load.
BUSY_EVENTS = 100
#: What `everysec` may lose.
EVERYSEC_WINDOW_S = 2.0
#: Seconds within which the events of a killed worker should be learned.
RECOVERY_AIM_S = 5.0


def pause(run: Run) -> None:
    """Not to wait for anything: something should die at any moment of its work."""
    time.sleep(run.rng.uniform(0, PAUSE_S))


def die_at(run: Run, node: Node, place: str) -> None:
    """Start a node's next life armed, and wait until that life has ended at the failpoint."""
    before = node.kills
    # Not at the first time: an event that is tried alone just then could look like the one to blame.
    node.arm(f"{place}={run.rng.randint(2, 6)}")
    wait_until(lambda: node.kills >= before + 2, f"{node.name} dies at {place}")


def kill_workers(run: Run) -> None:
    """kill -9 of a worker at random times."""
    _at_random(run, servers=1, workers=2, victims=lambda deployment: deployment.workers)


def kill_workers_at_failpoints(run: Run) -> None:
    """kill -9 of a worker after it has read, before it applies, and after."""
    _at_failpoints(run, servers=1, workers=2, places=WORKER_FAILPOINTS)


def kill_servers(run: Run) -> None:
    """kill -9 of a server at random times; clients try again at another, or at the same when it is back."""
    _at_random(run, servers=2, workers=1, victims=lambda deployment: deployment.servers)


def kill_servers_at_failpoints(run: Run) -> None:
    """kill -9 of a server just before it stores events, and just after, when nobody was told yet."""
    _at_failpoints(run, servers=2, workers=1, places=SERVER_FAILPOINTS)


def _at_random(run: Run, *, servers: int, workers: int, victims: Callable[[Deployment], Sequence[Node]]) -> None:
    ledger = Ledger()
    with run.deployment(servers=servers, workers=workers) as deployment:
        deployment.start()
        deployment.keep()
        with run.load(deployment, ledger):
            while run.going() or len(ledger.acknowledged()) < BUSY_EVENTS:
                pause(run)
                run.rng.choice(victims(deployment)).kill()
        run.close_books(deployment, ledger)


def _at_failpoints(run: Run, *, servers: int, workers: int, places: tuple[str, ...]) -> None:
    ledger = Ledger()
    died: Counter[str] = Counter()
    with run.deployment(servers=servers, workers=workers) as deployment:
        deployment.start()
        deployment.keep()
        with run.load(deployment, ledger):
            while run.going() or len(died) < len(places):
                place = places[sum(died.values()) % len(places)]
                die_at(run, run.rng.choice(deployment.workers if workers > 1 else deployment.servers), place)
                died[place] += 1
        run.close_books(deployment, ledger)
    run.note(", ".join(f"{place} {times}" for place, times in died.items()))


def kill_store_always(run: Run) -> None:
    """kill -9 of the store, which syncs each write: nothing acknowledged is missing."""
    _kill_store(run, "always")


def kill_store_everysec(run: Run) -> None:
    """kill -9 of the store, which syncs each second: at most the last 2 s are missing, and effects are still once."""
    _kill_store(run, "everysec")


def _kill_store(run: Run, appendfsync: AppendFsync) -> None:
    ledger = Ledger(may_lose=appendfsync == "everysec")
    with run.deployment(workers=2, appendfsync=appendfsync) as deployment:
        deployment.start()
        deployment.keep()
        with run.load(deployment, ledger):
            while run.going() or len(ledger.acknowledged()) < BUSY_EVENTS:
                pause(run)
                deployment.valkey.kill()
                wait_until(lambda: deployment.valkey.alive and deployment.valkey.client.ping(), "the store is back")
        excused = tuple(deployment.valkey.kills) if ledger.may_lose else ()
        findings = run.close_books(deployment, ledger, excused_until=excused, window_s=EVERYSEC_WINDOW_S)
    if ledger.may_lose:
        void = sum(event.void for event in ledger.events.values())
        run.note(f"{findings.excused} of the last {EVERYSEC_WINDOW_S:g} s missing, {void} void with their decisions")


def kill_anything(run: Run) -> None:
    """All of it at once: 3 workers, 2 servers and the store, at random times and at failpoints."""
    ledger = Ledger()
    killed: Counter[str] = Counter()
    with run.deployment(servers=2, workers=3) as deployment:
        deployment.start()
        deployment.keep()
        with run.load(deployment, ledger, clients=4):
            while run.going() or len(ledger.acknowledged()) < BUSY_EVENTS:
                pause(run)
                kind = run.rng.choice(("worker", "worker", "server", "store"))
                if kind == "store":
                    deployment.valkey.kill()
                else:
                    node = run.rng.choice(deployment.workers if kind == "worker" else deployment.servers)
                    places = WORKER_FAILPOINTS if kind == "worker" else SERVER_FAILPOINTS
                    if run.rng.random() < 0.5:
                        node.arm(f"{run.rng.choice(places)}={run.rng.randint(2, 12)}")
                    else:
                        node.kill()
                killed[kind] += 1
        run.close_books(deployment, ledger)
    run.note(", ".join(f"{kind} {times}" for kind, times in sorted(killed.items())))


def stall_workers(run: Run) -> None:
    """SIGSTOP of a worker for longer than others wait for it, then SIGCONT: its work is void, and it knows."""
    ledger = Ledger()
    stalls = 0
    with run.deployment(workers=2) as deployment:
        deployment.start()
        with run.load(deployment, ledger, pace_s=0.002):
            while run.going() or not stalls:
                node = run.rng.choice(deployment.workers)
                wait_until(partial(_stopped_with_work, deployment, node), "a worker is stopped at work")
                time.sleep(STALL_S)
                node.send(signal.SIGCONT)
                stalls += 1
        run.expect(all(node.alive for node in deployment.workers), "a worker that was stalled ended")
        run.close_books(deployment, ledger)
    run.note(f"{stalls} stalls of {STALL_S:g} s")


def _stopped_with_work(deployment: Deployment, node: Node) -> bool:
    """Stop a worker; if it has nothing in hand just now, let it go on."""
    node.send(signal.SIGSTOP)
    if in_hand(deployment, node.child):
        time.sleep(ON_THE_WAY_S)
        if in_hand(deployment, node.child):
            return True
    node.send(signal.SIGCONT)
    return False


def in_hand(deployment: Deployment, child: Child | None) -> list[tuple[int, bytes]]:
    """Partition and entry of the events that a worker was given and has not finished."""
    client = deployment.valkey.client
    record = load_record(client)
    if record is None or child is None:
        return []
    keys = record.keys
    return [
        (partition, entry_id)
        for partition in range(keys.partitions)
        for entry_id, consumer, *_ in call(client, "XPENDING", keys.events(partition), LEARNERS, "-", "+", 10_000)
        if f"-{child.pid}-".encode() in consumer
    ]


def measure_recovery(run: Run) -> None:
    """Time from the death of a worker with a batch in hand to the learning of that batch by another."""
    ledger = Ledger()
    times: list[float] = []
    with run.deployment(workers=2) as deployment:
        deployment.start()
        with run.load(deployment, ledger, pace_s=0.002):
            while run.going() or not times:
                times.append(_recovery(run, deployment))
        run.close_books(deployment, ledger)
    run.aim(times, RECOVERY_AIM_S, "batches of killed workers learned")


def _recovery(run: Run, deployment: Deployment) -> float:
    node = deployment.workers[0]
    node.kill()
    child = node.start(f"worker-after-read={run.rng.randint(3, 8)}")
    wait_until(lambda: not child.alive, "the worker dies with a batch in hand")
    batch = in_hand(deployment, child)
    run.expect(batch, "the killed worker had nothing in hand")
    wait_until(lambda: not set(batch) & set(_waiting(deployment)), "the batch of the killed worker is learned")
    took = time.monotonic() - child.ended_at
    node.kills += 1
    node.start()
    return took


def _waiting(deployment: Deployment) -> list[tuple[int, bytes]]:
    """Partition and entry of all events in the streams."""
    client = deployment.valkey.client
    record = load_record(client)
    if record is None:
        return []
    return [
        (partition, entry_id)
        for partition in range(record.partitions)
        for entry_id, _ in call(client, "XRANGE", record.keys.events(partition), "-", "+")
    ]
