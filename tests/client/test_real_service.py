"""The client with a real service, also over a faulty network: every call takes effect once."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from metaban.client import (
    AsyncMetaban,
    Conflict,
    ConnectionFailed,
    Forbidden,
    InvalidInput,
    Job,
    JobFailed,
    Metaban,
    NotFound,
    Reward,
    Unauthorized,
)
from metaban.service.http.auth import FreshKey
from metaban.service.process.local_deployment import Deployment
from tests.chaos.proxy import Proxy
from tests.valkeys import eventually

CLIENT, ADMIN = FreshKey.generate(), FreshKey.generate()
ARMS = {"espresso": [1.0, 0.0], "sencha": [0.0, 1.0], "croissant": [1.0, 1.0]}
ROOT = Path(__file__).resolve().parents[2]
#: Requests over a network that loses one answer in three.
QUESTIONS = 16


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    keys = {"METABAN_CLIENT_KEYS": CLIENT.digest, "METABAN_ADMIN_KEYS": ADMIN.digest}
    with Deployment(tmp_path_factory.mktemp("service"), keys) as deployment:
        yield deployment


@pytest.fixture
def metaban(service: Deployment) -> Iterator[Metaban]:
    with Metaban(service.url, ADMIN.key, timeout_s=60, deadline_s=120) as client:
        yield client


def test_recommend_and_feedback(metaban: Metaban) -> None:
    decision = metaban.recommend("ada", ARMS, k=2)
    assert decision.logged
    assert decision.cold_start == "meta"
    assert [item.rank for item in decision.items] == [1, 2]
    assert {item.arm_id for item in decision.items} < set(ARMS)
    told = metaban.feedback(decision.decision_id, 1.0, arm_id=decision.arm_id, event_id="once", wait_applied=True)
    assert (told.accepted, told.duplicates, told.rejected, told.applied) == (1, 0, (), True)
    assert metaban.feedback(decision.decision_id, 1.0, arm_id=decision.arm_id, event_id="once").duplicates == 1
    assert metaban.recommend("ada", ARMS).cold_start is None
    assert metaban.admin.user("ada").version == 1


def test_repeated_decision_id_returns_the_same_decision(metaban: Metaban) -> None:
    first = metaban.recommend("ada", ARMS, decision_id="order-1")
    assert metaban.recommend("ada", ARMS, decision_id="order-1").items == first.items
    with pytest.raises(Conflict) as caught:
        metaban.recommend("bob", ARMS, decision_id="order-1")
    assert caught.value.slug == "decision-conflict"
    assert [error.field for error in caught.value.errors] == ["decision_id"]


def test_batch_of_rewards(metaban: Metaban) -> None:
    decisions = [metaban.recommend(f"many-{number}", ARMS) for number in range(5)]
    rewards = [Reward(decision.decision_id, 0.5) for decision in decisions]
    told = metaban.feedback_batch([*rewards, Reward("never-made", 1)], wait_applied=True)
    assert (told.accepted, told.applied) == (5, True)
    assert [(rejection.index, rejection.code) for rejection in told.rejected] == [(5, "unknown-decision")]
    assert metaban.feedback_batch(rewards).duplicates == 5


def test_refusals_raise_errors(metaban: Metaban, service: Deployment) -> None:
    with pytest.raises(InvalidInput) as caught:
        metaban.recommend("ada", ARMS, k=4)
    assert caught.value.errors[0].field == "k"
    with pytest.raises(NotFound) as missing:
        metaban.feedback("never-made", 1)
    assert missing.value.slug == "unknown-decision"
    with Metaban(service.url) as stranger, pytest.raises(Unauthorized):
        stranger.recommend("ada", ARMS)
    with Metaban(service.url, CLIENT.key) as client:
        client.recommend("ada", ARMS)
        with pytest.raises(Forbidden):
            client.admin.user("ada")


@pytest.mark.parametrize("user_id", ["a/b?c#d", "..", ".", "%2F", "Zoë 🙂", " "])
def test_user_ids_with_any_characters(metaban: Metaban, user_id: str) -> None:
    decision = metaban.recommend(user_id, ARMS)
    metaban.feedback(decision.decision_id, 1, wait_applied=True)
    user = metaban.admin.user(user_id)
    assert (user.user_id, user.version, user.forgotten) == (user_id, 1, False)
    assert (user.samples, user.events, user.traces) == (1, (), None)
    assert [event.arm_id for event in metaban.admin.user(user_id, events=5).events] == [decision.arm_id]
    forgotten = metaban.admin.forget(user_id)
    assert (forgotten.incarnation, forgotten.removed.samples) == (1, 1)
    assert metaban.admin.user(user_id).forgotten


def test_health(metaban: Metaban) -> None:
    assert metaban.health.live().version
    ready = metaban.health.ready()
    assert ready.status == "ready"
    assert ready.ok
    assert all(check.ok for check in ready.checks.values())


def test_snapshots_and_jobs(metaban: Metaban) -> None:
    decision = metaban.recommend("kept", ARMS)
    metaban.feedback(decision.decision_id, 1, wait_applied=True)
    seen: list[Job] = []

    def taken() -> bool:
        """Fails until the worker has published its first epoch."""
        with suppress(JobFailed):
            metaban.admin.wait_for_job(metaban.admin.snapshots.create("before").id, on_progress=seen.append)
        return seen[-1].state == "done"

    eventually(taken, "a snapshot is taken")
    job = metaban.admin.jobs.get(seen[-1].id)
    assert (job.kind, job.state, seen[-1]) == ("snapshot-create", "done", job)
    assert job.result is not None
    [snapshot] = [each for each in metaban.admin.snapshots.list(verify=True) if each.id == job.result["snapshot"]]
    assert (snapshot.name, snapshot.intact) == ("before", True)
    metaban.admin.wait_for_job(metaban.admin.snapshots.restore(snapshot.id).id)
    assert metaban.admin.user("kept").version == 1
    with pytest.raises(NotFound):
        metaban.admin.snapshots.restore("20200101T000000Z-ab12cd")
    with pytest.raises(NotFound):
        metaban.admin.wait_for_job("none")


def test_dead_letters(metaban: Metaban) -> None:
    page = metaban.admin.dead_letters.list(limit=2, order="oldest")
    assert (page.items, page.cursor) == ((), None)
    assert list(metaban.admin.dead_letters.iterate()) == []
    assert metaban.admin.dead_letters.replay_all().replayed == 0
    for call in (metaban.admin.dead_letters.replay, metaban.admin.dead_letters.discard):
        with pytest.raises(NotFound):
            call(0, "1767225600000-0")


def test_namespaces_settings_and_audit(metaban: Metaban, service: Deployment) -> None:
    made = metaban.admin.namespaces.create("shop", arm_features=3, seed=4)
    assert (made.name, made.dimension) == ("shop", 4)
    assert metaban.admin.namespaces.get("shop") == made
    assert {"default", "shop"} <= {each.name for each in metaban.admin.namespaces.list()}
    with pytest.raises(Conflict) as caught:
        metaban.admin.namespaces.create("shop")
    assert caught.value.slug == "namespace-exists"
    with Metaban(service.url, ADMIN.key, "shop") as shop:
        assert shop.recommend("ada", {"a": [1, 2, 3], "b": [3, 2, 1]}).cold_start == "meta"
        with pytest.raises(InvalidInput):
            shop.recommend("ada", ARMS)
        before = shop.admin.config.get()
        after = shop.admin.config.patch({"epsilon": 0.5}, revision=before.revision)
        assert (after.namespace, after.settings["epsilon"], after.overridden) == ("shop", 0.5, ("epsilon",))
        with pytest.raises(Conflict):
            shop.admin.config.patch({"epsilon": 0.1}, revision=before.revision)
        assert shop.admin.config.patch({"epsilon": None}).settings == before.settings
        lines = list(shop.admin.iterate_audit(limit=1))
        assert [line.action for line in lines[:2]] == ["PATCH /admin/config"] * 2
        assert shop.admin.audit(limit=1).items == (lines[0],)
    assert metaban.admin.config.get().settings["epsilon"] == 0.02
    assert metaban.admin.namespaces.delete("shop") is None
    with pytest.raises(NotFound):
        metaban.admin.namespaces.delete("shop")


def test_catalogue(metaban: Metaban, service: Deployment, tmp_path: Path) -> None:
    metaban.admin.namespaces.create("cafe", arm_features=2)
    with Metaban(service.url, ADMIN.key, "cafe") as cafe:
        arms = cafe.admin.arms
        assert (arms.create("tea/1", [0.0, 1.0]).version, arms.get("tea/1").features) == (1, (0.0, 1.0))
        with pytest.raises(Conflict) as caught:
            arms.create("tea/1", [0.0, 1.0])
        assert caught.value.slug == "arm-exists"
        assert arms.put("tea/1", [0.5, 1.0], version=1).version == 2
        with pytest.raises(Conflict):
            arms.put("tea/1", [0.5, 1.0], version=1)
        job = arms.import_lines((f"arm-{number}", [1.0, float(number)]) for number in range(30))
        assert cafe.admin.wait_for_job(job.id).kind == "arms-import"
        assert len(list(arms.iterate(limit=7))) == 31
        page = arms.list(limit=7)
        assert (len(page.items), page.count) == (7, 31)
        exported = tmp_path / "arms.ndjson"
        exported.write_text(
            "".join(f'{{"id": "{arm.id}", "features": {list(arm.features)}}}\n' for arm in arms.export())
        )
        arms.delete("tea/1")
        with pytest.raises(NotFound):
            arms.delete("tea/1")
        cafe.admin.wait_for_job(arms.import_lines(exported, mode="replace").id)
        assert arms.get("tea/1").version > 2
        chosen = cafe.recommend("ada", arm_ids=["tea/1", "arm-1"], exclude=["arm-1"])
        assert chosen.arm_id == "tea/1"
        assert len(cafe.recommend("ada", k=20).items) == 20
        with pytest.raises(JobFailed, match="line 1"):
            cafe.admin.wait_for_job(arms.import_lines({"": [1.0]}).id)
    metaban.admin.namespaces.delete("cafe")


def test_deferred_decisions(metaban: Metaban) -> None:
    decision = metaban.recommend("later", ARMS, deferred=True)
    with pytest.raises(Conflict) as caught:
        metaban.feedback(decision.decision_id, 1)
    assert caught.value.slug == "not-activated"
    first = metaban.activate(decision.decision_id)
    assert metaban.activate(decision.decision_id) == first
    assert metaban.feedback(decision.decision_id, 1).accepted == 1


async def test_asyncio_client(service: Deployment) -> None:
    async with AsyncMetaban(service.url, ADMIN.key, timeout_s=60, deadline_s=120) as metaban:
        decisions = await asyncio.gather(*(metaban.recommend(f"task-{number}", ARMS) for number in range(20)))
        told = await metaban.feedback_batch([Reward(made.decision_id, 1) for made in decisions], wait_applied=True)
        assert (told.accepted, told.applied) == (20, True)
        assert (await metaban.admin.user("task-7")).version == 1
        assert [letter async for letter in metaban.admin.dead_letters.iterate()] == []
        assert (await metaban.health.ready()).ok
        with pytest.raises(InvalidInput):
            await metaban.recommend("task-7", ARMS, k=4)


def port_of(service: Deployment) -> tuple[str, int]:
    url = httpx.URL(service.url)
    assert url.port is not None
    return url.host, url.port


def test_lost_answers_count_once(service: Deployment, tmp_path: Path, metaban: Metaban) -> None:
    """The proxy closes connections after the request and before the answer."""
    with Proxy(tmp_path / "p.sock", port_of(service), random.Random(5)) as proxy:
        transport = httpx.HTTPTransport(uds=str(proxy.socket))
        proxy.faults.reply_lost = 0.35
        with Metaban(service.url, ADMIN.key, retries=30, deadline_s=120, transport=transport) as through:
            decisions = [through.recommend("lossy", ARMS) for _ in range(QUESTIONS)]
            told = [through.feedback(decision.decision_id, 1.0) for decision in decisions]
        assert proxy.cuts > QUESTIONS / 2, "the network was too kind to show anything"
    # The lost answer may be `accepted` and that of the retry `duplicate`.
    assert all(result.accepted + result.duplicates == 1 for result in told)
    assert any(result.duplicates for result in told), "no answer to a reward was lost"
    assert len({decision.decision_id for decision in decisions}) == QUESTIONS
    last = metaban.recommend("lossy", ARMS)
    metaban.feedback(last.decision_id, 1.0, wait_applied=True)
    assert metaban.admin.user("lossy").version == QUESTIONS + 1


async def test_lost_answers_count_once_in_asyncio(service: Deployment, tmp_path: Path) -> None:
    with Proxy(tmp_path / "p.sock", port_of(service), random.Random(6)) as proxy:
        transport = httpx.AsyncHTTPTransport(uds=str(proxy.socket))
        proxy.faults.reply_lost = 0.42  # the order of calls varies
        async with AsyncMetaban(
            "http://service", ADMIN.key, retries=30, deadline_s=120, transport=transport
        ) as through:
            decisions = await asyncio.gather(*(through.recommend("lossy-task", ARMS) for _ in range(QUESTIONS)))
            rewards = [Reward(decision.decision_id, 1.0) for decision in decisions]
            await asyncio.gather(*(through.feedback_batch([reward]) for reward in rewards))
        assert proxy.cuts > QUESTIONS / 2
    async with AsyncMetaban(service.url, ADMIN.key, timeout_s=60, deadline_s=120) as metaban:
        last = await metaban.recommend("lossy-task", ARMS)
        await metaban.feedback(last.decision_id, 1.0, wait_applied=True)
        assert (await metaban.admin.user("lossy-task")).version == QUESTIONS + 1


def test_unrepeatable_calls_are_sent_once(service: Deployment, tmp_path: Path, metaban: Metaban) -> None:
    before = len(metaban.admin.snapshots.list())
    with Proxy(tmp_path / "p.sock", port_of(service), random.Random(7)) as proxy:
        proxy.faults.reply_lost = 1.0
        transport = httpx.HTTPTransport(uds=str(proxy.socket))
        with Metaban(service.url, ADMIN.key, transport=transport) as through:
            with pytest.raises(ConnectionFailed) as caught:
                through.admin.snapshots.create("perhaps")
            assert caught.value.sent
        assert proxy.cuts == 1
    eventually(lambda: len(metaban.admin.snapshots.list()) > before, "the snapshot is taken")
    assert [snapshot.name for snapshot in metaban.admin.snapshots.list()].count("perhaps") == 1


def examples(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_examples_of_the_readmes_run(tmp_path: Path) -> None:
    example, shop = examples("README.md")
    blocking, waiting = examples("client/README.md")
    made: dict[str, Any] = {}
    with Deployment(tmp_path) as service, Metaban(service.url) as metaban:
        run_example(example, service, made)
        assert made["decision"].arm_id in made["menu"]
        run_example(shop, service, made)
        assert {item.arm_id for item in made["slate"].items} < set(made["menu"])
        run_example(blocking, service, made)
        assert made["decision"].arm_id in {"espresso", "sencha"}
        run_example(waiting, service, made)
        eventually(lambda: _learned(metaban, "ada") == 3, "the rewards of the examples are applied")


def run_example(example: str, service: Deployment, made: dict[str, Any]) -> None:
    """Run an example unchanged except for the port."""
    assert 'etaban("http://127.0.0.1:8000")' in example
    exec(compile(example.replace("http://127.0.0.1:8000", service.url), "README.md", "exec"), made)  # noqa: S102


def _learned(metaban: Metaban, user_id: str) -> int:
    try:
        return metaban.admin.user(user_id).version
    except NotFound:
        return 0
