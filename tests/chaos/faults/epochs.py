"""The epoch trainer, killed between any two of its writes."""

from __future__ import annotations

from collections import Counter

from tests.chaos.clients import Client, SentEvents
from tests.chaos.deployment import Deployment, wait_until
from tests.chaos.run import Run
from tests.chaos.store_audit import audit_states, read_store, wait_drained, wait_settled

#: In the order in which they are reached; the last three need an epoch that changes the inputs.
FAILPOINTS = ("meta-leased", "meta-derived", "meta-before-publish", "meta-after-publish", "meta-refitted", "meta-swept")
#: Events between epochs, more than there are users: each user can get an event without a new epoch.
SETTINGS = {"METABAN_LEARNER": '{"bins": 4, "memory_samples": 8, "replayed": 64, "epoch_events": 24}'}
USERS = 10
#: Most rounds of one event per user until no epoch is published in between.
SETTLE_ROUNDS = 12


def kill_epoch_trainer(run: Run) -> None:
    """SIGKILL of the epoch trainer between any two of its writes: epochs are complete and all users are fitted."""
    died: Counter[str] = Counter()
    while run.going() or not died:
        # A new namespace each time: inputs change when events have doubled, which takes longer each time.
        _one_namespace(run, died)
    run.note(", ".join(f"{place} {times}" for place, times in died.items()))


def _one_namespace(run: Run, died: Counter[str]) -> None:
    sent = SentEvents()
    with run.deployment(workers=1, settings=SETTINGS) as deployment:
        deployment.start()
        client = Client(sent, deployment.urls, run.rng)
        for place in run.rng.sample(FAILPOINTS, len(FAILPOINTS)):
            _die_at(deployment, client, place)
            died[place] += 1
            deployment.workers[0].start()
        _settle(run, deployment, client)
        client.close()
        run.audit_store(deployment, sent)
        run.row.problems += audit_states(read_store(deployment.valkey.client), whole=True)


def _die_at(deployment: Deployment, client: Client, place: str) -> None:
    """Send events until the only worker dies at the failpoint."""
    worker = deployment.workers[0]
    worker.kill()
    worker.kills += 2
    child = worker.start(f"{place}=1")
    number = 0

    def dead() -> bool:
        nonlocal number
        events = []
        for _ in range(8):
            number += 1
            events += client.events_of(client.recommend(f"u{number % USERS}"))
        client.send(events)
        store = deployment.valkey.client
        wait_until(lambda: not child.alive or not read_store(store).waiting, "the worker learns, or dies")
        return not child.alive

    wait_until(dead, f"the trainer dies at {place}")


def _settle(run: Run, deployment: Deployment, client: Client) -> None:
    """One more event for each user, all applied under the current epoch."""
    store = deployment.valkey.client
    for _ in range(SETTLE_ROUNDS):
        wait_drained(store)
        wait_settled(store)
        before = read_store(store).epoch_number
        for number in range(USERS):
            client.send(client.events_of(client.recommend(f"u{number}", k=1)))
        wait_drained(store)
        wait_settled(store)
        contents = read_store(store)
        if contents.epoch_number == before and all(
            user.state is not None and user.state.epoch == before for user in contents.users.values()
        ):
            return
    run.expect(False, "there was a new epoch between any two events")
