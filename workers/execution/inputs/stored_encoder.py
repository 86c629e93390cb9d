"""Keep the outputs of an encoder in a directory, which servers share and which survives restarts."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import torch

from ....protocol.checkpoint.content_hash import hash_content
from ....protocol.config import EngineConfig, LoadFormat
from ....protocol.config.audio.tower import CausalSpec
from ....protocol.errors import ConfigError
from ...cpu.library import LIBRARY_PATH, instruction_set
from ...kv_transfer.disk.directory import SEALED_SUFFIX, SharedDirectory
from ...layers.spec import ModelSpec
from ...models.encoder import Encoder

logger = logging.getLogger(__name__)

GIB: Final = 1 << 30

NUMERICS_VERSION: Final = 1
"""Version of the numerics of encoders in torch; increase it whenever the outputs for the same input change."""

_DTYPES: Final = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


class _Head(msgspec.Struct, array_like=True):
    """The beginning of a file: shape of the outputs, the CRC-32 of their bytes, which follow, and the dtype.

    The text is last, because zeros fill the rest of the beginning, and a number may end in one.
    """

    num_rows: int
    size: int
    checksum: int
    dtype: str


_HEAD_BYTES: Final = 64
_decode = msgspec.msgpack.Decoder(_Head).decode


class StoredEncoder:
    """An encoder that reads outputs from a directory if they are there, and otherwise computes and writes them.

    A file that is damaged is deleted, and its outputs are computed. After an error of the file system, the directory is
    not used any more.

    Raises:
        ConfigError: The directory cannot be used.
    """

    def __init__(
        self,
        encoder: Encoder,
        root: str,
        limit_bytes: int,
        fingerprint: bytes,
        device: torch.device,
    ) -> None:
        self._encoder = encoder
        self._root = root
        self._device = device
        self._is_off = False
        try:
            self._directory = SharedDirectory(Path(root), limit_bytes)
            self._path = self._directory.fingerprint_directory(fingerprint)
        except OSError as error:
            raise ConfigError(f"--encoder-disk {root}: {error.strerror}") from error

    def encode(self, data: bytes) -> torch.Tensor:
        """Return the outputs [rows, D] for the data of one input."""
        if self._is_off:
            return self._encoder.encode(data)
        path = self._path / (hashlib.sha256(data).hexdigest() + SEALED_SUFFIX)
        found = None
        with self._turning_off():
            found = self._read(path)
        if found is not None:
            return found
        outputs = self._encoder.encode(data)
        with self._turning_off():
            self._write(path, outputs)
        return outputs

    def warm_up(self) -> None:
        """Encode a dummy input, because kernels are prepared on first use."""
        self._encoder.warm_up()

    @contextlib.contextmanager
    def _turning_off(self) -> Iterator[None]:
        """Stop to use the directory after an error of the file system."""
        try:
            yield
        except OSError as error:
            self._is_off = True
            logger.warning(
                "outputs of the encoder are no longer kept in %s: %s", self._root, error.strerror
            )

    def _read(self, path: Path) -> torch.Tensor | None:
        try:
            content = bytearray(path.read_bytes())
        except FileNotFoundError:
            return None
        outputs = _unpack(content)
        if outputs is None:
            path.unlink(missing_ok=True)
            return None
        # The least recently used files are deleted first.
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
        return outputs.to(self._device)

    def _write(self, path: Path, outputs: torch.Tensor) -> None:
        content = _pack(outputs)
        with self._directory.making_room(len(content)) as has_room:
            if not has_room:
                return
            # Readers see the whole file, or none.
            with tempfile.NamedTemporaryFile(dir=self._path, delete=False) as file:
                try:
                    file.write(content)
                    file.flush()
                    os.replace(file.name, path)
                except OSError:
                    os.unlink(file.name)
                    raise


def _pack(outputs: torch.Tensor) -> bytes:
    data = outputs.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    rows, size = outputs.shape
    head = _Head(rows, size, zlib.crc32(data), str(outputs.dtype))
    return msgspec.msgpack.encode(head).ljust(_HEAD_BYTES, b"\0") + data


def _unpack(content: bytearray) -> torch.Tensor | None:
    """Return the outputs in a file's content, or None if it is damaged."""
    data = memoryview(content)[_HEAD_BYTES:]
    try:
        head = _decode(bytes(content[:_HEAD_BYTES]).rstrip(b"\0"))
    except msgspec.MsgspecError:
        return None
    dtype = _DTYPES.get(head.dtype)
    if dtype is None or len(data) != head.num_rows * head.size * dtype.itemsize:
        return None
    if not len(data) or zlib.crc32(data) != head.checksum:
        return None
    return torch.frombuffer(data, dtype=dtype).view(head.num_rows, head.size)


def store_outputs(
    config: EngineConfig,
    encoder: Encoder,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
) -> Encoder:
    """Return an encoder whose outputs are kept in the configured directory; the encoder itself without one.

    Raises:
        ConfigError: The directory cannot be used.
    """
    root = config.cache.encoder_disk_path
    if root is None or isinstance(spec.audio_encoder, CausalSpec):
        # The parts of a growing clip are encoded one after another, and depend on those before.
        return encoder
    limit = int(config.cache.encoder_disk_gib * GIB)
    return StoredEncoder(encoder, root, limit, _fingerprint(config, spec, device, dtype), device)


def _fingerprint(
    config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> bytes:
    """Return a hash of all that determines the outputs for an input, 32 bytes."""
    model = config.model
    mmproj = Path(model.mmproj) if model.mmproj else None
    beside = [] if mmproj is None else [mmproj] if mmproj.is_file() else sorted(mmproj.glob("*"))
    facts = (
        NUMERICS_VERSION,
        [file.content for file in model.weight_files],
        [hash_content(file) for file in beside if file.is_file()],
        model.seed if model.load_format is LoadFormat.DUMMY else None,
        model.quantization,
        repr(spec),
        str(dtype),
        str(torch.__version__),
        "cpu" if device.type == "cpu" else torch.cuda.get_device_name(),
        (config.device.cpu_backend.value, instruction_set(), hash_content(LIBRARY_PATH)),
    )
    return hashlib.sha256(b"engine.encoder.v1" + msgspec.msgpack.encode(facts)).digest()
