"""Commands shown by `--help` can be pasted from a terminal of 80 columns."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

from metaban.service.cli.main import app

README = Path(__file__).parents[3] / "README.md"
#: Typer leaves one of the 80 columns free on either side.
ROOM = 78


def help_of(*words: str) -> str:
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    return result.output


def curls_in(text: str) -> list[list[str]]:
    """The words of every curl command, split as by a shell."""
    return [shlex.split(call) for call in re.findall(r"^ *curl .*?-d '.*?'", text, re.MULTILINE | re.DOTALL)]


def body_of(call: list[str]) -> object:
    return json.loads(call[call.index("-d") + 1])


def epilogs(command: object, name: str) -> Iterator[tuple[str, str]]:
    if epilog := getattr(command, "epilog", None):
        yield name, epilog
    for word, inner in getattr(command, "commands", {}).items():
        yield from epilogs(inner, f"{name} {word}")


def test_calls_in_the_help_of_serve_equal_the_readme() -> None:
    shown, written = curls_in(help_of("serve")), curls_in(README.read_text())
    assert [call[call.index("-s") + 1] for call in shown] == ["localhost:8000/recommend", "localhost:8000/feedback"]
    assert [body_of(call) for call in shown] == [body_of(call) for call in written[:2]]


@pytest.mark.parametrize(("name", "epilog"), list(epilogs(typer.main.get_command(app), "metaban")))
def test_no_line_of_an_epilog_is_wrapped(name: str, epilog: str) -> None:
    lines = [Text.from_markup(line).plain for line in epilog.splitlines()]
    assert [line for line in lines if len(line) > ROOM or line.endswith("\\")] == []
    shown = [line.rstrip() for line in help_of(*name.split()[1:]).splitlines()]
    assert [line for line in lines if line and f" {line}".rstrip() not in shown] == []
