"""Trains warm starts: a fusion model of users' heads by their profiles, and the guard that says how far to trust it.

Sources are users with samples and a profile. Their heads are posteriors under the epoch's prior, from plain statistics:
no warm start has a part in them, or fusion would be taught its own predictions. The guard holds a share of them out,
fits on the others, and asks how well what is fused from their profiles alone foresees the rewards that the ones held
out earned first, against the prior (`models/warm_start_guard.py`).


Users keep their latest samples. Of one who has had more events than samples are kept, the first rewards are gone, and
the oldest kept stand in for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.fusion import Fusion
from models.fusion_training import FusionFit, FusionSettings, fit_fusion
from models.learner import Learner, State, UserBatch
from models.plain_net import NetShape
from models.posterior import PosteriorLearner, stored_prior
from models.prior import Prior, Statistics
from models.upkeep import sample_weights
from models.warm_start_guard import FirstRewards, judge
from models.warm_starts import BASIS, FUSION, GuardReport, basis_names, standardised_profiles

#: Sources from which on a fusion model is worth fitting, and the share of them that is held out.
LEAST_SOURCES: Final = 32
HELD_OUT: Final = 0.3
#: Rewards of each user held out that are foretold.
FIRST_REWARDS: Final = 20
#: Inputs at which what heads say counts.
INPUTS: Final = 64
#: Least weight of a source, whose head is mostly the prior's.
LEAST_WEIGHT: Final = 0.02


@final
@dataclass(frozen=True, slots=True)
class TrainedStarts:
    """What `models.warm_starts.WarmStarter` answers from, and what the guard found."""

    arrays: dict[str, NDArray[Any]]
    report: GuardReport


@final
@dataclass(frozen=True, slots=True)
class _Sources:
    """n users: standardised profiles [n, d], statistics, and their first rewards."""

    profiles: Tensor
    users: Statistics
    first: FirstRewards

    def rows(self, index: Tensor) -> _Sources:
        return _Sources(self.profiles[index], self.users.rows(index), self.first.rows(index))


def train_warm_starts(
    learner: Learner,
    shared: State,
    batches: Sequence[UserBatch],
    profiles: Tensor,
    *,
    seed: int,
    settings: FusionSettings | None = None,
    progress: Callable[[float], None] | None = None,
) -> TrainedStarts:
    """Warm starts for users like those of the batches, whose profiles [n, d] come in the same order."""
    if not isinstance(learner, PosteriorLearner):
        raise ValueError("this learner takes no warm starts")
    count = sum(len(batch.events) for batch in batches)
    if profiles.dim() != 2 or len(profiles) != count or not bool(profiles.isfinite().all()):
        raise ValueError("every source needs a profile of finite numbers")
    if count < LEAST_SOURCES:
        raise ValueError(f"warm starts need at least {LEAST_SOURCES} sources")
    tell = progress or (lambda share: None)
    centre, scale = _spread(profiles.cpu().numpy())
    standard = torch.from_numpy(standardised_profiles(profiles.cpu().numpy(), centre, scale))
    prior = stored_prior({name: tensor.detach().cpu() for name, tensor in shared.items()})
    sources, inputs = _gathered(learner, shared, batches, standard, seed)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    held = max(1, round(HELD_OUT * count))
    fit = _fit(prior, sources.rows(order[held:]), inputs, settings, seed, lambda share: tell(share * 0.45))
    out = sources.rows(order[:held])
    said = Fusion(fit.state).predict(out.profiles.float())
    report = judge(prior, out.first, said.mean.double(), torch.arange(held) % 2 == 0)
    fit = _fit(prior, sources, inputs, settings, seed, lambda share: tell(0.5 + share * 0.5))
    arrays: dict[str, NDArray[Any]] = {FUSION + name: tensor.numpy() for name, tensor in fit.state.to_dict().items()}
    arrays |= {BASIS + name: shared[name].detach().cpu().numpy() for name in basis_names(learner)}
    arrays |= {"profile_centre": centre, "profile_scale": scale, "prior_mean": prior.mean.numpy()}
    novelty = float(said.novelty.median())
    arrays |= {"blend": np.array(report.blend), "trust": np.array(report.trust), "novelty": np.array(novelty)}
    return TrainedStarts(arrays, report)


def _spread(profiles: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Means and standard deviations of profiles, 1 for numbers that do not vary."""
    centre, scale = profiles.mean(0), profiles.std(0)
    return centre, np.where(scale > 1e-6 * (1e-6 + np.abs(centre)), scale, 1.0)


def _gathered(
    learner: PosteriorLearner, shared: State, batches: Sequence[UserBatch], profiles: Tensor, seed: int
) -> tuple[_Sources, Tensor]:
    """The sources, and some of their inputs h [N, D]."""
    parts, firsts, rewards, valids, inputs = [], [], [], [], []
    for batch in batches:
        h = learner.batch_heads(shared, batch).detach()
        weights = sample_weights(batch, shared["since"])
        parts.append(Statistics.of(h, batch.rewards, weights))
        short = max(0, FIRST_REWARDS - h.shape[1])
        pad = torch.nn.functional.pad
        firsts.append(pad(h[:, :FIRST_REWARDS].double(), (0, 0, 0, short)).cpu())
        rewards.append(pad(batch.rewards[:, :FIRST_REWARDS].double(), (0, short)).cpu())
        valids.append(pad(batch.valid[:, :FIRST_REWARDS].double(), (0, short)).cpu())
        inputs.append(h[batch.valid].double().cpu())
    joined = Statistics.joined(parts)
    users = Statistics(joined.gram.cpu(), joined.moment.cpu(), joined.squares.cpu(), joined.events.cpu())
    rows = torch.cat(inputs)
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:INPUTS]
    first = FirstRewards(torch.cat(firsts), torch.cat(rewards), torch.cat(valids))
    return _Sources(profiles, users, first), rows[chosen]


def _fit(
    prior: Prior,
    sources: _Sources,
    inputs: Tensor,
    settings: FusionSettings | None,
    seed: int,
    progress: Callable[[float], None],
) -> FusionFit:
    """A fusion model of heads as far as the users' own rewards tell them from the prior."""
    heads, covariance = prior.posterior(sources.users.gram, sources.users.moment)
    open_share = torch.einsum("nd,bde,ne->b", inputs, covariance, inputs) / (inputs @ prior.covariance * inputs).sum()
    weights = (1 - open_share).clamp_min(LEAST_WEIGHT)
    shape = NetShape((heads.shape[1], 1), offsets=False)
    return fit_fusion(
        sources.profiles.float(), heads.float(), shape, settings, seed=seed, inputs=inputs.float(),
        weights=weights.float(), progress=progress,
    )  # fmt: skip
