"""Finds the LoRA adapters of `--lora-modules`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from ...protocol.errors import CheckpointError, ConfigError
from ..supervisor.console import Console
from .options import ModelOptions

ADAPTER_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
"""The files of an adapter in PEFT's format."""


class _Module(msgspec.Struct):
    """An adapter in vLLM's JSON form."""

    name: str
    path: str


def find_loras(
    options: ModelOptions, served_names: Sequence[str], console: Console
) -> dict[str, str]:
    """Return the directory of each adapter by its name.

    Raises:
        ConfigError: The options contradict each other, or there is no such adapter.
        CheckpointError: A file of an adapter is missing.
    """
    if options.enable_lora != bool(options.lora_modules):
        given = "--enable-lora" if options.enable_lora else "--lora-modules"
        missing = "--lora-modules" if options.enable_lora else "--enable-lora"
        raise ConfigError(f"{given} needs {missing}; give both or neither")
    loras: dict[str, str] = {}
    for text in options.lora_modules:
        module = _parse(text)
        if module.name in loras or module.name in served_names:
            raise ConfigError(f"--lora-modules: the name {module.name!r} is already served")
        loras[module.name] = str(_find(module.path, options, console))
    return loras


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


def _find(name: str, options: ModelOptions, console: Console) -> Path:
    path = Path(name).expanduser().absolute()
    if not path.is_dir():
        if name.count("/") != 1 or name.startswith((".", "~", "/")):
            raise ConfigError(
                f"--lora-modules: {name} is neither a directory nor ORG/NAME on the hub"
            )
        from .hub import fetch_adapter

        path = fetch_adapter(name, ADAPTER_FILES, cache_dir=options.download_dir, console=console)
    for file in ADAPTER_FILES:
        if not (path / file).is_file():
            raise CheckpointError(path, f"the LoRA adapter has no {file}; save it with PEFT")
    return path
