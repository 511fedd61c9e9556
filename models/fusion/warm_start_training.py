"""Training of warm starts: a fusion model of users' heads by their profiles, and the guard that sets its trust.

Sources are users with samples and a profile. Their heads are posteriors under the epoch's prior from their statistics
alone, without warm starts, because fusion must not learn its own predictions. The guard holds a part of the sources
out, fits on the others, and compares predictions of the held-out users' first rewards from their profiles with the
prior's (`warm_start_guard.py`).

Only the latest samples of a user are kept; where the first rewards are gone, the oldest kept ones are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metaban.models.default.learner import PosteriorLearner
from metaban.models.default.prior import Prior, Statistics, prior_from_state
from metaban.models.default.shared_state import SharedState
from metaban.models.fusion.model import FusionModel
from metaban.models.fusion.training import FusionFit, FusionSettings, fit_fusion
from metaban.models.fusion.warm_start_guard import FirstRewards, evaluate_starts
from metaban.models.fusion.warm_starts import BASIS, FUSION, GuardReport, basis_names, standardised_profiles
from metaban.models.learner import Learner, State, UserBatch
from metaban.models.numerics.dense_net import NetShape

#: Fewest sources for a fusion model.
LEAST_SOURCES: Final = 32

#: Folds of the sources; folds are evaluated until this many users are.
PARTS: Final = 3
EVALUATED_USERS: Final = 100

#: Rewards of each held-out user that are predicted.
FIRST_REWARDS: Final = 20

#: Training settings for heads, which have no hidden units to align and need fewer rounds; more would overfit.
HEAD_SETTINGS: Final = FusionSettings(rounds=6, rate=1e-2, warm_rounds=1)

#: Inputs at which heads' outputs are compared.
INPUTS: Final = 64

#: Least weight of a source with little data.
LEAST_WEIGHT: Final = 0.02


@final
@dataclass(frozen=True, slots=True)
class TrainedStarts:
    """Arrays for `WarmStarter`, and the guard's report."""

    arrays: dict[str, NDArray[Any]]
    report: GuardReport


@final
@dataclass(frozen=True, slots=True)
class Sources:
    """n users: profiles [n, d], statistics, their first rewards, and the inputs h [N, D] of all their samples."""

    profiles: Tensor
    users: Statistics
    first: FirstRewards
    inputs: Tensor

    def rows(self, index: Tensor) -> Sources:
        return Sources(self.profiles[index], self.users.rows(index), self.first.rows(index), self.inputs)


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
    """Warm starts for users like those of the batches, whose profiles [n, d] are in the same order."""
    if not isinstance(learner, PosteriorLearner):
        raise ValueError("this learner takes no warm starts")
    count = sum(len(batch.events) for batch in batches)
    if profiles.dim() != 2 or len(profiles) != count or not bool(profiles.isfinite().all()):
        raise ValueError("every source needs a profile of finite numbers")
    if count < LEAST_SOURCES:
        raise ValueError(f"warm starts need at least {LEAST_SOURCES} sources")
    report_progress = progress or (lambda share: None)
    centre, scale = _spread(profiles.cpu().numpy())
    standard = torch.from_numpy(standardised_profiles(profiles.cpu().numpy(), centre, scale))
    prior = prior_from_state({name: tensor.detach().cpu() for name, tensor in shared.items()})
    sources = gather(learner, shared, batches, standard)
    chosen = torch.randperm(len(sources.inputs), generator=torch.Generator().manual_seed(seed))[:INPUTS]
    inputs = sources.inputs[chosen]
    part = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) % PARTS
    turns = min(PARTS, -(-EVALUATED_USERS * PARTS // count))
    held = torch.nonzero(part < turns).squeeze(1)
    heads = torch.zeros(count, learner.head_size, dtype=torch.float64)
    novelty = torch.zeros(count, dtype=torch.float64)
    for turn in range(turns):
        out = part == turn
        others = sources.rows(torch.nonzero(~out).squeeze(1))
        fit = _fit(prior, others, inputs, settings, seed, _share(report_progress, turn, turns + 1))
        predicted = FusionModel(fit.state).predict(standard[out].float())
        heads[out], novelty[out] = predicted.mean.double(), predicted.novelty.double()
    report = evaluate_starts(prior, sources.first.rows(held), heads[held])
    fit = _fit(prior, sources, inputs, settings, seed, _share(report_progress, turns, turns + 1))
    arrays: dict[str, NDArray[Any]] = {FUSION + name: tensor.numpy() for name, tensor in fit.state.to_dict().items()}
    arrays |= {BASIS + name: shared[name].detach().cpu().numpy() for name in basis_names(learner)}
    arrays |= {"profile_centre": centre, "profile_scale": scale, "prior_mean": prior.mean.numpy()}
    guarded = {"blend": report.blend, "trust": report.trust, "novelty": float(novelty[held].median())}
    arrays |= {name: np.array(value) for name, value in guarded.items()}
    return TrainedStarts(arrays, report)


def _share(report_progress: Callable[[float], None], done: int, total: int) -> Callable[[float], None]:
    """Progress of one fit after `done` of `total` others."""
    return lambda share: report_progress((done + share) / total)


def _spread(profiles: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Means and standard deviations of profiles, 1 for constant columns."""
    centre, scale = profiles.mean(0), profiles.std(0)
    return centre, np.where(scale > 1e-6 * (1e-6 + np.abs(centre)), scale, 1.0)


def gather(learner: PosteriorLearner, shared: State, batches: Sequence[UserBatch], profiles: Tensor) -> Sources:
    """Sources from users' samples, and profiles [n, d] in the same order."""
    state = SharedState.stored(shared)
    parts, firsts, rewards, valids, inputs = [], [], [], [], []
    for batch in batches:
        samples = learner.head_samples(state, batch)
        h = samples.inputs.detach()
        parts.append(samples.statistics())
        short = max(0, FIRST_REWARDS - h.shape[1])
        pad = torch.nn.functional.pad
        firsts.append(pad(h[:, :FIRST_REWARDS].double(), (0, 0, 0, short)).cpu())
        rewards.append(pad(samples.targets[:, :FIRST_REWARDS].double(), (0, short)).cpu())
        valids.append(pad(batch.valid[:, :FIRST_REWARDS].double(), (0, short)).cpu())
        inputs.append(h[batch.valid].double().cpu())
    joined = Statistics.joined(parts)
    users = joined.cpu()
    first = FirstRewards(torch.cat(firsts), torch.cat(rewards), torch.cat(valids))
    return Sources(profiles, users, first, torch.cat(inputs))


def _fit(
    prior: Prior,
    sources: Sources,
    inputs: Tensor,
    settings: FusionSettings | None,
    seed: int,
    progress: Callable[[float], None],
) -> FusionFit:
    """A fusion model of heads, weighted by how much the users' rewards reduced the prior's variance."""
    heads, covariance = prior.posterior(sources.users.gram, sources.users.moment)
    open_share = torch.einsum("nd,bde,ne->b", inputs, covariance, inputs) / (inputs @ prior.covariance * inputs).sum()
    weights = (1 - open_share).clamp_min(LEAST_WEIGHT)
    shape = NetShape((heads.shape[1], 1), offsets=False)
    return fit_fusion(
        sources.profiles.float(), heads.float(), shape, settings or HEAD_SETTINGS, seed=seed, inputs=inputs.float(),
        weights=weights.float(), progress=progress,
    )  # fmt: skip
