"""Hyper-parameters of the learners, named after what they do; the papers' letters stand beside them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Final, Literal, Self, final

#: Numbers in the networks that all users share. Epochs keep up to three of each, so that is 100 MB.
SHARED_NUMBERS_MAX: Final = 1 << 23
#: Numbers of one user's learner. A service makes room for 64 users at once, so that is 256 MB.
USER_NUMBERS_MAX: Final = 1 << 20
#: Hidden units of the trunk times the samples of a step, all of which are held during the step.
STEP_NUMBERS_MAX: Final = 1 << 25
#: Multiplications, a forward pass counted: of training the trunk in an epoch (minutes), of fitting one sample of a user
#: (a second for the 256 that are kept), and of `pooled` for a request (a second). One thread does them for everybody.
EPOCH_WORK_MAX: Final = 1 << 42
SAMPLE_WORK_MAX: Final = 1 << 25
REQUEST_WORK_MAX: Final = 1 << 31


@final
@dataclass(frozen=True, slots=True)
class Load:
    """What settings come to together with the number of inputs."""

    amount: int
    most: int
    what: str
    names: tuple[str, ...]  # of the settings to blame

    def check(self, inputs: int) -> None:
        """ValueError, which names the settings and the limit, for too much."""
        if self.amount > self.most:
            raise ValueError(
                f"{', '.join(self.names)} and {inputs} input{'s' * (inputs != 1)} make {self.amount:,} {self.what}, "
                f"more than the {self.most:,} allowed"
            )


@final
@dataclass(frozen=True, slots=True)
class Limits:
    """The values that a setting may have."""

    least: float
    most: float
    below: bool = False  # `most` itself is too much

    def check(self, name: str, value: float) -> None:
        """ValueError, which names the setting and its limits, for a value outside of them."""
        if value < self.least or value > self.most or (self.below and value == self.most):
            upper = "below" if self.below else "at most"
            raise ValueError(f"{name} must be at least {_shown(self.least)} and {upper} {_shown(self.most)}")


#: Of every number among the settings, of whichever learner. A request or a step of training is to end in some seconds,
#: and nothing that follows from them is to leave float32.
LIMITS: Final[dict[str, Limits]] = {
    "seed": Limits(-(2**63), 2**64 - 1),  # those that a generator takes
    "user_weight": Limits(1e-6, 1e6),  # of 0 nothing would be learned that all share
    "alpha": Limits(0, 1e6),
    "nu": Limits(0, 1e6),
    "width": Limits(1, 4_096),
    "depth": Limits(1, 16),
    "epoch_events": Limits(1, 1_000_000),
    # The default learner
    "members": Limits(1, 64),
    "bins": Limits(0, 1_024),
    "codes_max": Limits(0, 65_536),
    "trunk_rate": Limits(1e-9, 10),
    "trunk_decay": Limits(0, 1e3),
    "replayed": Limits(1, 16_384),
    "steps_per_event": Limits(0, 1e3),
    "epoch_steps_max": Limits(1, 100_000),
    "head_inputs_max": Limits(1, 256),
    "head_directions": Limits(1, 256),
    "products_max": Limits(0, 512),
    "group_spread": Limits(1e-6, 1e3),
    "memory_samples": Limits(1, 4_096),
    "memory_radius": Limits(1e-6, 1e3),
    "epoch_growth": Limits(0, 1e3),
    # Meta-Ban
    "user_steps": Limits(1, 10_000),
    "user_rate": Limits(1e-9, 10),
    "meta_steps": Limits(1, 10_000),
    "meta_rate": Limits(1e-9, 10),
    "l1": Limits(0, 1e3),
    "gamma": Limits(0, 1, below=True),
    "noise": Limits(1e-9, 1e6),
    "beta2": Limits(0, 1e6),
    "z1": Limits(0, 1e6),
    "xi1": Limits(0, 1e6),
    "epsilon1": Limits(0, 1e6),
    "delta": Limits(1e-9, 1, below=True),
    "log_constant": Limits(1e-9, 1e6),
    "checkpoints": Limits(1, 256),
    "input_norm": Limits(0, 1e3),
    "clip_norm": Limits(1e-9, 1e9),
    "recent_samples": Limits(1, 4_096),
    "step_samples": Limits(1, 4_096),
}


def _shown(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:.15g}"  # 1000000, not 1e+06


@dataclass(frozen=True)
class LearnerSettings(ABC):
    """What the settings of every learner have; `named_settings` gives the presets, `stored_settings` stored ones."""

    preset: str
    seed: int = 0
    user_weight: float = 1.0  #: w_u of Eq. 5

    #: The settings that fix what a user's stored tensors mean; the others may change under stored users.
    STRUCTURE: ClassVar[tuple[str, ...]] = ("preset", "seed")
    #: The settings that say how large networks are, and those that say it of all that a user's learner has.
    NETWORK_SIZE: ClassVar[tuple[str, ...]]
    USER_SIZE: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        self._check_kinds()
        for field in fields(self):
            if field.type in ("int", "float"):
                LIMITS[field.name].check(field.name, getattr(self, field.name))
        self._check_values()

    @abstractmethod
    def _check_values(self) -> None:
        """Raise ValueError for values within their limits that make no sense to this learner, or together."""

    @abstractmethod
    def _work(self, network: int) -> list[Load]:
        """What there is to do with a network of so many numbers."""

    def check_size(self, inputs: int, *, network: int, user: int) -> None:
        """ValueError, which names the settings to blame, for a learner that is too large, or takes too long.

        The shared network has so many numbers, and each user's learner has.
        """
        loads = [
            Load(network, SHARED_NUMBERS_MAX, "numbers in the shared network", self.NETWORK_SIZE),
            Load(user, USER_NUMBERS_MAX, "numbers in the learner of a user", self.USER_SIZE),
        ]
        for load in loads + self._work(network):
            load.check(inputs)

    def _check_kinds(self) -> None:
        """Settings also come from JSON, where anything can stand."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in CHOICES:
                if value not in CHOICES[field.name]:
                    raise ValueError(f"{field.name} must be one of {', '.join(CHOICES[field.name])}")
            elif field.type == "bool":
                if not isinstance(value, bool):
                    raise ValueError(f"{field.name} must be true or false")
            elif isinstance(value, bool) or not isinstance(value, int if field.type == "int" else int | float):
                raise ValueError(f"{field.name} must be a {'whole ' if field.type == 'int' else ''}number")
            elif isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{field.name} must be finite")

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a namespace's record."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Restore what `to_json` wrote; a field this version does not know is an error, never ignored."""
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"unknown learner settings: {', '.join(sorted(unknown))}")
        return cls(**values)

    def structure(self) -> dict[str, Any]:
        """The values of STRUCTURE, by name."""
        return {name: getattr(self, name) for name in self.STRUCTURE}


@final
@dataclass(frozen=True)
class PosteriorSettings(LearnerSettings):
    """Settings of the default learner: posterior heads on a shared trunk."""

    preset: str = "default"
    alpha: float = 0.3  #: α, weight of the posterior's deviation
    # What it is made of; each can be left out to see what it is worth.
    trunk: bool = True
    embed: bool = True  # tell the trunk who asks
    heads: bool = True  # False: the trunk alone, no users
    groups: bool = True
    memory: bool = True
    plain: bool = True  # one plain head for everybody decides until users' own foresee more
    teaching: bool = True  # nobody learns from kinds of users who teach badly
    apart: bool = True  # take out of wide inputs what the arms of a request have in common
    # The trunk: p(x), the mean of some networks, and the samples they replay.
    members: int = 4
    width: int = 48
    depth: int = 2
    bins: int = 12  # pieces of the code of one input; 0 for none
    codes_max: int = 384  # numbers that all codes may have together
    trunk_rate: float = 0.003
    trunk_decay: float = 0.5
    replayed: int = 256  # samples a step
    steps_per_event: float = 0.25
    epoch_steps_max: int = 2_048
    # Heads: inputs of more than `head_inputs_max` numbers reach them as `head_directions` principal directions.
    head_inputs_max: int = 48
    head_directions: int = 6
    products_max: int = 48  # products of two head inputs are head inputs too, where they are at most so many
    # Groups: Σ within one as a share of Σ, and ν: how many deviations apart two users may be on an arm to agree on it.
    group_spread: float = 0.15
    nu: float = 1.0
    # Memory: latest samples kept, and how alike two arms must be (rms, in standard deviations).
    memory_samples: int = 64
    memory_radius: float = 0.087
    # An epoch is due after so many events, or this share of all there were.
    epoch_events: int = 64
    epoch_growth: float = 0.03

    STRUCTURE = ("preset", "seed", "members", "width", "depth", "bins", "codes_max", "head_inputs_max",
                 "head_directions", "memory_samples", "embed", "products_max", "apart")  # fmt: skip

    NETWORK_SIZE = ("members", "width", "depth", "codes_max")
    USER_SIZE = ("head_inputs_max", "head_directions", "products_max", "memory_samples")

    def _check_values(self) -> None:
        if self.head_directions > self.head_inputs_max:
            raise ValueError("head_directions must be at most head_inputs_max")
        held = self.replayed * self.members * self.width * self.depth
        if held > STEP_NUMBERS_MAX:
            raise ValueError(
                f"replayed, members, width and depth make {held:,} numbers of a step, more than the "
                f"{STEP_NUMBERS_MAX:,} allowed"
            )

    def _work(self, network: int) -> list[Load]:
        steps = self.replayed * self.epoch_steps_max
        names = ("replayed", "epoch_steps_max", *self.NETWORK_SIZE)
        return [Load(steps * network, EPOCH_WORK_MAX, "multiplications in an epoch", names)]


@final
@dataclass(frozen=True)
class MetaBanSettings(LearnerSettings):
    """Settings of the published learner and of what its public code does."""

    preset: str = "paper"
    width: int = 100  #: m
    depth: int = 2  #: L
    user_steps: int = 10  #: J₁
    user_rate: float = 0.05  #: η₁
    meta_steps: int = 10  #: J₂
    meta_rate: float = 0.6  #: η₂
    #: Eq. 10 lets both rates fall with the data. "per-event" divides a summed gradient's rate by the number of samples
    #: in the sum, so that one setting stays stable from the first event to the last; "constant" does not.
    rate_schedule: Literal["constant", "per-event"] = "per-event"
    l1: float = 0.001  #: λ of Eq. 5
    nu: float = 5.0  #: ν of Eq. 4
    gamma: float = 0.1  #: γ of Eq. 4; Section 7 has 0.4, which earns less with the rates above
    alpha: float = 0.02  #: α, weight of the bonus
    #: The bonus: the published one, of gradients, or the deviation of the user's own learner (own_posterior.py).
    bonus: Literal["gradient", "posterior"] = "gradient"
    noise: float = 0.1  # variance of rewards around a user's learner, for the bonus "posterior"
    beta2: float = 1.0  #: β₂ of Lemma 6.2, whose constants the paper hides
    z1: float = 0.0  #: Z₁ of Eq. 13, the same for all arms
    xi1: float = 0.0  #: ξ₁ of Lemma 6.3
    epsilon1: float = 0.01  #: ε₁, the training error of Lemma 6.1
    delta: float = 0.1  #: δ, the confidence level
    log_constant: float = 1.0  #: the constant inside O(μk) of Eq. 11
    #: θ_t^u of Algorithm 3, line 9: the newest parameters, or one of the last `checkpoints` drawn uniformly.
    draw: Literal["latest", "uniform"] = "latest"
    checkpoints: int = 8
    standardize: bool = True  # inputs to zero mean and unit deviation, frozen for an epoch
    #: ‖x‖ of every input (Assumption 5.2 has 1), so that the rates fit any number and size of features; with the
    #: constant that the service appends nothing is lost by it. 0 leaves inputs as they are.
    input_norm: float = 2.24
    clip_norm: float = 100.0  # largest norm of a loss gradient averaged over its samples
    # Only `pooled`: samples of a user that the service holds, samples in a step, and applied events between epochs.
    recent_samples: int = 64
    step_samples: int = 64
    epoch_events: int = 64

    STRUCTURE = ("preset", "width", "depth", "draw", "checkpoints", "recent_samples", "standardize", "input_norm",
                 "seed", "bonus")  # fmt: skip

    NETWORK_SIZE = ("width", "depth")
    USER_SIZE = ("width", "depth", "checkpoints", "recent_samples")

    def _check_values(self) -> None:
        if self.depth < 2:
            raise ValueError("depth must be at least 2")
        if not self.nu > 1:
            raise ValueError("nu must be above 1")

    def _work(self, network: int) -> list[Load]:
        size, fitting = self.NETWORK_SIZE, self.user_steps * network
        loads = [Load(fitting, SAMPLE_WORK_MAX, "multiplications for a sample of a user", ("user_steps", *size))]
        if self.preset == "pooled":
            adapting, names = self.meta_steps * self.step_samples * network, ("meta_steps", "step_samples", *size)
            loads.append(Load(adapting, REQUEST_WORK_MAX, "multiplications in a request", names))
        return loads


#: What settings that are words may say.
CHOICES: dict[str, tuple[str, ...]] = {
    "preset": ("default", "paper", "pooled"),
    "rate_schedule": ("constant", "per-event"),
    "draw": ("latest", "uniform"),
    "bonus": ("gradient", "posterior"),
}

#: What each preset changes. `pooled` follows the authors' public code: Θ is trained on the pooled samples of the group.
PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {},
    "pooled": {"user_steps": 30, "user_rate": 0.1, "meta_steps": 30, "meta_rate": 0.1, "alpha": 0.01, "l1": 0.0},
}


def stored_settings(values: dict[str, Any]) -> LearnerSettings:
    """What `to_json` of any learner's settings wrote."""
    kind = PosteriorSettings if values.get("preset") == "default" else MetaBanSettings
    return kind.from_json(values)


def named_settings(preset: str, **overrides: Any) -> LearnerSettings:
    """A preset with some settings replaced."""
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}")
    return stored_settings({"preset": preset, **PRESETS[preset], **overrides})
