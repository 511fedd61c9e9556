"""The regret commands refuse unknown names, skip what is missing, and write the requested files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from metaban.bench.cli import bench_app
from metaban.bench.regret.methods import METHODS, unavailable
from metaban.bench.regret.scenarios import SCENARIOS
from metaban.bench.regret.vowpal_tuning import candidates
from metaban.bench.worlds.environments import ENVIRONMENTS


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(bench_app, arguments, env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"})


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("regret", "--env", "mars"), ENVIRONMENTS),
        (("ablation", "--env", "mars"), ENVIRONMENTS),
        (("regret", "--methods", "linucb,magic"), METHODS),
        (("regret", "--methods", ","), METHODS),
        (("scenarios", "--only", "magic"), SCENARIOS),
        (("scenarios", "--learner", "magic"), ("paper", "pooled")),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(arguments: tuple[str, ...], names: tuple[str, ...]) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert all(name in result.output for name in names)


def test_missing_data_is_skipped_in_one_line(tmp_path: Path) -> None:
    result = bench("regret", "--env", "yelp", "--data", str(tmp_path), "--methods", "linucb")
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        f"skipped yelp: yelp.npz is not in {tmp_path}; name the folder that has it with --data"
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("regret", "--env", "yelp"),
        ("ablation", "--env", "mnist"),
        ("scenarios", "--only", "nu"),
        ("fusion", "--part", "movielens"),
        ("transfer", "--part", "surrogate,selection"),
        ("bayes", "--part", "bandits"),
    ],
)
def test_a_check_of_nothing_fails(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = bench(*arguments, "--quick", "--data", str(tmp_path), "--check")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), "an error message, and no traceback"
    assert "skipped " in result.output
    assert "nothing was checked" in result.output
    assert "docs/benchmarks.md" in result.output
    result = bench(*arguments, "--quick", "--data", str(tmp_path))
    assert result.exit_code == 0
    assert "nothing was checked" not in result.output


def test_what_ran_is_checked_though_something_else_was_skipped(tmp_path: Path) -> None:
    arguments = ("--learner", "paper", "--rounds", "20", "--seeds", "7", "--jobs", "1", "--data", str(tmp_path))
    result = bench("scenarios", "--only", "delay,nu", *arguments, "--check")
    assert "skipped nu" in result.output
    assert "nothing was checked" not in result.output


def test_every_data_file_is_documented() -> None:
    root = Path(__file__).parents[2]
    read = set(re.findall(r'"([^"\s]+\.(?:npz|gz))"', (root / "bench" / "worlds" / "data.py").read_text()))
    names = {file.format(name=name) for file in read for name in ("mnist", "notmnist")}
    assert len(names) == 9
    page = (root / "docs" / "benchmarks.md").read_text()
    assert [name for name in names if f"`{name}`" not in page] == []


def test_an_environment_from_files_made_as_documented(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    entries = np.stack([random.integers(120, size=2_000), random.integers(30, size=2_000)], axis=1)
    signs = random.choice([-1, 1], size=(2_000, 1))
    features = {"user_features": random.standard_normal((120, 4)), "item_features": random.standard_normal((30, 3))}
    np.savez(tmp_path / "yelp.npz", entries=np.concatenate([entries, signs], axis=1), **features)
    arguments = ("--methods", "linucb", "--rounds", "5", "--seeds", "7", "--jobs", "1", "--data", str(tmp_path))
    result = bench("regret", "--env", "yelp", *arguments)
    assert result.exit_code == 0, result.output
    assert "linucb" in result.output
    assert "skipped" not in result.output


def test_tuning_without_a_world_fails(tmp_path: Path) -> None:
    result = bench("tune", "--envs", "yelp", "--data", str(tmp_path), "--json", str(tmp_path / "chosen.json"))
    assert result.exit_code == 1
    assert "nothing was tuned" in result.output
    assert not (tmp_path / "chosen.json").exists()


@pytest.mark.skipif(unavailable("vw") is not None, reason="needs the extra vw")
def test_a_run_prints_its_table_and_writes_what_is_asked_for(tmp_path: Path) -> None:
    result = bench(
        "regret", "--methods", "linucb,vw", "--rounds", "50", "--seeds", "7-9", "--jobs", "1",
        "--json", str(tmp_path / "regret.json"), "--plot", str(tmp_path / "regret.png"), "--check",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "regret.json").read_text())
    assert found["settings"]["seeds"] == [7, 8, 9]
    assert found["settings"]["rounds"] == 50
    assert len(found["results"]["methods"]["linucb"]["regrets"]) == 3
    assert (tmp_path / "regret.png").read_bytes().startswith(b"\x89PNG")
    assert "linucb" in result.output


def test_quick_is_small_and_says_so(tmp_path: Path) -> None:
    result = bench(
        "regret", "--methods", "linucb", "--quick", "--jobs", "1", "--seeds", "7-9", "--json", str(tmp_path / "r")
    )
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "r").read_text())
    assert found["quick"] is True
    assert found["settings"]["rounds"] == 500
    assert found["settings"]["seeds"] == [7, 8]


def test_a_bar_that_does_not_hold_fails_a_checked_run(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("scenarios", "--only", "delay", "--learner", "paper", "--rounds", "20", "--seeds", "7", "--jobs", "1")
    monkeypatch.setattr("metaban.bench.regret.scenarios.DELAY_LIMIT", 100.0)
    assert bench(*arguments, "--check").exit_code == 0
    monkeypatch.setattr("metaban.bench.regret.scenarios.DELAY_LIMIT", 0.0)
    assert bench(*arguments, "--check").exit_code == 1
    assert bench(*arguments).exit_code == 0


def test_a_quick_run_is_not_judged_by_the_limits_of_full_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ("scenarios", "--only", "delay", "--learner", "paper", "--rounds", "20", "--seeds", "7", "--jobs", "1")
    monkeypatch.setattr("metaban.bench.regret.scenarios.DELAY_LIMIT", 0.0)
    result = bench(*arguments, "--quick", "--check", "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    assert "not judged" in result.output
    assert "no claim was checked" in result.output
    [bar] = json.loads((tmp_path / "out.json").read_text())["bars"]
    assert (bar["limit"], bar["holds"]) == (0.0, None)


def test_a_run_that_raises_fails_without_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metaban.bench.regret.scenarios.NUS", (0.5,))
    monkeypatch.setitem(SCENARIOS, "nu", replace(SCENARIOS["nu"], env="synthetic"))
    result = bench("scenarios", "--only", "nu", "--learner", "paper", "--rounds", "5", "--seeds", "7", "--jobs", "1")
    assert result.exit_code == 1
    assert "failed: ν = 0.5, seed 7: ValueError: nu must be above 1" in result.output


@pytest.mark.skipif(unavailable("vw") is not None, reason="needs the extra vw")
def test_tuning_tries_baselines_and_vowpal_and_writes_the_choice(tmp_path: Path) -> None:
    arguments = ("tune", "--envs", "synthetic,yelp", "--methods", "linucb,vw", "--rounds", "20", "--jobs", "1")
    result = bench(*arguments, "--data", str(tmp_path), "--json", str(tmp_path / "chosen.json"))
    assert result.exit_code == 0, result.output
    assert "skipped yelp: " in result.output
    found = json.loads((tmp_path / "chosen.json").read_text())
    assert list(found) == ["synthetic"]
    assert {"regularization", "exploration"} <= set(found["synthetic"]["linucb"]["settings"])
    assert found["synthetic"]["vw"]["settings"]["options"] in candidates(8)
    assert found["synthetic"]["vw"]["rounds"] == found["synthetic"]["linucb"]["rounds"] == 20
