"""The extra `bench`: commands that need its packages say in one line how to install them."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner, Result

from metaban.bench.cli import EXTRA_MODULES
from metaban.service.cli.main import app


def metaban(*words: str) -> Result:
    return CliRunner().invoke(app, words, env={"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"})


@pytest.mark.parametrize("missing", EXTRA_MODULES)
def test_bench_without_the_extra_prints_how_to_install_it(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    result = metaban("bench", "regret", "--quick")
    assert result.exit_code == 2
    assert (
        result.output
        == "metaban bench needs packages that are not installed: pip install '.[bench]' in a clone of metaban\n"
    )


def test_bench_is_listed_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in EXTRA_MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    result = metaban("--help")
    assert result.exit_code == 0
    assert "Measure what the documentation claims" in result.output


def test_demo_plot_without_the_extra_is_refused_before_the_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = metaban("demo", "--plot", "demo.png")
    assert result.exit_code == 2
    assert "pip install '.[bench]'" in result.output


def test_an_unknown_command_is_refused() -> None:
    result = metaban("benches")
    assert result.exit_code == 2
    assert "No such command 'benches'" in result.output
