"""What a real engine tells Prometheus."""

from __future__ import annotations

from typing import Any

import httpx

from service.app import create_app
from service.metrics import Metrics
from service.recommenders import Recommenders
from service.settings import Settings
from store.keys import NamespaceKeys

ASK = {"user_id": "u", "arms": [{"id": "a", "features": [1, 2]}]}
KEYS = NamespaceKeys("shop", 2)


def values(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_decisions_rewards_and_what_waits(redis: Any, client: Any, valkey_url: str) -> None:
    settings, metrics = Settings(partitions=2, namespace="shop", backlog_limit=10), Metrics()
    app = create_app(settings, Recommenders(settings, valkey_url, metrics), metrics)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edge") as http,
    ):
        before = values((await http.get("/metrics")).text)
        assert before['metaban_backlog_events{namespace="shop"}'] == 0
        assert before['metaban_oldest_event_age_seconds{namespace="shop"}'] == 0
        for number in range(3):
            assert (await http.post("/recommend", json={**ASK, "decision_id": f"d{number}"})).status_code == 200
        for number, reward in ((0, 0.25), (1, 0.5), (1, 0.5)):
            answer = await http.post("/feedback", json={"decision_id": f"d{number}", "reward": reward})
            assert answer.status_code == 202
        # An event that has waited since 1970, and one that was given up on.
        await client.xadd(KEYS.dead_letters(1), {"dead_reason": "poison"})
        other = 1 - KEYS.partition_of("u")
        await client.xadd(KEYS.events(other), {"poison": "1"}, id="1000-1")
        found = values((await http.get("/metrics")).text)
    for name, value in {
        'metaban_backlog_events{namespace="shop"}': 3,
        'metaban_backlog_fill_ratio{namespace="shop"}': 0.2,
        'metaban_dead_letters{namespace="shop"}': 1,
        'metaban_events{namespace="shop",state="enqueued"}': 2,
        'metaban_reward_sum{namespace="shop"}': 0.75,
        'metaban_reward_count{namespace="shop"}': 2,
        'metaban_rewards_total{namespace="shop",outcome="duplicate"}': 1,
        'metaban_batch_requests_sum{namespace="shop"}': 3,
        'metaban_stage_seconds_count{namespace="shop",stage="intake"}': 3,
        'metaban_stage_seconds_count{namespace="shop",stage="load"}': 3,
        'metaban_stage_seconds_count{namespace="shop",stage="score"}': 3,
        'metaban_stage_seconds_count{namespace="shop",stage="record"}': 3,
        'metaban_store_up{namespace="shop"}': 1,
        "metaban_ready": 1,
    }.items():
        assert found[name] == value, name
    assert found['metaban_oldest_event_age_seconds{namespace="shop"}'] > 1e9
    assert found["process_resident_memory_bytes"] > 0
