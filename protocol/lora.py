"""The identity of a LoRA adapter, which travels with every request that uses it."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from .errors import CheckpointError

ADAPTER_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
"""The files of an adapter in PEFT's format."""

_CHUNK_BYTES: Final = 1 << 20


class LoraAdapter(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The files of a LoRA adapter, and the name that clients use.

    `path` is their directory and `version` the hash of their content, 32 bytes. A name may be given another version
    later; requests keep the one that they started with.
    """

    name: str
    path: str
    version: bytes

    @classmethod
    def read(cls, name: str, path: Path) -> LoraAdapter:
        """Return the adapter in a directory, whose files are read whole.

        Raises:
            CheckpointError: A file is missing or cannot be read.
        """
        return cls(name, str(path), _hash_files(path))

    def verify(self) -> None:
        """Check that the files are unchanged.

        Raises:
            CheckpointError: They are missing, or have changed.
        """
        if _hash_files(Path(self.path)) != self.version:
            raise CheckpointError(
                self.path,
                f"the files of the LoRA adapter {self.name!r} changed after it was added; restore them, or add it again",
            )


def _hash_files(directory: Path) -> bytes:
    digest = sha256(b"engine.lora.v1")
    for name in ADAPTER_FILES:
        path = directory / name
        try:
            with path.open("rb") as file:
                digest.update(path.stat().st_size.to_bytes(8, "little"))
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
        except FileNotFoundError:
            raise CheckpointError(
                directory, f"the LoRA adapter has no {name}; save it with PEFT"
            ) from None
        except OSError as error:
            raise CheckpointError(path, f"cannot be read: {error.strerror}") from None
    return digest.digest()
