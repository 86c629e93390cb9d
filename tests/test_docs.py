"""The documentation names files, flags and pages that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import yaml
from engine.frontend.cli.completion.tree import read_commands
from engine.frontend.cli.options import FLAGS
from engine.frontend.cli.peer_flags.accepted import PEER_FLAGS
from engine.frontend.cli.peer_flags.translated import TRANSLATIONS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
FOLDERS = ("core", "frontend", "protocol", "workers", "tests", "scripts", "docs", "examples")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+[a-z0-9]")
SCRIPTS = ("", ".py", ".sh")
FOREIGN_FLAGS = {
    "--auth-type", "--core", "--cpu-moe", "--detach", "--dimensions", "--draft-max", "--drafts",
    "--extra-index-url", "--fit", "--format", "--from-file", "--gpus", "--group-size", "--input",
    "--key", "--lora", "--max-seq-len-to-capture", "--mlock", "--no-mmap", "--no-python",
    "--nproc-per-node", "--num-blocks", "--out", "--outtype", "--overlap", "--plot", "--policy",
    "--prompt-name", "--provider", "--rope-scaling", "--rope-theta", "--shm-size", "--signal",
    "--step-time", "--task", "--weight-format", "--why",
}  # fmt: skip
"""Flags of other programs, in examples and comparisons."""


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_page_names_existing_files(page: Path) -> None:
    text = page.read_text()
    paths = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`", text)
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing
    # In the scheduler's specification a path is relative to core/ or core/scheduler/.
    if page.name == "scheduler.md":
        rooms = (ROOT / "core", ROOT / "core/scheduler")
        for path in re.findall(r"`((?:[\w]+/)*[a-z_]+\.py)`", text):
            assert (
                (ROOT / path).exists()
                or any((room / path).exists() for room in rooms)
                or any((ROOT / "core").rglob(path))
            ), path


@pytest.mark.parametrize(("page", "least"), [("scheduler.md", 20), ("architecture.md", 10)])
def test_page_names_existing_functions(page: str, least: int) -> None:
    named = re.findall(r"`((?:\w+/)*[a-z_]+\.py)`, `(\w+)`", (DOCS / page).read_text())
    assert len(named) > least
    for path, name in named:
        sources = [file.read_text() for file in (ROOT / "core").rglob(path)]
        sources.append((ROOT / path).read_text() if (ROOT / path).exists() else "")
        defined = rf"\b(def|class) {name}\b"
        assert any(re.search(defined, source) for source in sources), f"{path}: {name}"


@cache
def command_flags() -> frozenset[str]:
    """Return the flags of all commands."""
    flags = (flag for command in read_commands().walk() for flag in command.flags)
    return frozenset(name for flag in flags for name in flag.names)


@cache
def script_flags() -> frozenset[str]:
    """Return every flag that a program in `scripts` defines or passes on."""
    paths = (path for path in (ROOT / "scripts").rglob("*") if path.suffix in SCRIPTS)
    sources = (path.read_text() for path in paths if path.is_file())
    return frozenset(flag for source in sources for flag in FLAG.findall(source))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_page_names_existing_flags(page: Path) -> None:
    known = {*FLAGS, *PEER_FLAGS, *TRANSLATIONS, *FOREIGN_FLAGS, *command_flags(), *script_flags()}
    text = re.sub(r"https?://\S+", "", page.read_text())
    assert not sorted(set(FLAG.findall(text)) - known)


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    navigation = yaml.safe_load(text[text.index("nav:") : text.index("plugins:")])

    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        assert not isinstance(parts, str)
        return [page for part in parts for page in pages(part)]  # type: ignore[attr-defined]

    listed = set(pages(navigation)) - {"contributing.md", "security.md", "changelog.md"}
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
