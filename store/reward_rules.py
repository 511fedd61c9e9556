"""Reward rules of a namespace: range, repeated rewards, default reward, and how long rewards are taken.

The range may change while earlier rewards are kept, so each reward is stored with its own range, scaled to 0..1.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, Self, TypeAlias, final, get_args

#: Rewards lie within ± this.
REWARD_LIMIT: Final = 1e30


@final
@dataclass(frozen=True, slots=True)
class RewardRange:
    """Range of rewards; ValueError if it is empty or exceeds the limit."""

    least: float
    greatest: float

    def __post_init__(self) -> None:
        # NaN and infinity fail these comparisons too.
        if not -REWARD_LIMIT <= self.least < self.greatest <= REWARD_LIMIT:
            raise ValueError(f"rewards cannot lie between {self.least:g} and {self.greatest:g}")

    def takes(self, reward: float) -> bool:
        """Whether a reward lies in the range."""
        return self.least <= reward <= self.greatest

    def scaled(self, reward: float) -> float:
        """Reward scaled to 0..1; one outside the range is clipped."""
        return min(1.0, max(0.0, (reward - self.least) / (self.greatest - self.least)))

    def as_sent(self, scaled: float) -> float:
        """Scaled reward in the numbers of the range."""
        return self.least + scaled * (self.greatest - self.least)


#: What counts of several rewards for one arm of one decision: the first, the last, or their sum.
Repeated: TypeAlias = Literal["first", "last", "sum"]

#: Longest wait for a reward, and longest window: a year.
WAIT_MAX_S: Final = 31_536_000.0

#: Wait for a reward unless another is set, in seconds; never longer than the reward window.
WAIT_S: Final = 600.0

#: A day, and a week.
WINDOW_S: Final = 86_400
DEDUPE_WINDOW_S: Final = 604_800


@final
@dataclass(frozen=True, slots=True)
class RewardRules:
    """Rules of one namespace; ValueError for inconsistent ones."""

    repeated: Repeated = "sum"
    #: Range of the rewards that clients send; learners see it scaled to 0..1.
    reward_min: float = 0.0
    reward_max: float = 1.0
    #: Reward of an arm that got none in time; None: such an arm is not learned from. 0 is allowed in every range.
    default_reward: float | None = None
    #: Time to wait for a reward before the default one; None: WAIT_S, or the reward window if that is shorter.
    wait_s: float | None = None
    #: How long after a decision its rewards are learned.
    window_s: float = WINDOW_S
    #: How long an event id is remembered. Within the reward window a reward sent twice must be found.
    dedupe_window_s: float = DEDUPE_WINDOW_S

    #: Range of new rewards, from reward_min and reward_max.
    range: RewardRange = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.repeated not in get_args(Repeated):
            raise ValueError(f"repeated_rewards must be one of {', '.join(get_args(Repeated))}")
        given = [each for each in (self.default_reward, self.wait_s) if each is not None]
        windows = [self.window_s, self.dedupe_window_s]
        if not all(map(_is_number, [self.reward_min, self.reward_max, *given, *windows])):
            raise ValueError(f"rewards and the times to wait for them must be numbers within ±{REWARD_LIMIT:g}")
        if self.reward_min >= self.reward_max:
            raise ValueError("reward_min must be below reward_max")
        object.__setattr__(self, "range", RewardRange(self.reward_min, self.reward_max))
        if self.default_reward and not self.range.takes(self.default_reward):
            raise ValueError(f"the default reward must be 0 or lie between {self.reward_min:g} and {self.reward_max:g}")
        if self.wait_s is not None and not 0 < self.wait_s <= WAIT_MAX_S:
            raise ValueError(f"the wait for a reward must be above 0 and at most {WAIT_MAX_S:g} s")
        if not all(0 < window_s <= WAIT_MAX_S for window_s in windows):
            raise ValueError(f"the windows must be above 0 and at most {WAIT_MAX_S:g} s")
        if self.wait_s is not None and self.wait_s > self.window_s:
            raise ValueError("the wait for a reward must not be longer than the reward window: rewards are late then")
        if self.dedupe_window_s < self.window_s:
            raise ValueError(
                "the dedupe window must not be shorter than the reward window: a reward sent twice could be learned "
                "twice"
            )

    @property
    def reward_of_silence(self) -> float | None:
        """The default reward; the lower end of the range instead of a 0 outside of it."""
        default = self.default_reward
        return self.reward_min if default is not None and not self.range.takes(default) else default

    @property
    def waited_s(self) -> float:
        """Time to wait for a reward before the default one."""
        return min(WAIT_S, self.window_s) if self.wait_s is None else self.wait_s

    def overdue_ms(self, since_ms: int) -> int | None:
        """Time when a decision that counts from `since_ms` gets the default reward; None if there is none."""
        return None if self.default_reward is None else since_ms + max(1, round(self.waited_s * 1_000))

    def to_json(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}

    @classmethod
    def from_json(cls, stored: dict[str, Any] | None) -> Self:
        """Rules from `to_json`; missing fields have their defaults. ValueError for unknown ones."""
        stored = stored or {}
        if "window_s" not in stored and _is_number(stored.get("wait_s")):
            # Stored by a version without windows, whose wait may be longer than the default window.
            window_s = max(WINDOW_S, stored["wait_s"])
            stored = {"window_s": window_s, "dedupe_window_s": max(DEDUPE_WINDOW_S, window_s), **stored}
        if unknown := stored.keys() - {each.name for each in fields(cls) if each.init}:
            raise ValueError(f"reward rules have no {sorted(unknown)[0]!r}")
        return cls(**stored)


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number within the limit."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= REWARD_LIMIT
