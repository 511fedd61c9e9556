"""Whole workers that end in the midst of a transfer job: another one begins anew."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time

import pytest

from store.transfer import TransferJob
from tests.worker.conftest import OpenWorkshop
from tests.worker.transferring import TARGET, ask, look, open_transferring
from tests.worker.workshop import Workshop

pytestmark = pytest.mark.timeout(240)
#: Processes take their time where others are at work too.
LONG_S = 120.0


async def settled(shop: Workshop, job: TransferJob) -> TransferJob:
    end = time.monotonic() + LONG_S
    while not (found := (await look(shop, job))[0]).ended:
        assert time.monotonic() < end, found
        await asyncio.sleep(0.1)
    return found


async def test_another_worker_begins_anew(open_workshop: OpenWorkshop, valkey_url: str) -> None:
    shop = await open_transferring(open_workshop)
    job = await ask(shop)
    # As kill -9 would, when it is told that the work has begun.
    first = shop.start_process(valkey_url, METABAN_FAILPOINTS="transfer-begun=1")
    second: subprocess.Popen[bytes] | None = None
    try:
        assert await asyncio.to_thread(first.wait, LONG_S) == -signal.SIGKILL
        left, _ = await look(shop, job)
        assert (left.state, left.begun) == ("running", 1)
        second = shop.start_process(valkey_url)
        found = await settled(shop, job)
        assert (found.state, found.begun, found.requested_ms) == ("done", 2, job.requested_ms)
        assert (await look(shop, job))[1]["target"]["user_id"] == TARGET
        second.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(second.wait, LONG_S) == 0
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            process.wait()
