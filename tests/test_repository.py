"""Words that no file of the repository may contain."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Joined here, so that this file does not contain the forbidden words.
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


def repository_files() -> list[Path]:
    """Files that git tracks or would add; ignored files are left out."""
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


def test_a_forbidden_word_is_found() -> None:
    for text in ("see /wo" + "rk/main", "'/tm" + "p/w/notes'", "cd /ro" + "ot"):
        assert MACHINE_PATHS.search(text), text
    for text in ("https://py" + "pi.org/simple", "files.python" + "hosted.org", "download.py" + "torch.org/whl"):
        assert REGISTRIES.search(text), text
    for text in ("bench/worker", "/worker", "a/work", "/workdir", "/rooted"):
        assert not MACHINE_PATHS.search(text), text
