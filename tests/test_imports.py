"""Which package may import which, how long a module may be, and what no file of the repository may mention."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("models", "store", "worker", "service", "bench")
#: What each package may import of ours beside itself.
ALLOWED: dict[str, frozenset[str]] = {
    "models": frozenset(),
    "store": frozenset(),
    "worker": frozenset({"models", "store"}),
    "service": frozenset({"models", "store"}),
    "bench": frozenset(PACKAGES),
}
#: The command line starts everything, so it may import everything.
FREE_MODULES = frozenset({"service/cli.py"})
#: All that the mathematics may use from outside. Fusion has Gaussian processes, which gpytorch (on linear_operator)
#: trains in batches, and linear sum assignments, which scipy solves: neither is worth writing again.
MODELS_MAY_USE = (
    frozenset({"torch", "numpy", "threadpoolctl", "gpytorch", "linear_operator", "scipy"}) | sys.stdlib_module_names
)
MAX_LINES = 400

# Put together, or this file would mention what it forbids.
MACHINE_PATHS = re.compile("(?<![\\w.])/(?:" + "|".join(["wo" + "rk", "tm" + "p/w", "ro" + "ot"]) + ")(?![\\w-])")
REGISTRIES = re.compile(
    r"(?:^|[^\w.-])(?:[\w-]+\.)*(?:"
    + "|".join(f"{name}\\.{top}" for name, top in [("pypi", "org"), ("python" + "hosted", "org")])
    + "|"
    + "|".join(
        f"{host}\\.{name}\\.{top}"
        for host, name, top in [
            ("download", "pytorch", "org"),
            ("registry", "npm" + "js", "org"),
            ("conda", "ana" + "conda", "org"),
        ]
    )
    + ")",
    re.IGNORECASE,
)


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imported(source: str) -> Iterator[str]:
    """The absolute names a module imports, wherever in it; relative imports are not used here, and come out as '.'."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." if node.level else str(node.module)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"}:
                yield str(node.args[0].value)


def offences(path: str, source: str) -> list[str]:
    """Imports of a module that its place does not allow; `path` is relative to the repository."""
    package = path.split("/")[0]
    allowed = frozenset(PACKAGES) if path in FREE_MODULES else ALLOWED[package] | {package}
    found = []
    for name in imported(source):
        top = name.split(".")[0]
        strange = package == "models" and top not in MODELS_MAY_USE | {"models"}
        if not top or (top in PACKAGES and top not in allowed) or strange:
            found.append(f"{path} imports {name}")
    return found


def test_imports_go_one_way() -> None:
    found = [
        line for path in modules() for line in offences(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
    ]
    assert not found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("models/bank.py", "import redis"),
        ("models/bank.py", "from fastapi import FastAPI"),
        ("models/bank.py", "import sklearn.cluster"),
        ("models/bank.py", "from store.codec import Sample"),
        ("store/users.py", "from models.learner import State"),
        ("store/users.py", "def late():\n    import service.settings"),
        ("worker/meta.py", "from service.settings import Settings"),
        ("worker/meta.py", "import bench.report"),
        ("service/engine.py", "from worker.trainer import Trainer"),
        ("service/engine.py", "if TYPE_CHECKING:\n    from bench.report import Report"),
        ("service/engine.py", "from importlib import import_module\nimport_module('worker.runtime')"),
        ("service/routes/health.py", "from .. import engine"),
    ],
)
def test_an_import_the_wrong_way_is_found(path: str, source: str) -> None:
    assert len(offences(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("models/bank.py", "import math\nimport torch.nn\nfrom models.learner import State"),
        ("worker/meta.py", "import redis\nfrom models.learner import State\nfrom store.users import UserStore"),
        ("service/cli.py", "from bench.cli import bench_app\nfrom worker.runtime import run_worker"),
        ("bench/harness.py", "from service.served import ServedModel\nfrom worker.trainer import Trainer"),
    ],
)
def test_an_import_the_right_way_is_not(path: str, source: str) -> None:
    assert offences(path, source) == []


def test_modules_are_read_in_one_sitting() -> None:
    read = [*modules(), *(ROOT / "tests").rglob("*.py")]
    assert len(read) > 40
    long = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in read}
    assert {name: lines for name, lines in long.items() if lines > MAX_LINES} == {}


def repository_files() -> list[Path]:
    """What is in the repository or about to be: not what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def test_no_file_mentions_a_machine_or_a_registry() -> None:
    found = []
    for path in repository_files():
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
            found += [
                f"{path.relative_to(ROOT)}:{number}: {match.group(0)}"
                for pattern in (MACHINE_PATHS, REGISTRIES)
                for match in pattern.finditer(line)
            ]
    assert not found


def test_a_mention_would_be_found() -> None:
    for text in ("see /wo" + "rk/main", "'/tm" + "p/w/notes'", "cd /ro" + "ot"):
        assert MACHINE_PATHS.search(text), text
    for text in ("https://py" + "pi.org/simple", "files.python" + "hosted.org", "download.py" + "torch.org/whl"):
        assert REGISTRIES.search(text), text
    for text in ("bench/worker", "/worker", "a/work", "/workdir", "/rooted"):
        assert not MACHINE_PATHS.search(text), text
