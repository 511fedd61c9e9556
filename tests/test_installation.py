"""The distribution, built and installed as a user does, works beside folders that have the names of ours."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Packages that lie directly in site-packages would clash with those of a shop.
TOP_LEVEL = {"metaban"}


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository's files, so that building leaves nothing behind in it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    folder = tmp_path_factory.mktemp("checkout")
    for name in listed.stdout.decode().split("\0"):
        source, target = ROOT / name, folder / name
        if name and (source.is_symlink() or source.is_file()):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(checkout))
    (found,) = folder.glob("metaban-*.whl")
    return found


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_holds_every_file_under_one_name(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == TOP_LEVEL
    packages = ["service", "models", "store", "worker", "bench"]
    wanted = {
        f"metaban/{path.relative_to(ROOT)}"
        for package in packages
        for pattern in ("*.py", "*.lua", "*.json", "py.typed")
        for path in (ROOT / package).rglob(pattern)
    } | {f"metaban/{path.relative_to(ROOT / 'client' / 'metaban')}" for path in (ROOT / "client").rglob("*.py")}
    assert len(wanted) > 200
    assert wanted <= names


def test_installed_beside_folders_of_the_same_names(wheel: Path, tmp_path: Path) -> None:
    """A shop that has a `service` and a `models` of its own uses the installed product, and its own folders."""
    venv, shop = tmp_path / "venv", tmp_path / "shop"
    run(sys.executable, "-m", "venv", str(venv))
    python = venv / "bin" / "python"
    run(str(python), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel))
    # The dependencies are those of this environment; its own install of metaban is a .pth file, which is not read here.
    (site,) = (venv / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    for name in ("service", "models"):
        (shop / name).mkdir(parents=True)
        (shop / name / "__init__.py").write_text("OF_THE_SHOP = True\n")
    program = (
        "import service, models, metaban.client, metaban.service.http.app, metaban.worker.process\n"
        "assert service.OF_THE_SHOP and models.OF_THE_SHOP\n"
        "from metaban.client import AsyncMetaban, Metaban\n"
        "print(metaban.service.http.app.__file__)"
    )
    assert run(str(python), "-c", program, cwd=shop).startswith(str(site.resolve()))
    assert run(str(venv / "bin" / "metaban"), "--version", cwd=shop).startswith("metaban ")
    assert "METABAN_" in run(str(venv / "bin" / "metaban"), "settings", cwd=shop)
