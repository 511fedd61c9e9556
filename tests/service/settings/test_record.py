"""What shapes learning is in the namespace's record, and every process follows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
import structlog
from redis.asyncio import Redis

from metaban.models.settings import PRESETS, named_settings
from metaban.service.settings.namespace import LIVE
from metaban.store.keys import NamespaceKeys
from metaban.store.namespaces import NamespaceRecord, NamespaceStore
from tests.service.apps import ARMS, running_app
from tests.service.engines import worker_running
from tests.worker.workshop import soon

pytestmark = pytest.mark.usefixtures("short_tails")

ASK = {"user_id": "u", "arms": ARMS}

#: Another valid value of every setting that can change at run time.
OTHER: dict[str, Any] = {
    "alpha": 0.7,
    "nu": 2.5,
    "gamma": 0.35,
    "samples_kept": 30,
    "candidate_pool": 40,
    "policy": "squarecb",
    "epsilon": 0.5,
    "squarecb_gamma": 7.0,
    "thompson_draws": 9,
    "thompson_scale": 0.5,
    "serving": "baseline",
    "baseline": ["arm 1"],
    "repeated_rewards": "first",
    "reward_min": -3.0,
    "reward_max": 4.0,
    "default_reward": 0.5,
    "reward_wait_s": 30.0,
    "reward_window_s": 5_000,
    "dedupe_window_s": 90_000,
    "fusion": "off",
    "user_retention_days": 30,
}

#: Environments whose values differ from the defaults.
ENVIRONMENTS: list[dict[str, Any]] = [
    {},
    {"alpha": 0.1, "samples_kept": 9, "reward_min": -1.0, "reward_wait_s": 60.0, "default_reward": 0.0, "epsilon": 0.3},
    {"default_reward": "off", "reward_window_s": 300},
]


async def config(http: httpx.AsyncClient, namespace: str = "default") -> dict[str, Any]:
    answer = await http.get("/admin/config", params={"namespace": namespace})
    assert answer.status_code == 200, answer.text
    return answer.json()["settings"]


async def patched(http: httpx.AsyncClient, changes: dict[str, Any], namespace: str = "default") -> dict[str, Any]:
    answer = await http.patch("/admin/config", json=changes, params={"namespace": namespace})
    assert answer.status_code == 200, answer.text
    return answer.json()["settings"]


async def record_of(redis: Redis, name: str = "default") -> NamespaceRecord:
    record = await NamespaceStore(redis).load(name)
    assert record is not None
    return record


def logged(lines: list[Any]) -> list[tuple[str, Any, Any]]:
    return [
        (line["variable"], line["record"], line["environment"]) for line in lines if line["event"] == "settings_differ"
    ]


class TestWhatIsShownCanBeSet:
    def test_every_setting_has_another_value(self) -> None:
        assert OTHER.keys() == set(LIVE)

    @pytest.mark.parametrize("environment", ENVIRONMENTS)
    async def test_shown_settings_change_nothing(
        self, redis: Redis, valkey_url: str, environment: dict[str, Any]
    ) -> None:
        async with running_app(valkey_url, **environment) as (_, http):
            for preset in PRESETS:
                await http.post("/admin/namespaces", json={"name": preset, "preset": preset, "learner": {"width": 5}})
                shown, before = await config(http, preset), await record_of(redis, preset)
                assert await patched(http, shown, preset) == shown
                after = await record_of(redis, preset)
                assert (after.learner, after.rewards) == (before.learner, before.rewards)

    @pytest.mark.parametrize("environment", ENVIRONMENTS)
    async def test_every_default_can_be_set_again(
        self, redis: Redis, valkey_url: str, environment: dict[str, Any]
    ) -> None:
        async with running_app(valkey_url, **environment) as (_, http):
            for preset in PRESETS:
                await http.post("/admin/namespaces", json={"name": preset, "preset": preset})
                shown = await config(http, preset)
                changes = {name: value for name, value in OTHER.items() if name != "gamma" or preset != "default"}
                changed = await patched(http, changes, preset)
                assert changed == {**shown, **changes}
                for back in (shown, dict.fromkeys(shown)):
                    assert await patched(http, changes, preset) == changed
                    assert await patched(http, back, preset) == shown
                for name, value in changes.items():
                    assert (await patched(http, {name: value}, preset))[name] == value
                    assert await patched(http, {name: shown[name]}, preset) == shown

    async def test_limits_of_the_preset_are_told(self, http: httpx.AsyncClient) -> None:
        await http.post("/admin/namespaces", json={"name": "news", "preset": "paper"})
        answer = await http.patch("/admin/config?namespace=news", json={"alpha": 0.5, "nu": 1.0})
        assert answer.status_code == 422
        assert answer.json()["errors"] == [{"field": "nu", "detail": "nu must be above 1 and at most 1000000"}]

    async def test_namespace_goes_before_the_environment(self, redis: Redis, valkey_url: str) -> None:
        async with running_app(valkey_url, depth=3, learner={"bins": 3, "members": 2}) as (_, http):
            own = {"name": "news", "learner": {"depth": 1, "bins": 4, "samples_kept": 7}}
            answer = await http.post("/admin/namespaces", json=own)
            assert answer.status_code == 201, answer.text
        expected = named_settings("default", width=6, depth=1, bins=4, members=2, samples_kept=7)
        assert (await record_of(redis, "news")).learner == expected.to_json()


class TestProcessesThatDiffer:
    async def test_services_take_the_same_rewards(self, redis: Redis, valkey_url: str) -> None:
        with structlog.testing.capture_logs() as lines:
            async with running_app(valkey_url, reward_max=5.0) as (_, first):
                assert logged(lines) == []
                async with running_app(valkey_url, reward_max=2.0, alpha=0.9) as (_, second):
                    assert logged(lines) == [("METABAN_ALPHA", 0.3, 0.9), ("METABAN_REWARD_MAX", 5.0, 2.0)]
                    assert await config(first) == await config(second)
                    for service in (first, second):
                        for reward, status in ((4.0, 202), (6.0, 422)):
                            asked = (await service.post("/recommend", json=ASK)).json()
                            body = {"decision_id": asked["decision_id"], "reward": reward}
                            for told in (first, second):
                                assert (await told.post("/feedback", json=body)).status_code == status

    async def test_unset_variables_and_admins_choices_do_not_differ(self, redis: Redis, valkey_url: str) -> None:
        async with running_app(valkey_url, reward_max=5.0) as (_, http):
            await patched(http, {"samples_kept": 3})
            await http.post("/admin/namespaces", json={"name": "news", "preset": "paper", "learner": {"alpha": 0.2}})
            await http.post("/admin/namespaces", json={"name": "sport", "learner": {"width": 9}})
        with structlog.testing.capture_logs() as lines:
            async with running_app(valkey_url) as (_, http):
                assert (await config(http))["reward_max"] == 5.0
                assert (await config(http))["samples_kept"] == 3
                assert (await config(http, "news"))["alpha"] == 0.2
        assert logged(lines) == []

    async def test_a_change_reaches_all_processes(self, redis: Redis, valkey_url: str) -> None:
        async with running_app(valkey_url) as (_, here), running_app(valkey_url) as (app, there):
            async with worker_running(valkey_url):
                wanted = {"samples_kept": 2, "candidate_pool": 1, "reward_window_s": 50, "dedupe_window_s": 60}
                await patched(here, wanted)

                async def adopted() -> bool:
                    return wanted.items() <= (await config(there)).items()

                await soon(adopted)

                async def learned(number: int) -> int:
                    body = {**ASK, "decision_id": f"d{number}"}
                    assert (await there.post("/recommend", json=body)).status_code == 200
                    told = await there.post("/feedback?wait=applied", json={"decision_id": f"d{number}", "reward": 1})
                    assert told.status_code == 202, told.text
                    return await redis.llen(NamespaceKeys("default", 2).samples("u"))

                for number in range(3):
                    await learned(number)
                numbers = iter(range(3, 1_000))

                async def trimmed() -> bool:
                    return await learned(next(numbers)) == 2

                await soon(trimmed)
            keys = NamespaceKeys("default", 2)
            remembered = [await redis.pttl(key) async for key in redis.scan_iter("*:seen:*")]
            assert remembered
            assert max(remembered) <= 60_000
            kept_s = 50 + app.state.metaban.settings.late_window_s
            assert (kept_s - 60) * 1_000 < await redis.pttl(keys.decision("d2")) <= kept_s * 1_000


class TestOlderRecords:
    @pytest.mark.parametrize("stored", [None, {"repeated": "last"}, {"default_reward": None, "wait_s": None}])
    async def test_namespaces_without_a_default_reward_stay_without(
        self, redis: Redis, valkey_url: str, stored: dict[str, Any] | None
    ) -> None:
        async with running_app(valkey_url):
            pass
        record = await record_of(redis)
        await redis.set(record.keys.record, replace(record, rewards=stored).encode())
        async with running_app(valkey_url) as (_, http):
            shown = await config(http)
            assert (shown["default_reward"], shown["reward_wait_s"]) == ("off", 600)
            await http.post("/recommend", json=ASK)
            assert not [key async for key in redis.scan_iter("*:awaiting")]
            assert (await patched(http, {"default_reward": 0}))["default_reward"] == 0
            await http.post("/recommend", json=ASK)
            assert [key async for key in redis.scan_iter("*:awaiting")]

    async def test_an_explicit_default_reward_completes_the_record(self, redis: Redis, valkey_url: str) -> None:
        async with running_app(valkey_url):
            pass
        record = await record_of(redis)
        await redis.set(record.keys.record, replace(record, rewards=None).encode())
        async with running_app(valkey_url, default_reward=0.25) as (_, http):
            assert (await config(http))["default_reward"] == 0.25

    async def test_first_service_completes_the_record(self, redis: Redis, valkey_url: str) -> None:
        async with running_app(valkey_url) as (_, http):
            await patched(http, {"alpha": 0.8, "reward_max": 3})
        record = await record_of(redis)
        for name in ("samples_kept", "candidate_pool"):
            del record.learner[name]
        assert record.rewards is not None
        for name in ("window_s", "dedupe_window_s"):
            del record.rewards[name]
        await redis.set(record.keys.record, record.encode())
        environment = {"samples_kept": 11, "reward_window_s": 70, "dedupe_window_s": 80, "reward_max": 9, "alpha": 0.1}
        with structlog.testing.capture_logs() as lines:
            async with running_app(valkey_url, **environment) as (_, http):
                shown = await config(http)
            async with running_app(valkey_url, samples_kept=12) as (_, http):
                assert await config(http) == shown
        assert (shown["samples_kept"], shown["reward_window_s"], shown["dedupe_window_s"]) == (11, 70, 80)
        assert (shown["alpha"], shown["reward_max"], shown["candidate_pool"]) == (0.8, 3, 2_048)
        assert logged(lines) == [("METABAN_SAMPLES_KEPT", 11, 12)]
