"""A show of the whole product: simulated users with hidden tastes, served and rewarded over HTTP.

The world. Arms are `ITEMS` points on the unit sphere in R⁴, and every question offers `OFFERED` of them. Users belong
to hidden groups of unequal size; a group likes what is near one of its two favourite spots, so that liking is no linear
function of the features, and nothing that is sent tells the groups apart. An arm x is rewarded with 1 with chance
`LEAST + (MOST − LEAST)·exp(−d²/SPREAD)`, d being its distance from the nearest favourite, and with 0 otherwise. A
quarter of the users is there from the start, the others arrive one by one.

Beside the service plays a chooser that takes any arm offered, on the same questions with the same luck.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from service.client import Metaban
from service.client_errors import ApiError

Numbers = NDArray[np.float64]

DIMENSION: Final = 4
ITEMS: Final = 60
OFFERED: Final = 8
#: Shares of the users that the hidden groups have.
GROUPS: Final = (0.5, 0.3, 0.2)
FAVOURITES: Final = 2
LEAST, MOST, SPREAD = 0.05, 0.95, 0.5
#: Share of the users who are there from the start, and of the rounds after which all have come.
FIRST_USERS, LAST_ARRIVAL = 0.25, 0.8
#: Every so many rounds the reward is waited for until it is served.
FRESHNESS_EVERY: Final = 20


@final
@dataclass(frozen=True, slots=True)
class Question:
    """One visit: who asks, which items are offered, how each would be liked, and how lucky the moment is."""

    user: int
    #: Whether it is the first question of a user who was not there from the start.
    is_newcomer: bool
    items: NDArray[np.int64]
    chances: Numbers
    luck: float
    #: What the chooser without a clue takes, as a place among the items.
    random_place: int

    def reward(self, place: int) -> float:
        """1 when the item at this place is liked, else 0."""
        return float(self.luck < self.chances[place])


@final
class World:
    """Users, items and who likes what; the same for the same seed."""

    def __init__(self, *, users: int, rounds: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.users, self.rounds = users, rounds
        self.items = _on_sphere(random.standard_normal((ITEMS, DIMENSION)))
        self.group_of = random.choice(len(GROUPS), size=users, p=GROUPS)
        favourites = _on_sphere(random.standard_normal((len(GROUPS), FAVOURITES, DIMENSION)))
        squared = np.square(self.items[:, None, None] - favourites).sum(-1).min(-1)  # [items, groups]
        self.chances = LEAST + (MOST - LEAST) * np.exp(-squared / SPREAD)
        self._random = random

    def questions(self) -> Iterator[Question]:
        """One a round; whoever has just arrived asks at once."""
        arrived = max(1, int(FIRST_USERS * self.users))
        for number in range(self.rounds):
            share = FIRST_USERS + (1 - FIRST_USERS) * number / (LAST_ARRIVAL * self.rounds)
            is_newcomer = arrived < min(self.users, int(share * self.users))
            arrived += is_newcomer
            user = arrived - 1 if is_newcomer else int(self._random.integers(arrived))
            items = self._random.choice(ITEMS, size=OFFERED, replace=False)
            yield Question(
                user=user,
                is_newcomer=is_newcomer,
                items=items,
                chances=self.chances[items, self.group_of[user]],
                luck=float(self._random.random()),
                random_place=int(self._random.integers(OFFERED)),
            )


@final
@dataclass(frozen=True, slots=True)
class Round:
    """What came of a question."""

    question: Question
    reward: float
    #: The chance of a reward that the chosen item had.
    chance: float
    #: Users who agree about the chosen item, as the service sees it.
    group_size: int
    model_version: int
    #: Milliseconds of the decision, seen from here.
    took_ms: float
    #: Milliseconds until the reward was served; None when that was not waited for.
    fresh_ms: float | None

    @property
    def random_reward(self) -> float:
        """What the chooser without a clue got."""
        return self.question.reward(self.question.random_place)


@final
@dataclass(frozen=True, slots=True)
class Rates:
    """Rewards a round, in expectation: of the service, of chance, and of one who knows the hidden tastes."""

    service: float
    chance: float
    best: float


@final
@dataclass(slots=True)
class Story:
    """Everything that has happened so far."""

    rounds: list[Round] = field(default_factory=list)
    #: Share of a user's group that is of the same hidden group, by user looked at; empty when it cannot be asked for.
    purity: list[float] = field(default_factory=list)
    #: The same of users taken at random.
    purity_of_chance: float = 0.0

    def rates(self, last: int | None = None, *, first_decisions: bool = False) -> Rates:
        """Over the last rounds, or all of them; of these the first decisions for newcomers, if asked for."""
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
        """How long rewards took to be served."""
        return [each.fresh_ms for each in self.rounds if each.fresh_ms is not None]


def play(metaban: Metaban, world: World, story: Story) -> Iterator[Round]:
    """Ask and reward, round by round; each is in the story before it is yielded."""
    names = [f"item-{number}" for number in range(ITEMS)]
    features = world.items.tolist()
    for number, question in enumerate(world.questions()):
        arms = {names[item]: features[item] for item in question.items}
        started_s = time.perf_counter()
        decision = metaban.recommend(user_name(question.user), arms)
        answered_s = time.perf_counter()
        place = list(arms).index(decision.arm_id)
        waits = number % FRESHNESS_EVERY == FRESHNESS_EVERY - 1
        told = metaban.feedback(decision.decision_id, question.reward(place), wait_applied=waits)
        story.rounds.append(
            Round(
                question=question,
                reward=question.reward(place),
                chance=float(question.chances[place]),
                group_size=decision.items[0].group_size,
                model_version=decision.model_version,
                took_ms=(answered_s - started_s) * 1e3,
                fresh_ms=(time.perf_counter() - answered_s) * 1e3 if told.applied else None,
            )
        )
        yield story.rounds[-1]


def look_into_groups(metaban: Metaban, world: World, story: Story, *, users: int = 12) -> None:
    """How many of those whom the service takes for alike are of one hidden group, for the users who asked most."""
    asked = np.bincount([each.question.user for each in story.rounds], minlength=world.users)
    story.purity.clear()
    pure_by_chance = []
    for user in np.argsort(-asked, kind="stable")[:users]:
        group = world.group_of[user]
        liked = world.items[world.chances[:, group].argmax()]
        try:
            members = metaban.admin.groups(user_name(int(user)), features=liked.tolist()).members
        except ApiError:  # not every key may ask
            return
        others = [world.group_of[user_number(member.user_id)] for member in members]
        if others:
            story.purity.append(float(np.mean([other == group for other in others])))
            pure_by_chance.append(float(np.mean(world.group_of == group)))
    story.purity_of_chance = float(np.mean(pure_by_chance)) if pure_by_chance else 0.0


def user_name(user: int) -> str:
    """What the service knows a user by."""
    return f"visitor-{user}"


def user_number(name: str) -> int:
    """The user of such a name."""
    return int(name.removeprefix("visitor-"))


def _on_sphere(points: Numbers) -> Numbers:
    scaled: Numbers = points / np.linalg.norm(points, axis=-1, keepdims=True)
    return scaled
