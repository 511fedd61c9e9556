"""An outage of the store is one line of the log when it begins and one when it is over, for each namespace."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from structlog.testing import capture_logs

from metaban.store.client.connection import connect
from metaban.store.errors import StoreUnavailable
from metaban.worker.learning import outages
from metaban.worker.learning.outages import StoreOutage
from metaban.worker.namespace import NamespaceWorker, WorkerSettings
from tests.own_valkey import own_valkey
from tests.worker.workshop import NAME, Workshop, soon

AWAY = StoreUnavailable("the store does not answer")
SETTINGS = WorkerSettings(samples_kept=5, backlog_limit=1_000, candidate_pool=100, device="cpu")


def test_only_changes_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    outage = StoreOutage()
    with capture_logs() as lines:
        outage.answered()
        outage.failed(AWAY)
        outage.answered()  # another server of a cluster may answer while one hangs
        outage.failed(AWAY)
        monkeypatch.setattr(outages, "OVER_AFTER_S", 0.0)
        outage.answered()
        outage.answered()
        outage.failed(AWAY)
    assert [line["event"] for line in lines] == ["store_unavailable", "store_recovered", "store_unavailable"]


async def test_all_parts_of_a_worker_report_one_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "OVER_AFTER_S", 1.0)
    with own_valkey() as server, ThreadPoolExecutor(1) as compute, capture_logs() as lines:
        redis, stopping = connect(server.url, shared=True), asyncio.Event()
        reading = connect(server.url)
        await Workshop.open(redis, compute, partitions=3)
        worker = NamespaceWorker(redis, reading, SETTINGS, compute, compute, compute, token="a worker")

        async def work() -> None:
            while not stopping.is_set():  # as the process does: it starts again what an outage has ended
                await asyncio.create_task(worker.run(NAME, stopping))
                await asyncio.sleep(0.1)

        async def logged(event: str) -> bool:
            return event in [line["event"] for line in lines]

        task = asyncio.create_task(work())
        await soon(lambda: logged("worker_ready"))
        server.kill()
        await soon(lambda: logged("store_unavailable"))
        await asyncio.sleep(2)  # every part finds out, several times
        server.start()
        await soon(lambda: logged("store_recovered"))
        stopping.set()
        await task
        await redis.aclose()
        await reading.aclose()
    told = [line["event"] for line in lines if line["event"].startswith(("store_", "default_rewards"))]
    assert told == ["store_unavailable", "store_recovered"]
