"""Trains warm starts: a fusion model of users' heads by their profiles, and the guard that says how far to trust it.

Sources are users with samples and a profile. Their heads are posteriors under the epoch's prior, from plain statistics:
no warm start has a part in them, or fusion would be taught its own predictions. Users who make others learn worse
(`models/teachers.py`) are no sources. The guard holds a part of them out, fits on the others, and asks how well what is
fused from their profiles alone foresees the rewards that the ones held out earned first, against the prior
(`models/warm_start_guard.py`).

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
from models.posterior import PosteriorLearner
from models.prior import Prior, Statistics, stored_prior
from models.teachers import stored_kinds
from models.upkeep import sample_weights
from models.warm_start_guard import FirstRewards, judge
from models.warm_starts import BASIS, FUSION, GuardReport, basis_names, standardised_profiles

#: Sources from which on a fusion model is worth fitting.
LEAST_SOURCES: Final = 32
#: Sources are held out in so many parts, one part after the other until so many users are judged by.
PARTS: Final = 3
JUDGED: Final = 100
#: Rewards of each user held out that are foretold.
FIRST_REWARDS: Final = 20
#: How heads are fused. They are learned sooner than networks, whose units have to find their places, and before what is
#: each source's own is learned by heart.
HEAD_SETTINGS: Final = FusionSettings(rounds=6, rate=1e-2, warm_rounds=1)
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
class Sources:
    """n users: profiles [n, d], statistics, their first rewards, and the inputs h [N, D] of all they earned."""

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
    sources = gather(learner, shared, batches, standard)
    taught = teaching(shared, sources.users)
    chosen = torch.randperm(len(sources.inputs), generator=torch.Generator().manual_seed(seed))[:INPUTS]
    inputs = sources.inputs[chosen]
    part = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) % PARTS
    turns = min(PARTS, -(-JUDGED * PARTS // count))
    held = torch.nonzero(part < turns).squeeze(1)
    heads = torch.zeros(count, learner.head_size, dtype=torch.float64)
    novelty = torch.zeros(count, dtype=torch.float64)
    for turn in range(turns):
        out = part == turn
        others = sources.rows(torch.nonzero(taught & ~out).squeeze(1))
        fit = _fit(prior, others, inputs, settings, seed, _share(tell, turn, turns + 1))
        said = Fusion(fit.state).predict(standard[out].float())
        heads[out], novelty[out] = said.mean.double(), said.novelty.double()
    report = judge(prior, sources.first.rows(held), heads[held])
    teachers = sources.rows(torch.nonzero(taught).squeeze(1))
    fit = _fit(prior, teachers, inputs, settings, seed, _share(tell, turns, turns + 1))
    arrays: dict[str, NDArray[Any]] = {FUSION + name: tensor.numpy() for name, tensor in fit.state.to_dict().items()}
    arrays |= {BASIS + name: shared[name].detach().cpu().numpy() for name in basis_names(learner)}
    arrays |= {"profile_centre": centre, "profile_scale": scale, "prior_mean": prior.mean.numpy()}
    guarded = {"blend": report.blend, "trust": report.trust, "novelty": float(novelty[held].median())}
    arrays |= {name: np.array(value) for name, value in guarded.items()}
    return TrainedStarts(arrays, report)


def teaching(shared: State, users: Statistics) -> Tensor:
    """Of which users new ones learn [n] bool: of those who teach, or of everybody if those are too few."""
    kinds = stored_kinds({name: tensor.detach().cpu() for name, tensor in shared.items()})
    found = kinds.weights_of(users) > 0
    return found if int(found.sum()) >= LEAST_SOURCES else torch.ones_like(found)


def _share(tell: Callable[[float], None], done: int, total: int) -> Callable[[float], None]:
    """Tells the share done of one fit after so many others."""
    return lambda share: tell((done + share) / total)


def _spread(profiles: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Means and standard deviations of profiles, 1 for numbers that do not vary."""
    centre, scale = profiles.mean(0), profiles.std(0)
    return centre, np.where(scale > 1e-6 * (1e-6 + np.abs(centre)), scale, 1.0)


def gather(learner: PosteriorLearner, shared: State, batches: Sequence[UserBatch], profiles: Tensor) -> Sources:
    """Sources from users' samples, and profiles [n, d] in the same order."""
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
    """A fusion model of heads as far as the users' own rewards tell them from the prior."""
    heads, covariance = prior.posterior(sources.users.gram, sources.users.moment)
    open_share = torch.einsum("nd,bde,ne->b", inputs, covariance, inputs) / (inputs @ prior.covariance * inputs).sum()
    weights = (1 - open_share).clamp_min(LEAST_WEIGHT)
    shape = NetShape((heads.shape[1], 1), offsets=False)
    return fit_fusion(
        sources.profiles.float(), heads.float(), shape, settings or HEAD_SETTINGS, seed=seed, inputs=inputs.float(),
        weights=weights.float(), progress=progress,
    )  # fmt: skip
