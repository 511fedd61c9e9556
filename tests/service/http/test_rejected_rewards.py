"""Rejected rewards, alone and in batches: the answer, and that nothing is stored."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import httpx
import pytest
from redis.asyncio import Redis

from metaban.service.http.schemas.feedback import RejectionOut
from metaban.store.decisions.decisions import DecisionStore
from metaban.store.namespaces import NamespaceStore
from metaban.store.users.users import UserStore
from tests.service.http.error_steps import began_anew, decided, deferred, rewarded_often
from tests.service.http.error_world import (
    ASK,
    KEYS,
    USER,
    Case,
    Step,
    World,
    check_problem,
    differences,
    dump,
    world_of,
)

DAY_MS = 86_400_000


async def overdue(world: World) -> None:
    """A decision whose reward window ended a minute ago."""
    await decided(world)
    await age(world)


async def overdue_and_deferred(world: World) -> None:
    await deferred(world)
    await age(world)


async def age(world: World) -> None:
    stored = await DecisionStore(world.store, KEYS, ttl_s=60).get("d")
    assert stored is not None
    earlier = replace(stored, created_ms=stored.created_ms - DAY_MS - 60_000)
    await world.store.execute_command("SET", KEYS.decision("d"), earlier.encode(), "KEEPTTL")


async def of_the_baseline(world: World) -> None:
    await world.ok("PATCH", "/admin/config", {"serving": "baseline"})
    await decided(world)
    await world.ok("PATCH", "/admin/config", {"serving": None})


async def of_several(world: World) -> None:
    await world.ok("POST", "/recommend", {**ASK, "decision_id": "d", "k": 2})


async def of_nothing(world: World) -> None:
    """A decision other than the rewarded one."""
    await world.ok("POST", "/recommend", {**ASK, "decision_id": "another"})


@final
@dataclass(frozen=True)
class Rejected:
    """A rejection code, the step that causes it, and the answer if the reward is sent alone."""

    code: str
    given: Step
    status: int
    slug: str = ""
    blames: str = ""
    arm_id: str | None = None
    event_id: str | None = None
    #: Counted each time it is sent.
    counted: bool = False

    @property
    def reward(self) -> dict[str, Any]:
        named = {"arm_id": self.arm_id, "event_id": self.event_id}
        return {"decision_id": "d", "reward": 1} | {name: value for name, value in named.items() if value is not None}


REJECTED = [
    Rejected("unknown-decision", of_nothing, 404, "unknown-decision", "decision_id"),
    Rejected("unknown-arm", decided, 422, "invalid-input", "arm_id", arm_id="x"),
    Rejected("arm-required", of_several, 422, "invalid-input", "arm_id"),
    Rejected("user-reset", began_anew, 409, "user-reset", "decision_id"),
    Rejected("not-activated", deferred, 409, "not-activated", "decision_id"),
    Rejected("too-many-rewards", rewarded_often, 409, "too-many-rewards", "decision_id", event_id="another"),
    Rejected("late", overdue, 202, counted=True),
    Rejected("late", overdue_and_deferred, 202, counted=True),
    Rejected("not-learned", of_the_baseline, 202),
]


@pytest.fixture
async def world(
    rejected: Rejected, redis: Redis, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    case = Case(rejected.code, rejected.status, rejected.slug, "POST /feedback", given=rejected.given)
    async with world_of(case, valkey_url, redis, tmp_path, monkeypatch, None) as world:
        yield world


async def counters(world: World) -> dict[str, int]:
    record = await NamespaceStore(world.engine._redis).load("default")
    assert record is not None
    return await UserStore(world.engine._redis, KEYS, record.store_id, samples_kept=1).counters()


async def send(world: World, body: Any) -> httpx.Response:
    return await world.http.post("/feedback", json=body, headers={"X-Request-ID": "reward-1"})


def test_every_code_has_a_case() -> None:
    [codes] = [RejectionOut.model_fields["code"].examples]
    assert {rejected.code for rejected in REJECTED} == set(codes or ())


@pytest.mark.parametrize("rejected", REJECTED, ids=lambda each: f"{each.code}-{each.given.__name__}")
class TestRejected:
    async def test_single_reward(self, rejected: Rejected, world: World) -> None:
        before, counted = await dump(world.store), await counters(world)
        answer = await send(world, rejected.reward)
        if rejected.slug:
            check_problem(answer, rejected.status, rejected.slug, rejected.blames, "reward-1")
            if rejected.code == "unknown-decision":
                assert "in namespace default" in answer.json()["detail"]
        else:
            assert answer.status_code == rejected.status
            self.check_listed(answer, rejected, accepted=0, index=0)
        await self.check_unchanged(world, rejected, before, counted)

    async def test_batch_of_one(self, rejected: Rejected, world: World) -> None:
        before, counted = await dump(world.store), await counters(world)
        answer = await send(world, {"events": [rejected.reward]})
        self.check_listed(answer, rejected, accepted=0, index=0)
        await self.check_unchanged(world, rejected, before, counted)

    async def test_batch_with_accepted_rewards(self, rejected: Rejected, world: World) -> None:
        for name in ("first", "last"):
            await world.ok("POST", "/recommend", {**ASK, "user_id": "somebody", "decision_id": name})
        before, counted = await dump(world.store), await counters(world)
        others = [{"decision_id": name, "reward": 1} for name in ("first", "last")]
        answer = await send(world, {"events": [others[0], rejected.reward, others[1]]})
        self.check_listed(answer, rejected, accepted=2, index=1)
        assert differences(before, await dump(world.store)) == {"events", "counters", "seen"}
        now = await counters(world)
        assert now["enqueued"] == counted["enqueued"] + 2
        assert now["late"] == counted["late"] + rejected.counted

    async def test_wait_without_accepted_rewards(self, rejected: Rejected, world: World) -> None:
        answer = await world.http.post("/feedback?wait=applied", json={"events": [rejected.reward]})
        assert (answer.status_code, answer.json()["applied"]) == (202, False)

    def check_listed(self, answer: httpx.Response, rejected: Rejected, *, accepted: int, index: int) -> None:
        assert answer.status_code == 202, answer.text
        told = answer.json()
        [rejection] = told["rejected"]
        assert (told["accepted"], told["duplicates"]) == (accepted, 0)
        assert (rejection["index"], rejection["code"]) == (index, rejected.code)
        assert rejection["detail"]
        assert USER not in answer.text

    async def check_unchanged(
        self, world: World, rejected: Rejected, before: dict[bytes, tuple[bytes, int]], counted: dict[str, int]
    ) -> None:
        if not rejected.counted:
            assert await dump(world.store) == before
            return
        assert differences(before, await dump(world.store)) == {"counters"}
        assert await counters(world) == {**counted, "late": counted["late"] + 1}


async def test_all_rejections_in_one_batch(
    redis: Redis, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reward of a batch is checked separately; a malformed one refuses the batch."""
    case = Case("all", 202, "", "POST /feedback", given=deferred)
    async with world_of(case, valkey_url, redis, tmp_path, monkeypatch, None) as world:
        await world.ok("POST", "/recommend", {**ASK, "decision_id": "two", "k": 2})
        events = [
            {"decision_id": "none", "reward": 1},
            {"decision_id": "two", "reward": 1},
            {"decision_id": "two", "arm_id": "x", "reward": 1},
            {"decision_id": "d", "reward": 1},
        ]
        before = await dump(redis)
        told = (await send(world, {"events": events})).json()
        assert [(each["index"], each["code"]) for each in told["rejected"]] == [
            (0, "unknown-decision"),
            (1, "arm-required"),
            (2, "unknown-arm"),
            (3, "not-activated"),
        ]
        for wrong, field in (({"reward": 2}, "reward"), ({"reward": None}, "reward"), ({"colour": 1}, "colour")):
            answer = await send(world, {"events": [*events, {"decision_id": "two", "reward": 1, **wrong}]})
            check_problem(answer, 422, "invalid-input", f"events[4].{field}", "reward-1")
        assert await dump(redis) == before
