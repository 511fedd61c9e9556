"""One address opens more sockets than the service has descriptors; every other client is answered."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="uses 127.0.0.2 as a second address"),
]

WAIT_S = 30.0
#: Descriptors of the service, half of them for connections; and more sockets than that.
DESCRIPTORS = 256
SOCKETS = 300
#: Failed probes in a row after which an orchestrator acts, such as `failureThreshold` of Kubernetes.
PROBE_FAILURES = 3
ASK = {"user_id": "u", "arms": [{"id": "a", "features": [1.0]}, {"id": "b", "features": [2.0]}]}
#: The limit is set in the process itself, which cannot raise it again.
SERVE = (
    f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS})); "
    "import sys; from metaban.service.cli.main import main; "
    "sys.argv = ['metaban', 'serve', '--no-worker', '--port', '0']; sys.exit(main())"
)


@contextmanager
def service(folder: Path, redis_url: str) -> Iterator[str]:
    """The URL of a service with few descriptors."""
    environment = {**os.environ, "REDIS_URL": redis_url, "METABAN_DATA_DIR": str(folder), "METABAN_DRAIN_S": "0"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", SERVE], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output = process.stdout
    assert output is not None
    try:
        said = ""
        while (found := re.search(r"service\s+(http://\S+)", said)) is None:
            line = output.readline().decode()
            assert line, said
            said += line
        yield found.group(1)
    finally:
        process.send_signal(signal.SIGTERM)
        output.read()
        assert process.wait(WAIT_S) == 0


class IdleSockets:
    """Keeps sockets open that send nothing, and replaces those that the service closes."""

    def __init__(self, url: str) -> None:
        self._address = (urlsplit(url).hostname, urlsplit(url).port)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.opened = 0
        #: Set when more sockets were opened than the service can have at once.
        self.full = threading.Event()

    def __enter__(self) -> IdleSockets:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        held: list[socket.socket] = []
        while not self._ended.is_set():
            held.append(socket.create_connection(self._address, timeout=WAIT_S))
            self.opened += 1
            if len(held) > SOCKETS:
                self.full.set()
                held.pop(0).close()
        for each in held:
            each.close()


def probed(neighbour: httpx.Client) -> httpx.Response:
    """The answer to a probe from the address of the attack, on a new connection, as an orchestrator asks.

    On a busy machine so many sockets may be opened between its connection and its request that it is the one that has
    waited longest. Then it is closed, and repeated.
    """
    for _ in range(PROBE_FAILURES):
        with suppress(httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            return neighbour.get("/health/live", headers={"Connection": "close"})
    raise AssertionError(f"{PROBE_FAILURES} probes in a row failed: an orchestrator would restart the service")


def test_idle_sockets_do_not_keep_other_clients_out(redis: object, valkey_url: str, tmp_path: Path) -> None:
    with service(tmp_path, valkey_url) as url, httpx.Client(base_url=url, timeout=WAIT_S) as neighbour:
        elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(base_url=url, timeout=WAIT_S, transport=elsewhere) as client, IdleSockets(url) as idle:
            assert idle.full.wait(WAIT_S)
            before = idle.opened
            for _ in range(50):
                assert client.get("/health/live").status_code == 200
                assert client.get("/health/ready").status_code == 200
                assert client.post("/recommend", json=ASK).status_code == 200
                assert probed(neighbour).status_code == 200
            assert idle.opened > before


def test_a_slow_client_of_another_address_keeps_its_connection(redis: object, valkey_url: str, tmp_path: Path) -> None:
    with service(tmp_path, valkey_url) as url, IdleSockets(url) as idle:
        assert idle.full.wait(WAIT_S)
        slow = HTTPConnection(urlsplit(url).netloc, timeout=WAIT_S, source_address=("127.0.0.2", 0))
        for _ in range(3):
            slow.connect()
            before, end = idle.opened, time.monotonic() + WAIT_S
            while idle.opened <= before + SOCKETS:
                assert time.monotonic() < end, "the attack has stopped"
                time.sleep(0.001)
            slow.request("GET", "/health/live")
            answer = slow.getresponse()
            assert (answer.status, bool(answer.read())) == (200, True)
            slow.close()


def test_a_connection_outlives_the_pause_of_a_quiet_client(redis: object, valkey_url: str, tmp_path: Path) -> None:
    """httpx, for one, uses a connection again after up to 5 s; a service that closes it then loses the request."""
    with service(tmp_path, valkey_url) as url:
        connection = HTTPConnection(urlsplit(url).netloc, timeout=WAIT_S)
        for pause_s in (0.0, 6.0):
            time.sleep(pause_s)
            connection.request("GET", "/health/live")
            answer = connection.getresponse()
            assert answer.status == 200
            assert answer.read()
            assert not answer.will_close
        connection.close()
