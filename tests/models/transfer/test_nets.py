"""Networks with a shared encoder, many sets at once, against one model at a time by autograd."""

from __future__ import annotations

import pytest
import torch

from metaban.models.transfer.nets import EPSILON, MOMENTS, NetLosses, NetSettings, TaskTensors, _Stack
from metaban.models.transfer.task_modeling import model_transfer
from tests.models.transfer.small_tasks import SMALL, losses_of, mixed_sets, some_tasks


def slow_validation(losses: NetLosses, members: list[bool]) -> float:
    """One model by autograd, sample by sample in turn, with torch's AdamW."""
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
                row = int(first.order[task, (step * settings.batch + slot) % count])
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
        inputs = torch.cat([losses.validation_samples.x, torch.ones(len(losses.validation_samples.x), 1)], 1)
        outputs = torch.relu(inputs @ encoder) @ heads[0] + offsets[0]
        if losses.squares:
            return float((outputs - losses.validation_samples.y).square().mean())
        return float(torch.nn.functional.binary_cross_entropy_with_logits(outputs, losses.validation_samples.y))


class TestTraining:
    @pytest.mark.parametrize("metric", ["mse", "cross-entropy"])
    def test_batched_sets_equal_single_models_by_autograd(self, metric: str) -> None:
        losses = losses_of(metric)
        members = mixed_sets(losses.sources, 5)
        expected = [slow_validation(losses, row) for row in members.tolist()]
        assert losses.validation(members).tolist() == pytest.approx(expected, rel=1e-3)

    def test_results_do_not_depend_on_order_batch_or_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        losses = losses_of()
        members = mixed_sets(losses.sources, 9)
        whole = losses.validation(members)
        single = torch.cat([losses.validation(row.unsqueeze(0)) for row in members])
        torch.testing.assert_close(single, whole, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(losses.validation(members.flip(0)).flip(0), whole, rtol=1e-4, atol=1e-5)
        monkeypatch.setattr("metaban.models.transfer.nets.UNITS_MAX", 100)
        assert len(losses.train(members)) > 4
        torch.testing.assert_close(losses.validation(members), whole, rtol=1e-4, atol=1e-5)

    def test_sample_order_uses_all_before_repeating_any(self) -> None:
        losses = losses_of()
        stack = _Stack(losses.tasks, mixed_sets(losses.sources, 4)[3:], SMALL, squares=True)
        count = int(losses.tasks.counts[2])
        rows = [float(y) for step in range(-(-count // SMALL.batch)) for y in stack.batch(step)[1][0, 2]][:count]
        assert sorted(rows) == pytest.approx(sorted(losses.tasks.y[2, losses.tasks.valid[2]].tolist()))

    def test_invalid_samples_are_never_used(self) -> None:
        tasks = some_tasks()
        expected = NetLosses.from_tasks(tasks, 0, "mse", seed=3, settings=SMALL)
        x = torch.where(tasks.valid.unsqueeze(-1), tasks.x, 1e9)
        y = torch.where(tasks.valid, tasks.y, torch.nan)
        found = NetLosses.from_tasks(TaskTensors(x, y, tasks.valid, tasks.group), 0, "mse", seed=3, settings=SMALL)
        members = mixed_sets(6, 5)
        torch.testing.assert_close(found.validation(members), expected.validation(members))

    def test_training_lowers_the_loss(self) -> None:
        losses = losses_of(settings=NetSettings(hidden=16, steps=300))
        start = losses_of(settings=NetSettings(hidden=16, steps=1, rate=0.0))
        everybody = torch.ones(1, losses.sources, dtype=torch.bool)
        assert float(losses.validation(everybody)) < 0.5 * float(start.validation(everybody))


class TestSplit:
    def test_parts_are_disjoint_and_complete(self) -> None:
        tasks = some_tasks()
        losses = NetLosses.from_tasks(tasks, 2, "mse", seed=3, settings=SMALL)
        assert losses.sources == 6
        own = (
            losses.tasks.y[0, losses.tasks.valid[0]].tolist()
            + losses.validation_samples.y.tolist()
            + losses.held_out_samples.y.tolist()
        )
        assert sorted(own) == sorted(tasks.y[2, tasks.valid[2]].tolist())
        assert torch.equal(losses.tasks.y[1:], tasks.y[[0, 1, 3, 4, 5, 6]])

    def test_held_out_losses_use_the_same_models(self) -> None:
        losses = losses_of()
        members = mixed_sets(losses.sources, 4)
        (models,) = losses.train(members[:1])
        inputs = torch.cat([losses.held_out_samples.x, torch.ones(len(losses.held_out_samples.x), 1)], 1)
        squares = (models.outputs(inputs)[0] - losses.held_out_samples.y).square()
        expected = [float(part.mean()) for part in squares.tensor_split(losses.parts)]
        assert losses.held_out(members)[0].tolist() == pytest.approx(expected, rel=1e-4)

    def test_invalid_input_raises_a_clear_error(self) -> None:
        tasks = some_tasks()
        one_group = TaskTensors(tasks.x, tasks.y, tasks.valid, torch.zeros_like(tasks.group))
        few, none = tasks.valid.clone(), tasks.valid.clone()
        few[0, 2:], none[4] = False, False
        cases = [
            (tasks, "auc", "no metric 'auc'"),
            (one_group, "worst-group-accuracy", "all samples are of one"),
            (TaskTensors(tasks.x, tasks.y, few, tasks.group), "mse", "too few"),
            (TaskTensors(tasks.x, tasks.y, none, tasks.group), "mse", "task 4 has no samples"),
        ]
        for bad, metric, words in cases:
            with pytest.raises(ValueError, match=words):
                NetLosses.from_tasks(bad, 0, metric, seed=1)
        with pytest.raises(ValueError, match=r"x \[T, m, d\]"):
            TaskTensors(tasks.x, tasks.y[:, :2], tasks.valid, tasks.group)

    @pytest.mark.parametrize("metric", ["margin", "worst-group-accuracy", "demographic-parity", "equal-opportunity"])
    def test_other_metrics_use_the_same_models(self, metric: str) -> None:
        losses = losses_of(metric)
        values = losses.held_out(mixed_sets(losses.sources, 4))
        assert values.shape == (4, losses.parts)
        assert bool(values.isfinite().all())


class TestProgress:
    def test_progress_is_reported_and_may_stop_it(self) -> None:
        tasks, shares = some_tasks(), list[float]()
        settings = NetSettings(hidden=4, steps=45)
        members = mixed_sets(6, 4)
        NetLosses.from_tasks(tasks, 0, "mse", seed=1, settings=settings, progress=shares.append).validation(members)
        assert shares == pytest.approx([0.0, 20 / 45, 40 / 45])

        def stop(share: float) -> None:
            raise InterruptedError

        with pytest.raises(InterruptedError):
            NetLosses.from_tasks(tasks, 0, "mse", seed=1, settings=settings, progress=stop).validation(members)


def test_sources_of_the_same_kind_are_preferred() -> None:
    tasks = some_tasks(count=17, longest=80, seed=4)
    settings = NetSettings(hidden=16, steps=200)
    found = model_transfer(NetLosses.from_tasks(tasks, 0, "mse", seed=2, settings=settings), seed=2)
    related, others = found.surrogate.coefficients[:8], found.surrogate.coefficients[8:]
    assert float(related.mean()) < float(others.mean())
    assert int(found.chosen[:8].sum()) > int(found.chosen[8:].sum())
