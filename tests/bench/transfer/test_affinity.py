"""Affinity baselines: pairwise gains, gradient similarity, and greedy selection."""

from __future__ import annotations

import pytest
import torch

from metaban.bench.transfer.affinity import averaged_affinity, best_first, gradient_similarity, pairwise_affinity
from metaban.models.transfer.nets import NetSettings
from tests.models.transfer.small_tasks import losses_of


def test_pair_affinity_is_the_gain_of_one_source() -> None:
    losses = losses_of()
    score = pairwise_affinity(losses)
    alone = losses.validation(torch.zeros(1, 6, dtype=torch.bool))
    third = losses.validation(torch.eye(6, dtype=torch.bool)[2:3])
    assert float(score[2]) == pytest.approx(float(alone - third), abs=1e-5)


def test_set_affinity_is_the_mean_of_its_sources() -> None:
    score = torch.tensor([1.0, 2.0, 6.0])
    members = torch.tensor([[True, False, True], [False] * 3, [True] * 3])
    assert averaged_affinity(score, members).tolist() == [3.5, 0.0, 3.0]


@pytest.mark.parametrize("metric", ["mse", "cross-entropy"])
def test_gradients_equal_autograd(metric: str) -> None:
    losses = losses_of(metric)
    (alone,) = losses.train(torch.zeros(1, 6, dtype=torch.bool))
    gradients = []
    for task in range(7):
        valid = losses.tasks.valid[task]
        x, y = losses.tasks.x[task, valid], losses.tasks.y[task, valid]
        encoder = alone.encoder[0].clone().requires_grad_()
        outputs = torch.relu(torch.cat([x, torch.ones(len(x), 1)], 1) @ encoder) @ alone.head[0]
        if metric == "mse":
            loss = (outputs - y).var(correction=0) / 2  # at the best offset
        else:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(outputs + alone.offset, y)
        gradients.append(torch.autograd.grad(loss, encoder)[0].flatten())
    expected = [float(torch.cosine_similarity(gradients[0], other, dim=0)) for other in gradients[1:]]
    assert gradient_similarity(losses).tolist() == pytest.approx(expected, abs=1e-4)


def test_the_best_sources_are_taken_while_they_help() -> None:
    losses = losses_of(settings=NetSettings(hidden=8, steps=60))
    score = torch.tensor([0.3, 0.9, 0.1, 0.8, 0.2, 0.7])
    order = score.argsort(descending=True).tolist()
    nested = torch.stack([torch.tensor([place in order[:size] for place in range(6)]) for size in range(7)])
    values = losses.validation(nested)
    assert best_first(losses, score, slack=0.0).tolist() == nested[values.argmin()].tolist()
