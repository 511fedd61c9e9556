"""The simulated world of `metaban demo`: users with hidden tastes, served and rewarded over HTTP.

Arms are `ITEMS` points on the unit sphere in R⁴; every request offers `OFFERED` of them. Users belong to hidden groups
of unequal size. A group likes arms near one of its two favourite points, so the reward is not linear in the features,
and no feature tells the groups apart. An arm is rewarded with 1 with probability
`LEAST + (MOST − LEAST)·exp(−d²/SPREAD)`, where d is its distance from the nearest favourite, and with 0 otherwise. A
quarter of the users exists from the start; the others arrive one by one.

A random policy plays the same requests with the same random numbers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from metaban.client import ApiError, Metaban

Numbers = NDArray[np.float64]

DIMENSION: Final = 4

ITEMS: Final = 60

OFFERED: Final = 8

#: Shares of the users in each hidden group.
GROUPS: Final = (0.5, 0.3, 0.2)

FAVOURITES: Final = 2

LEAST, MOST, SPREAD = 0.05, 0.95, 0.5

#: Share of the users that exist from the start, and share of the rounds after which all have arrived.
FIRST_USERS, LAST_ARRIVAL = 0.25, 0.8

#: Rounds between two measurements of how long a reward takes to be served.
FRESHNESS_EVERY: Final = 20


@final
@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One request: the user, the items offered, their reward probabilities, and the random number that decides."""

    user: int
    #: Whether it is the first request of a user who arrived during the demo.
    is_newcomer: bool
    items: NDArray[np.int64]
    chances: Numbers
    luck: float
    #: The choice of the random policy, as a place among the items.
    random_place: int

    def reward(self, place: int) -> float:
        """1 when the item at this place is liked, else 0."""
        return float(self.luck < self.chances[place])


@final
class DemoWorld:
    """Users, items and tastes; the same for the same seed."""

    def __init__(self, *, users: int, rounds: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.users, self.rounds = users, rounds
        self.items = _on_sphere(random.standard_normal((ITEMS, DIMENSION)))
        self.group_of = random.choice(len(GROUPS), size=users, p=GROUPS)
        favourites = _on_sphere(random.standard_normal((len(GROUPS), FAVOURITES, DIMENSION)))
        squared = np.square(self.items[:, None, None] - favourites).sum(-1).min(-1)  # [items, groups]
        self.chances = LEAST + (MOST - LEAST) * np.exp(-squared / SPREAD)
        self._random = random

    def questions(self) -> Iterator[DemoRequest]:
        """One request per round; a user who has just arrived asks at once."""
        arrived = max(1, int(FIRST_USERS * self.users))
        for number in range(self.rounds):
            share = FIRST_USERS + (1 - FIRST_USERS) * number / (LAST_ARRIVAL * self.rounds)
            is_newcomer = arrived < min(self.users, int(share * self.users))
            arrived += is_newcomer
            user = arrived - 1 if is_newcomer else int(self._random.integers(arrived))
            items = self._random.choice(ITEMS, size=OFFERED, replace=False)
            yield DemoRequest(
                user=user,
                is_newcomer=is_newcomer,
                items=items,
                chances=self.chances[items, self.group_of[user]],
                luck=float(self._random.random()),
                random_place=int(self._random.integers(OFFERED)),
            )


@final
@dataclass(frozen=True, slots=True)
class DemoRound:
    """The result of one request."""

    question: DemoRequest
    reward: float
    #: Reward probability of the chosen item.
    chance: float
    #: Group size of the chosen item, as answered.
    group_size: int
    model_version: int
    #: Milliseconds of the decision, measured by the client.
    took_ms: float
    #: Milliseconds until the reward was served; None when not measured.
    fresh_ms: float | None

    @property
    def random_reward(self) -> float:
        """The reward of the random policy."""
        return self.question.reward(self.question.random_place)


@final
@dataclass(frozen=True, slots=True)
class Rates:
    """Expected rewards per round: of the service, of the random policy, and of the best choice."""

    service: float
    chance: float
    best: float


@final
@dataclass(slots=True)
class Story:
    """All results so far."""

    rounds: list[DemoRound] = field(default_factory=list)
    #: Share of a user's group that is in the same hidden group, per checked user; empty when the key may not ask.
    purity: list[float] = field(default_factory=list)
    #: The same for random users.
    purity_of_chance: float = 0.0

    def rates(self, last: int | None = None, *, first_decisions: bool = False) -> Rates:
        """Rates over the last rounds, or all; optionally only of the first decisions for new users."""
        seen = self.rounds[-last:] if last else self.rounds
        if first_decisions:
            seen = [each for each in seen if each.question.is_newcomer]
        if not seen:
            return Rates(0.0, 0.0, 0.0)
        chances = np.stack([each.question.chances for each in seen])
        return Rates(
            float(np.mean([each.chance for each in seen])), float(chances.mean()), float(chances.max(axis=1).mean())
        )

    @property
    def fresh_ms(self) -> list[float]:
        """Milliseconds until rewards were served."""
        return [each.fresh_ms for each in self.rounds if each.fresh_ms is not None]


def play(metaban: Metaban, world: DemoWorld, story: Story) -> Iterator[DemoRound]:
    """Play round by round; each result is added to the story before it is yielded."""
    names = [f"item-{number}" for number in range(ITEMS)]
    features = world.items.tolist()
    for number, question in enumerate(world.questions()):
        arms = {names[item]: features[item] for item in question.items}
        started_s = time.perf_counter()
        decision = metaban.recommend(user_name(question.user), arms)
        answered_s = time.perf_counter()
        place = list(arms).index(decision.arm_id)
        waits = number % FRESHNESS_EVERY == FRESHNESS_EVERY - 1
        outcome = metaban.feedback(decision.decision_id, question.reward(place), wait_applied=waits)
        story.rounds.append(
            DemoRound(
                question=question,
                reward=question.reward(place),
                chance=float(question.chances[place]),
                group_size=decision.items[0].group_size,
                model_version=decision.model_version,
                took_ms=(answered_s - started_s) * 1e3,
                fresh_ms=(time.perf_counter() - answered_s) * 1e3 if outcome.applied else None,
            )
        )
        yield story.rounds[-1]


def look_into_groups(metaban: Metaban, world: DemoWorld, story: Story, *, users: int = 12) -> None:
    """Measure how many members of a group share its hidden group, for the users with most requests."""
    asked = np.bincount([each.question.user for each in story.rounds], minlength=world.users)
    story.purity.clear()
    pure_by_chance = []
    for user in np.argsort(-asked, kind="stable")[:users]:
        group = world.group_of[user]
        liked = world.items[world.chances[:, group].argmax()]
        try:
            members = metaban.admin.groups(user_name(int(user)), features=liked.tolist()).members
        except ApiError:  # the key may not ask
            return
        others = [world.group_of[user_number(member.user_id)] for member in members]
        if others:
            story.purity.append(float(np.mean([other == group for other in others])))
            pure_by_chance.append(float(np.mean(world.group_of == group)))
    story.purity_of_chance = float(np.mean(pure_by_chance)) if pure_by_chance else 0.0


def user_name(user: int) -> str:
    """The user id of a simulated user."""
    return f"visitor-{user}"


def user_number(name: str) -> int:
    """The simulated user of an id."""
    return int(name.removeprefix("visitor-"))


def _on_sphere(points: Numbers) -> Numbers:
    scaled: Numbers = points / np.linalg.norm(points, axis=-1, keepdims=True)
    return scaled
