"""The whole loop in one process, from the service's and the worker's own parts: benchmarks measure the shipped code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from metaban.models.features import FeatureLayout, assemble, infer_layout
from metaban.models.learner import Learner, State, UserBatch, arm_key
from metaban.models.policies import Policy, Slate, decision_draws, draw_slate
from metaban.models.posterior_draws import draws_seed
from metaban.models.presets import build_learner
from metaban.models.settings import LearnerSettings
from metaban.service.engine.model.served_model import BRIEFS_A_TURN, ServedModel
from metaban.service.engine.model.types import ArmScores, ScoreRequest
from metaban.store.codec import Sample
from metaban.store.users.records import UserState
from metaban.worker.epochs.derive_shared import choose_by_hash, derive_shared
from metaban.worker.learning.trainer import USERS_PER_FIT, FitInput, Trainer


@final
@dataclass(slots=True)  # made at every decision; frozen dataclasses take three times as long
class LoopDecision:
    """A decision: the chosen row, its input to the learner, its φ, propensity, score, epoch and the user's events; the
    arm's id, empty for none, and its place in the slate."""

    arm: int
    inputs: NDArray[np.float32]
    phi: NDArray[np.float32]
    propensity: float
    score: float
    epoch: int
    user_events: int
    arm_id: str
    place: int


@final
class LocalLoop:
    """Decides and learns synchronously: every event is applied before the next decision."""

    def __init__(
        self,
        settings: LearnerSettings,
        policy: Policy,
        *,
        inputs: FeatureLayout,
        seed: int = 0,
        samples_kept: int = 256,
        pool_max: int = 2_048,
        device: torch.device | None = None,
        epochs: bool = True,
    ) -> None:
        """Without `epochs`, the shared state stays the initial one."""
        device = device or torch.device("cpu")
        self.layout = inputs
        learner = build_learner(settings, inputs.parts)
        self._policy = policy
        self._seed = seed
        self._samples_kept = samples_kept
        self._pool_max = pool_max
        self._epochs = epochs
        self._trainer = Trainer(learner, device, user_weight=settings.user_weight)
        self._served = ServedModel(learner, device, pool_max=pool_max, guests_max=pool_max)
        self._shared: State = {name: tensor.to(device) for name, tensor in learner.initial_shared().items()}
        self._samples: dict[str, list[Sample]] = {}
        self._starts: dict[str, NDArray[np.float64]] = {}
        self._states: dict[str, UserState] = {}
        self._applied = 0

    def choose(
        self,
        user_id: str,
        arms: Sequence[Sequence[float]],
        decision_id: str,
        context: Sequence[float] | None = None,
        arm_ids: Sequence[str] | None = None,
    ) -> LoopDecision:
        """Choose one arm for a user; users that the model no longer holds are loaded, as in the service."""
        [chosen] = self.choose_slate(user_id, assemble(self.layout, arms, context), 1, decision_id, arm_ids)
        return chosen

    def choose_slate(
        self,
        user_id: str,
        inputs: NDArray[np.float32],
        size: int,
        decision_id: str,
        arm_ids: Sequence[str] | None = None,
    ) -> list[LoopDecision]:
        """Choose `size` arms, first place first, by their inputs [n, d]; each arm is a decision that takes a reward.

        Without `arm_ids` the learner knows arms by their inputs alone.
        """
        known = self._states.get(user_id) or self._started(user_id)
        policy = self._policy
        seed = draws_seed(self._seed, decision_id) if policy.draws else 0
        keys = None if arm_ids is None else np.array([arm_key(arm_id) for arm_id in arm_ids])
        request = ScoreRequest(user_id, inputs, known, draws=policy.draws, seed=seed, arm_keys=keys)

        def draw(scores: ArmScores) -> Slate:
            shares = decision_draws(self._seed, decision_id)
            return draw_slate(policy, scores.mean, scores.bonus, size, shares, scores.drawn)

        made = self._served.choose_one(request, draw)
        scores = made.scores
        return [
            LoopDecision(
                arm,
                inputs[arm],
                scores.phi[arm],
                propensity,
                float(scores.mean[arm] + scores.bonus[arm]),
                scores.epoch,
                scores.user_events,
                "" if arm_ids is None else arm_ids[arm],
                place,
            )
            for place, (arm, propensity) in enumerate(zip(made.slate.chosen, made.slate.propensities, strict=True))
        ]

    def start(self, user_id: str, start: NDArray[np.float64]) -> None:
        """Give a new user a warm start."""
        self._starts[user_id] = start

    def copy_learner(self, source: str, user_id: str) -> None:
        """Give a new user the samples and the state of a source."""
        self._samples[user_id] = list(self._samples[source])
        self._states[user_id] = replace(self._states[source], user_id=user_id)

    def teaching(self, users: Sequence[str]) -> tuple[Learner, State, UserBatch]:
        """The learner, its shared state and the samples of these users as a batch."""
        pupils = [FitInput(user, len(self._samples[user]), self._samples[user], None) for user in users]
        return self._trainer.learner, self._shared, self._trainer.batch(pupils)

    def _started(self, user_id: str) -> UserState | None:
        """State of a user without events who has a warm start; None without one."""
        if user_id not in self._starts:
            return None
        with torch.inference_mode():
            given = torch.from_numpy(self._starts[user_id][None]).to(self._trainer.device)
            states = self._trainer.learner.warm_started(self._shared, given)
        tensors = {name: np.asarray(tensor[0].cpu().numpy()) for name, tensor in states.items()}
        return UserState(user_id, 0, 0, self._served.epoch_number, tensors)

    def learn(self, user_id: str, choice: LoopDecision, reward: float) -> None:
        """Apply one event, and publish an epoch if it is due."""
        sample = Sample(
            choice.inputs, reward, choice.propensity, choice.epoch, 0, choice.arm_id, choice.phi, place=choice.place
        )
        kept = self._samples.setdefault(user_id, [])
        kept.append(sample)
        del kept[: -self._samples_kept]
        before = self._states.get(user_id)
        version = (before.version if before else 0) + 1
        pupil = FitInput(user_id, version, kept, before.tensors if before else None, self._starts.get(user_id))
        self._publish([pupil], self._served.epoch_number)
        self._applied += 1
        if self._epochs and self._trainer.learner.epoch_due(self._served.epoch_events, self._applied):
            self._advance()
        while self._served.refresh(BRIEFS_A_TURN):
            pass

    def _publish(self, pupils: Sequence[FitInput], epoch: int) -> None:
        fitted = self._trainer.fit(self._shared, pupils)
        states = [
            UserState(pupil.user_id, 0, pupil.events, epoch, tensors)
            for pupil, tensors in zip(pupils, fitted.states, strict=True)
        ]
        self._states |= {state.user_id: state for state in states}
        self._served.put(states)

    def _advance(self) -> None:
        events, number = self._served.epoch_events, self._served.epoch_number + 1
        teachers = [FitInput(user, 0, self._samples[user], None) for user in choose_by_hash(list(self._samples))]
        refit = self._trainer.learner.refit_due(events, self._applied)
        self._shared = derive_shared(self._trainer, self._shared, teachers, events, self._applied)
        arrays = {name: tensor.cpu().numpy() for name, tensor in self._shared.items()}
        users = list(self._samples)
        members = choose_by_hash(users, self._pool_max) if len(users) > self._pool_max else []
        self._served.adopt_epoch(number, self._applied, arrays, members)
        self._served.put([self._states[user] for user in members if user not in self._served])
        if refit:
            ordered = sorted(self._samples)
            for start in range(0, len(ordered), USERS_PER_FIT):
                users = ordered[start : start + USERS_PER_FIT]
                self._publish([self._pupil(user) for user in users], number)

    def _pupil(self, user: str) -> FitInput:
        return FitInput(user, self._states[user].version, self._samples[user], None, self._starts.get(user))


def plain_layout(dimension: int) -> FeatureLayout:
    """The layout that the service infers from arms of this many numbers: no context, with intercept."""
    return infer_layout(
        [[0.0] * dimension], None, products=False, intercept=True, hash_dimension=1, max_dimension=dimension + 1
    )
