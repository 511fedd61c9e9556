"""The whole scoring and training path on a fake GPU.

Under torch's FakeTensorMode tensors have a shape, a dtype and a device but no numbers. An operation on operands of
different devices raises as on a real GPU. So does reading a number back, which would stall a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from metaban.models.bayes.curvature import STRUCTURES, Structure
from metaban.models.bayes.laplace import (
    BernoulliOutputs,
    GaussianOutputs,
    OutputLikelihood,
    TaskBatch,
    adapted,
    laplace,
    log_evidence,
    mode,
    objective,
)
from metaban.models.features import InputParts
from metaban.models.learner import Learner, Query, State, UserBatch
from metaban.models.metaban.served_epoch import relative_groups
from metaban.models.numerics.bias_free_net import Shape, gradient_distance, gradient_norm
from metaban.models.numerics.dense_net import NetShape
from metaban.models.numerics.slates import Slates
from metaban.models.numerics.stacked_users import UserBank
from metaban.models.posterior_draws import Draws
from metaban.models.presets import build_learner
from metaban.models.settings import LearnerSettings, named_settings

CUDA = torch.device("cuda", 0)
TWO_DEVICES = "two (different )?devices"
INPUTS, USERS, SAMPLES, ARMS = 5, 7, 6, (3, 1, 4)


class WithoutDriver(TorchFunctionMode):
    """Turn t[key], t[key] = value and ~t into the operations they stand for.

    These three make the driver select the tensor's device before any operation is dispatched, which a torch built
    without CUDA refuses even for fake tensors. The operations themselves need no driver.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__getitem__:
            if isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
                return self.all_of(args[0], args[1])
            view, indices = self.view(args[0], args[1])
            return torch.ops.aten.index.Tensor(view, indices) if indices else view
        if func is Tensor.__setitem__:
            view, indices = self.view(args[0], args[1])
            if not indices and isinstance(args[2], int | float):
                return view.fill_(args[2])
            value = torch.as_tensor(args[2], dtype=view.dtype)
            if indices:
                return torch.ops.aten.index_put_.default(view, indices, value)
            return torch.ops.aten.copy_.default(view, value)
        if func is Tensor.__invert__:
            return torch.bitwise_not(args[0])
        return func(*args, **(kwargs or {}))

    @staticmethod
    def all_of(tensor: Tensor, mask: Tensor) -> Tensor:
        """t[mask] for a mask that is true everywhere: the real count is a number, and fake tensors have none."""
        held = mask.view(*mask.shape, *[1] * (tensor.dim() - mask.dim()))
        return torch.where(held, tensor, 0).flatten(0, mask.dim() - 1)

    @staticmethod
    def view(tensor: Tensor, key: Any) -> tuple[Tensor, list[Tensor | None]]:
        """The view selected by the integers and slices of a key, and the key's tensors by dimension of that view."""
        keys = key if isinstance(key, tuple) else (key,)
        if Ellipsis in [part for part in keys if not isinstance(part, Tensor)]:
            place = next(index for index, part in enumerate(keys) if part is Ellipsis)
            named = [part for part in keys if part is not None]
            rest = (slice(None),) * (tensor.dim() - len(named) + 1)
            keys = (*keys[:place], *rest, *keys[place + 1 :])
        indices: list[Tensor | None] = []
        for part in keys:
            if isinstance(part, Tensor):
                indices.append(part)
            elif isinstance(part, slice):
                start, stop, step = part.indices(tensor.shape[len(indices)])
                tensor = torch.ops.aten.slice.Tensor(tensor, len(indices), start, stop, step)
                indices.append(None)
            elif part is None:
                tensor = tensor.unsqueeze(len(indices))
                indices.append(None)
            elif isinstance(part, int):
                tensor = tensor.select(len(indices), part)
            else:
                raise NotImplementedError(f"{part!r} in brackets")
        return tensor, indices if any(index is not None for index in indices) else []


@pytest.fixture(autouse=True)
def fake_gpu() -> Iterator[None]:
    """Refuse real tensors: one made outside the mode raises instead of being converted."""
    with FakeTensorMode(allow_non_fake_inputs=False), WithoutDriver():
        yield


def moved(state: State) -> State:
    """A state on the GPU."""
    return {name: value.to(CUDA) for name, value in state.items()}


def on_gpu(*tensors: Tensor) -> None:
    """Check that every tensor is fake and on the GPU."""
    for tensor in tensors:
        assert isinstance(tensor, FakeTensor)
        assert tensor.device == CUDA


def batch(users: int, samples: int, noted: int = 0, start_size: int = 0) -> UserBatch:
    """Samples of users, on the GPU."""
    return UserBatch(
        features=torch.zeros(users, samples, INPUTS, device=CUDA),
        rewards=torch.zeros(users, samples, device=CUDA),
        valid=torch.ones(users, samples, dtype=torch.bool, device=CUDA),
        events=torch.ones(users, dtype=torch.int64, device=CUDA),
        draw=torch.zeros(users, dtype=torch.int64, device=CUDA),
        weight=torch.ones(users, device=CUDA),
        phi=torch.zeros(users, samples, noted, device=CUDA),
        epochs=torch.zeros(users, samples, dtype=torch.int64, device=CUDA),
        starts=torch.zeros(users, start_size, dtype=torch.float64, device=CUDA),
        arm_keys=torch.zeros(users, samples, dtype=torch.int64, device=CUDA),
        places=torch.zeros(users, samples, dtype=torch.int64, device=CUDA),
    )


def fitted(learner: Learner, shared: State, users: int) -> State:
    """States of this many users after a fit, through a bank as the service holds them."""
    initial_user = {name: value.expand(users, *value.shape) for name, value in learner.initial_user(shared).items()}
    on_gpu(*initial_user.values())
    states = learner.fit(shared, batch(users, SAMPLES, learner.noted, learner.start_size), initial_user)
    assert {name: tuple(value.shape[1:]) for name, value in states.items()} == learner.fields
    bank = UserBank(learner.fields, learner.dtype, CUDA)
    if users:
        bank.put([f"u{index}" for index in range(users)], states)
    on_gpu(*states.values(), *bank.view().values())
    return bank.view()


def query(own: State, *, ids: bool = True) -> Query:
    """Three requests of different sizes, on the GPU; arms have ids or not."""
    return Query(
        arms=torch.zeros(sum(ARMS), INPUTS, device=CUDA),
        slates=Slates(ARMS),
        own=own,
        own_row=torch.tensor([0, -1, 4], device=CUDA),
        own_events=torch.tensor([1, 0, 4], device=CUDA),
        arm_keys=torch.zeros(sum(ARMS), dtype=torch.int64, device=CUDA) if ids else None,
    )


def settings(preset: str, **changes: Any) -> LearnerSettings:
    """A small learner of a preset."""
    if preset == "default":
        small = {"width": 8, "replayed": 4, "epoch_steps_max": 2, "memory_samples": 4}
        return named_settings(preset, **{**small, **changes})
    small = {"width": 8, "user_steps": 2, "meta_steps": 2, "recent_samples": 4, "step_samples": 4, "epoch_events": 1}
    return named_settings(preset, **{**small, **changes})


SLOW_VARIANTS = [
    settings("paper", draw="uniform", checkpoints=3),
    settings("paper", rate_schedule="constant", standardize=False, depth=4),
    settings("pooled", rate_schedule="constant", standardize=False, depth=4),
    settings("paper", bonus="posterior", draw="uniform", checkpoints=3),
    settings("pooled", bonus="posterior", depth=3),
    settings("default", head_inputs_max=3, head_directions=2, bins=0),
    settings("default", head_inputs_max=3, head_directions=2, apart=False),
    settings("default", head_inputs_max=3, head_directions=2, heads=False),
    settings("default", trunk=False, kinds=False, memory=False),
    settings("default", arms=False),
    settings("default", heads=False),
]
VARIANTS = [
    *(settings(preset) for preset in ("paper", "pooled", "default")),
    *(pytest.param(chosen, marks=pytest.mark.slow) for chosen in SLOW_VARIANTS),
]


def named(chosen: LearnerSettings) -> str:
    """The settings in which a variant differs from its preset."""
    usual = settings(chosen.preset).to_json()
    return "-".join([chosen.preset, *(name for name, value in chosen.to_json().items() if value != usual[name])])


@pytest.mark.parametrize("chosen", VARIANTS, ids=named)
def test_training_and_scoring_stay_on_the_gpu(chosen: LearnerSettings) -> None:
    check_training_and_scoring(build_learner(chosen, INPUTS))


@pytest.mark.parametrize("hashed", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("arm_inputs", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_wide_inputs_of_arm_and_context_stay_on_the_gpu(arm_inputs: int, hashed: bool) -> None:
    """Heads see the arm alone, its principal directions or its most active places; all users share the rest."""
    chosen = settings("default", head_inputs_max=3, head_directions=2)
    check_training_and_scoring(build_learner(chosen, InputParts(INPUTS, arm_inputs, INPUTS - arm_inputs, hashed)))


def check_training_and_scoring(learner: Learner) -> None:
    chosen, shared = learner.settings, moved(learner.initial_shared())
    teachers = [
        batch(3, SAMPLES, learner.noted, learner.start_size),
        batch(2, SAMPLES + 1, learner.noted, learner.start_size),
    ]
    # Epochs that change inputs, of which the last finds kinds and factors, and one that does not.
    for epoch_events, events in ((0, 32), (250, 256), (256, 400), (1_000, 1_024)):
        refit = events != 400 and getattr(chosen, "standardize", True)
        assert learner.refit_due(epoch_events, events) == refit
        shared = learner.derive(shared, teachers, epoch_events, events)
        on_gpu(*shared.values())
    own = {name: value.clone() for name, value in fitted(learner, shared, len(ARMS)).items()}
    # Training takes long here and does not depend on the size of the scored pool.
    for users in (USERS, 0):
        scoring_stays_on_the_gpu(learner, shared, fitted(learner, shared, users), own)


def scoring_stays_on_the_gpu(learner: Learner, shared: State, pool: State, own: State) -> None:
    """Scores of three requests, without draws and with, against a pool of users."""
    for ids in (True, False):
        scores = learner.score(shared, pool, query(own, ids=ids))
        on_gpu(scores.mean, scores.bonus, scores.group_size, scores.phi)
        assert scores.phi.shape == (sum(ARMS), learner.noted)
        assert scores.mean.shape == scores.bonus.shape == scores.group_size.shape == (sum(ARMS),)
        assert scores.mean.dtype == scores.bonus.dtype == learner.dtype
        assert scores.group_size.dtype == torch.int64
        assert scores.draws is None
    drawn = learner.score(shared, pool, replace(query(own), draws=Draws(6, [1, 2, 3])))
    assert drawn.draws is not None
    on_gpu(drawn.sigma, drawn.draws)
    assert drawn.draws.shape == (sum(ARMS), 6)
    assert drawn.sigma.dtype == drawn.draws.dtype == learner.dtype


@pytest.mark.parametrize("chosen", VARIANTS[:3], ids=named)
def test_explaining_stays_on_the_gpu(chosen: LearnerSettings) -> None:
    learner = build_learner(chosen, INPUTS)
    shared = moved(learner.initial_shared())
    epoch = learner.prepare_epoch(shared)
    own = {name: value[:1].clone() for name, value in fitted(learner, shared, 1).items()}
    asked = Query(
        arms=torch.zeros(4, INPUTS, device=CUDA),
        slates=Slates([4]),
        own=epoch.prepare_users(own),
        own_row=torch.tensor([0], device=CUDA),
        own_events=torch.tensor([1], device=CUDA),
        arm_keys=torch.zeros(4, dtype=torch.int64, device=CUDA),
    )
    pool, rows = fitted(learner, shared, USERS), torch.tensor([2, 0], device=CUDA)
    agreement = epoch.agreement(pool, asked, rows)
    parts = epoch.contributions(pool, asked, rows, agreement)
    on_gpu(agreement.prediction, agreement.threshold, agreement.predictions, agreement.members, agreement.group_size)
    on_gpu(parts.columns, parts.intercept, parts.memory, parts.rest(agreement.prediction))
    assert parts.columns.shape == (2, INPUTS)
    assert agreement.members.shape == (2, USERS)


def test_the_parts_stay_on_the_gpu() -> None:
    shape = Shape(INPUTS, 8, 3)
    theta = torch.zeros(USERS, shape.parameters, device=CUDA)
    x = torch.zeros(USERS, INPUTS, device=CUDA)
    on_gpu(
        gradient_norm(shape, theta, x),
        gradient_distance(shape, theta, theta, x),
        gradient_distance(shape, theta, theta[0], x),
        relative_groups(torch.zeros(3, USERS, device=CUDA), torch.zeros(3, device=CUDA), 0.1),
    )


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli"])
@pytest.mark.parametrize("structure", sorted(STRUCTURES))
def test_laplace_stays_on_the_gpu(structure: Structure, likelihood: str) -> None:
    shape, damping = NetShape((INPUTS, 4, 2)), torch.ones((), dtype=torch.float64, device=CUDA)
    likely: OutputLikelihood = GaussianOutputs(damping) if likelihood == "gaussian" else BernoulliOutputs()
    start = torch.zeros(shape.parameters, dtype=torch.float64, device=CUDA)
    x = torch.zeros(USERS, SAMPLES, INPUTS, dtype=torch.float64, device=CUDA)
    tasks = TaskBatch(x, x[..., :2], x[..., 0])
    nets = mode(shape, start, tasks, likely, structure, damping)
    fitted = laplace(shape, nets, tasks, likely, structure, damping)
    drawn = fitted.curvature.spread(torch.zeros(USERS, 3, shape.parameters, device=CUDA))
    on_gpu(nets, drawn, *fitted.predicted(x), log_evidence(fitted, start, tasks, likely, damping))
    # The operations of the meta-gradient; autograd itself asks the driver for a stream.
    on_gpu(adapted(shape, start, tasks, likely, rate=0.1, steps=2), objective(fitted, tasks, likely, 0.5))
    with pytest.raises(RuntimeError, match=TWO_DEVICES):
        fitted.predicted(x.cpu())


@pytest.mark.parametrize("preset", ["default", "paper", "pooled"])
@pytest.mark.parametrize("left_behind", ["shared", "pool", "own", "samples"])
def test_a_state_left_on_the_cpu_raises(preset: str, left_behind: str) -> None:
    """The test above can fail: the same path raises when one part is on another device."""
    learner = build_learner(settings(preset), INPUTS)
    on_cpu = learner.initial_shared()
    shared = moved(on_cpu)
    pool = fitted(learner, shared, USERS)
    own = fitted(learner, shared, len(ARMS))
    elsewhere = {"pool": pool, "own": own}
    with pytest.raises(RuntimeError, match=TWO_DEVICES):  # noqa: PT012
        if left_behind == "samples":
            learner.fit(on_cpu, batch(USERS, SAMPLES, learner.noted, learner.start_size), pool)
        elif left_behind == "shared":
            learner.score(on_cpu, pool, query(own))
        else:
            elsewhere[left_behind] = {name: value.cpu() for name, value in elsewhere[left_behind].items()}
            _ = learner.score(shared, elsewhere["pool"], query(elsewhere["own"])).group_size


def test_mixing_devices_raises_in_this_mode() -> None:
    with pytest.raises(RuntimeError, match=TWO_DEVICES):
        torch.zeros(3, device=CUDA) + torch.zeros(3)
    with pytest.raises(RuntimeError, match=TWO_DEVICES):
        torch.zeros(2, 3, device=CUDA) @ torch.zeros(3, 2)


def test_reading_a_number_back_raises_in_this_mode() -> None:
    with pytest.raises(DataDependentOutputException):
        torch.zeros(3, device=CUDA).sum().item()
