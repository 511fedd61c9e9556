"""Heads of the default learner against the analytic posterior, also after a long stream of events.

The reference computes the posterior in another form: the product inverts Σhhᵀ/σ² + Σ⁻¹ of sufficient statistics; here
it is the least-squares solution with all samples and the prior as rows, by QR in float64, and the evidence of a kind
is the normal density of all its rewards.

The product does not update posteriors incrementally: an event appends a sample, and the worker sums the statistics of
the kept samples again in float64, so rounding errors do not accumulate. Incremental updates would fail anyway:
statistics are stored in float32, old samples are dropped, and head inputs change when they are standardised again.
Running sums and rank-one updates, in float32 and float64, are measured for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from metaban.bench.bayes.plan import BayesPlan
from metaban.bench.core.local_loop import LocalLoop, plain_layout
from metaban.bench.core.report import Bar
from metaban.bench.worlds.environments import SyntheticGroups
from metaban.models.default.kinds import Kinds, MixtureEM
from metaban.models.default.learner import PosteriorLearner
from metaban.models.default.prior import Prior, prior_from_state
from metaban.models.default.shared_state import SharedState
from metaban.models.learner import Query, State, UserBatch
from metaban.models.numerics.arrays import as_arrays
from metaban.models.numerics.hardware import one_thread
from metaban.models.numerics.slates import Slates
from metaban.models.policies import UpperConfidence
from metaban.models.settings import PosteriorSettings
from metaban.store.codec import Sample
from metaban.worker.learning.trainer import FitInput, Trainer

#: Limit of the difference in every head weight and covariance entry.
LIMIT: Final = 1e-6

USERS, DIMENSION = 40, 4

#: Kinds of users that are fitted to compare posteriors under a mixture.
KINDS: Final = 3

#: Rounds before users are measured, and events of the long stream; full and quick.
ROUNDS, EVENTS = 1_500, 10_000

QUICK_ROUNDS, QUICK_EVENTS = 300, 1_000

#: Samples kept in the long stream: all of them, and the service's default.
KEPT: Final = 256
CHECKPOINTS: Final = 20


@final
@dataclass(frozen=True, slots=True)
class PlayedWorld:
    """A learner after some rounds, its shared state then, and its users' samples."""

    learner: PosteriorLearner
    shared: State
    batch: UserBatch
    environment: SyntheticGroups


def measure_heads(plan: BayesPlan, quick: bool, console: Console) -> tuple[dict[str, Any], list[Bar]]:
    """Heads against the analytic posterior, and incremental statistics against a fresh fit."""
    rows, drifts = [], []
    for seed in plan.seeds:
        with one_thread():
            world = _played(seed, QUICK_ROUNDS if quick else ROUNDS)
            rows.append(_posteriors(world))
            drifts.append(_drift(world, QUICK_EVENTS if quick else EVENTS, seed))
    posterior = {name: max(row[name] for row in rows) for name in rows[0]}
    drift = {name: max(row[name] for row in drifts) for name in drifts[0]}
    _print(posterior, drift, console)
    events, note = QUICK_EVENTS if quick else EVENTS, ", quick" if quick else ""
    bars = [
        Bar(f"heads: fitted − analytic{note}", posterior["fitted head"], "<=", LIMIT),
        Bar(f"heads: served − analytic{note}", posterior["served head"], "<=", LIMIT),
        Bar(f"heads: served covariance − analytic{note}", posterior["served covariance"], "<=", LIMIT),
        Bar(f"heads: after {events:,} events, all kept{note}", drift["product, all kept"], "<=", LIMIT),
        Bar(f"heads: after {events:,} events, {KEPT} kept{note}", drift[f"product, {KEPT} kept"], "<=", LIMIT),
    ]
    results = {
        "largest_deviation": posterior,
        "largest_deviation_over_checkpoints": drift,
        "by_seed": [{"posterior": row, "drift": found} for row, found in zip(rows, drifts, strict=True)],
        "events": events,
        "kept_by": "Σhhᵀ and Σhr of the kept samples are summed anew at each event, in float64",
    }
    return results, bars


def _played(seed: int, rounds: int) -> PlayedWorld:
    """The default learner after some rounds of the synthetic environment."""
    environment, settings = SyntheticGroups(seed=seed, users=USERS, dimension=DIMENSION), PosteriorSettings()
    loop = LocalLoop(settings, UpperConfidence(), inputs=plain_layout(DIMENSION), seed=seed)
    seen = set()
    for number in range(rounds):
        asked = environment.next_round()
        choice = loop.choose(asked.user_id, asked.arms.tolist(), f"round-{number}")
        loop.learn(asked.user_id, choice, environment.reward(asked, choice.arm))
        seen.add(asked.user_id)
    learner, shared, batch = loop.teaching(sorted(seen))
    if not isinstance(learner, PosteriorLearner):
        raise TypeError("bench heads measures the default learner only")
    return PlayedWorld(learner, shared, batch, environment)


# ---------------------------------------------------------------------- the analytic posterior


def analytic(prior: Prior, h: Tensor, rewards: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [U, D] and covariance [U, D, D] of heads under r = hᵀw + noise, w ~ N(μ, Σ), by QR of all rows.

    Head inputs [U, S, D], rewards and weights [U, S], float64. The prior is D rows more: C⁻¹(w − μ) ~ N(0, I), Σ = CCᵀ.
    """
    scale = (weights / prior.noise).sqrt().unsqueeze(-1)  # [U, S, 1]
    whitening = torch.linalg.inv(torch.linalg.cholesky(prior.covariance)).expand(h.shape[0], -1, -1)  # [U, D, D]
    rows = torch.cat([h * scale, whitening], 1)  # [U, S + D, D]
    short = (rewards - h @ prior.mean).unsqueeze(-1) * scale  # [U, S, 1]
    targets = torch.cat([short, torch.zeros_like(whitening[..., :1])], 1)  # [U, S + D, 1]
    q, r = torch.linalg.qr(rows)
    away = torch.linalg.solve_triangular(r, q.mT @ targets, upper=True).squeeze(-1)  # [U, D]
    root = torch.linalg.inv(r)  # [U, D, D]
    return prior.mean + away, root @ root.mT


def analytic_kinds(prior: Prior, kinds: Kinds, h: Tensor, rewards: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of heads that are N(c_k, κΣ) in a mixture over kinds k, by the density of all rewards."""
    centres, within = kinds.centres, prior.covariance * kinds.spread  # [K, D], [D, D]
    real = weights > 0  # [U, S]
    means, covariances = [], []
    for user in range(h.shape[0]):  # users differ in their number of samples
        x, r, w = h[user, real[user]], rewards[user, real[user]], weights[user, real[user]]
        covered = within @ x.mT  # [D, S]
        spread = x @ covered + (prior.noise / w).diag()  # [S, S]
        short = r - centres @ x.mT  # [K, S]
        # log N(r; Hc_k, spread) up to a constant.
        density = -0.5 * (short * torch.linalg.solve(spread, short.mT).mT).sum(-1)  # [K]
        belief = (density + kinds.log_shares).softmax(0)  # [K]
        gain = torch.linalg.solve(spread, covered.mT).mT  # [D, S]
        each = centres + short @ gain.mT  # [K, D]
        mean = belief @ each  # [D]
        means.append(mean)
        covariances.append(within - gain @ covered.mT + (each - mean).mT @ ((each - mean) * belief.unsqueeze(-1)))
    return torch.stack(means), torch.stack(covariances)


def _posteriors(world: PlayedWorld) -> dict[str, float]:
    """Differences of every user's fitted and served posterior from the analytic one, without kinds and with."""
    learner, state, batch = world.learner, SharedState.stored(world.shared), world.batch
    samples = learner.head_samples(state, batch)
    # In this world every arm is at the first place. h is [U, S, D].
    h, rewards, weights = samples.inputs.double(), samples.targets.double(), samples.weights.double()
    users, generator = samples.statistics(), torch.Generator().manual_seed(0)
    kinds = MixtureEM(state.prior, users, torch.ones_like(users.events)).fit(KINDS, generator)
    found = {"largest head": 0.0, "fitted head": 0.0, "served head": 0.0, "served covariance": 0.0}
    for mixture, (head, spread) in (
        (Kinds.none(state.prior), analytic(state.prior, h, rewards, weights)),
        (kinds.padded(), analytic_kinds(state.prior, kinds, h, rewards, weights)),
    ):
        shared = replace(state, kinds=mixture).state()
        fitted = as_arrays({name: torch.as_tensor(value) for name, value in learner.fit(shared, batch, {}).items()})
        brief = learner.prepare_epoch(shared, as_numpy=True).prepare_users(fitted)
        differences = {
            "largest head": float(head.abs().max()),
            "fitted head": _apart(fitted["head"], head),
            "served head": _apart(brief["head"], head),
            "served covariance": _apart(brief["covariance"], spread),
        }
        found = {name: max(found[name], value) for name, value in differences.items()}
    return found


def _apart(found: NDArray[Any], true: Tensor) -> float:
    return float((torch.as_tensor(found).double() - true).abs().max())


# ---------------------------------------------------------------------- a long stream


def _drift(world: PlayedWorld, events: int, seed: int) -> dict[str, float]:
    """Largest difference of one user's head from the analytic one at any checkpoint of a long stream of events."""
    learner = PosteriorLearner(replace(world.learner.settings, kinds=False), world.learner.input_size)
    trainer, samples = Trainer(learner, torch.device("cpu")), _stream(world, events, seed)
    ends = sorted({round(events * (place + 1) / CHECKPOINTS) for place in range(CHECKPOINTS)})
    whole = trainer.batch([FitInput("u", events, samples, None)])
    h = learner.head_samples(SharedState.stored(world.shared), whole).inputs[0].double()  # [S, D]
    rewards, prior = whole.rewards[0].double(), prior_from_state(world.shared)
    found: dict[str, float] = {}
    for name, kept in (("all kept", events), (f"{KEPT} kept", KEPT)):
        true = torch.cat(
            [
                analytic(prior, rows.unsqueeze(0), r.unsqueeze(0), torch.ones_like(r).unsqueeze(0))[0]
                for rows, r in ((h[max(0, end - kept) : end], rewards[max(0, end - kept) : end]) for end in ends)
            ]
        )  # [checkpoints, D]
        pupils = [FitInput("u", end, samples[max(0, end - kept) : end], None) for end in ends]
        states = trainer.fit(world.shared, pupils).states
        found[f"product, {name}"] = _apart(np.stack([state["head"] for state in states]), true)
        for kind in (np.float64, np.float32):
            sums, updates = _updated(prior, h.numpy(), rewards.numpy(), ends, kept, kind)
            found[f"running sums in {kind.__name__}, {name}"] = _apart(sums, true)
            found[f"rank-one updates in {kind.__name__}, {name}"] = _apart(updates, true)
    return found


def _stream(world: PlayedWorld, events: int, seed: int) -> list[Sample]:
    """Events of one new user: arms of the environment with the values logged for them."""
    generator, rewards, arms = np.random.default_rng(seed), [], []
    for _ in range(events):
        asked = world.environment.next_round()
        arm = int(generator.integers(len(asked.arms)))
        arms.append([*asked.arms[arm], 1.0])
        rewards.append(float(world.environment.reward(asked, arm)))
    initial_user = {name: value.unsqueeze(0) for name, value in world.learner.initial_user(world.shared).items()}
    features = torch.tensor(arms, dtype=world.learner.dtype)
    query = Query(features, Slates([events]), initial_user, torch.tensor([-1]), torch.tensor([0]))
    no_pool = {name: value[:0] for name, value in initial_user.items()}
    notes = world.learner.score(world.shared, no_pool, query).phi
    epoch = int(world.shared["epoch"])
    return [
        Sample(x.numpy(), reward, 1.0, epoch, 0, "", phi.numpy())
        for x, phi, reward in zip(features, notes, rewards, strict=True)
    ]


def _updated(
    prior: Prior, h: NDArray[np.float64], rewards: NDArray[np.float64], ends: Sequence[int], kept: int, kind: Any
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Heads at each checkpoint by running sums and by the Sherman-Morrison formula.

    (P⁻¹ ± hhᵀ/σ²)⁻¹ = P ∓ Phhᵀ P / (σ² ± hᵀPh); both in one number type.
    """
    noise, precision = kind(float(prior.noise)), prior.precision.numpy().astype(kind)
    pull = precision @ prior.mean.numpy().astype(kind)  # [D]
    gram, moment = np.zeros_like(precision), np.zeros_like(pull)
    covariance = prior.covariance.numpy().astype(kind)
    x, r = h.astype(kind), rewards.astype(kind)
    sums, updates = [], []
    for place in range(ends[-1]):
        for row, sign in ((place, kind(1)), (place - kept, kind(-1))):
            if row < 0:
                continue
            along = covariance @ x[row]  # [D]
            covariance = covariance - sign * np.outer(along, along) / (noise + sign * (x[row] @ along))
            gram = gram + sign * np.outer(x[row], x[row])
            moment = moment + sign * x[row] * r[row]
        if place + 1 in ends:
            known = moment / noise + pull
            sums.append(np.linalg.solve(gram / noise + precision, known))
            updates.append(covariance @ known)
    return np.stack(sums), np.stack(updates)


def _print(posterior: dict[str, float], drift: dict[str, float], console: Console) -> None:
    for title, found in (("heads", posterior), ("head after a long stream", drift)):
        table = Table(title, "largest deviation", box=None, pad_edge=False)
        for name, value in found.items():
            table.add_row(name, f"{value:.2g}")
        console.print(table)
