"""The shared state of the default learner: what an epoch publishes, as the records of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self, final

from metaban.models.default.arms import SharedEffects
from metaban.models.default.kinds import Kinds
from metaban.models.default.prior import Prior, prior_from_state, prior_state
from metaban.models.default.trunk import TrunkState
from metaban.models.learner import State
from metaban.models.numerics.arrays import Array, Arrays

#: Tensors of the inputs; which of them exist depends on the settings (inputs.py).
BASIS: Final = (
    "mean", "scale", "edges", "common_ratio", "common_centre", "wide_factors", "head_columns", "directions"
)  # fmt: skip


@final
@dataclass(frozen=True, slots=True)
class SharedState:
    """Shared state as numpy arrays or tensors."""

    trunk: TrunkState
    prior: Prior
    effects: SharedEffects
    kinds: Kinds
    gain: Array  # [] of the memory
    epoch: Array  # [] number of the epoch
    since: Array  # [] epoch of the last change of tastes
    reach: Array  # [] of intervals, in deviations (calibration.py)
    reliability: Array  # [BINS, COLUMNS] (calibration.py)
    basis: dict[str, Array]  # tensors of the inputs by name

    @classmethod
    def stored(cls, shared: Arrays) -> Self:
        """From an epoch's shared state."""
        return cls(
            trunk=TrunkState.stored(shared),
            prior=prior_from_state(shared),
            effects=SharedEffects.stored(shared),
            kinds=Kinds.stored(shared),
            gain=shared["gain"],
            epoch=shared["epoch"],
            since=shared["since"],
            reach=shared["reach"],
            reliability=shared["reliability"],
            basis={name: shared[name] for name in BASIS if name in shared},
        )

    def state(self) -> State:
        """The shared state by name."""
        return {
            **self.trunk.state(),
            **prior_state(self.prior),
            **self.effects.state(),
            **self.kinds.state(),
            "gain": self.gain,
            "epoch": self.epoch,
            "since": self.since,
            "reach": self.reach,
            "reliability": self.reliability,
            **self.basis,
        }
