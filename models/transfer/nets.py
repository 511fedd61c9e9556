"""Multitask training with hard parameter sharing for many sets of sources at once (Section 2.1 of task modeling).

A model is an encoder φ, one hidden ReLU layer shared by its tasks, and a linear head ψ per task; the objective is the
mean loss over all samples of the target and of the set's sources. All models are stacked: a training step is a few
batched products, with the gradient written out. Models start from the same weights and see the samples of a task in the
same order, so that they differ by their sources only.

Letters in shape comments: T tasks, of which the target is the first; m samples, d inputs and a constant; n models of at
most s tasks each, b samples of a task per step, h hidden units, p parameters of a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from metaban.models.transfer.metrics import metric_named, needs_groups
from metaban.models.transfer.task_modeling import SubsetLosses

#: Largest number of hidden units, over all samples of a step and all models trained at once; bounds memory.
UNITS_MAX: Final = 100_000

#: Adam's usual constants.
MOMENTS, EPSILON = (0.9, 0.999), 1e-8

#: Steps between two progress calls.
REPORT_EVERY: Final = 20


@final
@dataclass(frozen=True, slots=True)
class TaskTensors:
    """Samples of T tasks, padded; y of a classification is 0 or 1."""

    x: Tensor  # [T, m, d]
    y: Tensor  # [T, m]
    valid: Tensor  # [T, m], bool
    group: Tensor  # [T, m], int64

    def __post_init__(self) -> None:
        shape = self.y.shape
        if self.x.dim() != 3 or any(other.shape != shape for other in (self.x[..., 0], self.valid, self.group)):
            raise ValueError("tasks need x [T, m, d] and y, valid and group [T, m]")

    @property
    def counts(self) -> Tensor:
        """Samples of each task: [T]."""
        return self.valid.sum(1)


@final
@dataclass(frozen=True, slots=True)
class NetSettings:
    """Training settings of a model."""

    hidden: int = 32
    steps: int = 300
    #: Initial rate; it falls linearly to 0.
    rate: float = 0.01
    #: Samples of each task in a step.
    batch: int = 8
    #: Weight decay per step: this times the rate.
    decay: float = 1.0
    #: Seed of the initial weights and of the order of samples.
    seed: int = 0


@final
@dataclass(frozen=True, slots=True)
class EvaluationSamples:
    """Samples of the target that no model is trained on."""

    x: Tensor  # [m, d]
    y: Tensor  # [m]
    group: Tensor  # [m]


@final
@dataclass(frozen=True, slots=True)
class Trained:
    """Trained encoders with the target's heads."""

    encoder: Tensor  # [n, d + 1, h]
    head: Tensor  # [n, h]
    offset: Tensor  # [n]

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs at inputs with their constant [m, d + 1]: [n, m]."""
        hidden = torch.matmul(x, self.encoder).relu_()  # [n, m, h]
        return (hidden @ self.head.unsqueeze(-1)).squeeze(-1) + self.offset.unsqueeze(1)


@final
@dataclass(frozen=True)
class NetLosses(SubsetLosses):
    """f_t of networks. The first of `tasks` is the target, with its training samples."""

    tasks: TaskTensors
    validation_samples: EvaluationSamples
    held_out_samples: EvaluationSamples
    metric: str
    settings: NetSettings = field(default_factory=NetSettings)
    #: Parts of the held-out samples.
    parts: int = 4
    #: Called with the share of the sets that is done; may raise to cancel.
    progress: Callable[[float], None] | None = None

    def __post_init__(self) -> None:
        metric_named(self.metric)
        counts = self.tasks.counts
        if not bool((counts > 0).all()):
            raise ValueError(f"task {int((counts == 0).nonzero()[0])} has no samples to train with")
        if min(len(self.validation_samples.y), len(self.held_out_samples.y)) < 1:
            raise ValueError("the target has no samples for evaluation")

    @classmethod
    def from_tasks(
        cls,
        tasks: TaskTensors,
        target: int,
        metric: str,
        *,
        seed: int,
        settings: NetSettings | None = None,
        shares: tuple[float, float] = (0.4, 0.3),
        parts: int = 4,
        progress: Callable[[float], None] | None = None,
    ) -> NetLosses:
        """Split the target's shuffled samples: `shares` for training and validation, the rest is held out.

        All other tasks are sources, in their order. Inputs are standardised over all tasks.
        """
        if needs_groups(metric) and bool((tasks.group == tasks.group[target, 0]).all()):
            raise ValueError(f"{metric} compares groups, and all samples are of one")
        rows = tasks.valid[target].nonzero().squeeze(-1)  # [m]
        generator = torch.Generator().manual_seed(seed)
        rows = rows[torch.randperm(len(rows), generator=generator).to(rows.device)]
        train, validated = (max(1, round(share * len(rows))) for share in shares)
        if train + validated >= len(rows):
            raise ValueError(f"{len(rows)} samples are too few for training, validation and evaluation")
        seen = tasks.x[tasks.valid]  # [samples, d]
        x = (tasks.x - seen.mean(0)) / seen.std(0, correction=0).clamp_min(1e-6)  # [T, m, d]
        x = torch.where(tasks.valid.unsqueeze(-1), x, 0.0)
        order = [target, *[task for task in range(len(x)) if task != target]]
        valid = tasks.valid.clone()  # [T, m]
        valid[target] = False
        valid[target, rows[:train]] = True
        kept = TaskTensors(x[order], tasks.y[order], valid[order], tasks.group[order])
        chooses, last = (
            EvaluationSamples(x[target, part], tasks.y[target, part], tasks.group[target, part])
            for part in (rows[train : train + validated], rows[train + validated :])
        )
        tuned = replace(settings or NetSettings(), seed=seed)
        return cls(kept, chooses, last, metric, tuned, parts, progress)

    @property
    def sources(self) -> int:  # type: ignore[override]
        """k."""
        return len(self.tasks.y) - 1

    @property
    def squares(self) -> bool:
        """Whether models are trained on squared errors, otherwise on −log p of 0 and 1."""
        return self.metric == "mse"

    def validation(self, members: Tensor) -> Tensor:
        return torch.cat([self._evaluate(part, self.validation_samples) for part in self.train(members)])[
            _places(members)
        ]

    def held_out(self, members: Tensor) -> Tensor:
        trained = self.train(members)
        pieces = torch.arange(len(self.held_out_samples.y), device=self.held_out_samples.y.device).tensor_split(
            self.parts
        )
        found = []
        for rows in pieces:
            some = EvaluationSamples(
                self.held_out_samples.x[rows], self.held_out_samples.y[rows], self.held_out_samples.group[rows]
            )
            found.append(torch.cat([self._evaluate(part, some) for part in trained]))
        return torch.stack(found, dim=1)[_places(members)]

    def _evaluate(self, models: Trained, samples: EvaluationSamples) -> Tensor:
        metric = metric_named(self.metric)
        return metric(models.outputs(_with_constant(samples.x)), samples.y, samples.group).double()

    def train(self, members: Tensor) -> list[Trained]:
        """Models of sets [n, k], in chunks, ordered by set size (`_places` restores the order)."""
        order = members.sum(1).argsort(stable=True)  # [n]
        chunks = self._chunks(members[order].sum(1))
        done, found = 0, []
        for size in chunks:
            rows = members[order[done : done + size]]  # [n, k]
            found.append(self._train(rows, done / len(order), size / len(order)))
            done += size
        return found

    def _chunks(self, sizes: Tensor) -> list[int]:
        """Number of models per chunk, for sets of increasing size, so that memory is bounded."""
        each = self.settings.batch * self.settings.hidden
        chunks, begun = [], 0
        counts = sizes.tolist()
        for end in range(1, len(counts) + 1):
            if end == len(counts) or (end + 1 - begun) * (counts[end] + 1) * each > UNITS_MAX:
                chunks.append(end - begun)
                begun = end
        return chunks

    def _train(self, members: Tensor, begun: float, share: float) -> Trained:
        settings, tasks = self.settings, self.tasks
        with torch.no_grad():
            stack = _Stack(tasks, members, settings, squares=self.squares)
            for step in range(settings.steps):
                if self.progress is not None and step % REPORT_EVERY == 0:
                    self.progress(begun + share * step / settings.steps)
                stack.step(step)
        return stack.trained()


def _places(members: Tensor) -> Tensor:
    """Places of sets [n, k] after sorting by size: [n]."""
    return members.sum(1).argsort(stable=True).argsort()


def _with_constant(x: Tensor) -> Tensor:
    """[..., d] → [..., d + 1]."""
    return pad(x, (0, 1), value=1.0)


@final
class _Stack:
    """Models of n sets during training."""

    def __init__(self, tasks: TaskTensors, members: Tensor, settings: NetSettings, *, squares: bool) -> None:
        generator = torch.Generator().manual_seed(settings.seed)
        total, longest, inputs = tasks.x.shape
        device, hidden = tasks.x.device, settings.hidden
        self._settings, self._squares = settings, squares
        self._x, self._y = _with_constant(tasks.x), tasks.y.to(tasks.x)  # [T, m, d + 1], [T, m]
        self._counts = tasks.counts.unsqueeze(1)  # [T, 1]
        keys = torch.rand((total, longest), generator=generator).to(device)  # [T, m]
        self.order = torch.where(tasks.valid, keys, 2.0).argsort(1)  # [T, m], samples first
        self._slots = torch.arange(settings.batch, device=device)  # [b]
        self._rows = torch.arange(total, device=device).unsqueeze(1)  # [T, 1]

        everyone = pad(members.to(device), (1, 0), value=True)  # [n, T]
        size = int(everyone.sum(1).max())
        found = everyone.to(torch.uint8).sort(dim=1, descending=True, stable=True)  # [n, T]
        self._index, present = found.indices[:, :size], found.values[:, :size].bool()  # [n, s]
        weight = torch.where(present, self._counts.squeeze(1)[self._index], 0).to(tasks.x)  # [n, s]
        # The objective is the mean over all samples; each step has the same number of each task.
        self._weight = (weight / weight.sum(1, keepdim=True) / settings.batch).unsqueeze(-1)  # [n, s, 1]

        encoder = torch.randn((inputs + 1, hidden), generator=generator) * (2 / (inputs + 1)) ** 0.5  # [d + 1, h]
        heads = torch.randn((total, hidden), generator=generator) * hidden**-0.5  # [T, h]
        offsets = torch.zeros(total)  # [T]
        if squares:
            sums = torch.where(tasks.valid, self._y, 0.0).sum(1)  # [T]
            offsets = sums / self._counts.squeeze(1)
        index = self._index
        self._sizes = [encoder.numel(), size * hidden, size]
        self._shapes = [(inputs + 1, hidden), (size, hidden), (size,)]
        first = encoder.to(tasks.x).expand(len(members), -1, -1).flatten(1)  # [n, (d + 1)·h]
        self.flat = torch.cat([first, heads.to(tasks.x)[index].flatten(1), offsets.to(tasks.x)[index]], 1)  # [n, p]
        self._mean, self._square = torch.zeros_like(self.flat), torch.zeros_like(self.flat)  # [n, p]

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Encoder [n, d + 1, h], heads [n, s, h] and offsets [n, s]."""
        pieces = torch.split(flat, self._sizes, dim=1)
        return [piece.view(-1, *shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The samples of a step, cycling through each task: [n, s, b, d + 1] and [n, s, b]."""
        turns = (step * self._settings.batch + self._slots) % self._counts  # [T, b]
        rows = self.order.gather(1, turns)  # [T, b]
        return self._x[self._rows, rows][self._index], self._y[self._rows, rows][self._index]

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """Gradient of the weighted mean loss (½ squared error, or −log p) in all parameters: [n, p]."""
        encoder, heads, offsets = self.parts(self.flat)
        tasks, batch = x.shape[1:3]
        rows = x.flatten(1, 2)  # [n, s·b, d + 1]
        hidden = torch.bmm(rows, encoder).relu_()  # [n, s·b, h]
        by_task = hidden.view(-1, tasks, batch, hidden.shape[-1])  # [n, s, b, h]
        # Elementwise products: batched matrix products are slow for thousands of tiny matrices.
        outputs = (by_task * heads.unsqueeze(2)).sum(-1) + offsets.unsqueeze(-1)  # [n, s, b]
        slope = ((outputs if self._squares else outputs.sigmoid()) - y) * self._weight  # [n, s, b]
        of_heads = (slope.unsqueeze(-1) * by_task).sum(2)  # [n, s, h]
        of_hidden = slope.unsqueeze(-1) * heads.unsqueeze(2)  # [n, s, b, h]
        of_hidden = torch.ops.aten.threshold_backward(of_hidden.flatten(1, 2), hidden, 0)  # [n, s·b, h]
        of_encoder = torch.bmm(rows.mT, of_hidden)  # [n, d + 1, h]
        return torch.cat([of_encoder.flatten(1), of_heads.flatten(1), slope.sum(-1)], dim=1)

    def step(self, step: int) -> None:
        """One step of AdamW."""
        settings, (first, second) = self._settings, MOMENTS
        gradient = self.gradient(*self.batch(step))
        self._mean.lerp_(gradient, 1 - first)
        self._square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        rate = settings.rate * (1 - step / settings.steps)
        size = rate / (1 - first ** (step + 1))
        spread = (self._square / (1 - second ** (step + 1))).sqrt_().add_(EPSILON)  # [n, p]
        self.flat.mul_(1 - rate * settings.decay).addcdiv_(self._mean, spread, value=-size)

    def trained(self) -> Trained:
        """The models with the head of the target, their first task."""
        encoder, heads, offsets = self.parts(self.flat)
        return Trained(encoder, heads[:, 0], offsets[:, 0])
