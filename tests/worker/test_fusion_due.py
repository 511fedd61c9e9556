"""When fusion is trained without being asked for, and what it costs to find out that it is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from models.settings import named_settings
from store.fusion import FusionJob
from tests.worker.conftest import OpenWorkshop
from tests.worker.fusing import FEW, PLAN, Gate, fusion_store, open_fusing, populate, saying, trained, trainer
from tests.worker.workshop import Workshop
from worker import fusion as fusion_module
from worker.fusion import FusionPlan, FusionTrainer

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
async def shop(open_workshop: OpenWorkshop) -> Workshop:
    return await open_fusing(open_workshop)


@pytest.fixture
async def gate(shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Open from the beginning; and looks are taken whenever there is something to see."""
    monkeypatch.setattr(fusion_module, "LOOK_S", 0.0)
    monkeypatch.setattr(fusion_module, "LOOK_SHARE", 0)
    gate = Gate(tmp_path, await trained(shop))
    gate.open()
    return gate


async def version(shop: Workshop) -> int:
    identity = await fusion_store(shop).identity()
    return 0 if identity is None else identity[0]


async def tick(shop: Workshop, fusion: FusionTrainer) -> tuple[int, str]:
    """The version after a tick, and what the latest one was trained for."""
    await fusion._tick()
    return await version(shop), (await fusion_store(shop).job()).by


def of(shop: Workshop, gate: Gate, plan: FusionPlan = PLAN) -> FusionTrainer:
    return trainer(shop, command=gate.command, plan=plan)


class TestGrowth:
    async def test_the_first_version_as_soon_as_there_are_sources(self, shop: Workshop, gate: Gate) -> None:
        many = of(shop, gate, replace(PLAN, least_sources=FEW + 2))
        assert await tick(shop, many) == (0, "")
        await populate(shop, [FEW])
        assert await tick(shop, many) == (0, "")
        await populate(shop, [FEW + 1])
        assert await tick(shop, many) == (1, "growth")
        job = await fusion_store(shop).job()
        assert (job.state, job.requested_ms) == ("done", 0)

    async def test_another_when_they_have_grown_by_their_share(self, shop: Workshop, gate: Gate) -> None:
        fusion = of(shop, gate)
        assert await tick(shop, fusion) == (1, "growth")
        assert await tick(shop, fusion) == (1, "growth")
        await populate(shop, range(FEW, FEW + 7))
        assert (await tick(shop, fusion))[0] == 1, "39 of 32 are not a quarter more"
        await populate(shop, [FEW + 7])
        assert (await tick(shop, fusion))[0] == 2

    async def test_another_when_a_source_was_forgotten(self, shop: Workshop, gate: Gate) -> None:
        await populate(shop, [FEW])
        fusion = of(shop, gate)
        assert await tick(shop, fusion) == (1, "growth")
        await shop.users.forget("user 3")
        await fusion_store(shop).strike(["user 3"])
        assert await tick(shop, fusion) == (2, "growth")
        assert await tick(shop, fusion) == (2, "growth")
        # With too few left it is not tried.
        await shop.users.forget("user 4")
        await fusion_store(shop).strike(["user 4"])
        assert await tick(shop, fusion) == (2, "growth")

    async def test_not_soon_after_a_failure(self, shop: Workshop, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
        bad = trainer(shop, command=saying("garbage"))
        await bad._tick()
        failed = await fusion_store(shop).job()
        assert (failed.state, failed.by) == ("failed", "growth")
        await of(shop, gate)._tick()
        assert await fusion_store(shop).job() == failed
        monkeypatch.setattr(fusion_module, "AFTER_FAILURE_S", 0.0)
        assert await tick(shop, of(shop, gate)) == (1, "growth")

    async def test_another_process_was_faster(self, shop: Workshop, gate: Gate) -> None:
        """Both find that it is due; the one that gets the lease later finds that it was seen to."""
        slow, store = of(shop, gate), fusion_store(shop)
        acquire = slow._fusion.acquire_lease

        async def after_another(token: str, ttl_ms: int) -> bool:
            await of(shop, gate)._tick()
            return await acquire(token, ttl_ms)

        slow._fusion.acquire_lease = after_another  # type: ignore[method-assign]
        await slow._tick()
        assert await version(shop) == 1
        assert not await shop.redis.exists(shop.keys.fusion_lease)
        assert (await store.job()).state == "done"


class TestSchedule:
    async def test_when_the_time_is_over_and_something_was_learned(self, shop: Workshop, gate: Gate) -> None:
        hasty = of(shop, gate, replace(PLAN, interval_s=0.001, growth=100.0))
        assert await tick(shop, hasty) == (1, "growth")
        assert await tick(shop, hasty) == (1, "growth"), "nothing was learned since"
        await populate(shop, [0], events=1)
        assert await tick(shop, hasty) == (2, "schedule")
        patient = of(shop, gate, replace(PLAN, growth=100.0))
        await populate(shop, [1], events=1)
        assert await tick(shop, patient) == (2, "schedule"), "an hour is not over"


class TestSwitchedOff:
    async def test_by_the_deployment_or_by_the_namespace(self, shop: Workshop, gate: Gate) -> None:
        await fusion_store(shop).request(5)
        off = of(shop, gate, replace(PLAN, wanted="off"))
        await off._tick()
        assert (await fusion_store(shop).job()).state == "queued"
        changed = await shop.namespaces.change(shop.record, overrides={"fusion": "auto"})
        assert changed is not None
        await shop.model.refresh_record()
        await off._tick()
        assert await version(shop) == 1
        changed = await shop.namespaces.change(changed, overrides={"fusion": "off"})
        await shop.model.refresh_record()
        await fusion_store(shop).request(6)
        await of(shop, gate)._tick()
        assert await version(shop) == 1


class TestIdle:
    async def commands(self, shop: Workshop) -> dict[str, int]:
        stats = await shop.redis.info("commandstats")
        return {name.removeprefix("cmdstat_"): row["calls"] for name, row in stats.items()}

    @pytest.mark.single_node("one server counts what it is asked")
    async def test_a_tick_is_a_look_at_one_hash(self, shop: Workshop) -> None:
        many = trainer(shop, plan=replace(PLAN, least_sources=FEW + 1))
        await many._tick()
        before = await self.commands(shop)
        for _ in range(7):
            await many._tick()
        after = await self.commands(shop)
        spent = {name: calls - before.get(name, 0) for name, calls in after.items() if calls != before.get(name, 0)}
        spent.pop("info", None)
        assert spent == {"hgetall": 7}

    @pytest.mark.single_node("one server counts what it is asked")
    async def test_users_are_not_gone_over_while_nothing_changes(self, shop: Workshop, monkeypatch) -> None:
        monkeypatch.setattr(fusion_module, "LOOK_S", 0.0)
        monkeypatch.setattr(fusion_module, "LOOK_SHARE", 0)
        await populate(shop, [FEW], events=1)
        many = trainer(shop, plan=replace(PLAN, least_sources=FEW + 1))
        await many._tick()
        before = await self.commands(shop)
        for _ in range(3):
            await many._tick()
        after = await self.commands(shop)
        assert after["hscan"] == before["hscan"] > 0
        await populate(shop, [FEW + 1], events=1)
        await many._tick()
        assert (await self.commands(shop))["hscan"] > before["hscan"]

    async def test_a_namespace_without_profiles_is_not_gone_over(
        self, open_workshop: OpenWorkshop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shop = await open_workshop(settings=named_settings("default"), name="plain")
        fusion = trainer(shop)

        async def must_not(*arguments: object, **named: object) -> None:
            raise AssertionError("users were gone over")

        monkeypatch.setattr(fusion._sources, "find", must_not)
        await fusion._tick()
        assert await fusion_store(shop).job() == FusionJob()


async def test_a_damaged_job_is_no_obstacle(shop: Workshop, gate: Gate) -> None:
    await shop.redis.hset(shop.keys.fusion_job, "state", "odd")
    assert await tick(shop, of(shop, gate)) == (1, "growth")
    assert (await fusion_store(shop).job()).state == "done"
