"""Processes killed or stopped under load."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from metaban.store.keys import LEARNERS
from tests.chaos.clients import SentEvents
from tests.chaos.deployment import AppendFsync, Deployment, Node, wait_until
from tests.chaos.fork_server import Child
from tests.chaos.run import Run
from tests.chaos.store_audit import call, load_record

WORKER_FAILPOINTS = ("worker-after-read", "worker-before-apply", "worker-after-apply")
SERVER_FAILPOINTS = ("server-before-enqueue", "server-after-enqueue")
#: Longer than the time after which events of a silent worker are claimed.
STALL_S = 6.0
#: Commands that a stopped worker had sent are most likely executed within this time.
ON_THE_WAY_S = 0.1
#: Longest time between two kills.
PAUSE_S = 0.6
#: Fewest events for a run to count as under load.
BUSY_EVENTS = 100
#: Seconds of events that `everysec` may lose.
EVERYSEC_WINDOW_S = 2.0
#: Seconds within which the events of a killed worker should be applied.
RECOVERY_AIM_S = 5.0


def pause(run: Run) -> None:
    """Sleep a random time, so that processes are killed at any moment."""
    time.sleep(run.rng.uniform(0, PAUSE_S))


def more_acknowledged(sent: SentEvents, before: int) -> bool:
    """Whether events were acknowledged since there were `before` of them."""
    return len(sent.acknowledged()) > before


def die_at(run: Run, node: Node, place: str) -> None:
    """Restart a node with a failpoint and wait until it died there."""
    before = node.kills
    # Not at the first pass: an event tried alone at that moment could be blamed.
    node.arm(f"{place}={run.rng.randint(2, 6)}")
    wait_until(lambda: node.kills >= before + 2, f"{node.name} dies at {place}")


def kill_workers(run: Run) -> None:
    """SIGKILL of a worker at random times."""
    _at_random(run, servers=1, workers=2, victims=lambda deployment: deployment.workers)


def kill_workers_at_failpoints(run: Run) -> None:
    """SIGKILL of a worker after a read, before an apply, and after it."""
    _at_failpoints(run, servers=1, workers=2, places=WORKER_FAILPOINTS)


def kill_servers(run: Run) -> None:
    """SIGKILL of a server at random times; clients retry at another server, or at the same one when it is back."""
    _at_random(run, servers=2, workers=1, victims=lambda deployment: deployment.servers)


def kill_servers_at_failpoints(run: Run) -> None:
    """SIGKILL of a server just before it stores events, and just after, before the answer."""
    _at_failpoints(run, servers=2, workers=1, places=SERVER_FAILPOINTS)


def _at_random(run: Run, *, servers: int, workers: int, victims: Callable[[Deployment], Sequence[Node]]) -> None:
    sent = SentEvents()
    with run.deployment(servers=servers, workers=workers) as deployment:
        deployment.start()
        deployment.keep()
        with run.load(deployment, sent):
            while run.going() or len(sent.acknowledged()) < BUSY_EVENTS:
                pause(run)
                before = len(sent.acknowledged())
                run.rng.choice(victims(deployment)).kill()
                # On a busy machine a process may take longer to start than the pause: without this none would answer.
                wait_until(partial(more_acknowledged, sent, before), "events are accepted after a kill")
        run.audit_store(deployment, sent)


def _at_failpoints(run: Run, *, servers: int, workers: int, places: tuple[str, ...]) -> None:
    sent = SentEvents()
    died: Counter[str] = Counter()
    with run.deployment(servers=servers, workers=workers) as deployment:
        deployment.start()
        deployment.keep()
        with run.load(deployment, sent):
            while run.going() or len(died) < len(places):
                place = places[sum(died.values()) % len(places)]
                die_at(run, run.rng.choice(deployment.workers if workers > 1 else deployment.servers), place)
                died[place] += 1
        run.audit_store(deployment, sent)
    run.note(", ".join(f"{place} {times}" for place, times in died.items()))


def kill_store_always(run: Run) -> None:
    """SIGKILL of a store that syncs each write: no acknowledged event is lost."""
    _kill_store(run, "always")


def kill_store_everysec(run: Run) -> None:
    """SIGKILL of a store that syncs each second: at most the last 2 s are lost, and no event is applied twice."""
    _kill_store(run, "everysec")


def _kill_store(run: Run, appendfsync: AppendFsync) -> None:
    sent = SentEvents(may_lose=appendfsync == "everysec")
    with run.deployment(workers=2, appendfsync=appendfsync) as deployment:
        deployment.start()
        deployment.keep()
        with run.load(deployment, sent):
            while run.going() or len(sent.acknowledged()) < BUSY_EVENTS:
                pause(run)
                deployment.valkey.kill()
                wait_until(lambda: deployment.valkey.alive and deployment.valkey.client.ping(), "the store is back")
        excused = tuple(deployment.valkey.kills) if sent.may_lose else ()
        findings = run.audit_store(deployment, sent, excused_until=excused, window_s=EVERYSEC_WINDOW_S)
    if sent.may_lose:
        void = sum(event.void for event in sent.events.values())
        run.note(f"{findings.excused} of the last {EVERYSEC_WINDOW_S:g} s missing, {void} void with their decisions")


def kill_anything(run: Run) -> None:
    """SIGKILL of 3 workers, 2 servers and the store, at random times and at failpoints."""
    sent = SentEvents()
    killed: Counter[str] = Counter()
    with run.deployment(servers=2, workers=3) as deployment:
        deployment.start()
        deployment.keep()
        with run.load(deployment, sent, clients=4):
            while run.going() or len(sent.acknowledged()) < BUSY_EVENTS:
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
        run.audit_store(deployment, sent)
    run.note(", ".join(f"{kind} {times}" for kind, times in sorted(killed.items())))


def stall_workers(run: Run) -> None:
    """SIGSTOP of a worker until its events are claimed, then SIGCONT: its fence is lost and its work is void."""
    sent = SentEvents()
    stalls = 0
    with run.deployment(workers=2) as deployment:
        deployment.start()
        with run.load(deployment, sent, pace_s=0.002):
            while run.going() or not stalls:
                node = run.rng.choice(deployment.workers)
                wait_until(partial(_stopped_with_work, deployment, node), "a worker is stopped at work")
                time.sleep(STALL_S)
                node.send(signal.SIGCONT)
                stalls += 1
        run.expect(all(node.alive for node in deployment.workers), "a worker that was stalled ended")
        run.audit_store(deployment, sent)
    run.note(f"{stalls} stalls of {STALL_S:g} s")


def _stopped_with_work(deployment: Deployment, node: Node) -> bool:
    """Stop a worker that has pending events; one without goes on."""
    node.send(signal.SIGSTOP)
    if in_hand(deployment, node.child):
        time.sleep(ON_THE_WAY_S)
        if in_hand(deployment, node.child):
            return True
    node.send(signal.SIGCONT)
    return False


def in_hand(deployment: Deployment, child: Child | None) -> list[tuple[int, bytes]]:
    """Partition and entry id of the pending events of a worker."""
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
    """Time from the death of a worker to the apply of its pending events by another."""
    sent = SentEvents()
    times: list[float] = []
    with run.deployment(workers=2) as deployment:
        deployment.start()
        with run.load(deployment, sent, pace_s=0.002):
            while run.going() or not times:
                times.append(_recovery(run, deployment))
        run.audit_store(deployment, sent)
    run.aim(times, RECOVERY_AIM_S, "batches of killed workers learned")


def _recovery(run: Run, deployment: Deployment) -> float:
    node = deployment.workers[0]
    node.kill()
    child = node.start(f"worker-after-read={run.rng.randint(3, 8)}")
    wait_until(lambda: not child.alive, "the worker dies with pending events")
    batch = in_hand(deployment, child)
    run.expect(batch, "the killed worker had no pending events")
    wait_until(lambda: not set(batch) & set(_waiting(deployment)), "the batch of the killed worker is learned")
    took = time.monotonic() - child.ended_at
    node.kills += 1
    node.start()
    return took


def _waiting(deployment: Deployment) -> list[tuple[int, bytes]]:
    """Partition and entry id of all events in the streams."""
    client = deployment.valkey.client
    record = load_record(client)
    if record is None:
        return []
    return [
        (partition, entry_id)
        for partition in range(record.partitions)
        for entry_id, _ in call(client, "XRANGE", record.keys.events(partition), "-", "+")
    ]
