"""Hyper-parameters of the learners, with their symbols in the papers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Final, Literal, Self, final

#: Parameters of the shared networks. Epochs keep up to three copies: 100 MB.
SHARED_NUMBERS_MAX: Final = 1 << 23

#: Numbers of one user's state. A service allocates room for 64 users at once: 256 MB.
USER_NUMBERS_MAX: Final = 1 << 20

#: Hidden units of the trunk times the samples of a step; all of them are in memory during the step.
STEP_NUMBERS_MAX: Final = 1 << 25

#: Multiplications of forward passes: of training the trunk in an epoch (minutes), of fitting one sample of a user
#: (a second for the 256 samples kept), and of one request to `pooled` (a second). They run on one thread.
EPOCH_WORK_MAX: Final = 1 << 42
SAMPLE_WORK_MAX: Final = 1 << 25
REQUEST_WORK_MAX: Final = 1 << 31


@final
@dataclass(frozen=True, slots=True)
class WorkLimit:
    """A quantity that follows from settings and the number of inputs, and its limit."""

    amount: int
    most: int
    what: str
    names: tuple[str, ...]  # the settings it depends on

    def check(self, inputs: int) -> None:
        """Raise ValueError, naming the settings and the limit, if the amount is too large."""
        if self.amount > self.most:
            raise ValueError(
                f"{', '.join(self.names)} and {inputs} input{'s' * (inputs != 1)} make {self.amount:,} {self.what}, "
                f"more than the {self.most:,} allowed"
            )


@final
@dataclass(frozen=True, slots=True)
class Limits:
    """The range of a setting."""

    least: float
    most: float
    above: bool = False  # `least` itself is excluded
    below: bool = False  # `most` itself is excluded

    def check(self, name: str, value: float) -> None:
        """Raise ValueError, naming the setting and its range, for a value outside."""
        low = value < self.least or (self.above and value == self.least)
        if low or value > self.most or (self.below and value == self.most):
            lower, upper = "above" if self.above else "at least", "below" if self.below else "at most"
            raise ValueError(f"{name} must be {lower} {_shown(self.least)} and {upper} {_shown(self.most)}")


#: The range of every numeric setting of any learner, chosen such that a request or a training step ends within seconds
#: and no intermediate result overflows float32. A learner may narrow it (`LearnerSettings.NARROWER`).
LIMITS: Final[dict[str, Limits]] = {
    "seed": Limits(-(2**63), 2**64 - 1),  # the range of torch's generators
    "user_weight": Limits(1e-6, 1e6),  # with 0 nothing shared would be learned
    "samples_kept": Limits(1, 100_000),
    "candidate_pool": Limits(1, 1_000_000),
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
    """Settings that every learner has; `named_settings` builds presets, `stored_settings` reads stored ones."""

    preset: str
    seed: int = 0
    user_weight: float = 1.0  #: w_u of Eq. 5
    samples_kept: int = 256  # latest samples of a user that are learned from
    candidate_pool: int = 2_048  # most users that a request is compared with

    #: The settings that fix the meaning of a user's stored tensors; all others may change while users exist.
    STRUCTURE: ClassVar[tuple[str, ...]] = ("preset", "seed")
    #: Format of what is stored: raised when stored tensors or notes change their meaning.
    STATE_FORMAT: ClassVar[int] = 1
    #: The settings that determine the size of the shared networks, and of a user's state.
    NETWORK_SIZE: ClassVar[tuple[str, ...]]
    USER_SIZE: ClassVar[tuple[str, ...]]
    #: Ranges that are narrower for this learner than in LIMITS.
    NARROWER: ClassVar[dict[str, Limits]] = {}

    def __post_init__(self) -> None:
        self._check_types()
        for field in fields(self):
            if field.type in ("int", "float"):
                limits = self.NARROWER.get(field.name, LIMITS[field.name])
                limits.check(field.name, getattr(self, field.name))

    @abstractmethod
    def _work(self, network: int) -> list[WorkLimit]:
        """Computing costs with a network of so many parameters."""

    def check_size(self, inputs: int, *, network: int, user: int) -> None:
        """Raise ValueError, naming the settings, for a learner that is too large or too slow.

        `network` and `user` are the numbers in the shared network and in a user's state.
        """
        loads = [
            WorkLimit(network, SHARED_NUMBERS_MAX, "numbers in the shared network", self.NETWORK_SIZE),
            WorkLimit(user, USER_NUMBERS_MAX, "numbers in the learner of a user", self.USER_SIZE),
        ]
        for load in loads + self._work(network):
            load.check(inputs)

    def _check_types(self) -> None:
        """Check types, because settings also come from JSON."""
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
        return asdict(self) | {"state_format": self.STATE_FORMAT}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Restore the result of `to_json`; an unknown field, or another format of stored state, is an error."""
        values = dict(values)
        stored = values.pop("state_format", 1)  # versions without formats had format 1
        if stored != cls.STATE_FORMAT:
            raise ValueError(
                f"what it learned has format {stored}, and this version reads format {cls.STATE_FORMAT}. Use another "
                "namespace, or delete this one with DELETE /admin/namespaces/{name} and begin again"
            )
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"unknown learner settings: {', '.join(sorted(unknown))}")
        return cls(**values)

    def structure(self) -> dict[str, Any]:
        """The values of STRUCTURE, by name, and the format of stored state."""
        return {name: getattr(self, name) for name in self.STRUCTURE} | {"state_format": self.STATE_FORMAT}


@final
@dataclass(frozen=True)
class PosteriorSettings(LearnerSettings):
    """Settings of the default learner: posterior heads on a shared trunk."""

    preset: str = "default"
    alpha: float = 0.3  #: α, weight of the posterior's deviation
    # Parts; each can be switched off to measure its effect.
    trunk: bool = True
    heads: bool = True  # False: the trunk alone, without user heads
    kinds: bool = True  # of users
    memory: bool = True
    arms: bool = True  # an effect and factors of each arm, and of places
    apart: bool = True  # subtract the slate effect from wide inputs
    # The trunk: p(x), the mean of several networks, trained on replayed samples.
    members: int = 4
    width: int = 48
    depth: int = 2
    bins: int = 12  # pieces of the piecewise-linear code of one input; 0 for none
    codes_max: int = 384  # all codes together
    trunk_rate: float = 0.003
    trunk_decay: float = 0.5
    replayed: int = 256  # samples of a step
    steps_per_event: float = 0.25
    epoch_steps_max: int = 2_048
    # Heads: inputs of more than `head_inputs_max` numbers reach them as `head_directions` principal directions.
    head_inputs_max: int = 48
    head_directions: int = 6
    products_max: int = 48  # products of two head inputs are head inputs too, if they are at most so many
    nu: float = 1.0  #: ν of Eq. 4: users agree on an arm within so many deviations
    # Memory: latest samples kept, and the kernel's radius (rms distance, in standard deviations).
    memory_samples: int = 64
    memory_radius: float = 0.087
    # An epoch is due after so many events or this share of all events, whichever is more.
    epoch_events: int = 64
    epoch_growth: float = 0.03

    STATE_FORMAT = 5  # one prior, which may be a mixture of kinds
    STRUCTURE = ("preset", "seed", "members", "width", "depth", "bins", "codes_max", "head_inputs_max",
                 "head_directions", "memory_samples", "trunk", "products_max", "apart")  # fmt: skip

    NETWORK_SIZE = ("members", "width", "depth", "codes_max")
    USER_SIZE = ("head_inputs_max", "head_directions", "products_max", "memory_samples")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_directions > self.head_inputs_max:
            raise ValueError("head_directions must be at most head_inputs_max")
        held = self.replayed * self.members * self.width * self.depth
        if held > STEP_NUMBERS_MAX:
            raise ValueError(
                f"replayed, members, width and depth make {held:,} numbers of a step, more than the "
                f"{STEP_NUMBERS_MAX:,} allowed"
            )

    def _work(self, network: int) -> list[WorkLimit]:
        steps = self.replayed * self.epoch_steps_max
        names = ("replayed", "epoch_steps_max", *self.NETWORK_SIZE)
        return [WorkLimit(steps * network, EPOCH_WORK_MAX, "multiplications in an epoch", names)]


@final
@dataclass(frozen=True)
class MetaBanSettings(LearnerSettings):
    """Settings of Meta-Ban as published (`paper`) and as in the authors' public code (`pooled`)."""

    preset: str = "paper"
    width: int = 100  #: m
    depth: int = 2  #: L
    user_steps: int = 10  #: J₁
    user_rate: float = 0.05  #: η₁
    meta_steps: int = 10  #: J₂
    meta_rate: float = 0.6  #: η₂
    #: Eq. 10 lets both rates fall with the data. "per-event" divides the rate of a summed gradient by the number of
    #: samples in the sum, which keeps one setting stable for any number of events; "constant" does not.
    rate_schedule: Literal["constant", "per-event"] = "per-event"
    l1: float = 0.001  #: λ of Eq. 5
    nu: float = 5.0  #: ν of Eq. 4
    gamma: float = 0.1  #: γ of Eq. 4; Section 7 uses 0.4, which has more regret with the rates above
    alpha: float = 0.02  #: α, weight of the bonus
    #: The bonus: "gradient" as published, or the posterior deviation of the user's own learner (posterior_bonus.py).
    bonus: Literal["gradient", "posterior"] = "gradient"
    noise: float = 0.1  # variance of rewards around a user's learner, for the bonus "posterior"
    beta2: float = 1.0  #: β₂ of Lemma 6.2, whose constants the paper does not state
    z1: float = 0.0  #: Z₁ of Eq. 13, the same for all arms
    xi1: float = 0.0  #: ξ₁ of Lemma 6.3
    epsilon1: float = 0.01  #: ε₁, the training error of Lemma 6.1
    delta: float = 0.1  #: δ, the confidence level
    log_constant: float = 1.0  #: the constant inside O(μk) of Eq. 11
    #: θ_t^u of Algorithm 3, line 9: the newest parameters, or one of the last `checkpoints` drawn uniformly.
    draw: Literal["latest", "uniform"] = "latest"
    checkpoints: int = 8
    standardize: bool = True  # inputs to zero mean and unit deviation, frozen for an epoch
    #: ‖x‖ of every input (1 in Assumption 5.2), so that the rates fit any number and size of features. The service
    #: appends a constant input, so scaling loses no information. 0 leaves inputs unscaled.
    input_norm: float = 2.24
    clip_norm: float = 100.0  # largest norm of the mean loss gradient
    # `pooled` only: samples of a user in its state, samples of a step, and applied events between epochs.
    recent_samples: int = 64
    step_samples: int = 64
    epoch_events: int = 64

    STRUCTURE = ("preset", "width", "depth", "draw", "checkpoints", "recent_samples", "standardize", "input_norm",
                 "seed", "bonus")  # fmt: skip

    NETWORK_SIZE = ("width", "depth")
    USER_SIZE = ("width", "depth", "checkpoints", "recent_samples")

    NARROWER: ClassVar[dict[str, Limits]] = {"depth": Limits(2, 16), "nu": Limits(1, 1e6, above=True)}

    def _work(self, network: int) -> list[WorkLimit]:
        size, fitting = self.NETWORK_SIZE, self.user_steps * network
        loads = [WorkLimit(fitting, SAMPLE_WORK_MAX, "multiplications for a sample of a user", ("user_steps", *size))]
        if self.preset == "pooled":
            adapting, names = self.meta_steps * self.step_samples * network, ("meta_steps", "step_samples", *size)
            loads.append(WorkLimit(adapting, REQUEST_WORK_MAX, "multiplications in a request", names))
        return loads


#: Allowed values of settings that are strings.
CHOICES: dict[str, tuple[str, ...]] = {
    "preset": ("default", "paper", "pooled"),
    "rate_schedule": ("constant", "per-event"),
    "draw": ("latest", "uniform"),
    "bonus": ("gradient", "posterior"),
}

#: Settings of each preset that differ from the defaults. `pooled` follows the authors' public code.
PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {},
    "pooled": {"user_steps": 30, "user_rate": 0.1, "meta_steps": 30, "meta_rate": 0.1, "alpha": 0.01, "l1": 0.0},
}


def stored_settings(values: dict[str, Any]) -> LearnerSettings:
    """Settings from the result of any learner's `to_json`."""
    kind = PosteriorSettings if values.get("preset") == "default" else MetaBanSettings
    return kind.from_json(values)


def named_settings(preset: str, **overrides: Any) -> LearnerSettings:
    """A preset with some settings replaced."""
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}")
    kind: type[LearnerSettings] = PosteriorSettings if preset == "default" else MetaBanSettings
    return kind.from_json({"preset": preset, "state_format": kind.STATE_FORMAT, **PRESETS[preset], **overrides})
