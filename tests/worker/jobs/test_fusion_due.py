"""When fusion is trained without a request, and the cost of a check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from metaban.models.settings import named_settings
from metaban.store.shared.fusion import FusionJobRecord
from metaban.worker.jobs import fusion as fusion_module
from metaban.worker.jobs.fusion import FusionSchedule, FusionTrainer
from tests.worker.jobs.fusion_setup import (
    FEW,
    SCHEDULE,
    Gate,
    fusion_store,
    open_fusion_users,
    populate,
    sources_of,
    trained,
    trainer,
    writing_command,
)
from tests.worker.workshop import OpenWorkshop, Workshop


@pytest.fixture
async def shop(open_workshop: OpenWorkshop) -> Workshop:
    return await open_fusion_users(open_workshop)


@pytest.fixture
async def gate(shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """An open gate; checks have no pause."""
    monkeypatch.setattr(fusion_module, "CHECK_S", 0.0)
    monkeypatch.setattr(fusion_module, "CHECK_PAUSE_FACTOR", 0)
    gate = Gate(tmp_path, await trained(shop))
    gate.open()
    return gate


async def version(shop: Workshop) -> int:
    identity = await fusion_store(shop).identity()
    return 0 if identity is None else identity[0]


async def tick(shop: Workshop, fusion: FusionTrainer) -> tuple[int, str]:
    """Version after a tick, and the cause of its training."""
    await fusion.tick()
    return await version(shop), (await fusion_store(shop).job()).by


def of(shop: Workshop, gate: Gate, schedule: FusionSchedule = SCHEDULE) -> FusionTrainer:
    return trainer(shop, command=gate.command, schedule=schedule)


class TestGrowth:
    async def test_the_first_version_when_there_are_enough_sources(self, shop: Workshop, gate: Gate) -> None:
        many = of(shop, gate, replace(SCHEDULE, min_sources=FEW + 2))
        assert await tick(shop, many) == (0, "")
        await populate(shop, [FEW])
        assert await tick(shop, many) == (0, "")
        await populate(shop, [FEW + 1])
        assert await tick(shop, many) == (1, "growth")
        job = await fusion_store(shop).job()
        assert (job.state, job.requested_ms) == ("done", 0)

    async def test_another_version_when_sources_have_grown_by_a_share(self, shop: Workshop, gate: Gate) -> None:
        fusion = of(shop, gate)
        assert await tick(shop, fusion) == (1, "growth")
        assert await tick(shop, fusion) == (1, "growth")
        await populate(shop, range(FEW, FEW + 7))
        assert (await tick(shop, fusion))[0] == 1, "39 is less than 5/4 of 32"
        await populate(shop, [FEW + 7])
        assert (await tick(shop, fusion))[0] == 2

    async def test_another_version_when_a_source_was_forgotten(self, shop: Workshop, gate: Gate) -> None:
        await populate(shop, [FEW])
        fusion = of(shop, gate)
        assert await tick(shop, fusion) == (1, "growth")
        await shop.users.forget("user 3")
        await fusion_store(shop).strike(["user 3"])
        assert await tick(shop, fusion) == (2, "growth")
        assert await tick(shop, fusion) == (2, "growth")
        # With too few sources left, no training is tried.
        await shop.users.forget("user 4")
        await fusion_store(shop).strike(["user 4"])
        assert await tick(shop, fusion) == (2, "growth")

    async def test_a_pause_after_a_failure(self, shop: Workshop, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
        bad = trainer(shop, command=writing_command("garbage"))
        await bad.tick()
        failed = await fusion_store(shop).job()
        assert (failed.state, failed.by) == ("failed", "growth")
        await of(shop, gate).tick()
        assert await fusion_store(shop).job() == failed
        monkeypatch.setattr(fusion_module, "AFTER_FAILURE_S", 0.0)
        assert await tick(shop, of(shop, gate)) == (1, "growth")

    async def test_another_process_was_faster(self, shop: Workshop, gate: Gate) -> None:
        """Both find that it is due; the one that gets the lease later finds that it is done."""
        store = fusion_store(shop)
        slow = trainer(shop, command=gate.command, fusion=store)
        acquire = store.acquire_lease

        async def after_another(token: str, ttl_ms: int) -> bool:
            await of(shop, gate).tick()
            return await acquire(token, ttl_ms)

        store.acquire_lease = after_another  # type: ignore[method-assign]
        await slow.tick()
        assert await version(shop) == 1
        assert not await shop.redis.exists(shop.keys.fusion_lease)
        assert (await store.job()).state == "done"


class TestSchedule:
    async def test_another_version_after_the_interval_and_new_events(self, shop: Workshop, gate: Gate) -> None:
        hasty = of(shop, gate, replace(SCHEDULE, interval_s=0.001, growth=100.0))
        assert await tick(shop, hasty) == (1, "growth")
        assert await tick(shop, hasty) == (1, "growth"), "no event was applied since"
        await populate(shop, [0], events=1)
        assert await tick(shop, hasty) == (2, "schedule")
        patient = of(shop, gate, replace(SCHEDULE, growth=100.0))
        await populate(shop, [1], events=1)
        assert await tick(shop, patient) == (2, "schedule"), "the hour is not over"


class TestSwitchedOff:
    async def test_disabled_by_the_deployment_or_the_namespace(self, shop: Workshop, gate: Gate) -> None:
        await fusion_store(shop).request(5)
        off = of(shop, gate, replace(SCHEDULE, mode="off"))
        await off.tick()
        assert (await fusion_store(shop).job()).state == "queued"
        changed = await shop.namespaces.change(shop.record, overrides={"fusion": "auto"})
        assert changed is not None
        await shop.model.refresh_record()
        await off.tick()
        assert await version(shop) == 1
        changed = await shop.namespaces.change(changed, overrides={"fusion": "off"})
        await shop.model.refresh_record()
        await fusion_store(shop).request(6)
        await of(shop, gate).tick()
        assert await version(shop) == 1


class TestIdle:
    async def commands(self, shop: Workshop) -> dict[str, int]:
        stats = await shop.redis.info("commandstats")
        return {name.removeprefix("cmdstat_"): row["calls"] for name, row in stats.items()}

    @pytest.mark.single_node("one server counts what it is asked")
    async def test_a_tick_reads_one_hash(self, shop: Workshop) -> None:
        many = trainer(shop, schedule=replace(SCHEDULE, min_sources=FEW + 1))
        await many.tick()
        before = await self.commands(shop)
        for _ in range(7):
            await many.tick()
        after = await self.commands(shop)
        spent = {name: calls - before.get(name, 0) for name, calls in after.items() if calls != before.get(name, 0)}
        spent.pop("info", None)
        assert spent == {"hgetall": 7}

    @pytest.mark.single_node("one server counts what it is asked")
    async def test_users_are_not_scanned_while_nothing_changes(self, shop: Workshop, monkeypatch) -> None:
        monkeypatch.setattr(fusion_module, "CHECK_S", 0.0)
        monkeypatch.setattr(fusion_module, "CHECK_PAUSE_FACTOR", 0)
        await populate(shop, [FEW], events=1)
        many = trainer(shop, schedule=replace(SCHEDULE, min_sources=FEW + 1))
        await many.tick()
        before = await self.commands(shop)
        for _ in range(3):
            await many.tick()
        after = await self.commands(shop)
        assert after["hscan"] == before["hscan"] > 0
        await populate(shop, [FEW + 1], events=1)
        await many.tick()
        assert (await self.commands(shop))["hscan"] > before["hscan"]

    async def test_users_of_a_namespace_without_profiles_are_not_scanned(
        self, open_workshop: OpenWorkshop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shop = await open_workshop(settings=named_settings("default"), name="plain")
        sources = sources_of(shop)

        async def must_not(*arguments: object, **named: object) -> None:
            raise AssertionError("users were scanned")

        monkeypatch.setattr(sources, "find", must_not)
        await trainer(shop, sources=sources).tick()
        assert await fusion_store(shop).job() == FusionJobRecord()


async def test_a_damaged_job_is_replaced(shop: Workshop, gate: Gate) -> None:
    await shop.redis.hset(shop.keys.fusion_job, "state", "odd")
    assert await tick(shop, of(shop, gate)) == (1, "growth")
    assert (await fusion_store(shop).job()).state == "done"
