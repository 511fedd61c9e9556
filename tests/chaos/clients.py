"""Clients that send requests and events and record the answers, for comparison with the store.

Every request and every event is unique: arms are named after the request that offered them and no two rewards are
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

#: Features of an arm.
FEATURES = 3
ARMS = 3
#: An odd number: multiplied by it, no two numbers below 2³² are the same modulo 2³².
SPREAD = 0x9E3779B1
REQUEST_TIMEOUT_S = 20.0
#: How long a client retries before it reports that the service is gone.
GIVE_UP_S = 90.0
AGAIN_S = 0.03
#: Most events of one user; fewer than the kept samples, so that the store shows every event.
EVENTS_PER_USER_MAX = 400


@dataclass(slots=True)
class Event:
    """One reward as its client knows it."""

    event_id: str
    user_id: str
    decision_id: str
    arm_id: str
    reward: float
    sends: int = 0
    accepted: int = 0
    acknowledged_at: float | None = None
    #: Expected to become a dead letter.
    poison: bool = False
    #: Must have no effect: refused with its decision, or sent before its user was forgotten.
    void: bool = False

    def body(self) -> dict[str, Any]:
        return {
            "decision_id": self.decision_id,
            "arm_id": self.arm_id,
            "reward": self.reward,
            "event_id": self.event_id,
        }


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One /recommend request and its answer."""

    body: dict[str, Any]
    chosen: tuple[str, ...]

    @property
    def decision_id(self) -> str:
        return str(self.body["decision_id"])


@final
@dataclass
class SentEvents:
    """All events of a run by event id, and all wrong answers."""

    events: dict[str, Event] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    duplicates_refused: int = 0
    refused: int = 0
    unanswered: int = 0
    #: Requests without an answer after a connection was made, by error.
    dropped: Counter[str] = field(default_factory=Counter)
    #: Whether a crash of the store may lose the last acknowledged events (everysec).
    may_lose: bool = False
    #: Whether users are forgotten or restored during the run, which voids earlier decisions.
    may_reset: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _numbers: count[int] = field(default_factory=count)

    def number(self) -> int:
        with self._lock:
            return next(self._numbers)

    def add(self, event: Event) -> None:
        with self._lock:
            self.events[event.event_id] = event

    def report(self, problem: str) -> None:
        with self._lock:
            if problem not in self.problems:
                self.problems.append(problem)

    def tally(self, *, refused: int = 0, unanswered: int = 0, duplicates: int = 0) -> None:
        with self._lock:
            self.refused += refused
            self.unanswered += unanswered
            self.duplicates_refused += duplicates

    def acknowledged(self) -> list[Event]:
        """Acknowledged events."""
        with self._lock:
            return [event for event in self.events.values() if event.acknowledged_at is not None]

    def unknown(self) -> list[Event]:
        """Events that were sent but never acknowledged."""
        with self._lock:
            return [event for event in self.events.values() if event.acknowledged_at is None and not event.void]


class GivenUp(Exception):
    """The service did not answer within the time a client retries."""


@final
class Client:
    """A client that retries until it is answered. Use it from one thread."""

    def __init__(
        self,
        sent: SentEvents,
        urls: Callable[[], Sequence[str]],
        rng: random.Random,
        *,
        keep_connections: bool = True,
    ) -> None:
        self.sent = self._sent = sent
        self._urls = urls
        self._rng = rng
        limits = httpx.Limits(max_keepalive_connections=None if keep_connections else 0)
        self._http = httpx.Client(timeout=REQUEST_TIMEOUT_S, limits=limits)

    def close(self) -> None:
        self._http.close()

    def recommend(self, user_id: str, *, k: int = 2, features: Callable[[], float] | None = None) -> Recommendation:
        """Request arms for a user and check that the answer belongs to the request."""
        number = self._sent.number()
        draw = features or (lambda: self._rng.uniform(-1, 1))
        body: dict[str, Any] = {
            "user_id": user_id,
            "arms": [
                {"id": f"a{number}.{place}", "features": [draw() for _ in range(FEATURES)]} for place in range(ARMS)
            ],
            "k": k,
            "decision_id": f"d{number}",
        }
        return Recommendation(body, self._decide(body))

    def repeat_request(self, asked: Recommendation) -> None:
        """Repeat a request and check that the answer is the same."""
        again = self._decide(asked.body)
        if again != asked.chosen and not self._sent.may_lose:
            self._sent.report(f"{asked.decision_id} was {asked.chosen}, and asked again it is {again}")

    def events_of(self, asked: Recommendation) -> list[Event]:
        """A new event for every recommended arm."""
        made = []
        for arm_id in asked.chosen:
            number = self._sent.number()
            event = Event(
                event_id=f"e{number}",
                user_id=str(asked.body["user_id"]),
                decision_id=asked.decision_id,
                arm_id=arm_id,
                reward=(number * SPREAD % 2**32) / 2**32,
            )
            self._sent.add(event)
            made.append(event)
        return made

    def send(self, events: Sequence[Event]) -> None:
        """Send events, with retries under the same ids, until all are acknowledged."""
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
                # The store may have accepted them before the outage.
                lost_answer = True
                continue
            if self._gone(answer):
                for event in events:
                    event.void = event.acknowledged_at is None
                return
            if answer.status_code != httpx.codes.ACCEPTED:
                self._sent.report(f"feedback answered {answer.status_code}: {answer.text[:200]}")
                return
            self._note(events, answer.json(), once=clean and not lost_answer)
            return

    def send_again(self, event: Event) -> None:
        """Send an acknowledged event again and check that it is a duplicate."""
        answer = self._post("/feedback", event.body(), time.monotonic() + GIVE_UP_S)
        if answer is None or answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            return
        if answer.status_code == httpx.codes.ACCEPTED and answer.json()["duplicates"] == 1:
            self._sent.tally(duplicates=1)
        elif not self._gone(answer) and not self._sent.may_lose:
            self._sent.report(f"{event.event_id}, sent again, got {answer.status_code}: {answer.text[:200]}")

    def _gone(self, answer: httpx.Response) -> bool:
        """Whether the rejection says that the decision is void, where that is allowed."""
        lost = self._sent.may_lose and answer.status_code in (404, 422)
        # Decisions of a forgotten user are unknown; those of a restored user are refused.
        return lost or (self._sent.may_reset and answer.status_code in (404, 409))

    def _note(self, events: Sequence[Event], said: dict[str, Any], *, once: bool) -> None:
        now = time.monotonic()
        if said["rejected"] and (self._sent.may_lose or self._sent.may_reset):
            rejected = {row["index"] for row in said["rejected"]}
            for place in rejected:
                events[place].void = True
            events = [event for place, event in enumerate(events) if place not in rejected]
        if said["accepted"] + said["duplicates"] != len(events):
            self._sent.report(f"{len(events)} events were answered with {said}")
        if once and said["duplicates"]:
            self._sent.report(f"{[event.event_id for event in events]}, sent once, were said to be known: {said}")
        self._sent.tally(duplicates=said["duplicates"])
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
                continue  # decided without the store: no reward can be learned for it
            chosen = tuple(item["arm_id"] for item in said["items"])
            offered = {arm["id"] for arm in body["arms"]}
            ranks = [item["rank"] for item in said["items"]]
            fits = said["decision_id"] == body["decision_id"] and set(chosen) <= offered
            if not fits or len(set(chosen)) != body["k"] or ranks != list(range(1, body["k"] + 1)):
                self._sent.report(f"{body['decision_id']} with {sorted(offered)} was answered with {said}")
            return chosen

    def _post(self, path: str, body: dict[str, Any], deadline: float) -> httpx.Response | None:
        """One attempt at a random server; None without an answer."""
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
            self._sent.tally(unanswered=1)
            self._sent.dropped[f"{type(error).__name__}: {error}"] += 1
            time.sleep(AGAIN_S)
            return None
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            self._sent.tally(refused=1)
            if not answer.headers.get("Retry-After", "").isdigit():
                self._sent.report(f"{path}: 503 without Retry-After: {answer.text[:200]}")
            time.sleep(AGAIN_S)
        return answer


@final
class Load:
    """Clients in threads; when stopped, they finish what they began."""

    def __init__(
        self,
        sent: SentEvents,
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
        self._sent = sent
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
        """Stop all clients; afterwards no event is in doubt."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def user(self, rng: random.Random) -> str:
        """A random user; a user with many events is replaced by a new one."""
        slot = rng.randrange(self._users)
        with self._lock:
            told = self._told[slot] = self._told.get(slot, 0) + 2
        return f"{self._prefix}{slot}-{told // EVENTS_PER_USER_MAX}"

    def _work(self, rng: random.Random) -> None:
        client = Client(self._sent, self._urls, rng, keep_connections=self._keep_connections)
        try:
            while not self._stopping.is_set():
                asked = [client.recommend(self.user(rng)) for _ in range(rng.choice((1, 1, 1, 4)))]
                events = [event for one in asked for event in client.events_of(one)]
                if len(asked) > 1:
                    client.send(events)
                else:
                    for event in events:
                        client.send([event])
                if rng.random() < self._repeated:
                    client.repeat_request(asked[0])
                    if events[0].acknowledged_at is not None:
                        client.send_again(events[0])
                self._stopping.wait(self._pace_s)
        except GivenUp as error:
            self._sent.report(str(error))
        finally:
            client.close()
