import errno
import fcntl
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from engine.frontend.supervisor.run_dir import MAX_SOCKET_PATH_BYTES, RunDirectory
from engine.protocol.config import CONFIG_FILE
from engine.protocol.errors import ConfigError
from support.servers.engine_fixtures import engine_config

HOLDER = """
import sys, time
from engine.frontend.supervisor.run_dir import RunDirectory
directory = RunDirectory()
open(directory.path + "/config.msgpack", "w").close()
print(directory.path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_run_directory_is_private_and_removed() -> None:
    with RunDirectory() as directory:
        assert os.stat(directory.path).st_mode & 0o777 == 0o700
        Path(directory.path, "core0").touch()
    assert not os.path.exists(directory.path)


def test_leftover_run_directories_are_removed_unless_in_use() -> None:
    owner = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        left = owner.stdout.readline().strip()
        with RunDirectory():
            assert os.path.exists(left)
    finally:
        owner.kill()
        owner.communicate()
    with RunDirectory() as mine:
        assert not os.path.exists(left)
        with RunDirectory():
            assert os.path.exists(mine.path)


def test_foreign_directories_are_kept(runtime_dir: Path) -> None:
    foreign = runtime_dir / "engine-abcdefgh"
    foreign.mkdir(mode=0o700)
    (foreign / "precious").touch()
    open_to_all = runtime_dir / "engine-ijklmnop"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    (open_to_all / CONFIG_FILE).touch()
    with RunDirectory():
        pass
    assert (foreign / "precious").exists()
    assert open_to_all.exists()


def test_socket_paths_fit_the_system_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with RunDirectory() as directory:
        assert not directory.path.startswith(str(deep))
        assert len(f"{directory.path}/core9999.workers") <= MAX_SOCKET_PATH_BYTES


def test_no_usable_directory_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="set TMPDIR"):
        RunDirectory()


def test_run_directory_is_the_only_temporary_directory(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/nonexistent")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    with RunDirectory() as directory:
        assert Path(directory.path).parent == runtime_dir


def test_full_disk_error_names_the_remedy(runtime_dir: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(ConfigError, match=f"cannot write {runtime_dir}.*free some space there"):
            engine_config(runtime_dir).save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_system_without_locks_is_named(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=f"cannot lock a directory in {runtime_dir}: .*flock"):
        RunDirectory()
    assert list(runtime_dir.iterdir()) == []


def test_simultaneous_starts_keep_each_others_directories() -> None:
    owners = [
        subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    try:
        paths = [owner.stdout.readline().strip() for owner in owners if owner.stdout]
        assert len(set(paths)) == 4
        for _ in range(50):
            with RunDirectory():
                pass
        assert all(map(os.path.exists, paths))
    finally:
        for owner in owners:
            owner.kill()
            owner.communicate()
