"""What the rewards of a namespace mean: their range, what several of them make, and what none makes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, Self, TypeAlias, final, get_args

from store.reward_range import REWARD_LIMIT, RewardRange

#: Of several rewards of one arm of one decision the first counts, the last, or their sum.
Repeated: TypeAlias = Literal["first", "last", "sum"]
#: Longest wait for a reward, a year.
WAIT_MAX_S: Final = 31_536_000.0


@final
@dataclass(frozen=True, slots=True)
class RewardRules:
    """The rules of one namespace; ValueError for some that make no sense together."""

    repeated: Repeated = "sum"
    #: The range that clients' rewards lie in; learners see it as 0 to 1.
    reward_min: float = 0.0
    reward_max: float = 1.0
    #: What a decision without any reward is learned with once it has waited; None: it is not learned.
    default_reward: float | None = None
    #: How long it waits.
    wait_s: float | None = None

    def __post_init__(self) -> None:
        if self.repeated not in get_args(Repeated):
            raise ValueError(f"repeated rewards count as one of {', '.join(get_args(Repeated))}")
        given = [each for each in (self.default_reward, self.wait_s) if each is not None]
        if not all(map(_is_number, [self.reward_min, self.reward_max, *given])):
            raise ValueError(f"rewards and the wait for them must be numbers within ±{REWARD_LIMIT:g}")
        if self.reward_min >= self.reward_max:
            raise ValueError("the least reward must be below the greatest")
        if self.default_reward is not None:
            if not self.reward_min <= self.default_reward <= self.reward_max:
                raise ValueError(f"the default reward must lie between {self.reward_min:g} and {self.reward_max:g}")
            if self.wait_s is None:
                raise ValueError("a default reward needs a time to wait for others")
        if self.wait_s is not None and not 0 < self.wait_s <= WAIT_MAX_S:
            raise ValueError(f"the wait for a reward must be above 0 and at most {WAIT_MAX_S:g} s")

    @property
    def range(self) -> RewardRange:
        """The range of rewards that arrive now."""
        return RewardRange(self.reward_min, self.reward_max)

    def overdue_ms(self, since_ms: int) -> int | None:
        """When a decision that counts since then is learned without a reward; None when it never is."""
        if self.default_reward is None or self.wait_s is None:
            return None
        return since_ms + max(1, round(self.wait_s * 1_000))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any] | None) -> Self:
        """The rules of `to_json`; what is left out is as by default, and ValueError for anything else."""
        stored = stored or {}
        if unknown := stored.keys() - {each.name for each in fields(cls)}:
            raise ValueError(f"reward rules have no {sorted(unknown)[0]!r}")
        return cls(**stored)


def _is_number(value: Any) -> bool:
    """Whether it is a number that is not too large; one that is not finite is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= REWARD_LIMIT
