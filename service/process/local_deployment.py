"""Runs `metaban serve` with its worker and Valkey as processes, for the demo, benchmarks and tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, final

import httpx

#: Longest time from the start of the service to readiness.
START_TIMEOUT_S = 60.0

STOP_TIMEOUT_S = 30.0

POLL_S = 0.05


@final
class Deployment:
    """`metaban serve` on a free port with its state in `data_dir`; can be stopped, killed and started again."""

    def __init__(self, data_dir: Path, environment: Mapping[str, str] | None = None, *options: str) -> None:
        self.data_dir = data_dir
        self._environment = dict(environment or {})
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._log = data_dir / "serve.log"
        self.url = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The `metaban serve` process, parent of all others."""
        if self._process is None:
            raise RuntimeError("the service is not running")
        return self._process

    @property
    def worker_pid(self) -> int:
        """The worker's process id, from the start-up message."""
        return int(self._announced(r"worker\s+process (\d+)"))

    def start(self) -> None:
        """Start and wait until the service is ready. Raises RuntimeError with the log if it does not get ready."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("METABAN_", "REDIS_URL"))}
        environment = {
            **kept,
            "METABAN_DATA_DIR": str(self.data_dir),
            "METABAN_LOG_FORMAT": "json",
            "METABAN_DRAIN_S": "0",
            # A first reward waits for the worker to start, which takes long on a busy machine.
            "METABAN_WAIT_APPLIED_TIMEOUT_S": "50",
            **self._environment,
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "metaban.service.cli.main", "serve", "--port", "0", *self._options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"the service did not start:\n{self.log()}")
            time.sleep(POLL_S)

    def stop(self) -> int:
        """Send SIGTERM and wait; returns the exit status."""
        if self._process is None:
            return 0
        process, self._process = self._process, None
        process.send_signal(signal.SIGTERM)
        return process.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """Kill the parent process; its children exit by themselves."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait(STOP_TIMEOUT_S)

    def log(self) -> str:
        """The output of the service since its start."""
        return self._log.read_text(errors="replace")

    def _announced(self, pattern: str) -> str:
        found = re.search(pattern, self.log())
        if found is None:
            raise RuntimeError(f"the service's output has no match for {pattern}")
        return found.group(1)

    def _ready(self) -> bool:
        try:
            self.url = self._announced(r"service\s+(http://\S+)")
            return httpx.get(f"{self.url}/health/ready").status_code == httpx.codes.OK
        except (RuntimeError, httpx.TransportError):
            return False
