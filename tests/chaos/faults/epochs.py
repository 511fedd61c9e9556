"""The trainer of what is shared, killed between any two of its writes."""

from __future__ import annotations

from collections import Counter

from tests.chaos.auditor import audit_states, read_books, wait_drained, wait_settled
from tests.chaos.deployment import Deployment, wait_until
from tests.chaos.ledger import Client, Ledger
from tests.chaos.run import Run

#: In the order in which they are reached; the last three only, or also, by an epoch that changes the inputs.
FAILPOINTS = ("meta-leased", "meta-derived", "meta-before-publish", "meta-after-publish", "meta-refitted", "meta-swept")
#: Epochs are due often, and fewer users than that: each can have an event without another epoch.
SETTINGS = {"METABAN_LEARNER": '{"bins": 4, "memory_samples": 8, "replayed": 64, "epoch_events": 24}'}
USERS = 10
#: Rounds of one event a user until no epoch comes in between.
SETTLE_ROUNDS = 12


def kill_meta_trainer(run: Run) -> None:
    """kill -9 of the meta-trainer between any two of its writes: epochs stay whole, everybody ends up under them."""
    died: Counter[str] = Counter()
    while run.going() or not died:
        # A namespace of its own each time: inputs change when events have doubled, which takes longer and longer.
        _one_namespace(run, died)
    run.note(", ".join(f"{place} {times}" for place, times in died.items()))


def _one_namespace(run: Run, died: Counter[str]) -> None:
    ledger = Ledger()
    with run.deployment(workers=1, settings=SETTINGS) as deployment:
        deployment.start()
        client = Client(ledger, deployment.urls, run.rng)
        for place in run.rng.sample(FAILPOINTS, len(FAILPOINTS)):
            _die_at(deployment, client, place)
            died[place] += 1
            deployment.workers[0].start()
        _settle(run, deployment, client)
        client.close()
        run.close_books(deployment, ledger)
        run.row.problems += audit_states(read_books(deployment.valkey.client), whole=True)


def _die_at(deployment: Deployment, client: Client, place: str) -> None:
    """Send events until the trainer, in the only worker, dies at the failpoint."""
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
            events += client.events_of(client.ask(f"u{number % USERS}"))
        client.tell(events)
        store = deployment.valkey.client
        wait_until(lambda: not child.alive or not read_books(store).waiting, "the worker learns, or dies")
        return not child.alive

    wait_until(dead, f"the trainer dies at {place}")


def _settle(run: Run, deployment: Deployment, client: Client) -> None:
    """One more event for everybody, under the epoch that is out when all of them are learned."""
    store = deployment.valkey.client
    for _ in range(SETTLE_ROUNDS):
        wait_drained(store)
        wait_settled(store)
        before = read_books(store).epoch_number
        for number in range(USERS):
            client.tell(client.events_of(client.ask(f"u{number}", k=1)))
        wait_drained(store)
        wait_settled(store)
        books = read_books(store)
        if books.epoch_number == before and all(
            user.state is not None and user.state.epoch == before for user in books.users.values()
        ):
            return
    run.expect(False, "there was a new epoch between any two events")
