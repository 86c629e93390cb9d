"""The LoRA adapters that clients may use, shared by all frontends.

The adapters are listed in a file in the run directory, so that a restarted frontend has the adapters that were added at
run time.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from ...protocol.config import EngineConfig
from ...protocol.errors import ParameterError
from ...protocol.file_identity import LoraAdapter

MAX_ADAPTERS: Final = 10_000
"""Maximum number of adapters. Only a few are loaded at a time."""


MAX_SCALE: Final = 1000.0
"""Maximum absolute scale of an adapter. Much larger ones overflow, so that outputs are NaN."""


class LoraScale(msgspec.Struct):
    """The scale of an adapter, as in llama.cpp's API. `id` is its position among all adapters."""

    id: int
    scale: float


class _File(msgspec.Struct, array_like=True):
    """The adapters, and the scales of those that apply to requests for the base model, by name."""

    loras: list[LoraAdapter]
    scales: dict[str, float]


_decode = msgspec.msgpack.Decoder(_File).decode


class LoraRegistry:
    """The adapters by name, which clients choose. Initially these are the adapters of flags and of the checkpoint."""

    def __init__(self, config: EngineConfig) -> None:
        self._path = Path(config.run_dir) / "loras"
        self._loras = {adapter.name: adapter for adapter in config.model.loras}
        default = config.model.default_lora
        self._scales: dict[str, float] = {} if default is None else {default.name: default.scale}
        self._served_names = config.model.served_names
        self._may_change = config.model.enable_lora
        self._stamp: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[LoraAdapter]:
        self._refresh()
        return iter(list(self._loras.values()))

    def find(self, name: str) -> LoraAdapter | None:
        """Return the adapter of this name, or None if there is none.

        As in SGLang, the name may be that of the model, a colon and that of the adapter.
        """
        self._refresh()
        found = self._loras.get(name)
        for model in self._served_names if found is None and ":" in name else ():
            if name.startswith(f"{model}:"):
                found = self._loras.get(name[len(model) + 1 :].strip())
        return found

    @property
    def default(self) -> LoraAdapter | None:
        """The adapter that applies to requests for the base model, if there is one."""
        self._refresh()
        return self._scaled(self._scales)

    @property
    def scales(self) -> list[tuple[LoraAdapter, float]]:
        """Each adapter, with its scale for requests for the base model.

        Unless `set_scales` changed it, it is 1 for the default adapter and 0 for all others.
        """
        self._refresh()
        return [(adapter, self._scales.get(name, 0.0)) for name, adapter in self._loras.items()]

    def find_scaled(self, scales: Sequence[LoraScale], param: str) -> LoraAdapter | None:
        """Return the adapter whose scale is not 0, with that scale; None if all are 0.

        Raises:
            ParameterError: An id or a scale is invalid, or more than one scale is not 0.
        """
        self._refresh()
        return self._scaled(self._by_name(scales, param))

    def set_scales(self, scales: Sequence[LoraScale], param: str) -> None:
        """Apply an adapter to all later requests for the base model.

        Raises:
            ParameterError: An id or a scale is invalid, or more than one scale is not 0.
        """
        with self._lock():
            self._write(self._loras, self._by_name(scales, param))

    def _scaled(self, scales: dict[str, float]) -> LoraAdapter | None:
        for name, scale in scales.items():
            return self._loras[name].with_scale(scale)
        return None

    def _by_name(self, scales: Sequence[LoraScale], param: str) -> dict[str, float]:
        """Return the only scale that is not 0, by the name of its adapter."""
        adapters = list(self._loras)
        found: dict[str, float] = {}
        for i, each in enumerate(scales):
            if not 0 <= each.id < len(adapters):
                raise ParameterError(
                    f"{param}[{i}].id",
                    f"must be below {len(adapters)}, the number of adapters, got {each.id}",
                )
            if not abs(each.scale) <= MAX_SCALE:
                raise ParameterError(
                    f"{param}[{i}].scale",
                    f"must be between {-MAX_SCALE:g} and {MAX_SCALE:g}, got {each.scale:g}",
                )
            found[adapters[each.id]] = each.scale
        found = {name: scale for name, scale in found.items() if scale}
        if len(found) > 1:
            raise ParameterError(
                param,
                f"may have one scale other than 0, got {len(found)}; merge the adapters into one",
            )
        return found

    def add(self, adapter: LoraAdapter, *, replaces: bool) -> None:
        """Add an adapter. If it `replaces` one of the same name, running requests keep the old adapter.

        Raises:
            ParameterError: The name is taken and must not be replaced, or there are too many adapters.
        """
        with self._lock():
            if adapter.name in self._loras and not replaces:
                raise ParameterError(
                    "lora_name",
                    f"{adapter.name!r} has already been loaded; unload it first, or send load_inplace=true",
                )
            if len(self._loras) >= MAX_ADAPTERS:
                raise ParameterError(
                    "lora_name", f"cannot be added: at most {MAX_ADAPTERS} adapters are allowed"
                )
            self._write({**self._loras, adapter.name: adapter}, self._scales)

    def remove(self, name: str) -> bool:
        """Remove an adapter; its running requests keep it. Return False if there is no adapter of this name."""
        with self._lock():
            if name not in self._loras:
                return False
            others = {n: adapter for n, adapter in self._loras.items() if n != name}
            self._write(others, {n: scale for n, scale in self._scales.items() if n != name})
            return True

    def _refresh(self) -> None:
        """Read the file again if another frontend has replaced it."""
        if not self._may_change:
            return
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return
        stamp = status.st_ino, status.st_mtime_ns
        if stamp != self._stamp:
            file = _decode(self._path.read_bytes())
            self._loras = {each.name: each for each in file.loras}
            self._scales = file.scales
            self._stamp = stamp

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with self._path.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._refresh()
            yield

    def _write(self, loras: dict[str, LoraAdapter], scales: dict[str, float]) -> None:
        new = self._path.with_suffix(".new")
        new.write_bytes(msgspec.msgpack.encode(_File(list(loras.values()), scales)))
        new.replace(self._path)
        self._refresh()
