"""A stop under load: every accepted request is answered and no acknowledged reward is lost."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from metaban.service.process.local_deployment import Deployment

WAIT_S = 30.0
CLIENTS = 8


class Line:
    """A raw HTTP connection that counts requests and answers exactly."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, timeout=WAIT_S)
        self._file = self._socket.makefile("rb")
        self.said_close = False
        #: Whether an answer came. Without one, the connection may not have been accepted before the listener closed.
        self.answered = False

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, object]]:
        """One request and its complete answer; ConnectionError when there is none."""
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self._socket.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        status = self._file.readline()
        if not status:
            raise ConnectionError("closed without an answer")
        headers = {}
        while line := self._file.readline().strip():
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip()
        self.answered = True
        self.said_close = headers.get(b"connection") == b"close"
        length = int(headers[b"content-length"])
        answer = self._file.read(length)
        if len(answer) < length:
            raise ConnectionError("half an answer")
        return int(status.split()[1]), json.loads(answer)

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class Load:
    """Clients that send decisions and rewards until the service refuses connections."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._address = (parts.hostname, parts.port)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._told_to_stop = threading.Event()
        self.answered = 0
        self.after_the_signal = 0
        self.rewarded: list[str] = []
        self.wrong: list[str] = []
        self.ready: list[int] = []

    def start(self) -> None:
        workers = [self._keep_alive, self._afresh]
        self._threads = [threading.Thread(target=worker) for worker in workers for _ in range(CLIENTS)]
        self._threads.append(threading.Thread(target=self._probe))
        for thread in self._threads:
            thread.start()

    def signal_sent(self) -> None:
        self._told_to_stop.set()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a client still waits"

    def _connect(self) -> Line | None:
        try:
            return Line(self._address)
        except (ConnectionRefusedError, ConnectionResetError):
            return None
        except OSError as error:
            self._complain(f"connecting: {error!r}")
            return None

    def _keep_alive(self) -> None:
        line = self._connect()
        while line is not None:
            if not self._ask(line):
                return
            if line.said_close:
                line.close()
                line = self._connect()

    def _afresh(self) -> None:
        while (line := self._connect()) is not None:
            if not self._ask(line):
                return
            line.close()

    def _probe(self) -> None:
        while (line := self._connect()) is not None:
            try:
                self.ready.append(line.ask("GET", "/health/ready")[0])
            except OSError as error:
                self._complain_of(line, f"probing: {error!r}")
                return
            line.close()
            time.sleep(0.01)

    def _ask(self, line: Line) -> bool:
        """Request a decision and send its reward; returns whether the client should go on."""
        arms = [{"id": "a", "features": [1.0, 0.0]}, {"id": "b", "features": [0.0, 1.0]}]
        late = self._told_to_stop.is_set()
        try:
            status, answer = line.ask("POST", "/recommend", {"user_id": f"u{self.answered % 50}", "arms": arms})
            decision = str(answer.get("decision_id"))
            if status != 200 or answer.get("logged") is not True:
                self._complain(f"{status} {answer}")
            rewarded = False
            if not line.said_close:
                status, answer = line.ask("POST", "/feedback", {"decision_id": decision, "reward": 1})
                rewarded = status == 202
                if not rewarded:
                    self._complain(f"{status} {answer}")
        except OSError as error:
            self._complain_of(line, f"asking: {error!r}")
            return False
        with self._lock:
            self.answered += 1
            self.after_the_signal += late
            self.rewarded += [decision] if rewarded else []
        return True

    def _complain_of(self, line: Line, what: str) -> None:
        """Report a lost connection, unless it was made while the listener closed and never accepted."""
        if line.answered or not self._told_to_stop.is_set():
            self._complain(what)

    def _complain(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("drain_s", ["1", "0"])
def test_a_stop_under_load_answers_every_accepted_request(tmp_path: Path, drain_s: str) -> None:
    service = Deployment(tmp_path, {"METABAN_DRAIN_S": drain_s, "METABAN_LOG_LEVEL": "warning"})
    with service:
        load = Load(service.url)
        load.start()
        until(lambda: load.answered > 100 or bool(load.wrong))
        load.signal_sent()
        assert service.stop() == 0, service.log()
        load.join()
    assert load.wrong == []
    if drain_s == "1":
        assert load.after_the_signal > CLIENTS, "requests are still served while draining"
        assert 503 in load.ready, "the readiness probe fails, for load balancers"
        assert load.ready == sorted(load.ready), "once it is draining it does not become ready again"
    with service, httpx.Client(base_url=service.url, timeout=WAIT_S) as client:
        events = [{"decision_id": decision, "reward": 1} for decision in load.rewarded]
        for start in range(0, len(events), 1_000):
            part = events[start : start + 1_000]
            answer = client.post("/feedback", json={"events": part}).json()
            assert (answer["duplicates"], answer["rejected"]) == (len(part), [])


def test_a_stop_is_logged_from_the_signal_to_the_end(tmp_path: Path) -> None:
    with Deployment(tmp_path) as service:
        assert httpx.get(f"{service.url}/nothing", timeout=WAIT_S).status_code == 404
        until(lambda: "worker_ready" in service.log())
        assert service.stop() == 0
        lines = [json.loads(line) for line in service.log().splitlines() if line.startswith("{")]
    events = [line["event"] for line in lines]
    stop = ["service_draining", "worker_stopping", "worker_stopped", "worker_process_stopped", "service_stopped"]
    assert [event for event in events if event in stop] == stop
    assert lines[events.index("service_draining")]["seconds"] == 0
    assert events[-1] == "service_stopped"
    assert lines[events.index("request")]["logger"] == "metaban.service.http.request_context"
