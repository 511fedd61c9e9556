"""Samples of a task: the newest, evenly from its users, combined by the reward rules and standardised."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metaban.store.reward_rules import RewardRules
from metaban.store.shared.transfer import TransferQuestion
from metaban.worker.jobs import transfer_tasks
from metaban.worker.jobs.transfer_tasks import (
    INPUTS_MAX,
    TaskSamples,
    TransferInput,
    TransferTasks,
    assemble_tasks,
    project_inputs,
    quota,
)
from tests.worker.jobs.transfer_setup import EVERYONE, FOES, FRIENDS, TARGET, open_transfer_users, set_clusters
from tests.worker.workshop import OpenWorkshop, Workshop

FEW = 40


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 60))
def test_the_quota_is_the_largest_that_fits(counts: list[int], most: int) -> None:
    def taken(each: int) -> int:
        return sum(min(count, each) for count in counts)

    found = quota(counts, most)
    assert found >= 1
    assert taken(found) <= most or found == 1
    assert taken(found + 1) > most or found >= max(counts)


def test_without_users() -> None:
    assert quota([], 5) == 1


class TestAssembling:
    def rows(self, counts: tuple[int, ...], inputs: int) -> list[TaskSamples]:
        generator = np.random.default_rng(0)
        return [
            TaskSamples(
                (100 + 7 * generator.normal(size=(count, inputs))).astype(np.float32),
                generator.uniform(0, 1.5, size=count),
                np.arange(count) % 3,
            )
            for count in counts
        ]

    def test_tasks_are_padded_to_one_shape(self) -> None:
        rows = self.rows((5, 3, 4), 2)
        tasks = assemble_tasks(rows, False)
        assert tasks.x.shape == (3, 5, 2)
        assert tasks.counts.tolist() == [5, 3, 4]
        for place, part in enumerate(rows):
            count = len(part.rewards)
            assert tasks.valid[place].tolist() == [True] * count + [False] * (5 - count)
            assert np.allclose(tasks.y[place, :count], part.rewards)
            assert tasks.group[place, :count].tolist() == part.group.tolist()
        seen = tasks.x[tasks.valid]
        assert torch.allclose(seen.mean(0), torch.zeros(2), atol=1e-4)
        assert torch.allclose(seen.std(0, correction=0), torch.ones(2), atol=1e-4)

    def test_rewards_as_shares_of_good_ones(self) -> None:
        rows = self.rows((5, 3), 2)
        assert float(assemble_tasks(rows, False).y.max()) > 1
        assert float(assemble_tasks(rows, True).y.max()) == 1

    def test_one_outlier_does_not_blank_its_column(self) -> None:
        [rows] = self.rows((200,), 2)
        rows.features[0, 0] = 1e30
        x = assemble_tasks([rows], False).x[0, 1:, 0]
        assert float(x.std()) > 0.5

    def test_wide_inputs_are_projected_to_few_directions(self) -> None:
        z = torch.randn(50, 300, generator=torch.Generator().manual_seed(1))
        found = project_inputs(z)
        assert found.shape == (50, INPUTS_MAX)
        assert torch.equal(found, project_inputs(z))
        # Orthonormal: rows in the span of the directions keep their lengths.
        basis = project_inputs(torch.eye(300))
        assert torch.allclose(basis.T @ basis, torch.eye(INPUTS_MAX), atol=1e-5)
        assert project_inputs(z[:, :INPUTS_MAX]).shape == (50, INPUTS_MAX)


class TestGathering:
    @pytest.fixture
    async def shop(self, open_workshop: OpenWorkshop) -> Workshop:
        return await open_transfer_users(open_workshop, events=FEW)

    async def gather(
        self, shop: Workshop, compute: Executor, question: TransferQuestion, rules: RewardRules | None = None
    ) -> TransferInput:
        trainer = shop.model.trainer
        assert trainer is not None
        tasks = TransferTasks(shop.users, compute, partitions=shop.record.partitions)
        return await tasks.gather(trainer, shop.model.epoch.tensors, rules or shop.model.rules, question)

    async def test_the_newest_samples(self, shop: Workshop, compute: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(transfer_tasks, "TASK_SAMPLES", 33)
        transfer_input = await self.gather(shop, compute, TransferQuestion("mse", user_id=TARGET, sources=FRIENDS))
        assert transfer_input.samples == [33] * 4
        kept = (await shop.users.load_samples([TARGET]))[TARGET]
        assert transfer_input.tasks.y[0].tolist() == [sample.reward for sample in kept[-33:]]

    async def test_samples_are_taken_evenly_from_the_users_of_a_cluster(
        self, shop: Workshop, compute: Executor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(transfer_tasks, "TASK_SAMPLES", 50)
        set_clusters(shop.model, dict.fromkeys(EVERYONE, 0) | {TARGET: 1, FOES[0]: 2, FOES[1]: 2, FOES[2]: 3})
        await shop.redis.ltrim(shop.keys.samples(FRIENDS[1]), -4, -1)
        transfer_input = await self.gather(shop, compute, TransferQuestion("mse", cluster=0))
        group = transfer_input.tasks.group[0][transfer_input.tasks.valid[0]]
        assert sorted(group.bincount().tolist()) == [4, 23, 23]
        assert [task.cluster for task in transfer_input.task_users] == [0, 1, 2, 3]
        assert transfer_input.samples == [50, 40, 50, 40]

    async def test_with_more_users_than_samples_some_give_one(
        self, shop: Workshop, compute: Executor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for limit in ("TASK_SAMPLES", "TARGET_SAMPLES_MIN"):
            monkeypatch.setattr(transfer_tasks, limit, 3)
        set_clusters(shop.model, dict.fromkeys(EVERYONE, 0) | {FOES[0]: 1, FOES[1]: 2})
        transfer_input = await self.gather(shop, compute, TransferQuestion("mse", cluster=0))
        assert transfer_input.samples == [3, 3, 3]
        assert transfer_input.tasks.group[0].tolist() == [0, 1, 2]
        assert len(transfer_input.task_users[0].users) == 5

    async def test_the_number_of_groups_is_limited(
        self, shop: Workshop, compute: Executor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(transfer_tasks, "GROUPS_MAX", 2)
        set_clusters(shop.model, dict.fromkeys(EVERYONE, 0) | {FOES[0]: 1, FOES[1]: 2})
        await shop.redis.ltrim(shop.keys.samples(FRIENDS[1]), -4, -1)
        transfer_input = await self.gather(shop, compute, TransferQuestion("demographic-parity", cluster=0))
        assert len(transfer_input.task_users[0].users) == 2
        assert FRIENDS[1] not in transfer_input.task_users[0].users, "the groups with the most samples"
        assert transfer_input.samples[0] == 2 * FEW

    async def test_wide_inputs_leave_fewer_samples(
        self, shop: Workshop, compute: Executor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(transfer_tasks, "NUMBERS_MAX", 35 * 3 * 8)
        transfer_input = await self.gather(shop, compute, TransferQuestion("mse", user_id=TARGET, sources=FRIENDS[:2]))
        assert transfer_input.samples == [35] * 3

    async def test_rewards_are_combined_by_the_rules(self, shop: Workshop, compute: Executor) -> None:
        """Several rewards for one arm of a decision are combined."""
        kept = (await shop.users.load_samples([TARGET]))[TARGET]
        await shop.redis.delete(shop.keys.samples(TARGET))
        doubled = [
            replace(sample, reward=reward, key=1 + number)
            for number, sample in enumerate(kept)
            for reward in (0.25, 0.5)
        ]
        await shop.redis.rpush(shop.keys.samples(TARGET), *(sample.encode() for sample in doubled))
        question = TransferQuestion("mse", user_id=TARGET, sources=FRIENDS)
        for repeated, reward in (("first", 0.25), ("last", 0.5), ("sum", 0.75)):
            rules = RewardRules(repeated=repeated)  # type: ignore[arg-type]
            transfer_input = await self.gather(shop, compute, question, rules)
            assert transfer_input.samples[0] == FEW
            assert set(transfer_input.tasks.y[0].tolist()) == {reward}
