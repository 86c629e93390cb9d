"""Find the LoRA adapters of `--lora-modules`, and adapters that are added while the server runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...protocol.checkpoint.audio.tower import has_audio_tower
from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.errors import ConfigError
from ...protocol.file_identity import ADAPTER_FILES, LoraAdapter
from ..supervisor.console import Console
from .options import ModelOptions


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


def with_own_adapter(options: ModelOptions, path: Path, config: ConfigFields) -> ModelOptions:
    """Return the options with the adapter for audio that is in the directory of a checkpoint (Granite Speech).

    They are unchanged if there is none, or if `--default-mm-loras` names another.

    Raises:
        CheckpointError: The config of the adapter is invalid.
    """
    has_own = config.get("has_lora_adapter") and (path / ADAPTER_FILES[1]).is_file()
    if options.default_mm_loras or not has_own or not has_audio_tower(config):
        return options
    fields = ConfigFields.read(path / ADAPTER_FILES[0])
    ranks = fields.section("rank_pattern") or ConfigFields({}, fields.path)
    rank = max(fields.integer("r"), *(ranks.integer(name) for name in ranks.config), 0)
    return msgspec.structs.replace(
        options,
        enable_lora=True,
        default_mm_loras={"audio": str(path)},
        max_lora_rank=max(rank, options.max_lora_rank),
    )


def find_adapter(
    name: str, path: str, download_dir: str | None, console: Console, param: str
) -> LoraAdapter:
    """Return the adapter in a directory or hub repository, which is downloaded if necessary.

    `param` is the flag or field that gave the path.

    Raises:
        ConfigError: The adapter does not exist.
        CheckpointError: A file of the adapter is missing.
    """
    directory = Path(path).expanduser().absolute()
    if not directory.is_dir():
        if path.count("/") != 1 or path.startswith((".", "~", "/")):
            raise ConfigError(f"{param}: {path} is neither a directory nor ORG/NAME on the hub")
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
