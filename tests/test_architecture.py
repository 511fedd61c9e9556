"""The architecture: which package and which room may import which, and how much code a warm request runs.

A *room* is a sub-package, or a module that lies directly in a package. `LAYERS` lists the rooms of every package from
the lowest to the highest: a room imports rooms listed before it, never one listed behind it.
"""

from __future__ import annotations

import ast
import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest
import uvicorn
from redis.asyncio import Redis

from metaban.service.engine.registry import EngineRegistry
from metaban.service.http.app import create_app
from metaban.service.http.protocol import limited_protocol
from metaban.service.settings.environment import Settings
from metaban.service.telemetry.metrics import Metrics

ROOT = Path(__file__).resolve().parents[1]
#: What each package may import of metaban beside itself.
ALLOWED: dict[str, frozenset[str]] = {
    "models": frozenset(),
    "store": frozenset(),
    "worker": frozenset({"models", "store"}),
    "service": frozenset({"models", "store"}),
    "client": frozenset(),
    "bench": frozenset({"models", "store", "worker", "service", "client"}),
}
#: The command line starts every process and shows the demo, so it also imports the worker and the client.
ALLOWED_COMMAND_LINE = ALLOWED["service"] | {"worker", "client"}
#: Import names of the packages before they moved into `metaban`.
OLD_NAMES = frozenset({"service", "models", "store", "worker", "bench"})
#: All that the mathematics may use from outside. gpytorch (on linear_operator) trains the Gaussian processes of model
#: fusion, scipy solves its linear sum assignments.
MODELS_MAY_USE = (
    frozenset({"torch", "numpy", "threadpoolctl", "gpytorch", "linear_operator", "scipy"}) | sys.stdlib_module_names
)
LAYERS: dict[str, tuple[str, ...]] = {
    "models": (
        "numerics",
        "transfer",
        "settings",
        "features",
        "policies",
        "posterior_draws",
        "explaining",
        "learner",
        "default",
        "bayes",
        "metaban",
        "fusion",
        "presets",
    ),
    "store": (
        "errors",
        "failpoints",
        "processes",
        "keys",
        "reward_rules",
        "client",
        "codec",
        "valkey",
        "catalogue",
        "audit",
        "shared",
        "users",
        "decisions",
        "events",
        "namespaces",
        "snapshots",
    ),
    "worker": ("learning", "epochs", "jobs", "namespace", "process"),
    "service": (
        "errors",
        "telemetry",
        "settings",
        "engine.commands",
        "engine.store_guard",
        "engine.waiting",
        "engine.model",
        "engine.recommend",
        "engine.feedback",
        "engine.reward_watch",
        "engine.admin",
        "engine.engine",
        "engine.registry",
        "http",
        "http.routes",
        "http.app",
        "process",
        "cli",
    ),
    "bench": (
        "worlds",
        "core",
        "baselines",
        "regret",
        "shop",
        "transfer",
        "serving",
        "bayes",
        "warm_starts",
        "cli",
    ),
}


def folder_of(package: str) -> Path:
    return ROOT / "client" / "metaban" / "client" if package == "client" else ROOT / package


def modules() -> dict[str, Path]:
    """Dotted name without `metaban.` → file, for every module of the product."""
    found = {}
    for package in ALLOWED:
        folder = folder_of(package)
        for path in folder.rglob("*.py"):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imported(source: str) -> Iterator[str]:
    """The absolute names that a module imports, wherever in it; a relative import comes out as '.'."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield "."
            else:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"}:
                yield str(node.args[0].value)


def module_in(name: str) -> str | None:
    """The module of ours that `metaban.…` names, without `metaban.`; None for names from outside."""
    parts = name.split(".")[1:]
    if not name.startswith("metaban.") or not parts:
        return None
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in MODULES:
            return ".".join(parts[:length])
    return parts[0]


def room_of(module: str) -> str:
    """The room of a module, as `LAYERS` names it; '' for the __init__ of a package whose parts are listed."""
    package, _, rest = module.partition(".")
    matches = [room for room in LAYERS[package] if rest == room or rest.startswith(room + ".")]
    if not matches and MODULES[module].name != "__init__.py":
        raise ValueError(f"{module} is in no room of LAYERS[{package!r}]: add it there")
    return max(matches, key=len, default="")


def offences(module: str, source: str) -> list[str]:
    """Imports that the place of a module does not allow."""
    package = module.split(".")[0]
    allowed = ALLOWED_COMMAND_LINE if module.startswith("service.cli") else ALLOWED[package]
    found = []
    for name in imported(source):
        top = name.split(".")[0]
        target = module_in(name)
        if target is not None:
            other = target.split(".")[0]
            wrong = other not in allowed | {package}
            if not wrong and other == package and package in LAYERS and room_of(module):
                rooms = LAYERS[package]
                here, there = room_of(module), room_of(target)
                wrong = there != "" and rooms.index(there) > rooms.index(here)
        else:
            wrong = not top or top in OLD_NAMES or (package == "models" and top not in MODELS_MAY_USE)
        if wrong:
            found.append(f"{module} imports {name}")
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_one_way(package: str) -> None:
    paths = {name: path for name, path in MODULES.items() if name.split(".")[0] == package}
    assert paths
    assert [line for name, path in paths.items() for line in offences(name, path.read_text("utf-8"))] == []


@pytest.mark.parametrize("package", LAYERS)
def test_every_layer_exists(package: str) -> None:
    rooms = {room_of(name) for name in MODULES if name.split(".")[0] == package} - {""}
    assert rooms == set(LAYERS[package])


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {
        name: {module for module in map(module_in, imported(path.read_text("utf-8"))) if module not in {None, name}}
        for name, path in MODULES.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"these modules import each other: {error.args[1]}")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("models.numerics.arrays", "import redis"),
        ("models.numerics.arrays", "from fastapi import FastAPI"),
        ("models.numerics.arrays", "import sklearn.cluster"),
        ("models.numerics.arrays", "from metaban.models.learner import State"),
        ("models.numerics.arrays", "from metaban.store.codec import Sample"),
        ("store.users.users", "from metaban.models.learner import State"),
        ("store.users.users", "def late():\n    import metaban.service.settings.environment"),
        ("store.client.connection", "from metaban.store.snapshots import manifest"),
        ("worker.epochs.derive_shared", "from metaban.service.settings.environment import Settings"),
        ("worker.epochs.derive_shared", "import metaban.bench.cli"),
        ("worker.learning.trainer", "from metaban.worker.epochs.derive_shared import derive_shared"),
        ("service.engine.engine", "from metaban.worker.learning.trainer import Trainer"),
        ("service.engine.engine", "if TYPE_CHECKING:\n    from metaban.bench.core.report import Report"),
        ("service.engine.engine", "from importlib import import_module\nimport_module('metaban.worker.process')"),
        ("service.engine.engine", "from metaban.service.http.auth import KEY_HEADER"),
        ("service.engine.engine", "from service.settings import Settings"),
        ("service.cli.main", "from metaban.bench.cli import bench_app"),
        ("service.http.routes.health", "from .. import engine"),
        ("client.clients", "from metaban.service.errors import ServiceError"),
    ],
)
def test_an_import_the_wrong_way_is_found(module: str, source: str) -> None:
    assert len(offences(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("models.learner", "import math\nimport torch.nn\nfrom metaban.models.numerics.arrays import Array"),
        ("worker.epochs.derive_shared", "import redis\nfrom metaban.store.users.users import UserStore"),
        ("service.cli.main", "from metaban.worker.process import run_worker"),
        ("bench.core.local_loop", "from metaban.worker.learning.trainer import Trainer"),
    ],
)
def test_an_import_the_right_way_is_not(module: str, source: str) -> None:
    assert offences(module, source) == []


def test_tests_import_no_test_modules() -> None:
    found = []
    for path in (ROOT / "tests").rglob("*.py"):
        for name in imported(path.read_text("utf-8")):
            parts = name.split(".")
            if parts[0] in OLD_NAMES or (
                parts[0] == "tests" and any(part.startswith(("test_", "conftest")) for part in parts[:-1])
            ):
                found.append(f"{path.relative_to(ROOT)} imports {name}")
    assert found == []


def test_class_names_are_unique() -> None:
    """One name, one thing: a public class name is defined in one module."""
    homes: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not name.startswith("client"):
                homes.setdefault(node.name, []).append(name)
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_production_runs_without_the_packages_of_the_benchmarks() -> None:
    """Every production module imports where matplotlib and scikit-learn are not installed."""
    names = [name for name in MODULES if name.split(".")[0] not in {"bench"} and not name.endswith("__main__")]
    program = (
        "import importlib, sys\n"
        "sys.modules.update(dict.fromkeys(['matplotlib', 'sklearn', 'vowpalwabbit', 'metaban.bench']))\n"
        f"for name in {names!r}: importlib.import_module('metaban.' + name)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# How much code a warm request runs

#: Requests of the same shape sent before one is measured.
WARM_UP = 2
#: Measured requests; the smallest count is taken, since a background task may run during one of them.
MEASURED = 24
#: Modules and functions a warm request may run on the event loop.
RECOMMEND_MODULES_MAX = 30
RECOMMEND_FUNCTIONS_MAX = 110
FEEDBACK_MODULES_MAX = 22
FEEDBACK_FUNCTIONS_MAX = 80

ARMS = [{"id": f"arm-{n}", "features": [float(n), 1.0, -0.5 * n]} for n in range(10)]


class Functions(NamedTuple):
    """Distinct functions that ran, as (module, function)."""

    names: frozenset[tuple[str, str, int]]

    @property
    def modules(self) -> frozenset[str]:
        return frozenset(module for module, _, _ in self.names)

    def show(self, title: str) -> None:
        """Print the counts and the list; pytest shows it with `-s`."""
        lines = [f"\n{title}: {len(self.modules)} modules, {len(self.names)} functions"]
        for module in sorted(self.modules):
            functions = sorted((line, name) for place, name, line in self.names if place == module)
            lines.append(f"  {module}: {', '.join(name for _, name in functions)}")
        sys.stdout.write("\n".join(lines) + "\n")


@contextmanager
def recorded(codes: set[CodeType]) -> Iterator[None]:
    """Collect the code objects that this thread, which runs the event loop, calls."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def ours(codes: set[CodeType]) -> Functions:
    """Those code objects whose file belongs to the product."""
    found = set()
    for code in codes:
        path = Path(code.co_filename).resolve()
        if path.is_file() and path.is_relative_to(ROOT):  # generated code has names such as <string>
            place = path.relative_to(ROOT)
            if place.parts[0] not in {"tests", ".venv"}:
                found.add((str(place), code.co_qualname, code.co_firstlineno))
    return Functions(frozenset(found))


@asynccontextmanager
async def served(url: str) -> AsyncIterator[int]:
    """The port of the whole service without a worker, on this thread's event loop, as `metaban serve` configures it."""
    settings, metrics = Settings(device="cpu"), Metrics()
    app = create_app(settings, EngineRegistry(settings, url, metrics), metrics)
    config = uvicorn.Config(
        app,
        port=0,
        http=limited_protocol(100, lambda reason: None),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )
    async with app.router.lifespan_context(app):
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event to wait for
            await asyncio.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
        server.should_exit = True
        await task


class Connection:
    """A keep-alive connection whose requests are recorded."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def post(self, path: str, body: Any) -> tuple[Any, Functions]:
        content = json.dumps(body).encode()
        lines = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        codes: set[CodeType] = set()
        with recorded(codes):
            self._writer.write(f"{lines}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.split("content-length: ")[1].split("\r\n")[0])
            answer = json.loads(await self._reader.readexactly(length))
            await asyncio.sleep(0)  # what follows the last byte of the answer, such as the log line
        assert head.startswith("http/1.1 20"), answer
        return answer, ours(codes)


def smallest(measured: list[Functions]) -> Functions:
    return min(measured, key=lambda functions: len(functions.names))


@pytest.mark.single_node("a cluster client runs more modules")
async def test_modules_and_functions_of_a_warm_request(redis: Redis, valkey_url: str) -> None:
    decided, rewarded = [], []
    async with served(valkey_url) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        connection = Connection(reader, writer)
        for _ in range(WARM_UP + MEASURED):
            decision, functions = await connection.post("/recommend", {"user_id": "ada", "arms": ARMS})
            decided.append(functions)
            reward = {"decision_id": decision["decision_id"], "reward": 1.0}
            _, functions = await connection.post("/feedback", reward)
            rewarded.append(functions)
        writer.close()
    recommend, feedback = smallest(decided[WARM_UP:]), smallest(rewarded[WARM_UP:])
    recommend.show("POST /recommend")
    feedback.show("POST /feedback")
    assert len(recommend.modules) <= RECOMMEND_MODULES_MAX
    assert len(recommend.names) <= RECOMMEND_FUNCTIONS_MAX
    assert len(feedback.modules) <= FEEDBACK_MODULES_MAX
    assert len(feedback.names) <= FEEDBACK_FUNCTIONS_MAX
