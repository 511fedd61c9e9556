"""What clients did and what they were told, to be compared with what the store holds.

Every request and every event is its own: arms are named after the request that offered them and no two rewards are
equal, so that an effect in the store can be traced to the event that had it, and an answer to the question.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, final

import httpx

#: Numbers an arm is described by.
FEATURES = 3
ARMS = 3
#: An odd number: multiplied by it, no two numbers below 2³² are the same modulo 2³².
SPREAD = 0x9E3779B1
REQUEST_TIMEOUT_S = 20.0
#: How long a client goes on asking before it says that the service is gone.
GIVE_UP_S = 90.0
AGAIN_S = 0.03
#: Events of one user; fewer than the samples kept, so that the store still shows each.
EVENTS_PER_USER_MAX = 400


@dataclass(slots=True)
class Event:
    """One reward, as its client knows it."""

    event_id: str
    user_id: str
    decision_id: str
    arm_id: str
    reward: float
    sends: int = 0
    accepted: int = 0
    acknowledged_at: float | None = None
    #: Meant to be given up on by the service.
    poison: bool = False
    #: Must have no effect: refused with its decision, or told before its user was forgotten.
    void: bool = False

    def body(self) -> dict[str, Any]:
        return {
            "decision_id": self.decision_id,
            "arm_id": self.arm_id,
            "reward": self.reward,
            "event_id": self.event_id,
        }


@dataclass(frozen=True, slots=True)
class Asked:
    """One request for arms and its answer."""

    body: dict[str, Any]
    chosen: tuple[str, ...]

    @property
    def decision_id(self) -> str:
        return str(self.body["decision_id"])


@final
@dataclass
class Ledger:
    """All events of a run, by event id, and what was wrong with answers."""

    events: dict[str, Event] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    duplicates_refused: int = 0
    refused: int = 0
    unanswered: int = 0
    #: Requests without an answer though a connection was made, by what the client saw.
    dropped: Counter[str] = field(default_factory=Counter)
    #: Whether a crash of the store may lose what was acknowledged last (everysec).
    may_lose: bool = False
    #: Whether users are forgotten or restored under way, which voids what was decided before.
    may_reset: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _numbers: count[int] = field(default_factory=count)

    def number(self) -> int:
        with self._lock:
            return next(self._numbers)

    def add(self, event: Event) -> None:
        with self._lock:
            self.events[event.event_id] = event

    def complain(self, problem: str) -> None:
        with self._lock:
            if problem not in self.problems:
                self.problems.append(problem)

    def tally(self, *, refused: int = 0, unanswered: int = 0, duplicates: int = 0) -> None:
        with self._lock:
            self.refused += refused
            self.unanswered += unanswered
            self.duplicates_refused += duplicates

    def acknowledged(self) -> list[Event]:
        """Events that the service has promised to learn."""
        with self._lock:
            return [event for event in self.events.values() if event.acknowledged_at is not None]

    def unknown(self) -> list[Event]:
        """Events that were sent and never acknowledged."""
        with self._lock:
            return [event for event in self.events.values() if event.acknowledged_at is None and not event.void]


class GivenUp(Exception):
    """The service did not answer for longer than a client waits."""


@final
class Client:
    """One client: asks, tells, and sends again until it is answered. Use it from one thread."""

    def __init__(
        self,
        ledger: Ledger,
        urls: Callable[[], Sequence[str]],
        rng: random.Random,
        *,
        keep_connections: bool = True,
    ) -> None:
        self.ledger = self._ledger = ledger
        self._urls = urls
        self._rng = rng
        limits = httpx.Limits(max_keepalive_connections=None if keep_connections else 0)
        self._http = httpx.Client(timeout=REQUEST_TIMEOUT_S, limits=limits)

    def close(self) -> None:
        self._http.close()

    def ask(self, user_id: str, *, k: int = 2, features: Callable[[], float] | None = None) -> Asked:
        """Have arms chosen for a user; the answer has to belong to the question."""
        number = self._ledger.number()
        draw = features or (lambda: self._rng.uniform(-1, 1))
        body: dict[str, Any] = {
            "user_id": user_id,
            "arms": [
                {"id": f"a{number}.{place}", "features": [draw() for _ in range(FEATURES)]} for place in range(ARMS)
            ],
            "k": k,
            "decision_id": f"d{number}",
        }
        return Asked(body, self._decide(body))

    def ask_again(self, asked: Asked) -> None:
        """The same question has the same answer."""
        again = self._decide(asked.body)
        if again != asked.chosen and not self._ledger.may_lose:
            self._ledger.complain(f"{asked.decision_id} was {asked.chosen}, and asked again it is {again}")

    def events_of(self, asked: Asked) -> list[Event]:
        """A new event for every arm that was chosen."""
        made = []
        for arm_id in asked.chosen:
            number = self._ledger.number()
            event = Event(
                event_id=f"e{number}",
                user_id=str(asked.body["user_id"]),
                decision_id=asked.decision_id,
                arm_id=arm_id,
                reward=(number * SPREAD % 2**32) / 2**32,
            )
            self._ledger.add(event)
            made.append(event)
        return made

    def tell(self, events: Sequence[Event]) -> None:
        """Send events, again and again under the same ids, until all are acknowledged."""
        body = events[0].body() if len(events) == 1 else {"events": [event.body() for event in events]}
        clean = all(event.sends == 0 for event in events)
        lost_answer = False
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            for event in events:
                event.sends += 1
            answer = self._post("/feedback", body, deadline)
            if answer is None:
                lost_answer = True
                continue
            if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                # The store may have taken them before it went away.
                lost_answer = True
                continue
            if self._gone(answer):
                for event in events:
                    event.void = event.acknowledged_at is None
                return
            if answer.status_code != httpx.codes.ACCEPTED:
                self._ledger.complain(f"feedback answered {answer.status_code}: {answer.text[:200]}")
                return
            self._note(events, answer.json(), once=clean and not lost_answer)
            return

    def tell_again(self, event: Event) -> None:
        """Send an acknowledged event once more: it has to be refused as a duplicate."""
        answer = self._post("/feedback", event.body(), time.monotonic() + GIVE_UP_S)
        if answer is None or answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            return
        if answer.status_code == httpx.codes.ACCEPTED and answer.json()["duplicates"] == 1:
            self._ledger.tally(duplicates=1)
        elif not self._gone(answer) and not self._ledger.may_lose:
            self._ledger.complain(f"{event.event_id}, sent again, got {answer.status_code}: {answer.text[:200]}")

    def _gone(self, answer: httpx.Response) -> bool:
        """Whether this says that the decision does not count any more, where that may be."""
        lost = self._ledger.may_lose and answer.status_code in (404, 422)
        # Those of a user who was forgotten are unknown, those of one who was restored refused.
        return lost or (self._ledger.may_reset and answer.status_code in (404, 409))

    def _note(self, events: Sequence[Event], said: dict[str, Any], *, once: bool) -> None:
        now = time.monotonic()
        if said["rejected"] and (self._ledger.may_lose or self._ledger.may_reset):
            rejected = {row["index"] for row in said["rejected"]}
            for place in rejected:
                events[place].void = True
            events = [event for place, event in enumerate(events) if place not in rejected]
        if said["accepted"] + said["duplicates"] != len(events):
            self._ledger.complain(f"{len(events)} events were answered with {said}")
        if once and said["duplicates"]:
            self._ledger.complain(f"{[event.event_id for event in events]}, sent once, were said to be known: {said}")
        self._ledger.tally(duplicates=said["duplicates"])
        for event in events:
            event.acknowledged_at = now

    def _decide(self, body: dict[str, Any]) -> tuple[str, ...]:
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            answer = self._post("/recommend", body, deadline)
            if answer is None or answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                continue
            if answer.status_code != httpx.codes.OK:
                raise GivenUp(f"recommend answered {answer.status_code}: {answer.text[:200]}")
            said = answer.json()
            if not said.get("logged", True):
                continue  # decided from memory while the store was away: nothing could be learned for it
            chosen = tuple(item["arm_id"] for item in said["items"])
            offered = {arm["id"] for arm in body["arms"]}
            ranks = [item["rank"] for item in said["items"]]
            fits = said["decision_id"] == body["decision_id"] and set(chosen) <= offered
            if not fits or len(set(chosen)) != body["k"] or ranks != list(range(1, body["k"] + 1)):
                self._ledger.complain(f"{body['decision_id']} with {sorted(offered)} was answered with {said}")
            return chosen

    def _post(self, path: str, body: dict[str, Any], deadline: float) -> httpx.Response | None:
        """One try at any server there is; None when there was no answer."""
        if time.monotonic() > deadline:
            raise GivenUp(f"{path}: no server has answered for {GIVE_UP_S:g} s")
        urls = self._urls()
        if not urls:
            time.sleep(AGAIN_S)
            return None
        try:
            answer = self._http.post(f"{self._rng.choice(urls)}{path}", json=body)
        except httpx.ConnectError:
            time.sleep(AGAIN_S)
            return None
        except httpx.TransportError as error:
            self._ledger.tally(unanswered=1)
            self._ledger.dropped[f"{type(error).__name__}: {error}"] += 1
            time.sleep(AGAIN_S)
            return None
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            self._ledger.tally(refused=1)
            if not answer.headers.get("Retry-After", "").isdigit():
                self._ledger.complain(f"{path}: 503 without Retry-After: {answer.text[:200]}")
            time.sleep(AGAIN_S)
        return answer


@final
class Load:
    """Clients at work in threads of their own, until they are stopped; then they finish what they began."""

    def __init__(
        self,
        ledger: Ledger,
        urls: Callable[[], Sequence[str]],
        rng: random.Random,
        *,
        users: int = 24,
        clients: int = 3,
        pace_s: float = 0.01,
        repeated: float = 0.1,
        prefix: str = "u",
        keep_connections: bool = True,
    ) -> None:
        self._ledger = ledger
        self._keep_connections = keep_connections
        self._urls = urls
        self._users = users
        self._pace_s = pace_s
        self._repeated = repeated
        self._prefix = prefix
        self._stopping = threading.Event()
        self._told: dict[int, int] = {}
        self._lock = threading.Lock()
        seeds = [rng.getrandbits(32) for _ in range(clients)]
        self._threads = [
            threading.Thread(target=self._work, args=(random.Random(seed),), name=f"client-{number}", daemon=True)
            for number, seed in enumerate(seeds)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Have every client finish: no event is left unknown."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def user(self, rng: random.Random) -> str:
        """One of the users; one who has had many events makes room for another."""
        slot = rng.randrange(self._users)
        with self._lock:
            told = self._told[slot] = self._told.get(slot, 0) + 2
        return f"{self._prefix}{slot}-{told // EVENTS_PER_USER_MAX}"

    def _work(self, rng: random.Random) -> None:
        client = Client(self._ledger, self._urls, rng, keep_connections=self._keep_connections)
        try:
            while not self._stopping.is_set():
                asked = [client.ask(self.user(rng)) for _ in range(rng.choice((1, 1, 1, 4)))]
                events = [event for one in asked for event in client.events_of(one)]
                if len(asked) > 1:
                    client.tell(events)
                else:
                    for event in events:
                        client.tell([event])
                if rng.random() < self._repeated:
                    client.ask_again(asked[0])
                    if events[0].acknowledged_at is not None:
                        client.tell_again(events[0])
                self._stopping.wait(self._pace_s)
        except GivenUp as error:
            self._ledger.complain(str(error))
        finally:
            client.close()
