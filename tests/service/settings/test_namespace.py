"""Live settings of a namespace, their audit log, and the kill switch."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from metaban.service.http.auth import FreshKey
from metaban.worker.jobs import retention
from tests.service.apps import ARMS, running_app
from tests.service.engines import worker_running
from tests.worker.workshop import SOON_S, soon

pytestmark = pytest.mark.usefixtures("short_tails")

ASK = {"user_id": "u", "arms": ARMS}


async def patched(http: httpx.AsyncClient, **changes: object) -> dict[str, object]:
    """Change settings, as a client does: on a busy machine the store may not answer within the limits of the guard."""
    answers: list[httpx.Response] = []

    async def answered() -> bool:
        answers.append(await http.patch("/admin/config", json=changes))
        return not (answers[-1].status_code == 503 and "Retry-After" in answers[-1].headers)

    await soon(answered, "settings changed")
    assert answers[-1].status_code == 200, answers[-1].text
    return answers[-1].json()


async def test_change_takes_effect_at_once_and_null_resets_it(http: httpx.AsyncClient) -> None:
    before = (await http.get("/admin/config")).json()
    assert (before["settings"]["policy"], before["settings"]["epsilon"], before["overridden"]) == (
        "ucb-floor",
        0.02,
        [],
    )
    changed = await patched(http, epsilon=1.0)
    assert changed["overridden"] == ["epsilon"]
    assert changed["revision"] > before["revision"]
    assert (await http.get("/admin/config")).json() == changed
    item = (await http.post("/recommend", json=ASK)).json()["items"][0]
    assert item["propensity"] == 0.25  # uniform
    await patched(http, policy="ucb")
    assert (await http.post("/recommend", json=ASK)).json()["policy"] == "ucb"
    back = await patched(http, epsilon=None, policy=None)
    assert (back["settings"], back["overridden"]) == (before["settings"], [])


async def test_learner_uses_new_settings(http: httpx.AsyncClient, valkey_url: str) -> None:
    async with worker_running(valkey_url):
        await http.post("/recommend", json={**ASK, "decision_id": "d"})
        await http.post("/feedback?wait=applied", json={"decision_id": "d", "reward": 1})
        first = (await http.post("/recommend", json=ASK)).json()["items"][0]
        assert first["bonus"] > 0
        assert (await patched(http, alpha=0))["settings"]["alpha"] == 0  # type: ignore[index]
        second = (await http.post("/recommend", json=ASK)).json()["items"][0]
        assert second["bonus"] == 0
        await http.post("/recommend", json={**ASK, "decision_id": "e"})
        told = await http.post("/feedback?wait=applied", json={"decision_id": "e", "reward": 1})
        assert told.json()["applied"] is True


async def test_other_and_later_processes_use_new_settings(redis: Redis, valkey_url: str) -> None:
    async with running_app(valkey_url) as (_, here), running_app(valkey_url) as (_, there):
        await patched(here, policy="squarecb", alpha=0.5)

        async def adopted() -> bool:
            settings = (await there.get("/admin/config")).json()["settings"]
            return (settings["policy"], settings["alpha"]) == ("squarecb", 0.5)

        await soon(adopted)
        assert (await there.post("/recommend", json=ASK)).json()["policy"] == "squarecb"
    async with running_app(valkey_url, policy="ucb") as (_, later):
        assert (await later.post("/recommend", json=ASK)).json()["policy"] == "squarecb"
        assert (await patched(later, policy=None))["settings"]["policy"] == "ucb"  # type: ignore[index]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"epsilon": 2}, "epsilon"),
        ({"epsilon": "0.1"}, "epsilon"),
        ({"nu": -1}, "nu"),
        ({"policy": "random"}, "policy"),
        ({"preset": "default"}, "preset"),
        ({"baseline": [""]}, "baseline[0]"),
        ({"serving": True}, "serving"),
    ],
)
async def test_invalid_change_is_refused(http: httpx.AsyncClient, body: dict[str, object], field: str) -> None:
    before = (await http.get("/admin/config")).json()
    answer = await http.patch("/admin/config", json=body)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field), answer.text
    assert (await http.get("/admin/config")).json() == before


async def test_setting_unknown_to_the_preset_is_refused(redis: Redis, valkey_url: str) -> None:
    async with running_app(valkey_url) as (_, http):
        answer = await http.patch("/admin/config", json={"gamma": 0.5})
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "gamma")


async def test_change_with_an_old_revision_is_refused(http: httpx.AsyncClient) -> None:
    seen = (await http.get("/admin/config")).json()["revision"]
    assert (await http.patch(f"/admin/config?revision={seen}", json={"epsilon": 0.1})).status_code == 200
    late = await http.patch(f"/admin/config?revision={seen}", json={"epsilon": 0.2})
    assert (late.status_code, late.json()["type"]) == (409, "/problems/settings-changed")
    assert (await http.get("/admin/config")).json()["settings"]["epsilon"] == 0.1


async def two_stored_answers(http: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers to two equal requests at once, repeated while a busy machine takes the store for unavailable."""
    while True:
        answers = await asyncio.gather(*(http.post("/recommend", json=body) for _ in range(2)))
        assert all(answer.status_code in (200, 503) for answer in answers), answers
        if all(answer.status_code == 200 and answer.json()["logged"] for answer in answers):
            return [answer.json() for answer in answers]


class TestKillSwitch:
    async def test_baseline_ignores_the_learner(self, http: httpx.AsyncClient) -> None:
        await patched(http, serving="baseline", baseline=["arm 2", "arm 9", "arm 1"])
        answer = (await http.post("/recommend", json={**ASK, "k": 4, "decision_id": "d"})).json()
        assert answer["policy"] == "baseline"
        assert [item["arm_id"] for item in answer["items"]] == ["arm 2", "arm 1", "arm 0", "arm 3"]
        assert {item["propensity"] for item in answer["items"]} == {1.0}
        again = (await http.post("/recommend", json={**ASK, "k": 4, "decision_id": "d"})).json()
        assert again["items"] == answer["items"]
        misfits = [{"id": "odd", "features": [1, 2]}, {"id": "even", "features": [3, 4]}]
        assert (await http.post("/recommend", json={"user_id": "u", "arms": misfits})).status_code == 200
        await patched(http, serving="learner")
        assert (await http.post("/recommend", json=ASK)).json()["policy"] == "ucb-floor"

    async def test_ranked_arms_come_first(self, http: httpx.AsyncClient) -> None:
        for arm in "abcdef":
            await http.put(f"/admin/arms/{arm}", json={"features": [1.0]})
        await patched(http, serving="baseline", baseline=["e", "x", "b", "e", "a"])

        async def chosen(**ask: object) -> list[str]:
            answer = await http.post("/recommend", json={"user_id": "u", **ask})
            assert answer.status_code == 200, answer.text
            return [item["arm_id"] for item in answer.json()["items"]]

        assert await chosen(k=100) == ["e", "b", "a", "c", "d", "f"]
        assert await chosen(k=2) == ["e", "b"]
        assert await chosen(k=4, exclude=["e", "c", "nobody"]) == ["b", "a", "d", "f"]
        assert await chosen(k=9, arm_ids=["f", "d", "a"]) == ["a", "f", "d"]

    async def test_baseline_is_served_when_the_learner_hangs(self, redis: Redis, valkey_url: str) -> None:
        """Also for forgotten users, repeated requests, and when the switch is set during the hang."""
        async with running_app(valkey_url) as (app, http):
            ask = {**ASK, "decision_id": "learned", "explain": True}
            first = (await http.post("/recommend", json=ask)).json()
            await http.delete("/admin/users/somebody")
            hanging = threading.Event()
            engine = app.state.metaban.recommenders.default
            engine._compute.submit(hanging.wait)
            stuck = asyncio.create_task(patched(http, alpha=0.7))

            async def waits_for_the_learner() -> bool:
                return (await http.get("/admin/config")).json()["settings"]["alpha"] == 0.7

            try:
                await soon(waits_for_the_learner)
                async with asyncio.timeout(SOON_S):
                    await patched(http, serving="baseline")
                    for name in ("u", "somebody", "new"):
                        theirs = {**ask, "user_id": name, "decision_id": f"of-{name}"}
                        answer = await http.post("/recommend", json=theirs)
                        assert (answer.json()["policy"], answer.json()["logged"]) == ("baseline", True)
                        again = await http.post("/recommend", json=theirs)
                        assert again.json()["items"] == answer.json()["items"]
                    replayed = (await http.post("/recommend", json=ask)).json()
                    assert [item["arm_id"] for item in replayed["items"]] == [i["arm_id"] for i in first["items"]]
                    assert replayed["items"][0]["explanation"] is None
                    assert (await http.get("/health/ready")).json()["checks"]["store"]["ok"] is True
            finally:
                hanging.set()
            await stuck
            shown = (await http.get("/admin/config")).json()["settings"]
            assert (shown["alpha"], shown["serving"]) == (0.7, "baseline")

    async def test_baseline_reaches_other_processes_whose_learner_hangs(self, redis: Redis, valkey_url: str) -> None:
        async with running_app(valkey_url) as (_, here), running_app(valkey_url) as (app, there):
            await here.post("/recommend", json=ASK)
            await there.post("/recommend", json=ASK)
            hanging = threading.Event()
            app.state.metaban.recommenders.default._compute.submit(hanging.wait)
            try:
                await patched(here, alpha=0.7)

                async def adopted() -> bool:
                    return (await there.get("/admin/config")).json()["settings"]["alpha"] == 0.7

                await soon(adopted)
                await patched(here, serving="baseline")

                async def thrown() -> bool:
                    return (await there.get("/admin/config")).json()["settings"]["serving"] == "baseline"

                await soon(thrown)
                assert (await there.post("/recommend", json=ASK)).json()["policy"] == "baseline"
            finally:
                hanging.set()
            await patched(here, serving=None, alpha=0)

            async def followed() -> bool:
                answer = (await there.post("/recommend", json=ASK)).json()
                return answer["policy"] == "ucb-floor" and answer["items"][0]["bonus"] == 0

            await soon(followed)

    async def test_baseline_fixes_no_layout_and_waits_for_no_epoch(self, http: httpx.AsyncClient) -> None:
        await patched(http, serving="baseline")
        ask = {**ASK, "decision_id": "d", "explain": True, "min_version": 99}
        for _ in range(2):
            answer = await http.post("/recommend", json=ask)
            assert (answer.status_code, answer.json()["model_version"]) == (200, 0)
            assert answer.json()["items"][0]["explanation"] is None
        assert (await http.get("/admin/namespaces/default")).json()["layout"] is None

    @pytest.mark.parametrize("outage", ["serve", "refuse"])
    async def test_decisions_while_the_switch_changes(self, redis: Redis, valkey_url: str, outage: str) -> None:
        async with running_app(valkey_url, store_outage=outage) as (_, http):
            await http.delete("/admin/users/u0")
            ended = asyncio.Event()
            seen: set[str] = set()

            async def ask(place: int) -> None:
                turn = 0
                while not ended.is_set():
                    turn += 1
                    body = {
                        **ASK,
                        "user_id": f"u{place}",
                        "decision_id": f"{place}-{turn}",
                        "k": 4,
                        "explain": place > 2,
                    }
                    one, other = await two_stored_answers(http, body)
                    assert one["policy"] == other["policy"]
                    chosen = [[item["arm_id"] for item in answer["items"]] for answer in (one, other)]
                    assert chosen[0] == chosen[1]
                    seen.add(one["policy"])

            asking = [asyncio.create_task(ask(place)) for place in range(4)]
            for turn in range(10):
                await patched(http, serving="learner" if turn % 2 else "baseline", baseline=["arm 3"])
                await asyncio.sleep(0.03)
            ended.set()
            async with asyncio.timeout(60):
                await asyncio.gather(*asking)
            assert seen == {"baseline", "ucb-floor"}


class TestAudit:
    async def test_changes_are_audited_without_secrets(self, redis: Redis, valkey_url: str) -> None:
        admin = FreshKey.generate()
        async with running_app(valkey_url, admin_keys={admin.digest}) as (_, http):
            http.headers["X-API-Key"] = admin.key
            await http.patch("/admin/config", json={"epsilon": 0.5}, headers={"X-Request-ID": "change-1"})
            await http.patch("/admin/config", json={"epsilon": 7})  # refused
            await http.delete("/admin/users/somebody-by-name")
            await http.post("/admin/namespaces", json={"name": "shop"})
            await http.get("/admin/config")
            lines = (await http.get("/admin/audit")).json()["lines"]
        assert [line["action"] for line in lines] == [
            "POST /admin/namespaces",
            "DELETE /admin/users/{user_id}",
            "PATCH /admin/config",
        ]
        assert {line["actor"] for line in lines} == {admin.digest[:8]}
        assert (lines[2]["request_id"], lines[2]["detail"]) == (
            "change-1",
            {"before": {"epsilon": 0.02}, "after": {"epsilon": 0.5}},
        )
        assert lines[0]["detail"] == {"name": "shop"}
        text = str(lines)
        assert admin.key not in text
        assert "somebody-by-name" not in text

    async def test_no_audit_entry_without_a_change(self, http: httpx.AsyncClient) -> None:
        before = await patched(http, epsilon=0.5)
        assert await patched(http) == before
        assert (await http.get("/admin/config")).json()["revision"] == before["revision"]
        [line] = (await http.get("/admin/audit")).json()["lines"]
        assert line["detail"]["after"] == {"epsilon": 0.5}
        stale = await http.patch(f"/admin/config?revision={before['revision'] - 1}", json={})
        assert stale.status_code == 409

    async def test_audit_entry_length_is_bounded(self, http: httpx.AsyncClient, redis: Redis) -> None:
        rankings = [[f"{turn} {'x' * 80} {place}" for place in range(9_000)] for turn in range(2)]
        for ranking in rankings:
            await patched(http, baseline=ranking, epsilon=0.5)
        answer = await http.get("/admin/audit?limit=1")
        assert len(answer.content) < 4_000
        [line] = answer.json()["lines"]
        assert line["detail"]["after"]["epsilon"] == 0.5
        before, after = line["detail"]["before"]["baseline"], line["detail"]["after"]["baseline"]
        assert (before["values"], before["first"]) == (9_000, rankings[0][:5])
        assert (after["values"], after["first"]) == (9_000, rankings[1][:5])
        assert before["digest"] != after["digest"]
        assert await redis.memory_usage("metaban:{default:meta}:audit") < 16_000

    async def test_pages(self, http: httpx.AsyncClient) -> None:
        for step in range(5):
            await patched(http, epsilon=step / 10)
        first = (await http.get("/admin/audit?limit=3")).json()
        rest = (await http.get(f"/admin/audit?limit=3&cursor={first['cursor']}")).json()
        found = [line["detail"]["after"]["epsilon"] for line in first["lines"] + rest["lines"]]
        assert found == [0.4, 0.3, 0.2, 0.1, 0.0]
        assert rest["cursor"] is None
        refused = await http.get("/admin/audit?cursor=0-0")
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "cursor")


class TestRewards:
    async def test_reward_range_is_a_setting(self, http: httpx.AsyncClient, valkey_url: str) -> None:
        await http.post("/recommend", json={**ASK, "decision_id": "d"})
        refused = await http.post("/feedback", json={"decision_id": "d", "reward": 4})
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "reward")
        await patched(http, reward_min=-1, reward_max=7)
        async with worker_running(valkey_url):
            told = await http.post("/feedback?wait=applied", json={"decision_id": "d", "reward": 4})
            assert told.json()["applied"] is True, told.text
        answer = await http.patch("/admin/config", json={"reward_max": -2})
        assert answer.status_code == 422

    async def test_default_reward_is_a_setting(self, http: httpx.AsyncClient, valkey_url: str) -> None:
        await patched(http, default_reward=0, reward_wait_s=0.2)
        async with worker_running(valkey_url):
            await http.post("/recommend", json={**ASK, "decision_id": "d"})

            async def learned() -> bool:
                found = await http.get("/admin/users/u")
                return found.status_code == 200 and found.json()["version"] == 1

            await soon(learned)

    async def test_the_default_reward_can_be_turned_off(self, http: httpx.AsyncClient) -> None:
        for sent, shown in (("off", "off"), ("off", "off"), (0.5, 0.5), ("off", "off"), (None, 0.0)):
            assert (await patched(http, default_reward=sent))["settings"]["default_reward"] == shown

    async def test_a_range_without_0_keeps_the_default_reward(self, http: httpx.AsyncClient) -> None:
        for least, greatest in ((1, 5), (-5, -1), (0, 1)):
            changed = await patched(http, reward_min=least, reward_max=greatest)
            assert changed["settings"]["default_reward"] == 0
        await patched(http, default_reward=0.5)
        refused = await http.patch("/admin/config", json={"reward_min": 1, "reward_max": 5})
        assert refused.status_code == 422

    async def test_the_wait_is_never_longer_than_the_reward_window(self, http: httpx.AsyncClient) -> None:
        for window_s, wait_s in ((60, 60), (700, 600)):
            changed = await patched(http, reward_window_s=window_s)
            assert changed["settings"]["reward_wait_s"] == wait_s

    async def test_baseline_decisions_are_not_learned(self, http: httpx.AsyncClient) -> None:
        await patched(http, serving="baseline")
        await http.post("/recommend", json={**ASK, "decision_id": "d"})
        told = await http.post("/feedback", json={"decision_id": "d", "reward": 1})
        assert told.status_code == 202
        assert [rejection["code"] for rejection in told.json()["rejected"]] == ["not-learned"]


async def test_unseen_users_are_forgotten(
    http: httpx.AsyncClient, redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "TICK_S", 0.05)
    async with worker_running(valkey_url):
        for user in ("u", "v"):
            await http.post("/recommend", json={**ASK, "user_id": user, "decision_id": user})
            await http.post("/feedback?wait=applied", json={"decision_id": user, "reward": 1})
        for key in [key async for key in redis.scan_iter("*:last_seen")]:
            await redis.zadd(key, {"u": 1}, xx=True)  # a day of 1970
        await patched(http, user_retention_days=30)

        async def forgotten() -> bool:
            return (await http.get("/admin/users/u")).json()["forgotten"]

        await soon(forgotten)

        async def dropped() -> bool:
            return (await http.post("/recommend", json=ASK)).json()["cold_start"] == "meta"

        await soon(dropped)
        assert (await http.get("/admin/users/v")).json()["version"] == 1
        metrics = (await http.get("/metrics")).text
    assert re.search(r'^metaban_events\{namespace="\w+",state="expired"\} 1\.0$', metrics, re.MULTILINE)


async def test_retention_outlasts_decisions(http: httpx.AsyncClient) -> None:
    assert (await http.get("/admin/config")).json()["settings"]["user_retention_days"] == 0
    refused = await http.patch("/admin/config", json={"user_retention_days": 1})
    assert refused.status_code == 422
    [error] = refused.json()["errors"]
    assert error["field"] == "user_retention_days"
    assert "at least 2" in error["detail"]
    assert (await patched(http, user_retention_days=2))["overridden"] == ["user_retention_days"]
