"""The client alone, installed into a new environment from its own folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from metaban.service.process.local_deployment import Deployment

ROOT = Path(__file__).resolve().parents[2]

#: Runs in the new environment and prints its findings.
PROGRAM = """
import asyncio, importlib.util, json, sys
import metaban.client
from metaban.client import AsyncMetaban, Metaban, NotFound

def loop(url):
    with Metaban(url) as client:
        decision = client.recommend("ada", [{"id": "espresso", "features": [1, 0]}])
        result = client.feedback(decision.decision_id, 1.0)
        try:
            client.activate("unknown")
        except NotFound as error:
            return [decision.arm_id, result.accepted, error.slug]

async def async_loop(url):
    async with AsyncMetaban(url) as client:
        decision = await client.recommend("bob", {"espresso": [1, 0], "sencha": [0, 1]})
        result = await client.feedback(decision.decision_id, 1.0)
        try:
            await client.activate("unknown")
        except NotFound as error:
            return [decision.arm_id, result.accepted, error.slug]

url = sys.argv[1]
print(json.dumps({
    "file": metaban.client.__file__,
    "found": [name for name in sys.argv[2:] if importlib.util.find_spec(name) is not None],
    "loops": [loop(url), asyncio.run(async_loop(url))],
}))
"""
ABSENT = ["torch", "numpy", "fastapi", "pydantic", "redis", "metaban.service", "metaban.store", "metaban.models"]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the client, built from a copy because building writes into the folder."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copytree(ROOT / "client", folder / "client", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    pip(folder / "venv", "install", "--quiet", folder / "client")
    return folder / "venv"


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(environment: Path, *words: str | Path) -> str:
    """Use the pip of this environment for the other one, to save time."""
    python = environment / "bin" / "python"
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, *words)


def test_both_clients_call_a_service(environment: Path, tmp_path: Path) -> None:
    with Deployment(tmp_path / "data") as service:
        found: dict[str, Any] = json.loads(
            run(environment / "bin" / "python", "-c", PROGRAM, service.url, *ABSENT, cwd=tmp_path)
        )
    assert Path(found["file"]).is_relative_to(environment)
    assert found["found"] == []
    for arm_id, accepted, slug in found["loops"]:
        assert arm_id in {"espresso", "sencha"}
        assert (accepted, slug) == (1, "unknown-decision")


def test_distribution_has_types_and_license(environment: Path) -> None:
    files = set(pip(environment, "show", "--files", "metaban-client").split())
    assert {"metaban/client/py.typed", "metaban/client/__init__.py"} <= files
    assert any(file.endswith("/LICENSE") for file in files)
    assert not {"metaban/__init__.py", "metaban/py.typed"} & files


def test_application_may_have_packages_named_as_those_of_the_service(environment: Path, tmp_path: Path) -> None:
    """An application may have packages named like those of the service."""
    for name in ("service", "models", "store", "worker", "client"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the application was imported')\n")
    program = "import metaban.client; print(metaban.client.Metaban('http://host'))"
    said = run(environment / "bin" / "python", "-c", program, cwd=tmp_path)
    assert said.startswith("Metaban('http://host'")
