"""Workers that end during a training: the child ends with them, and another worker starts again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from metaban.store.shared.fusion import FusionJobRecord
from tests.worker.jobs.fusion_setup import FEW, fusion_store, open_fusion_users
from tests.worker.workshop import OpenWorkshop, Workshop

pytestmark = pytest.mark.slow
#: A training takes longer when other processes use the cores.
LONG_S = 200.0


def start(shop: Workshop, url: str, *, rounds: int | None) -> subprocess.Popen[bytes]:
    """Start a worker; few rounds make the training short."""
    settings = (
        f"WorkerSettings(samples_kept={shop.samples_kept}, backlog_limit=1_000, candidate_pool=100,"
        f" device='cpu', fusion_min_sources={FEW}, fusion_rounds={rounds})"
    )
    script = (
        "import sys\nfrom metaban.worker.namespace import WorkerSettings\n"
        "from metaban.worker.process import run_worker\n"
        f"run_worker(sys.argv[1], {settings})"
    )
    return subprocess.Popen([sys.executable, "-P", "-c", script, url], stdout=subprocess.DEVNULL)


def children(pid: int) -> list[int]:
    """Training processes that a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"metaban.worker.jobs.fusion_process" in (stat.parent / "cmdline").read_bytes():
                found.append(int(stat.parent.name))
        except (OSError, ValueError):
            continue  # it has just ended
    return found


def ended(pid: int) -> bool:
    """Whether a process has ended; it may still be a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def trains(shop: Workshop, worker: subprocess.Popen[bytes]) -> int:
    """The training process of a worker, once it runs."""
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        job = await fusion_store(shop).job()
        found = children(worker.pid)
        if job.doing == "training" and found and job.progress > 0.1:
            return found[0]
        assert job.state in ("idle", "queued", "running"), job
        await asyncio.sleep(0.02)
    raise AssertionError("no training began")


async def settled(shop: Workshop) -> FusionJobRecord:
    end = time.monotonic() + LONG_S
    while (job := await fusion_store(shop).job()).state in ("queued", "running"):
        assert time.monotonic() < end, job
        await asyncio.sleep(0.1)
    return job


@pytest.mark.parametrize("how", [signal.SIGKILL])
async def test_another_worker_starts_the_training_again(
    open_workshop: OpenWorkshop, valkey_url: str, how: signal.Signals
) -> None:
    shop = await open_fusion_users(open_workshop)
    await fusion_store(shop).request(5)
    first, second = start(shop, valkey_url, rounds=None), None
    try:
        child = await trains(shop, first)
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, child) == min(own + 10, 19), "lowest priority"
        first.send_signal(how)
        assert await asyncio.to_thread(first.wait, 30) == (0 if how == signal.SIGTERM else -how)
        end = time.monotonic() + 30
        while not ended(child):
            assert time.monotonic() < end, "the training continues without its worker"
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
