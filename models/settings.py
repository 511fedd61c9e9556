"""Hyper-parameters of the Meta-Ban learners, named after what they do; the paper's letters stand beside them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self


@dataclass(frozen=True, slots=True)
class MetaBanSettings:
    """Settings of one learner. `preset(name)` gives the two named ones; `from_json` restores stored ones."""

    preset: Literal["paper", "pooled"]
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
    beta2: float = 1.0  #: β₂ of Lemma 6.2, whose constants the paper hides
    z1: float = 0.0  #: Z₁ of Eq. 13, the same for all arms
    xi1: float = 0.0  #: ξ₁ of Lemma 6.3
    epsilon1: float = 0.01  #: ε₁, the training error of Lemma 6.1
    delta: float = 0.1  #: δ, the confidence level
    log_constant: float = 1.0  #: the constant inside O(μk) of Eq. 11
    #: θ_t^u of Algorithm 3, line 9: the newest parameters, or one of the last `checkpoints` drawn uniformly.
    draw: Literal["latest", "uniform"] = "latest"
    checkpoints: int = 8
    user_weight: float = 1.0  #: w_u of Eq. 5
    standardize: bool = True  # inputs to zero mean and unit deviation, frozen for an epoch
    #: ‖x‖ of every input (Assumption 5.2 has 1), so that the rates fit any number and size of features; with the
    #: constant that the service appends nothing is lost by it. 0 leaves inputs as they are.
    input_norm: float = 2.24
    clip_norm: float = 100.0  # largest norm of a loss gradient averaged over its samples
    # Only `pooled`: samples of a user that the service holds, samples in a step, and applied events between epochs.
    recent_samples: int = 64
    step_samples: int = 64
    epoch_events: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_kinds()
        for name in (
            "width", "user_steps", "meta_steps", "checkpoints", "recent_samples", "step_samples", "epoch_events"
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("user_rate", "meta_rate", "clip_norm", "log_constant"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive")
        for name in ("l1", "alpha", "beta2", "z1", "xi1", "epsilon1", "user_weight", "input_norm"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        if self.depth < 2:
            raise ValueError("depth must be at least 2")
        if not self.nu > 1 or not 0 <= self.gamma < 1:
            raise ValueError("nu must be above 1 and gamma in [0, 1)")
        if not 0 < self.delta < 1:
            raise ValueError("delta must lie between 0 and 1")

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
            elif not math.isfinite(value):
                raise ValueError(f"{field.name} must be finite")

    @classmethod
    def named(cls, preset: Literal["paper", "pooled"], **overrides: Any) -> Self:
        """A preset with some settings replaced."""
        return cls.from_json({"preset": preset, **PRESETS[preset], **overrides})

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
        """The settings that fix what a user's stored tensors mean; the others may change under stored users."""
        names = (
            "preset",
            "width",
            "depth",
            "draw",
            "checkpoints",
            "recent_samples",
            "standardize",
            "input_norm",
            "seed",
        )
        return {name: getattr(self, name) for name in names}


#: What settings that are words may say.
CHOICES: dict[str, tuple[str, ...]] = {
    "preset": ("paper", "pooled"),
    "rate_schedule": ("constant", "per-event"),
    "draw": ("latest", "uniform"),
}

#: What each preset changes. `pooled` follows the authors' public code: Θ is trained on the pooled samples of the group.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "pooled": {"user_steps": 30, "user_rate": 0.1, "meta_steps": 30, "meta_rate": 0.1, "alpha": 0.01, "l1": 0.0},
}
