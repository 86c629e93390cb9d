"""Weights that replaced those with which an engine was started. Files in its run directory name them.

A process reads them when it starts, so that processes which are restarted get them too.
"""

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from ..file_identity import FileIdentity
from .model import ModelConfig

NO_UPDATE: Final = ""
"""The ID of the weights of the start."""


class WeightTransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of weights that a trainer sends.

    Attributes:
        backend: The backend of torch.distributed.
        timeout_s: Maximum seconds to wait for the trainer, when it joins and before each broadcast.
    """

    backend: Literal["gloo"]
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 300.0


class ReplacedWeights(msgspec.Struct, array_like=True, frozen=True):
    """The weights of a model after an update.

    Attributes:
        update_id: A random ID of the update; `NO_UPDATE` for the weights of the start.
        path: The checkpoint, a directory or a `.gguf` file.
        files: The identities of the files that workers read.
        version: The name that the client of the update gave to the weights.
        failure: Why they could not be loaded; "" if they could.
    """

    update_id: str
    path: str = ""
    files: tuple[FileIdentity, ...] = ()
    version: str = ""
    failure: str = ""

    def apply(self, model: ModelConfig) -> ModelConfig:
        """Return the configuration of a model with these weights."""
        if self.update_id == NO_UPDATE:
            return msgspec.structs.replace(model, weight_version=self.version)
        content = msgspec.msgpack.encode([(file.size, file.content) for file in self.files])
        return msgspec.structs.replace(
            model,
            path=self.path,
            weight_files=self.files,
            weights_id=hashlib.sha256(content).hexdigest()[:16],
            weight_version=self.version,
        )


WEIGHTS_OF_START: Final = ReplacedWeights(NO_UPDATE)


class WeightsFiles:
    """The files that name the weights of an engine.

    `previous` exists while the replicas load others: those are in `current`, and `previous` has the ones to return to.
    `failed` has the last ones that could not be loaded.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.current = Path(run_dir) / "weights"
        self.previous = self.current.with_suffix(".previous")
        self.failed = self.current.with_suffix(".failed")

    def read_current(self) -> ReplacedWeights:
        """Return the weights that replicas load when they start."""
        return _read(self.current)

    def read_previous(self) -> ReplacedWeights:
        """Return the weights to which replicas return if they cannot load the current ones."""
        return _read(self.previous)

    def read_failed(self) -> ReplacedWeights:
        """Return the last weights that could not be loaded."""
        return _read(self.failed)

    @property
    def is_updating(self) -> bool:
        """True from the start of an update until every replica has loaded the weights."""
        return self.previous.exists()

    def begin(self, weights: ReplacedWeights) -> None:
        """Let replicas load these weights when they start.

        Raises:
            OSError: A file cannot be written; nothing has changed.
        """
        if not self.is_updating:
            _write(self.previous, self.read_current())
        try:
            _write(self.current, weights)
        except OSError:
            self.end()
            raise

    def rename(self, version: str) -> None:
        """Give the current weights another name.

        Raises:
            OSError: The file cannot be written; nothing has changed.
        """
        _write(self.current, msgspec.structs.replace(self.read_current(), version=version))

    def end(self) -> None:
        """Record that every replica has loaded the current weights."""
        self.previous.unlink(missing_ok=True)

    def revert(self, failure: str) -> None:
        """Return to the previous weights, because the current ones cannot be loaded."""
        # On a full disk, clients get no reason.
        with contextlib.suppress(OSError):
            _write(self.failed, msgspec.structs.replace(self.read_current(), failure=failure))
        os.replace(self.previous, self.current)


def _read(path: Path) -> ReplacedWeights:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=ReplacedWeights)
    except FileNotFoundError:
        return WEIGHTS_OF_START


def _write(path: Path, weights: ReplacedWeights) -> None:
    scratch = path.with_name(f"{path.name}.new")
    scratch.write_bytes(msgspec.msgpack.encode(weights))
    os.replace(scratch, path)
