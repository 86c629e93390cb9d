"""scripts/install, with a stand-in for the Python that it installs into."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ("bash", "cat", "cut", "dirname", "find", "ln", "mkdir", "sha256sum", "sort")


def executable(path: Path, text: str = "#!/bin/sh\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_a_compiler_that_comes_later_is_used(tmp_path: Path) -> None:
    tools, tree = tmp_path / "tools", tmp_path / "tree"
    tools.mkdir()
    for name in TOOLS:
        (tools / name).symlink_to(str(shutil.which(name)))
    for part in ("pyproject.toml", "workers/cpu/build_native.py", "scripts/install"):
        (tree / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / part, tree / part)
    csrc = tree / "workers/cpu/csrc"
    (csrc / "isa").mkdir(parents=True)
    (csrc / "isa/isa.cpp").touch()
    executable(tree / ".venv/bin/python", f'#!{tools}/bash\necho "$@" >> {tmp_path}/calls\n')

    def install() -> tuple[int, str]:
        """How often pip has installed something, and what was said."""
        ran = subprocess.run(
            [tree / "scripts/install"],
            env={"PATH": str(tools)},
            capture_output=True,
            text=True,
            check=True,
        )
        return (tmp_path / "calls").read_text().count("--editable"), ran.stderr

    installs, said = install()
    assert installs == 1
    assert "apt install g++" in said
    assert install() == (1, "")
    executable(tools / "g++")
    (csrc.parent / "_native.so").touch()
    installs, said = install()
    assert installs == 2
    assert "g++" not in said
    assert install() == (2, "")
