"""Networks that share an encoder, many sets at once: against one model at a time, and its gradient by autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import models.transfer_nets
from models.transfer import model_transfer
from models.transfer_affinity import averaged_affinity, best_first, gradient_similarity, pairwise_affinity
from models.transfer_nets import EPSILON, MOMENTS, NetLosses, NetSettings, Tasks, _Stack

SMALL = NetSettings(hidden=5, steps=9, batch=3, rate=0.05, decay=0.1)


def some_tasks(count: int = 7, longest: int = 30, inputs: int = 3, *, classes: bool = False, seed: int = 0) -> Tasks:
    """The first is the target; the second half of the others has nothing to do with it. Some have fewer samples."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((count, longest, inputs), generator=generator)
    vector, noise = torch.randn(inputs, generator=generator), torch.randn((count, longest), generator=generator)
    y = torch.where(torch.arange(count).unsqueeze(1) <= count // 2, (x @ vector) ** 2 + 0.1 * noise, 3 * noise)
    if classes:
        y = (y > y.median()).float()
    valid = torch.arange(longest) < (longest - 2 * torch.arange(count)).unsqueeze(1)
    return Tasks(x, y, valid, torch.randint(0, 3, (count, longest), generator=generator))


def losses_of(metric: str = "mse", settings: NetSettings = SMALL, **kwargs: int) -> NetLosses:
    tasks = some_tasks(classes=metric != "mse", **kwargs)
    return NetLosses.from_tasks(tasks, 0, metric, seed=3, settings=settings)


def mixed_sets(sources: int, count: int) -> Tensor:
    members = torch.rand(count, sources, generator=torch.Generator().manual_seed(1)) < 0.5
    members[0], members[3] = False, True
    return members


def slow_validation(losses: NetLosses, members: list[bool]) -> float:
    """One model, by autograd, sample by sample in turn, with torch's own AdamW."""
    tasks, settings = losses.tasks, losses.settings
    first = _Stack(tasks, torch.tensor([members]), settings, squares=losses.squares)
    encoder, heads, offsets = [part[0].clone().requires_grad_() for part in first.parts(first.flat)]
    kept = [0, *[place + 1 for place, member in enumerate(members) if member]]
    total = sum(int(tasks.counts[task]) for task in kept)
    optimiser = torch.optim.AdamW(
        [encoder, heads, offsets], lr=settings.rate, betas=MOMENTS, eps=EPSILON, weight_decay=settings.decay
    )
    for step in range(settings.steps):
        optimiser.param_groups[0]["lr"] = settings.rate * (1 - step / settings.steps)
        objective = torch.zeros(())
        for place, task in enumerate(kept):
            count = int(tasks.counts[task])
            for slot in range(settings.batch):
                row = int(first._order[task, (step * settings.batch + slot) % count])
                hidden = torch.relu(torch.cat([tasks.x[task, row], torch.ones(1)]) @ encoder)
                output, outcome = hidden @ heads[place] + offsets[place], tasks.y[task, row]
                if losses.squares:
                    loss = (output - outcome) ** 2 / 2
                else:
                    loss = torch.nn.functional.binary_cross_entropy_with_logits(output, outcome)
                objective = objective + loss * count / total / settings.batch
        optimiser.zero_grad()
        objective.backward()
        optimiser.step()
    with torch.no_grad():
        inputs = torch.cat([losses.judged.x, torch.ones(len(losses.judged.x), 1)], 1)
        outputs = torch.relu(inputs @ encoder) @ heads[0] + offsets[0]
        if losses.squares:
            return float((outputs - losses.judged.y).square().mean())
        return float(torch.nn.functional.binary_cross_entropy_with_logits(outputs, losses.judged.y))


class TestTraining:
    @pytest.mark.parametrize("metric", ["mse", "cross-entropy"])
    def test_all_at_once_is_one_after_the_other_by_autograd(self, metric: str) -> None:
        losses = losses_of(metric)
        members = mixed_sets(losses.sources, 5)
        expected = [slow_validation(losses, row) for row in members.tolist()]
        assert losses.validation(members).tolist() == pytest.approx(expected, rel=1e-3)

    def test_neither_order_nor_company_nor_chunks_matter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        losses = losses_of()
        members = mixed_sets(losses.sources, 9)
        whole = losses.validation(members)
        single = torch.cat([losses.validation(row.unsqueeze(0)) for row in members])
        torch.testing.assert_close(single, whole, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(losses.validation(members.flip(0)).flip(0), whole, rtol=1e-4, atol=1e-5)
        monkeypatch.setattr(models.transfer_nets, "UNITS_MAX", 100)
        assert len(losses.train(members)) > 4
        torch.testing.assert_close(losses.validation(members), whole, rtol=1e-4, atol=1e-5)

    def test_order_of_samples_covers_them_all_before_any_comes_again(self) -> None:
        losses = losses_of()
        stack = _Stack(losses.tasks, mixed_sets(losses.sources, 4)[3:], SMALL, squares=True)
        count = int(losses.tasks.counts[2])
        rows = [float(y) for step in range(-(-count // SMALL.batch)) for y in stack.batch(step)[1][0, 2]][:count]
        assert sorted(rows) == pytest.approx(sorted(losses.tasks.y[2, losses.tasks.valid[2]].tolist()))

    def test_samples_that_are_not_valid_are_never_looked_at(self) -> None:
        tasks = some_tasks()
        expected = NetLosses.from_tasks(tasks, 0, "mse", seed=3, settings=SMALL)
        x = torch.where(tasks.valid.unsqueeze(-1), tasks.x, 1e9)
        y = torch.where(tasks.valid, tasks.y, torch.nan)
        found = NetLosses.from_tasks(Tasks(x, y, tasks.valid, tasks.group), 0, "mse", seed=3, settings=SMALL)
        members = mixed_sets(6, 5)
        torch.testing.assert_close(found.validation(members), expected.validation(members))

    def test_learning_takes_place(self) -> None:
        losses = losses_of(settings=NetSettings(hidden=16, steps=300))
        start = losses_of(settings=NetSettings(hidden=16, steps=1, rate=0.0))
        everybody = torch.ones(1, losses.sources, dtype=torch.bool)
        assert float(losses.validation(everybody)) < 0.5 * float(start.validation(everybody))


class TestSplit:
    def test_parts_share_no_sample_and_leave_none(self) -> None:
        tasks = some_tasks()
        losses = NetLosses.from_tasks(tasks, 2, "mse", seed=3, settings=SMALL)
        assert losses.sources == 6
        own = losses.tasks.y[0, losses.tasks.valid[0]].tolist() + losses.judged.y.tolist() + losses.last.y.tolist()
        assert sorted(own) == sorted(tasks.y[2, tasks.valid[2]].tolist())
        assert torch.equal(losses.tasks.y[1:], tasks.y[[0, 1, 3, 4, 5, 6]])

    def test_held_out_parts_are_of_the_same_models(self) -> None:
        losses = losses_of()
        members = mixed_sets(losses.sources, 4)
        (models,) = losses.train(members[:1])
        inputs = torch.cat([losses.last.x, torch.ones(len(losses.last.x), 1)], 1)
        squares = (models.outputs(inputs)[0] - losses.last.y).square()
        expected = [float(part.mean()) for part in squares.tensor_split(losses.parts)]
        assert losses.held_out(members)[0].tolist() == pytest.approx(expected, rel=1e-4)

    def test_bad_input_is_told_in_words(self) -> None:
        tasks = some_tasks()
        one_group = Tasks(tasks.x, tasks.y, tasks.valid, torch.zeros_like(tasks.group))
        few, none = tasks.valid.clone(), tasks.valid.clone()
        few[0, 2:], none[4] = False, False
        cases = [
            (tasks, "auc", "no metric 'auc'"),
            (one_group, "worst-group-accuracy", "all samples are of one"),
            (Tasks(tasks.x, tasks.y, few, tasks.group), "mse", "too few"),
            (Tasks(tasks.x, tasks.y, none, tasks.group), "mse", "task 4 has no samples"),
        ]
        for bad, metric, words in cases:
            with pytest.raises(ValueError, match=words):
                NetLosses.from_tasks(bad, 0, metric, seed=1)
        with pytest.raises(ValueError, match=r"x \[T, m, d\]"):
            Tasks(tasks.x, tasks.y[:, :2], tasks.valid, tasks.group)

    @pytest.mark.parametrize("metric", ["margin", "worst-group-accuracy", "demographic-parity", "equal-opportunity"])
    def test_other_metrics_are_of_the_same_models(self, metric: str) -> None:
        losses = losses_of(metric)
        values = losses.held_out(mixed_sets(losses.sources, 4))
        assert values.shape == (4, losses.parts)
        assert bool(values.isfinite().all())


class TestProgress:
    def test_it_is_told_and_may_end_it(self) -> None:
        tasks, shares = some_tasks(), list[float]()
        settings = NetSettings(hidden=4, steps=45)
        members = mixed_sets(6, 4)
        NetLosses.from_tasks(tasks, 0, "mse", seed=1, settings=settings, progress=shares.append).validation(members)
        assert shares == pytest.approx([0.0, 20 / 45, 40 / 45])

        def stop(share: float) -> None:
            raise InterruptedError

        with pytest.raises(InterruptedError):
            NetLosses.from_tasks(tasks, 0, "mse", seed=1, settings=settings, progress=stop).validation(members)


class TestFirstOrder:
    def test_pairs_are_what_one_source_saves(self) -> None:
        losses = losses_of()
        score = pairwise_affinity(losses)
        alone = losses.validation(torch.zeros(1, 6, dtype=torch.bool))
        third = losses.validation(torch.eye(6, dtype=torch.bool)[2:3])
        assert float(score[2]) == pytest.approx(float(alone - third), abs=1e-5)

    def test_of_a_set_it_is_the_mean(self) -> None:
        score = torch.tensor([1.0, 2.0, 6.0])
        members = torch.tensor([[True, False, True], [False] * 3, [True] * 3])
        assert averaged_affinity(score, members).tolist() == [3.5, 0.0, 3.0]

    @pytest.mark.parametrize("metric", ["mse", "cross-entropy"])
    def test_gradients_are_those_of_autograd(self, metric: str) -> None:
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

    def test_the_best_are_taken_as_long_as_they_help(self) -> None:
        losses = losses_of(settings=NetSettings(hidden=8, steps=60))
        score = torch.tensor([0.3, 0.9, 0.1, 0.8, 0.2, 0.7])
        chosen = best_first(losses, score)
        order = score.argsort(descending=True).tolist()
        nested = torch.stack([torch.tensor([place in order[:size] for place in range(6)]) for size in range(7)])
        values = losses.validation(nested)
        assert chosen.tolist() == nested[values.argmin()].tolist()


def test_sources_of_the_same_kind_are_preferred() -> None:
    tasks = some_tasks(count=17, longest=80, seed=4)
    settings = NetSettings(hidden=16, steps=200)
    found = model_transfer(NetLosses.from_tasks(tasks, 0, "mse", seed=2, settings=settings), seed=2)
    related, others = found.surrogate.coefficients[:8], found.surrogate.coefficients[8:]
    assert float(related.mean()) < float(others.mean())
    assert int(found.chosen[:8].sum()) > int(found.chosen[8:].sum())
