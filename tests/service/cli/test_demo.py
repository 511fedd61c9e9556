"""`metaban demo`: its world, its results and its output."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from metaban.client import Metaban
from metaban.service.cli import demo as cli_demo
from metaban.service.cli.demo_world import GROUPS, OFFERED, DemoWorld, Story, play, user_name, user_number
from metaban.service.cli.main import app
from metaban.service.process.local_deployment import Deployment

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    # On a busy machine the worker may need longer to start than a client usually waits.
    with Deployment(tmp_path_factory.mktemp("demo")) as deployment:
        yield deployment


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["demo", *words], env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})
    assert result.exit_code == code, result.output
    return result.output


def namespaces(service: Deployment) -> set[str]:
    with Metaban(service.url) as metaban:
        return {namespace.name for namespace in metaban.admin.namespaces.list()}


def test_demo_world() -> None:
    first, again, other = (DemoWorld(users=40, rounds=200, seed=seed) for seed in (3, 3, 4))
    questions = list(first.questions())
    for one, same in zip(questions, again.questions(), strict=True):
        assert (one.user, one.luck, one.items.tolist()) == (same.user, same.luck, same.items.tolist())
    assert not np.array_equal(first.items, other.items)
    newcomers = [question.user for question in questions if question.is_newcomer]
    assert newcomers == list(range(10, 40)), "a quarter is there from the start, the others come one by one"
    seen: set[int] = set()
    for question in questions:
        assert question.is_newcomer == (question.user not in seen and question.user >= 10)
        seen.add(question.user)
        assert len(set(question.items)) == OFFERED
        assert 0 < question.chances.min() < question.chances.max() < 1
    assert set(first.group_of) == set(range(len(GROUPS)))
    assert user_number(user_name(7)) == 7


@pytest.mark.slow
def test_service_beats_chance(service: Deployment) -> None:
    world, story = DemoWorld(users=16, rounds=400, seed=1), Story()
    with Metaban(service.url, namespace="default") as metaban:
        for played in play(metaban, world, story):
            assert played is story.rounds[-1]
    assert len(story.rounds) == 400
    late = story.rates(100)
    assert late.service > 1.4 * late.chance
    assert late.best > late.service
    assert len(story.fresh_ms) == 20
    assert sum(each.reward for each in story.rounds) > sum(each.random_reward for each in story.rounds)


@pytest.mark.slow
def test_command_writes_a_plot_and_deletes_its_namespace(service: Deployment, tmp_path: Path) -> None:
    before = namespaces(service)
    picture = tmp_path / "new" / "demo.png"
    said = run("--url", service.url, "--rounds", "25", "--users", "8", "--seed", "2", "--plot", str(picture))
    assert f"demo at {service.url}, in namespace demo-" in said
    assert "first decisions for new users" in said
    assert "reward until served" in said
    assert picture.read_bytes().startswith(PNG)
    assert namespaces(service) == before


@pytest.mark.slow
def test_existing_namespace_is_kept(service: Deployment) -> None:
    with Metaban(service.url) as metaban:
        metaban.admin.namespaces.create("stage")
    assert "in namespace stage" in run("--url", service.url, "--rounds", "2", "--namespace", "stage")
    assert "stage" in namespaces(service)


@pytest.mark.slow
def test_service_is_started_if_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cli_demo, "USUAL_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said = run("--rounds", "3")
    assert "starting a private service" in said
    assert "rewards earned" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--url", "http://127.0.0.1:9"], 1, "no answer from http://127.0.0.1:9"),
        (["--url", "nowhere"], 1, "base_url must be"),
        (["--plot", "demo.pdf"], 2, "--plot writes a PNG"),
        (["--rounds", "0"], 2, "--rounds"),
    ],
)
def test_invalid_arguments_are_refused(words: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metaban.client.transport.FIRST_PAUSE_S", 0.001)
    assert said in run(*words, code=code)


def test_help_describes_the_world() -> None:
    said = " ".join(run("--help").split())
    for word in ("three hidden groups", "not linear in the features", "METABAN_KEY", "--seed", "deleted at the end"):
        assert word in said
