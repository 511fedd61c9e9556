"""Snapshots with real processes: roll back bad rewards while requests are answered, and restore a lost store."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from metaban.bench.worlds.environments import EnvironmentRound, SyntheticGroups
from metaban.service.cli.main import app
from metaban.service.process.local_deployment import Deployment
from tests.end_to_end.steps import applied_events, epoch_served, eventually, play_over_http, scores_for_all_users


def metaban(data_dir: Path, *words: str, code: int = 0, **environment: str) -> str:
    """Output of `metaban snapshot`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("METABAN_", "REDIS_URL"))}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "metaban.service.cli.main", "snapshot", *words],
        env={**kept, "METABAN_DATA_DIR": str(data_dir), "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return (done.stdout if code == 0 else done.stderr).strip()


def error_output(data_dir: Path, *words: str, code: int = 1) -> str:
    """Error output of `metaban snapshot`, run in this process because that is faster."""
    removed = dict.fromkeys(name for name in os.environ if name.startswith(("METABAN_", "REDIS_URL")))
    environment = {**removed, "METABAN_DATA_DIR": str(data_dir), "COLUMNS": "200"}
    done = CliRunner().invoke(app, ["snapshot", *words], env=environment)
    assert done.exit_code == code, done.output
    assert isinstance(done.exception, SystemExit), "an error message, and no traceback"
    assert "Traceback" not in done.stderr
    return done.stderr.strip()


def send_inverted_rewards(client: httpx.Client, first: int, last: int) -> None:
    """Send inverted rewards for known users."""
    world = SyntheticGroups(seed=9)
    for number in range(first, last):
        asked = world.next_round()
        arms = [{"id": str(place), "features": row} for place, row in enumerate(asked.arms.tolist())]
        body = {"user_id": f"user-{number % 12}", "arms": arms, "decision_id": f"spoilt-{number}"}
        arm = int(client.post("/recommend", json=body).json()["items"][0]["arm_id"])
        told = {"decision_id": f"spoilt-{number}", "reward": 1.0 - world.reward(asked, arm)}
        assert client.post("/feedback", params={"wait": "applied"}, json=told).status_code == 202


def close(thought: list[dict[str, object]], other: list[dict[str, object]]) -> bool:
    return all(new == pytest.approx(old, rel=1e-3, abs=1e-3) for old, new in zip(thought, other, strict=True))


@pytest.mark.slow
def test_bad_rewards_are_rolled_back_under_traffic(tmp_path: Path) -> None:
    data = tmp_path / "data"
    service = Deployment(data)
    with service, httpx.Client(base_url=service.url, timeout=60) as client:
        world = SyntheticGroups(seed=3)
        play_over_http(client, world, 0, 66)
        assert epoch_served(service, 64)
        for user in range(12):  # all users of later requests are known, and fitted under this epoch
            play_over_http(client, OneUser(user), 1_000 + user, 1_001 + user)
        thought = scores_for_all_users(client, SyntheticGroups(seed=1))
        snapshot = metaban(data, "create", "--name", "good")
        assert snapshot in metaban(data, "list", "--verify")
        send_inverted_rewards(client, 0, 40)
        assert not close(thought, scores_for_all_users(client, SyntheticGroups(seed=1)))
        before = client.get("/health/ready").json()
        assert before["status"] == "ready"

        answers: list[int] = []
        done = threading.Event()

        def ask() -> None:
            with httpx.Client(base_url=service.url, timeout=60) as other:
                while not done.is_set():
                    asked = SyntheticGroups(seed=len(answers)).next_round()
                    arms = [{"id": str(place), "features": row} for place, row in enumerate(asked.arms.tolist())]
                    body = {"user_id": asked.user_id, "arms": arms}
                    answers.append(other.post("/recommend", json=body).status_code)

        asking = threading.Thread(target=ask)
        asking.start()
        assert "restored" in metaban(data, "restore", "good", "--yes")
        assert eventually(lambda: close(thought, scores_for_all_users(client, SyntheticGroups(seed=1))))
        done.set()
        asking.join()
        assert len(answers) > 10
        assert set(answers) == {200}
        assert applied_events(service) == 78
        assert client.get("/health/ready").json()["status"] == "ready"
        # Learning and epochs continue.
        play_over_http(client, world, 2_000, 2_030)
        assert applied_events(service) == 108

        # A killed restore reports it, and another restore repairs it.
        metaban(data, "restore", "good", "--yes", code=-9, METABAN_FAILPOINTS="restore-after-chunk=2")
        assert eventually(lambda: client.get("/health/ready").status_code == 503)
        told = client.get("/health/ready").json()["checks"]["restore"]["detail"]
        assert f"metaban snapshot restore {snapshot}" in told
        metaban(data, "restore", snapshot, "--yes")
        assert eventually(lambda: client.get("/health/ready").status_code == 200)
        assert eventually(lambda: close(thought, scores_for_all_users(client, SyntheticGroups(seed=1))))
        assert "cannot follow" not in service.log()
        assert "unexpected_error" not in service.log()

    # The store is lost; the exported snapshot restores everything before the service starts again.
    metaban(data, "export", "good", str(tmp_path / "kept.tar"))
    shutil.rmtree(data)
    assert metaban(data, "import", str(tmp_path / "kept.tar")) == snapshot
    assert "restored" in metaban(data, "restore", "latest", "--yes")
    with service, httpx.Client(base_url=service.url, timeout=60) as client:
        assert close(thought, scores_for_all_users(client, SyntheticGroups(seed=1)))
        play_over_http(client, world, 3_000, 3_010)
        assert applied_events(service) == 88


class OneUser:
    """A world with requests of one user."""

    def __init__(self, user: int) -> None:
        self._user = user
        self._world = SyntheticGroups(seed=77)

    def next_round(self) -> EnvironmentRound:
        return replace(self._world.next_round(), user=self._user)

    def reward(self, asked: EnvironmentRound, arm: int) -> float:
        return self._world.reward(asked, arm)


def test_impossible_commands_explain_why(tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert "there is no store" in metaban(data, "create", code=1)
    assert not data.exists()
    assert "there is no snapshot" in error_output(data, "restore", "latest")
    (tmp_path / "file").write_bytes(b"hello")
    assert "cannot be used" in error_output(data, "import", str(tmp_path / "file"))
    assert "cannot be opened" in error_output(data, "import", str(tmp_path / "nothing"))
    assert "letters" in error_output(data, "create", "--name", "../x", code=2)
    assert "latest" in error_output(data, "create", "--name", "latest", code=2)
    folder = data / "snapshots"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "20260301T060000Z-ab12cd.tar").write_bytes(bytes(4_096))
    assert "20260301T060000Z-ab12cd" in error_output(data, "list")
    assert "cannot be used" in error_output(data, "restore", "20260301T060000Z-ab12cd", "--yes")
    assert "cannot be used" in error_output(data, "export", "20260301T060000Z-ab12cd", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert "no namespace default" in error_output(data, "create")
