"""Workers that end during a transfer job: another one starts it again."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time

import pytest

from metaban.store.shared.transfer import TransferJobRecord
from tests.worker.jobs.transfer_setup import TARGET, job_status, open_transfer_users, request_job
from tests.worker.workshop import OpenWorkshop, Workshop

pytestmark = pytest.mark.slow
#: Processes take longer when others use the cores.
LONG_S = 120.0


async def settled(shop: Workshop, job: TransferJobRecord) -> TransferJobRecord:
    end = time.monotonic() + LONG_S
    while not (found := (await job_status(shop, job))[0]).ended:
        assert time.monotonic() < end, found
        await asyncio.sleep(0.1)
    return found


async def test_another_worker_starts_the_job_again(open_workshop: OpenWorkshop, valkey_url: str) -> None:
    shop = await open_transfer_users(open_workshop)
    job = await request_job(shop)
    # As kill -9 would, when the progress callback reports the start.
    first = shop.start_process(valkey_url, METABAN_FAILPOINTS="transfer-begun=1")
    second: subprocess.Popen[bytes] | None = None
    try:
        assert await asyncio.to_thread(first.wait, LONG_S) == -signal.SIGKILL
        left, _ = await job_status(shop, job)
        assert (left.state, left.begun) == ("running", 1)
        second = shop.start_process(valkey_url)
        found = await settled(shop, job)
        assert (found.state, found.begun, found.requested_ms) == ("done", 2, job.requested_ms)
        assert (await job_status(shop, job))[1]["target"]["user_id"] == TARGET
        second.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(second.wait, LONG_S) == 0
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            process.wait()
