"""The rules of the repository's layout: allowed imports and the contents of packages."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PARTS = ("protocol", "core", "workers", "frontend")
MODULES = [
    ROOT / "__init__.py",
    *(p for part in PARTS for p in sorted((ROOT / part).rglob("*.py"))),
]

UNSAFE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}


def relative_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    parts = ["engine", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(path: Path) -> list[str]:
    return ["engine", *path.relative_to(ROOT).parent.parts]


KNOWN = {module_name(path) for path in MODULES}


@cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return every import statement of a file, wherever it is."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


@cache
def imports(path: Path) -> list[tuple[int, int, str]]:
    """Return line, level and absolute name of every imported module."""
    found = []
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            found += [(node.lineno, 0, alias.name) for alias in node.names]
        elif node.level == 0:
            found.append((node.lineno, 0, node.module or ""))
        else:
            package = package_of(path)
            base = package[: len(package) - node.level + 1]
            found += [
                (node.lineno, node.level, ".".join([*base, node.module or alias.name]))
                for alias in node.names
            ]
    return found


def test_top_level_packages_are_the_expected_ones() -> None:
    assert {p.relative_to(ROOT).parts[0] for p in MODULES} == {"__init__.py", *PARTS}
    assert len(MODULES) > 40


@pytest.mark.parametrize("part", PARTS)
def test_top_level_packages_import_only_themselves_and_protocol(part: str) -> None:
    allowed = {"protocol", part}
    for path in (p for p in MODULES if p.relative_to(ROOT).parts[0] == part):
        for line, level, name in imports(path):
            where = f"{relative_name(path)}:{line} imports {name}"
            if level == 0:
                assert name.split(".")[0] != "engine", f"{where}: use a relative import"
                continue
            top = name.split(".")[1]
            assert top in allowed or name == "engine.__version__", where


def test_only_workers_import_torch_and_nothing_unpickles() -> None:
    for path in MODULES:
        for line, level, name in imports(path):
            where = f"{relative_name(path)}:{line} imports {name}"
            top = name.split(".")[0]
            assert level or top not in UNSAFE, where
            assert level or top != "transformers", f"{where}: it is a test dependency"
            if path.relative_to(ROOT).parts[0] != "workers":
                assert level or top not in ("torch", "triton"), where


@pytest.mark.parametrize("part", ["protocol", "core", "frontend"])
def test_torch_is_never_loaded_outside_workers(part: str) -> None:
    names = [module_name(p) for p in MODULES if p.relative_to(ROOT).parts[0] == part]
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
        "    assert 'transformers' not in sys.modules, name\n"
    )
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_importing_the_package_loads_nothing_heavy() -> None:
    program = (
        "import sys, engine\n"
        "assert engine.__version__\n"
        "assert not {'msgspec', 'numpy', 'zmq', 'torch'} & set(sys.modules)\n"
        "for name in engine.__all__:\n"
        "    getattr(engine, name)\n"
        "assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import engine

    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        engine.Llm  # noqa: B018


def test_every_package_is_listed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {".".join(package_of(path)) for path in MODULES}
    assert set(settings["packages"]) == packages
    for path in MODULES:
        assert (path.parent / "__init__.py").is_file(), relative_name(path)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a copy of the sources to build in."""
    names = ("__pycache__", "build", "dist", "node_modules", "site", "*.egg-info", "*.so")
    ignored = shutil.ignore_patterns(".*", *names)
    return shutil.copytree(ROOT, tmp_path / "source", ignore=ignored)


def test_the_wheel_has_every_module_and_nothing_else(source: Path, tmp_path: Path) -> None:
    """The wheel is built without a compiler, so it has everything but the native backend."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path)]
    environment = {**os.environ, "CC": "false", "CXX": "false"}
    subprocess.run(
        [*command, str(source)], check=True, capture_output=True, text=True, env=environment
    )
    (wheel,) = tmp_path.glob("engine_serve-*-py3-none-*.whl")
    shipped = {f for f in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in f}
    modules = {path for part in PARTS for path in (ROOT / part).rglob("*.py")}
    files = modules | {ROOT / "__init__.py", ROOT / "py.typed"}
    files |= set((ROOT / "frontend/web/bundle").iterdir())
    files |= {path for part in PARTS for path in (ROOT / part).rglob("*.jinja")}
    files |= {ROOT / "workers/cpu/abi/description.txt"}
    assert shipped == {f"engine/{path.relative_to(ROOT)}" for path in files}


def test_the_source_distribution_has_every_native_source(source: Path, tmp_path: Path) -> None:
    """The build command must find the same sources in the source distribution."""
    command = (
        "from sys import argv; from setuptools.build_meta import build_sdist; build_sdist(argv[1])"
    )
    subprocess.run(
        [sys.executable, "-c", command, str(tmp_path)], cwd=source, check=True, capture_output=True
    )
    (archive,) = tmp_path.glob("engine_serve-*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    sources = (path for path in (ROOT / "workers/cpu/csrc").rglob("*") if path.is_file())
    assert names >= {relative_name(path) for path in sources}


def test_scripts_are_executable() -> None:
    names = ("install", "serve", "test", "lint", "mypy", "docs", "bench/run")
    for path in (ROOT / ".ci" / "run", *(ROOT / "scripts" / name for name in names)):
        assert path.stat().st_mode & 0o111, path


def test_each_benchmark_is_listed_with_what_it_measures() -> None:
    result = subprocess.run([ROOT / "scripts/bench/run"], capture_output=True, text=True)
    assert result.returncode == 2
    usage, *lines = result.stderr.splitlines()
    assert "NAME [arguments]" in usage
    programs = {path.stem: path for path in (ROOT / "scripts/bench").glob("*.py")}
    listed = dict(line.split(maxsplit=1) for line in lines)
    assert set(listed) == set(programs)
    for name, path in programs.items():
        program = ast.parse(path.read_text())
        assert listed[name] == (ast.get_docstring(program) or "").splitlines()[0]
        functions = {node.name for node in program.body if isinstance(node, ast.FunctionDef)}
        assert "main" in functions, f"{name} is no program, so it must not be listed"
        assert not path.stat().st_mode & 0o111, f"{name} is run by scripts/bench/run"


# The rules for the folders. `docs/architecture.md` states each in one sentence.

PURE = ("core/state", "core/kv_cache", "core/scheduler")
EFFECTS = {
    *("asyncio", "datetime", "multiprocessing", "os", "pathlib", "random", "secrets", "select"),
    *("shutil", "socket", "subprocess", "tempfile", "threading", "time", "uuid", "zmq"),
}
MAX_FILES_OF_FOLDER = 17
MAX_LINES_OF_FILE = 500


def folder_of(path: Path) -> str:
    return str(path.relative_to(ROOT).parent)


def is_in(path: Path, folder: str) -> bool:
    return f"{folder_of(path)}/".startswith(f"{folder}/")


@cache
def imported_modules(path: Path) -> set[str]:
    """Return the modules of this package that a file imports, type-checking imports included."""
    names = set()
    for node in import_statements(path):
        if isinstance(node, ast.Import) or not node.level:
            continue
        package = package_of(path)
        base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
        target = ".".join(filter(None, base))
        submodules = {f"{target}.{alias.name}" for alias in node.names} & KNOWN
        names |= submodules or {target}
    return names


def test_scheduler_cache_and_state_import_nothing_with_side_effects() -> None:
    pure = [path for path in MODULES if any(is_in(path, folder) for folder in PURE)]
    assert len(pure) > 30
    for path in pure:
        for line, level, name in imports(path):
            where = f"{relative_name(path)}:{line} imports {name}"
            assert level or name.split(".")[0] not in EFFECTS, where
            assert not level or name.startswith(
                ("engine.protocol", *(f"engine.{folder.replace('/', '.')}" for folder in PURE))
            ), where


CORE_PROCESS = {"core/engine_core.py", "core/preloaded.py"}


def test_serving_imports_no_simulation_and_only_the_core_process_imports_replay() -> None:
    for path in MODULES:
        if is_in(path, "core/simulation"):
            continue
        for name in imported_modules(path):
            where = f"{relative_name(path)} imports {name}"
            assert not name.startswith("engine.core.simulation"), where
            if not is_in(path, "core/replay") and relative_name(path) not in CORE_PROCESS:
                assert not name.startswith("engine.core.replay"), where


def test_the_supervisor_imports_only_itself_and_the_protocol() -> None:
    guardian = ("engine.frontend.supervisor.guardian", "engine.protocol")
    for path in (p for p in MODULES if is_in(p, "frontend/supervisor")):
        # The guardian outlives the supervisor, and must not fail with it.
        is_guardian = is_in(path, "frontend/supervisor/guardian")
        allowed = guardian if is_guardian else ("engine.frontend.supervisor", "engine.protocol")
        for name in imported_modules(path):
            assert name.startswith(allowed), f"{relative_name(path)} imports {name}"


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the nodes of one circle, or none."""
    done: set[str] = set()
    path: list[str] = []

    def visit(node: str) -> list[str]:
        if node in path:
            return path[path.index(node) :]
        if node in done:
            return []
        path.append(node)
        for following in sorted(graph.get(node, ())):
            if circle := visit(following):
                return circle
        path.pop()
        done.add(node)
        return []

    for node in sorted(graph):
        if circle := visit(node):
            return circle
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    # The package itself is the public API: it imports the others when it is first used.
    graph = {
        module_name(path): imported_modules(path) - {"engine", module_name(path)}
        for path in MODULES
        if path != ROOT / "__init__.py"
    }
    assert find_circle(graph) == []


@pytest.mark.parametrize("part", PARTS)
def test_no_rooms_import_each_other_in_a_circle(part: str) -> None:
    """A unit is a folder directly below a top-level folder, or a file there."""
    graph: dict[str, set[str]] = {}
    for path in (p for p in MODULES if p.relative_to(ROOT).parts[0] == part):
        room = ".".join(module_name(path).split(".")[:3])
        for name in imported_modules(path):
            if name.startswith(f"engine.{part}.") and ".".join(name.split(".")[:3]) != room:
                graph.setdefault(room, set()).add(".".join(name.split(".")[:3]))
    assert find_circle(graph) == []


def test_the_configuration_has_annotations_that_are_evaluated_when_it_is_imported() -> None:
    """Otherwise msgspec compiles the text of each in every process, which takes a start 15 ms."""
    for path in (ROOT / "protocol" / "config").rglob("*.py"):
        assert "from __future__ import annotations" not in path.read_text(), relative_name(path)


def test_no_folder_is_crowded() -> None:
    files = [path for path in (ROOT / "workers/cpu/csrc").rglob("*.*") if path.is_file()]
    files += [*MODULES, *(ROOT / "tests").rglob("*.py")]
    counts = Counter(folder_of(path) for path in files if not path.stem.startswith("__"))
    crowded = {folder: n for folder, n in counts.items() if n > MAX_FILES_OF_FOLDER}
    assert not crowded


def test_no_file_is_long() -> None:
    files = [*MODULES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    files += [path for path in (ROOT / "workers/cpu/csrc").rglob("*.*") if path.is_file()]
    lengths = {relative_name(path): len(path.read_text().splitlines()) for path in files}
    assert not {name: n for name, n in lengths.items() if n > MAX_LINES_OF_FILE}


def test_the_table_of_rules_names_functions_that_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    rows = text.partition("## Where a rule is decided")[2].partition("\n## ")[0].splitlines()
    rules = [row for row in rows if row.startswith("| ") and "`" in row]
    assert len(rules) > 12
    for row in rules:
        path = ""
        for name in re.findall(r"`([^`]+)`", row):
            if name.endswith(".py"):
                path = name
            else:
                defined = rf"^\s*(class|(async )?def) {name}\b"
                assert re.search(defined, (ROOT / path).read_text(), re.M), (path, name)
