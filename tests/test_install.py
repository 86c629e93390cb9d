"""scripts/install, with a stand-in for the Python that it installs into."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ("bash", "cat", "cut", "dirname", "find", "ln", "mkdir", "rm", "sha256sum", "sort")


def executable(path: Path, text: str = "#!/bin/sh\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with the files that the script reads, whose Python writes its arguments to `calls`.

    Like the real one, it builds the native library if there is a compiler.
    """
    tree = tmp_path / "tree"
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in TOOLS:
        (tools / name).symlink_to(str(shutil.which(name)))
    for part in ("pyproject.toml", "workers/cpu/build_native.py", "scripts/install"):
        (tree / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / part, tree / part)
    csrc = tree / "workers/cpu/csrc"
    (csrc / "isa").mkdir(parents=True)
    (csrc / "isa/isa.cpp").touch()
    python = f"""#!{tools}/bash
echo "$@" >> {tmp_path}/calls
if [[ "$*" == *--editable* && -x {tools}/g++ ]]; then : > workers/cpu/_native.so; fi
"""
    executable(tree / ".venv/bin/python", python)
    return tree


def install(tree: Path, *extras: str) -> tuple[list[str], str]:
    """Return the extras of all installations so far, and what the script printed."""
    ran = subprocess.run(
        [tree / "scripts/install", *extras],
        env={"PATH": str(tree.parent / "tools")},
        capture_output=True,
        text=True,
        check=True,
    )
    calls = (tree.parent / "calls").read_text().splitlines()
    assert sum("--editable" in call for call in calls) == sum(
        "--requirement" in call for call in calls
    )
    listing = "scripts/requirements.py"
    return [call.removeprefix(listing).strip() for call in calls if listing in call], ran.stderr


def test_compiler_that_is_installed_later_builds_the_native_library(tree: Path) -> None:
    installed, printed = install(tree)
    assert len(installed) == 1
    assert "apt install g++" in printed
    assert install(tree) == (installed, "")
    executable(tree.parent / "tools/g++")
    installed, printed = install(tree)
    assert len(installed) == 2
    assert "g++" not in printed
    assert install(tree) == (installed, "")


def test_only_requested_extras_are_installed_and_each_only_once(tree: Path) -> None:
    assert install(tree)[0] == [""]
    assert install(tree, "test", "bench")[0] == ["", "test bench"]
    assert install(tree, "docs")[0] == ["", "test bench", "docs"]
    for extras in ([], ["test"], ["bench", "test"], ["docs"]):
        assert len(install(tree, *extras)[0]) == 3
    # Nothing of it holds for other sources.
    (tree / "workers/cpu/csrc/isa.cpp").write_text("// changed")
    assert len(install(tree)[0]) == 4
    assert install(tree, "docs")[0][4:] == ["docs"]
