"""Find the LoRA adapters of flags and checkpoints, and adapters that are added while the server runs."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from ...protocol.checkpoint.audio.tower import has_audio_tower
from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.checkpoint.field_names import TASK_ADAPTERS
from ...protocol.checkpoint.gguf import GGUFFile
from ...protocol.errors import ConfigError
from ...protocol.file_identity import ADAPTER_FILES, LoraAdapter
from ..supervisor.console import Console
from .lora_registry import MAX_SCALE
from .options import ModelOptions

_DEFAULT_TASK: Final = "retrieval"

MAX_SHOWN: Final = 200
"""Maximum characters of a path in an error."""


class _Module(msgspec.Struct):
    """An entry of `--lora-modules` in vLLM's JSON format."""

    name: str
    path: str


def find_loras(
    options: ModelOptions, served_names: Sequence[str], console: Console
) -> tuple[LoraAdapter, ...]:
    """Return the adapters of `--lora-modules`.

    Raises:
        ConfigError: The options contradict each other, or an adapter does not exist.
        CheckpointError: A file of an adapter is missing.
    """
    if options.lora_modules and not options.enable_lora:
        raise ConfigError("--lora-modules needs --enable-lora; add it, or remove --lora-modules")
    loras: dict[str, LoraAdapter] = {}
    for text in options.lora_modules:
        module = _parse(text)
        if module.name in loras or module.name in served_names:
            raise ConfigError(
                f"--lora-modules: the name {module.name!r} is already served; choose another one"
            )
        loras[module.name] = find_adapter(
            module.name, module.path, options.download_dir, console, "--lora-modules"
        )
    return tuple(loras.values())


def find_media_lora(
    options: ModelOptions, loras: Sequence[LoraAdapter], console: Console, modality: str | None
) -> LoraAdapter | None:
    """Return the adapter of `--default-mm-loras` for images or audio: one of `loras`, or one with its own path.

    `modality` is what the model reads, "image" or "audio"; None if it reads only text.

    Raises:
        ConfigError: The options contradict each other, or the adapter does not exist.
        CheckpointError: A file of the adapter is missing.
    """
    wanted = options.default_mm_loras
    if not wanted:
        return None
    if not options.enable_lora:
        raise ConfigError("--default-mm-loras needs --enable-lora; add it, or remove the flag")
    if others := sorted(set(wanted) - {modality}):
        reads = f"only {modality}" if modality else "only text"
        raise ConfigError(
            f"--default-mm-loras has {', '.join(others)}, but this model reads {reads}; remove it"
        )
    assert modality is not None
    path = wanted[modality]
    if not isinstance(path, str):
        raise ConfigError(f"--default-mm-loras: {modality} must be a name or a path, got {path!r}")
    named = next((adapter for adapter in loras if adapter.name == path), None)
    return named or find_adapter(
        modality, path, options.download_dir, console, "--default-mm-loras"
    )


def find_default_lora(
    options: ModelOptions, loras: Sequence[LoraAdapter], config: ConfigFields
) -> LoraAdapter | None:
    """Return the adapter of requests that choose none, with its scale: that of `--lora`, or that of a task.

    The task of a model with adapters for tasks (jina-embeddings-v5) is `jina_task` in `--hf-overrides`, as in vLLM.

    Raises:
        ConfigError: There is no adapter for the task, or there are several adapters for all requests.
    """
    tasks = config.texts(TASK_ADAPTERS)
    applied = [] if options.lora_init_without_apply else _applied(options)
    if scaled := [(_name(path), scale) for path, scale in applied if scale]:
        if len(scaled) > 1 or tasks:
            raise ConfigError(
                f"--lora: one adapter can apply to all requests, got {len(scaled) + bool(tasks)}; merge them, or add "
                "--lora-init-without-apply and let requests choose"
            )
        name, scale = scaled[0]
        return next(each for each in loras if each.name == name).with_scale(scale)
    if not tasks:
        return None
    task = config.text("jina_task", _DEFAULT_TASK)
    if task not in tasks:
        raise ConfigError(
            f"--hf-overrides: jina_task must be one of {', '.join(tasks)}, got {task!r}"
        )
    return next(adapter for adapter in loras if adapter.name == task)


def with_own_adapters(options: ModelOptions, path: Path, config: ConfigFields) -> ModelOptions:
    """Return the options with the adapters of `--lora`, and with those in the directory of a checkpoint.

    The latter are one for each task (jina-embeddings-v5), or one for audio (Granite Speech) unless `--default-mm-loras`
    names another.

    Raises:
        CheckpointError: An adapter is missing, or its config is invalid.
        ConfigError: A scale is invalid.
    """
    if applied := _applied(options):
        paths = [Path(path).expanduser() for path, _ in applied]
        ranks = [_rank(path) for path in paths if path.exists()]
        options = msgspec.structs.replace(
            options,
            enable_lora=True,
            lora_modules=(*options.lora_modules, *(f"{_name(path)}={path}" for path, _ in applied)),
            max_lora_rank=max(options.max_lora_rank, *ranks, 0),
        )
    if tasks := config.texts(TASK_ADAPTERS):
        directories = [path / "adapters" / task for task in tasks]
        modules = [f"{task}={each}" for task, each in zip(tasks, directories, strict=True)]
        return msgspec.structs.replace(
            options,
            enable_lora=True,
            lora_modules=(*modules, *options.lora_modules),
            max_lora_rank=max(options.max_lora_rank, *map(_rank, directories)),
        )
    has_own = config.get("has_lora_adapter") and (path / ADAPTER_FILES[1]).is_file()
    if options.default_mm_loras or not has_own or not has_audio_tower(config):
        return options
    return msgspec.structs.replace(
        options,
        enable_lora=True,
        default_mm_loras={"audio": str(path)},
        max_lora_rank=max(options.max_lora_rank, _rank(path)),
    )


def _applied(options: ModelOptions) -> list[tuple[str, float]]:
    """Return the paths of the adapters of `--lora` and `--lora-scaled`, with their scales."""
    found = [(path, 1.0) for text in options.lora for path in text.split(",")]
    for each in (part for text in options.lora_scaled for part in text.split(",")):
        path, _, number = each.rpartition(":")
        try:
            scale = float(number)
        except ValueError:
            scale = math.nan
        if not path or not abs(scale) <= MAX_SCALE:
            raise ConfigError(
                f"--lora-scaled must have the form FILE:SCALE, with a scale between {-MAX_SCALE:g} and {MAX_SCALE:g}, "
                f"got {each!r}"
            )
        found.append((path, scale))
    return found


def _name(path: str) -> str:
    """Return the name of an adapter that was given without one: that of its file or directory."""
    return Path(path).name.removesuffix(".gguf")


def _rank(path: Path) -> int:
    """Return the highest rank of the adapter in a directory, by its config, or in a GGUF file."""
    if path.suffix == ".gguf":
        tensors = GGUFFile(path).tensors.values()
        return max((each.shape[-1] for each in tensors if each.name.endswith(".lora_b")), default=0)
    fields = ConfigFields.read(path / ADAPTER_FILES[0])
    ranks = fields.section_or_empty("rank_pattern")
    return max(fields.integer("r"), *(ranks.integer(name) for name in ranks.config), 0)


def find_adapter(
    name: str, path: str, download_dir: str | None, console: Console, param: str
) -> LoraAdapter:
    """Return the adapter in a directory, a GGUF file or a hub repository, which is downloaded if necessary.

    `param` is the flag or field that gave the path.

    Raises:
        ConfigError: The adapter does not exist.
        CheckpointError: A file of the adapter is missing.
    """
    # Unlike the methods of paths, these functions accept unknown users and names that are too long.
    directory = Path(os.path.expanduser(path)).absolute()
    is_gguf = directory.suffix == ".gguf" and os.path.isfile(directory)
    if not is_gguf and not os.path.isdir(directory):
        if path.count("/") != 1 or path.startswith((".", "~", "/")):
            shown = path if len(path) <= MAX_SHOWN else f"{path[:MAX_SHOWN]}…"
            raise ConfigError(
                f"{param}: {shown} is no GGUF file, and neither a directory nor ORG/NAME on the hub"
            )
        from .hub import fetch_adapter

        directory = fetch_adapter(path, ADAPTER_FILES, cache_dir=download_dir, console=console)
    return LoraAdapter.read(name, directory)


def _parse(text: str) -> _Module:
    if text.startswith("{"):
        try:
            return msgspec.json.decode(text, type=_Module)
        except msgspec.DecodeError as error:
            raise ConfigError(f"--lora-modules {text}: {error}") from None
    name, _, path = text.partition("=")
    if not name or not path:
        raise ConfigError(f"--lora-modules {text} must have the form NAME=PATH")
    return _Module(name, path)
