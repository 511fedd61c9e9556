"""/admin/users, /admin/dead-letters and `metaban dead-letters`, on a real engine and store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis
from typer.testing import CliRunner

from metaban.service.cli.main import app as command_line
from metaban.service.engine.registry import EngineRegistry
from metaban.service.http.app import create_app
from metaban.service.http.auth import FreshKey
from metaban.service.settings.environment import Settings
from metaban.service.telemetry.metrics import Metrics
from metaban.store.events.stream import EventStream
from metaban.store.keys import NamespaceKeys
from tests.own_valkey import own_valkey
from tests.service.engines import settings, worker_running
from tests.worker.workshop import make_event, soon

ARMS = [{"id": f"arm {n}", "features": [float(n), 1.0, -float(n)]} for n in range(3)]
KEYS = NamespaceKeys("shop", 2)
NOTHING_LEFT = {
    "decisions": 0, "waiting": 0, "dead_letters": 0, "samples": 0, "log_lines": 0, "pool": False, "fusion": False,
    "transfer": False,
}  # fmt: skip


@pytest.fixture
async def http(redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app around a real engine."""
    monkeypatch.setattr("metaban.service.engine.model.replica.TAIL_BLOCK_MS", 100)
    chosen: Settings = settings()
    metrics = Metrics()
    app = create_app(chosen, EngineRegistry(chosen, valkey_url, metrics), metrics)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
    ):
        yield client


async def decide(http: httpx.AsyncClient, user: str, decision: str) -> None:
    answer = await http.post("/recommend", json={"user_id": user, "arms": ARMS, "decision_id": decision})
    assert answer.status_code == 200, answer.text


async def bury_all(client: Redis) -> None:
    """Move every waiting event to the dead letters."""
    stream = EventStream(client, KEYS, dedupe_window_s=60, backlog_limit=100)
    for partition in range(KEYS.partitions):
        for delivery in await stream.read([partition], "one", count=99, block_ms=0):
            await stream.letters.bury(delivery, "one", "hopeless [b]markup[/b]")


class TestUsers:
    async def test_unknown_known_forgotten_and_returned_user(self, http: httpx.AsyncClient, valkey_url: str) -> None:
        path = "/admin/users/of%2Fcorridor%207%3F"
        user = "of/corridor 7?"
        assert (await http.get(path)).json()["type"] == "/problems/not-found"
        await decide(http, user, "d1")
        await decide(http, user, "d2")
        asked = (await http.get(path)).json()
        assert [each["decision_id"] for each in asked.pop("decisions")] == ["d2", "d1"]
        assert asked == {
            "user_id": user,
            "incarnation": 0,
            "version": 0,
            "epoch": None,
            "samples": 0,
            "resident": False,
            "forgotten": False,
            "cold_start": "meta",
            "warm_start": None,
            "profile": None,
            "events": [],
            "traces": None,
        }
        async with worker_running(valkey_url):
            for decision in ("d1",):
                told = await http.post("/feedback?wait=applied", json={"decision_id": decision, "reward": 1})
                assert told.json() == {"accepted": 1, "duplicates": 0, "rejected": [], "applied": True}
            known = (await http.get(path)).json()
            assert len(known.pop("decisions")) == 2
            assert known == asked | {"version": 1, "epoch": 0, "samples": 1, "resident": True}
            forgotten = await http.delete(path)
            assert forgotten.status_code == 200
            assert forgotten.json() == {
                "user_id": user,
                "incarnation": 1,
                "removed": {"samples": 1, "decisions": 2, "dead_letters": 0, "log_lines": 1},
                "waiting": 0,
                "history": "not ours",
            }
            gone = (await http.get(path)).json()
            assert gone == known | {
                "incarnation": 1,
                "version": 0,
                "epoch": None,
                "samples": 0,
                "resident": False,
                "forgotten": True,
                "decisions": [],
                "traces": NOTHING_LEFT,
            }
            alone = await http.post("/feedback", json={"decision_id": "d2", "reward": 1})
            assert (alone.status_code, alone.json()["type"]) == (404, "/problems/unknown-decision")
            assert alone.json()["errors"][0]["field"] == "decision_id"
            batch = await http.post(
                "/feedback", json={"events": [{"decision_id": "d1", "reward": 1}, {"decision_id": "d2", "reward": 1}]}
            )
            assert (batch.status_code, batch.json()["accepted"], batch.json()["duplicates"]) == (202, 0, 0)
            assert [each["code"] for each in batch.json()["rejected"]] == ["unknown-decision"] * 2
            await decide(http, user, "d3")
            await http.post("/feedback?wait=applied", json={"decision_id": "d3", "reward": 1})
            back = (await http.get(path)).json()
            assert (back["incarnation"], back["version"], back["forgotten"]) == (1, 1, False)

    async def test_profile_and_latest_events(self, http: httpx.AsyncClient, valkey_url: str) -> None:
        body = {"user_id": "u", "arms": ARMS}
        async with worker_running(valkey_url):
            for number in range(3):
                told = {"decision_id": f"d{number}", "user_features": {"n": number, "kind": "ü"}}
                assert (await http.post("/recommend", json={**body, **told})).status_code == 200
                reward = {"decision_id": f"d{number}", "reward": number / 2}
                await http.post("/feedback?wait=applied", json=reward)
        found = (await http.get("/admin/users/u?events=2")).json()
        assert found["profile"] == {"n": 2, "kind": "ü"}
        assert [event["reward"] for event in found["events"]] == [1.0, 0.5]
        assert set(found["events"][0]) == {"arm_id", "reward", "propensity", "epoch", "received_ms"}
        assert (await http.get("/admin/users/u")).json()["events"] == []
        for wrong in ("-1", "101", "many"):
            answer = await http.get("/admin/users/u", params={"events": wrong})
            assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "events")
        await http.delete("/admin/users/u")
        gone = (await http.get("/admin/users/u?events=9")).json()
        assert (gone["profile"], gone["events"], gone["traces"]) == (None, [], NOTHING_LEFT)

    async def test_remnants_of_a_forgotten_user_are_shown(
        self, http: httpx.AsyncClient, client: Redis, valkey_url: str
    ) -> None:
        await decide(http, "u", "d")
        assert (await http.post("/feedback", json={"decision_id": "d", "reward": 1})).json()["accepted"] == 1
        assert (await http.delete("/admin/users/u")).json()["waiting"] == 1
        assert (await http.get("/admin/users/u")).json()["traces"] == NOTHING_LEFT | {"waiting": 1}
        async with worker_running(valkey_url):

            async def nothing_left() -> bool:
                return bool((await http.get("/admin/users/u")).json()["traces"] == NOTHING_LEFT)

            await soon(nothing_left)
        # As left by a killed process.
        event = make_event("u", 1).encode()
        await client.xadd(KEYS.dead_letters(KEYS.partition_of("u")), event)
        await client.xadd(KEYS.update_log(KEYS.partition_of("u")), {"u": "u", "i": 0, "v": 1, "e": "", "t": 0})
        await client.hset(KEYS.epoch, "members", json.dumps(["v", "u"]))
        await client.rpush(KEYS.samples("u"), b"a sample")
        await client.hset(KEYS.fusion_sources, mapping={"token 1": "v", "token 2": "u"})
        left = NOTHING_LEFT | {"dead_letters": 1, "log_lines": 1, "pool": True, "samples": 1, "fusion": True}
        assert (await http.get("/admin/users/u")).json()["traces"] == left
        again = (await http.delete("/admin/users/u")).json()
        assert again["removed"] == {"samples": 1, "decisions": 0, "dead_letters": 1, "log_lines": 2}
        assert (await http.get("/admin/users/u")).json()["traces"] == NOTHING_LEFT
        assert json.loads(await client.hget(KEYS.epoch, "members")) == ["v"]
        assert await client.hgetall(KEYS.fusion_sources) == {b"token 1": b"v"}

    @pytest.mark.parametrize("path", ["/admin/users/", "/admin/users/a%00b", "/admin/users/" + "x" * 257])
    async def test_invalid_user_ids_are_refused(self, http: httpx.AsyncClient, path: str) -> None:
        for method in ("GET", "DELETE"):
            answer = await http.request(method, path)
            assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "user_id")

    async def test_forgetting_deletes_dead_letters(self, http: httpx.AsyncClient, client: Redis) -> None:
        for user in ("u", "v"):
            await decide(http, user, f"of {user}".replace(" ", "-"))
            await http.post("/feedback", json={"decision_id": f"of-{user}", "reward": 1})
        await bury_all(client)
        forgotten = (await http.delete("/admin/users/u")).json()
        assert forgotten["removed"] == {"samples": 0, "decisions": 1, "dead_letters": 1, "log_lines": 0}
        left = (await http.get("/admin/dead-letters")).json()["letters"]
        assert [letter["event"]["user_id"] for letter in left] == ["v"]


class TestDeadLetters:
    @pytest.fixture
    async def letters(self, http: httpx.AsyncClient, client: Redis) -> list[dict[str, object]]:
        for number in range(5):
            await decide(http, f"user {number}", f"d{number}")
            await http.post("/feedback", json={"decision_id": f"d{number}", "reward": 0.5})
        await bury_all(client)
        found: list[dict[str, object]] = (await http.get("/admin/dead-letters")).json()["letters"]
        return found

    async def test_pages(self, http: httpx.AsyncClient, letters: list[dict[str, object]]) -> None:
        assert len(letters) == 5
        assert letters[0]["reason"] == "hopeless [b]markup[/b]"
        found: list[dict[str, object]] = []
        query: dict[str, str] = {"limit": "2", "order": "oldest"}
        while True:
            page = (await http.get("/admin/dead-letters", params=query)).json()
            found += page["letters"]
            if page["cursor"] is None:
                break
            query["cursor"] = page["cursor"]
        assert found == letters[::-1]
        for wrong in ({"cursor": "x"}, {"limit": "0"}, {"limit": "1000"}, {"order": "random"}):
            answer = await http.get("/admin/dead-letters", params=wrong)
            assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, next(iter(wrong)))

    async def test_replay_of_one_dead_letter(
        self, http: httpx.AsyncClient, letters: list[dict[str, object]], valkey_url: str
    ) -> None:
        chosen = letters[2]
        path = f"/admin/dead-letters/{chosen['partition']}/{chosen['letter_id']}"
        assert (await http.post(f"{path}/replay")).status_code == 200
        again = await http.post(f"{path}/replay")
        assert (again.status_code, again.json()["type"]) == (404, "/problems/not-found")
        assert (await http.delete(path)).status_code == 404
        event = chosen["event"]
        assert isinstance(event, dict)
        async with worker_running(valkey_url):
            told = await http.post("/feedback?wait=applied", json={"decision_id": event["decision_id"], "reward": 0.5})
            assert (told.json()["duplicates"], told.json()["applied"]) == (1, True)
        assert (await http.get(f"/admin/users/{event['user_id']}")).json()["version"] == 1
        assert len((await http.get("/admin/dead-letters")).json()["letters"]) == 4
        metrics = (await http.get("/metrics")).text
        for line in ('state="buried"} 5.0', 'state="replayed"} 1.0', 'state="applied"} 1.0', 'state="voided"} 0.0'):
            assert line in metrics

    async def test_replay_of_all_dead_letters(
        self, http: httpx.AsyncClient, letters: list[dict[str, object]], client: Redis, valkey_url: str
    ) -> None:
        poison = (await client.xadd(KEYS.dead_letters(0), {"dead_reason": "poison"})).decode()
        answer = await http.post("/admin/dead-letters/replay")
        assert (answer.status_code, answer.json()) == (200, {"replayed": 5, "refused": 1, "cursor": None})
        refused = await http.post(f"/admin/dead-letters/0/{poison}/replay")
        assert (refused.status_code, refused.json()["type"]) == (409, "/problems/not-replayable")
        assert (await http.delete(f"/admin/dead-letters/0/{poison}")).json() == {"discarded": True}
        assert (await http.get("/admin/dead-letters")).json() == {"letters": [], "cursor": None}
        stream = EventStream(client, KEYS, dedupe_window_s=60, backlog_limit=100)
        async with worker_running(valkey_url):

            async def drained() -> bool:
                return await stream.backlog() == 0

            await soon(drained)

    async def test_replay_in_several_calls(
        self, http: httpx.AsyncClient, letters: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("metaban.service.http.routes.dead_letters.REPLAYED_AT_ONCE", 3)
        first = (await http.post("/admin/dead-letters/replay")).json()
        assert (first["replayed"], first["refused"]) == (3, 0)
        rest = await http.post("/admin/dead-letters/replay", params={"cursor": first["cursor"]})
        assert rest.json() == {"replayed": 2, "refused": 0, "cursor": None}
        wrong = await http.post("/admin/dead-letters/replay", params={"cursor": "x"})
        assert (wrong.status_code, wrong.json()["errors"][0]["field"]) == (422, "cursor")

    @pytest.mark.parametrize("name", ["99/1-1", "0/1-1", "0/junk", f"0/{2**64}-0"])
    async def test_unknown_dead_letters(self, http: httpx.AsyncClient, name: str) -> None:
        assert (await http.post(f"/admin/dead-letters/{name}/replay")).status_code == 404
        assert (await http.delete(f"/admin/dead-letters/{name}")).status_code == 404

    async def test_replay_with_a_full_backlog(self, client: Redis, redis: Redis, valkey_url: str) -> None:
        chosen = settings(backlog_limit=1)
        app = create_app(chosen, EngineRegistry(chosen, valkey_url, Metrics()))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http,
        ):
            for decision in ("d1", "d2"):
                await decide(http, "u", decision)
                await http.post("/feedback", json={"decision_id": decision, "reward": 1})
                if decision == "d1":
                    await bury_all(client)
            answer = await http.post("/admin/dead-letters/replay")
            assert (answer.status_code, answer.json()["type"]) == (503, "/problems/overloaded")
            assert int(answer.headers["retry-after"]) > 0
            assert len((await http.get("/admin/dead-letters")).json()["letters"]) == 1


CALLS = [
    ("GET", "/admin/users/u"),
    ("DELETE", "/admin/users/u"),
    ("GET", "/admin/dead-letters"),
    ("POST", "/admin/dead-letters/replay"),
    ("POST", "/admin/dead-letters/0/1-1/replay"),
    ("DELETE", "/admin/dead-letters/0/1-1"),
]


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_requires_an_admin_key(redis: Redis, valkey_url: str, method: str, path: str) -> None:
    client_key, admin_key = FreshKey.generate(), FreshKey.generate()
    chosen = settings(client_keys={client_key.digest}, admin_keys={admin_key.digest})
    app = create_app(chosen, EngineRegistry(chosen, valkey_url, Metrics()))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http,
    ):
        statuses = [
            (await http.request(method, path, headers=headers)).status_code
            for headers in ({}, {"X-API-Key": client_key.key}, {"X-API-Key": admin_key.key})
        ]
    assert statuses[:2] == [401, 403]
    assert statuses[2] in {200, 404}


async def test_hanging_store_is_refused_quickly(tmp_path: Path) -> None:
    with own_valkey() as valkey:
        chosen = settings(data_dir=tmp_path)
        app = create_app(chosen, EngineRegistry(chosen, valkey.url, Metrics()))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http,
        ):
            documented = (await http.get("/openapi.json")).json()["paths"]
            valkey.pause()
            snapshots = [("POST", "/admin/snapshots"), ("POST", "/admin/snapshots/20260301T060000Z-ab12cd/restore")]
            async with asyncio.timeout(4):  # below the time-out of the driver's sockets
                # The first requests find the outage; later ones are refused at once.
                answers = await asyncio.gather(*(http.request(*call) for call in CALLS))
                answers += [await http.request(*call) for call in [*CALLS, *snapshots]]
            assert {(answer.status_code, answer.json()["type"]) for answer in answers} == {
                (503, "/problems/unavailable")
            }
            valkey.resume()
    for path in ("/admin/users/{user_id}", "/admin/dead-letters", "/admin/dead-letters/{partition}/{letter_id}"):
        assert all("503" in call["responses"] for call in documented[path].values()), path


class TestCommands:
    @pytest.fixture(autouse=True)
    async def letters(
        self, http: httpx.AsyncClient, client: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for number in range(3):
            await decide(http, f"user {number}", f"d{number}")
            await http.post("/feedback", json={"decision_id": f"d{number}", "reward": 0.5})
        await bury_all(client)
        monkeypatch.setenv("REDIS_URL", valkey_url)
        monkeypatch.setenv("METABAN_NAMESPACE", "shop")

    async def run(self, *words: str, code: int = 0, **changes: str) -> str:
        """The output of the command, run in a thread because it has its own event loop."""
        environment = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "xterm", **changes}
        result = await asyncio.to_thread(CliRunner().invoke, command_line, ["dead-letters", *words], env=environment)
        assert result.exit_code == code, result.output
        return str(result.output)

    async def listed(self) -> list[dict[str, object]]:
        # The service in this process logs to the same output.
        said = (await self.run("list", "--json")).splitlines()
        return [json.loads(line) for line in said if line.startswith("{")]

    async def test_commands_list_replay_and_discard(self, client: Redis) -> None:
        said = await self.run("list")
        # A narrow terminal breaks the line between the words.
        assert "hopeless" in said
        assert "[b]markup[/b]" in said
        assert all(f"user {number}" in said for number in range(3))
        assert "more with --cursor" in await self.run("list", "--limit", "1", "--oldest")
        first, second, _ = await self.listed()
        name = [str(first["partition"]), str(first["letter_id"])]
        assert "replayed as" in await self.run("replay", *name)
        assert "no such letter" in await self.run("replay", *name, code=1)
        assert "no such letter" in await self.run("discard", *name, code=1)
        assert "discarded" in await self.run("discard", str(second["partition"]), str(second["letter_id"]))
        assert "replayed 1, refused 0" in await self.run("replay", "--all")
        assert "no dead letters" in await self.run("list")
        assert await EventStream(client, KEYS, dedupe_window_s=60, backlog_limit=9).backlog() == 2

    @pytest.mark.parametrize("terminal", ["1", ""])
    async def test_ids_are_not_truncated_on_a_narrow_terminal(
        self, monkeypatch: pytest.MonkeyPatch, terminal: str
    ) -> None:
        monkeypatch.setenv("FORCE_COLOR", terminal)
        said = await self.run("list", COLUMNS="40")
        assert "…" not in said
        assert all(str(letter["letter_id"]) in said for letter in await self.listed())

    async def test_wrong_arguments_are_refused(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        assert "cursor" in await self.run("list", "--cursor", "x", code=2)
        assert "--all" in await self.run("replay", code=2)
        assert "--all" in await self.run("replay", "0", code=2)
        assert "--all" in await self.run("replay", "0", "1-1", "--all", code=2)
        monkeypatch.setenv("METABAN_NAMESPACE", "another")
        assert "there is no namespace another" in await self.run("list", code=1)
        monkeypatch.setenv("METABAN_EPSILON", "7")
        assert "METABAN_EPSILON" in await self.run("list", code=2)
        monkeypatch.delenv("METABAN_EPSILON")
        monkeypatch.setenv("METABAN_DATA_DIR", str(tmp_path))
        monkeypatch.delenv("REDIS_URL")  # it uses the empty store of the data directory
        assert "there is no namespace another" in await self.run("list", code=1)
        monkeypatch.setenv("REDIS_URL", "unix:///nowhere/at-all.sock")
        assert "does not answer" in await self.run("list", code=1)
