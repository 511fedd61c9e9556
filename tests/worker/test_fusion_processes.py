"""Whole workers that end while fusion is trained: their child ends with them, and another worker begins anew."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from store.fusion import FusionJob
from tests.worker.conftest import OpenWorkshop
from tests.worker.fusing import FEW, fusion_store, open_fusing
from tests.worker.workshop import Workshop

pytestmark = pytest.mark.timeout(300)
#: A training takes its time where others are at work too.
LONG_S = 200.0


def start(shop: Workshop, url: str, *, rounds: int | None) -> subprocess.Popen[bytes]:
    """A worker; with few rounds, one that is soon done."""
    settings = (
        f"WorkerSettings(samples_kept={shop.samples_kept}, dedupe_window_s=60, backlog_limit=1_000, candidate_pool=100,"
        f" device='cpu', fusion_min_sources={FEW}, fusion_rounds={rounds})"
    )
    script = (
        "import sys; from worker.namespace_work import WorkerSettings; from worker.runtime import run_worker;"
        f"run_worker(sys.argv[1], {settings})"
    )
    return subprocess.Popen([sys.executable, "-P", "-c", script, url], stdout=subprocess.DEVNULL)


def children(pid: int) -> list[int]:
    """Processes that a process has started to train."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"worker.fusion_process" in (stat.parent / "cmdline").read_bytes():
                found.append(int(stat.parent.name))
        except (OSError, ValueError):
            continue  # it has just ended
    return found


def ended(pid: int) -> bool:
    """Whether a process is over; whoever inherited it may not have noticed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def trains(shop: Workshop, worker: subprocess.Popen[bytes]) -> int:
    """The process that a worker has train, once it is at work on it."""
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        job = await fusion_store(shop).job()
        found = children(worker.pid)
        if job.doing == "training" and found and job.progress > 0.1:
            return found[0]
        assert job.state in ("idle", "queued", "running"), job
        await asyncio.sleep(0.02)
    raise AssertionError("no training began")


async def settled(shop: Workshop) -> FusionJob:
    end = time.monotonic() + LONG_S
    while (job := await fusion_store(shop).job()).state in ("queued", "running"):
        assert time.monotonic() < end, job
        await asyncio.sleep(0.1)
    return job


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_another_worker_begins_anew(open_workshop: OpenWorkshop, valkey_url: str, how: signal.Signals) -> None:
    shop = await open_fusing(open_workshop)
    await fusion_store(shop).request(5)
    first, second = start(shop, valkey_url, rounds=None), None
    try:
        child = await trains(shop, first)
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, child) == min(own + 10, 19), "below all others"
        first.send_signal(how)
        assert await asyncio.to_thread(first.wait, 30) == (0 if how == signal.SIGTERM else -how)
        end = time.monotonic() + 30
        while not ended(child):
            assert time.monotonic() < end, "the training goes on without its worker"
            await asyncio.sleep(0.02)
        left = await fusion_store(shop).job()
        assert left.state == ("queued" if how == signal.SIGTERM else "running")
        assert await fusion_store(shop).current() is None
        second = start(shop, valkey_url, rounds=1)
        job = await settled(shop)
        assert (job.state, job.requested_ms, job.reason) == ("done", 5, "")
        current = await fusion_store(shop).current()
        assert current is not None
        assert (current.version, len(current.sources)) == (1, FEW)
        second.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(second.wait, 30) == 0
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            process.wait()
