"""The LoRA adapters that clients may use, shared by all frontends.

The adapters are listed in a file in the run directory, so that a restarted frontend has the adapters that were added at
run time.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from ...protocol.config import EngineConfig
from ...protocol.errors import ParameterError
from ...protocol.file_identity import LoraAdapter

MAX_ADAPTERS: Final = 10_000
"""Maximum number of adapters. Only a few are loaded at a time."""

_decode = msgspec.msgpack.Decoder(list[LoraAdapter]).decode


class LoraRegistry:
    """The adapters by name. Initially these are the adapters of `--lora-modules`."""

    def __init__(self, config: EngineConfig) -> None:
        self._path = Path(config.run_dir) / "loras"
        self._loras = {adapter.name: adapter for adapter in config.model.loras}
        self._stamp: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[LoraAdapter]:
        self._refresh()
        return iter(list(self._loras.values()))

    def find(self, name: str) -> LoraAdapter | None:
        """Return the adapter of this name, or None if there is none."""
        self._refresh()
        return self._loras.get(name)

    def add(self, adapter: LoraAdapter, *, replaces: bool) -> None:
        """Add an adapter. If it `replaces` one of the same name, running requests keep the old adapter.

        Raises:
            ParameterError: The name is taken and must not be replaced, or there are too many adapters.
        """
        with self._lock():
            if adapter.name in self._loras and not replaces:
                raise ParameterError(
                    "lora_name",
                    f"{adapter.name!r} is already served; unload it first, or send load_inplace=true",
                )
            if len(self._loras) >= MAX_ADAPTERS:
                raise ParameterError(
                    "lora_name", f"cannot be added: at most {MAX_ADAPTERS} adapters are allowed"
                )
            self._write({**self._loras, adapter.name: adapter})

    def remove(self, name: str) -> bool:
        """Remove an adapter; its running requests keep it. Return False if there is no adapter of this name."""
        with self._lock():
            if name not in self._loras:
                return False
            self._write({n: adapter for n, adapter in self._loras.items() if n != name})
            return True

    def _refresh(self) -> None:
        """Read the file again if another frontend has replaced it. Otherwise this takes about a microsecond."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return
        stamp = status.st_ino, status.st_mtime_ns
        if stamp != self._stamp:
            self._loras = {each.name: each for each in _decode(self._path.read_bytes())}
            self._stamp = stamp

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with self._path.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._refresh()
            yield

    def _write(self, loras: dict[str, LoraAdapter]) -> None:
        new = self._path.with_suffix(".new")
        new.write_bytes(msgspec.msgpack.encode(list(loras.values())))
        new.replace(self._path)
        self._refresh()
