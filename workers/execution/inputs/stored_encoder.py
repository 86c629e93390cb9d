"""Keep the outputs of an encoder in a directory, which servers share and which survives restarts."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import torch

from ....protocol.checkpoint.content_hash import hash_content
from ....protocol.config import EngineConfig, LoadFormat
from ....protocol.config.audio.bases import AddedSpec
from ....protocol.errors import ConfigError
from ...cpu.library import LIBRARY_PATH, instruction_set
from ...kv_transfer.fingerprint import hash_config_files
from ...layers.spec import ModelSpec
from ...models.encoder import Encoder
from .output_files import OutputFiles

logger = logging.getLogger(__name__)

GIB: Final = 1 << 30

NUMERICS_VERSION: Final = 1
"""Version of the numerics of encoders in torch; increase it whenever the outputs for the same input change."""

NUM_READERS: Final = 4

MAX_READS: Final = 8
"""Maximum number of reads in progress, and of outputs that were read and are not needed yet."""

MIN_WAIT_S: Final = 0.25
"""Seconds to wait for a file at least. The maximum is the time that the encoder took for the previous input."""

WRITTEN_BYTES: Final = 64 << 20
"""Maximum size of the outputs that wait to be written. While more would wait, new outputs are not stored."""

CLOSE_S: Final = 5.0
"""Seconds that the worker, when it exits, waits for outputs to be written."""

_NICENESS: Final = 10


class _Read:
    """A read in progress. When `ended` is set, `outputs` are those of the file, or None without one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ended = threading.Event()
        self.outputs: torch.Tensor | None = None


class _Write:
    """Outputs that wait to be written. On a GPU, they are complete after `event`."""

    def __init__(self, name: str, outputs: torch.Tensor) -> None:
        self.name, self.outputs = name, outputs
        self.event: torch.cuda.Event | None = None
        if outputs.is_cuda:
            self.event = torch.cuda.Event()
            self.event.record()


class StoredEncoder:
    """An encoder that reads outputs from a directory if they are there, and otherwise computes and writes them.

    Threads read and write the files. A step waits for a file for at most as long as the encoder takes. While a file is
    late, steps wait for no other file. After an error of the file system, the directory is not used any more.

    Args:
        min_wait_s: Seconds to wait for a file even if the encoder takes less time.

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
        *,
        min_wait_s: float = MIN_WAIT_S,
    ) -> None:
        self._encoder = encoder
        self._root = root
        self._device = device
        self._min_wait_s = min_wait_s
        self._encoder_s = 0.0
        self._is_off = False
        self._mutex = threading.Lock()
        """Lock for `_is_off`, `_in_progress`, `_unwritten` and `_unwritten_bytes`."""
        try:
            self._files = OutputFiles(Path(root), limit_bytes, fingerprint)
        except OSError as error:
            raise ConfigError(f"--encoder-disk {root}: {error.strerror}") from error
        self._reads: dict[str, _Read] = {}
        """Reads whose outputs are not needed yet."""
        self._late: list[_Read] = []
        """Reads that took longer than a step waits."""
        self._in_progress = 0
        self._to_read: queue.SimpleQueue[_Read] = queue.SimpleQueue()
        self._unwritten: dict[str, torch.Tensor] = {}
        self._unwritten_bytes = 0
        self._to_write: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="encoder writer", daemon=True)
        self._writer.start()
        for _ in range(NUM_READERS):
            threading.Thread(target=self._read, name="encoder reader", daemon=True).start()

    # Called by the worker's main thread

    def expect(self, content_hash: bytes) -> None:
        """Start to read the outputs of an input that will soon be encoded."""
        name = content_hash.hex()
        if name in self._reads or name in self._unwritten or self._is_slow():
            return
        with self._mutex:
            if self._is_off or self._in_progress >= MAX_READS:
                return
            self._in_progress += 1
        if len(self._reads) >= MAX_READS:
            del self._reads[next(iter(self._reads))]
        self._reads[name] = read = _Read(name)
        self._to_read.put(read)

    def encode(self, data: bytes, content_hash: bytes = b"") -> torch.Tensor:
        """Return the outputs [rows, D] for the data of one input. Without its hash they are not kept."""
        if not content_hash:
            return self._encoder.encode(data)
        name = content_hash.hex()
        with self._mutex:
            unwritten = self._unwritten.get(name)
        if unwritten is not None:
            return unwritten
        self.expect(content_hash)
        found = self._await(self._reads.pop(name, None))
        if found is not None:
            return found.to(self._device)
        start = time.monotonic()
        outputs = self._encoder.encode(data)
        self._encoder_s = time.monotonic() - start
        self._store(name, outputs)
        return outputs

    def _is_slow(self) -> bool:
        """Return whether a read is in progress that was late."""
        self._late = [read for read in self._late if not read.ended.is_set()]
        return bool(self._late)

    def _await(self, read: _Read | None) -> torch.Tensor | None:
        if read is None:
            return None
        wait_s = 0.0 if self._is_slow() else max(self._encoder_s, self._min_wait_s)
        if not read.ended.wait(wait_s):
            self._late.append(read)
            return None
        return read.outputs

    def _store(self, name: str, outputs: torch.Tensor) -> None:
        """Queue outputs for writing, unless too many wait."""
        size = outputs.nbytes
        with self._mutex:
            if self._is_off or self._unwritten_bytes + size > WRITTEN_BYTES:
                return
            self._unwritten[name] = outputs
            self._unwritten_bytes += size
        self._to_write.put(_Write(name, outputs))

    def warm_up(self) -> None:
        """Encode a dummy input, because kernels are prepared on first use."""
        self._encoder.warm_up()

    def close(self) -> None:
        """Write waiting outputs for at most a few seconds."""
        self._to_write.put(None)
        self._writer.join(CLOSE_S)

    # The threads

    def _read(self) -> None:
        while True:
            read = self._to_read.get()
            with self._turning_off():
                read.outputs = self._files.read(read.name)
            with self._mutex:
                self._in_progress -= 1
            read.ended.set()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (write := self._to_write.get()) is not None:
            if write.event is not None:
                write.event.synchronize()
            with self._turning_off():
                if not self._is_off:
                    self._files.write(write.name, write.outputs)
            with self._mutex:
                del self._unwritten[write.name]
                self._unwritten_bytes -= write.outputs.nbytes

    @contextlib.contextmanager
    def _turning_off(self) -> Iterator[None]:
        """Stop to use the directory after an error of the file system."""
        try:
            yield
        except OSError as error:
            with self._mutex:
                was_off, self._is_off = self._is_off, True
            if not was_off:
                logger.warning(
                    "outputs of the encoder are no longer kept in %s: %s",
                    self._root,
                    error.strerror,
                )


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
    if root is None or isinstance(spec.audio_encoder, AddedSpec):
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
        hash_config_files(model),
        str(dtype),
        str(torch.__version__),
        "cpu" if device.type == "cpu" else torch.cuda.get_device_name(),
        (config.device.cpu_backend.value, instruction_set(), hash_content(LIBRARY_PATH)),
    )
    return hashlib.sha256(b"engine.encoder.v1" + msgspec.msgpack.encode(facts)).digest()
