"""The weight receiver: `python -m engine.workers.weight_transfer CONFIG`. It exits at the end of standard input."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import torch

from ...protocol.config import EngineConfig, load_config
from ...protocol.config.weights import WeightsFiles
from ...protocol.errors import CheckpointError
from ...protocol.process import configure_logging, ignore_stop_signals, name_process
from ...protocol.weights.transfer import (
    MAX_VALUES,
    SOCKET,
    STAGED,
    FinishUpdate,
    JoinGroup,
    LeaveGroup,
    ReadTensor,
    ReceiveTensors,
    StartUpdate,
    TransferCommand,
    TransferError,
    TransferReply,
)
from ..loaders.open_checkpoint import open_checkpoint
from .group import TrainerGroup
from .staging import StagedWeights


class Receiver:
    """Executes the commands of frontends one at a time."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._run_dir = Path(config.run_dir)
        self._weights = WeightsFiles(config.run_dir)
        settings = config.frontend.weight_transfer_config
        assert settings is not None
        self._timeout_s = settings.timeout_s
        self._group: TrainerGroup | None = None
        self._chunk_bytes = 0
        self._staged: StagedWeights | None = None
        self._announced: ReceiveTensors | None = None

    def serve(self) -> None:
        """Execute commands forever."""
        decoder = msgspec.msgpack.Decoder(TransferCommand)
        path = self._run_dir / SOCKET
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            while True:
                client, _ = listener.accept()
                with client, contextlib.suppress(OSError), client.makefile("rb") as file:
                    try:
                        reply = self._execute(decoder.decode(file.read()))
                    except (TransferError, CheckpointError) as error:
                        reply = TransferReply(str(error), getattr(error, "param", ""))
                    except msgspec.DecodeError:
                        continue
                    client.sendall(msgspec.msgpack.encode(reply))

    def _execute(self, command: TransferCommand) -> TransferReply:
        match command:
            case JoinGroup():
                self._leave()
                num_ranks = self._config.parallel.num_workers
                self._group = TrainerGroup(command, num_ranks, self._timeout_s)
                self._chunk_bytes = command.chunk_bytes
            case LeaveGroup():
                self._leave()
            case StartUpdate():
                self._drop()
                self._staged = StagedWeights(self._run_dir, self._current)
            case ReceiveTensors():
                self._receive(command)
            case FinishUpdate():
                if self._staged is None:
                    raise TransferError("no update was started")
                staged, path = self._staged, self._staged.finish()
                self._staged = None
                return TransferReply(path=str(path), version=staged.version)
            case ReadTensor():
                return TransferReply(values=self._read(command))
        return TransferReply()

    @property
    def _current(self) -> Path:
        return Path(self._weights.read_current().path or self._config.model.path)

    def _receive(self, command: ReceiveTensors) -> None:
        if self._group is None:
            raise TransferError("no trainer has joined, or its group has failed")
        if self._staged is None:
            raise TransferError("no update was started")
        if not command.names:
            command = self._announced or command
        try:
            self._staged.receive(self._group, command, self._chunk_bytes)
        except TransferError:
            # The trainer may be sending and would wait; the end of the group ends that.
            self._leave()
            raise
        self._announced = command

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = self._announced = None
        self._drop()

    def _drop(self) -> None:
        """Delete received tensors that no replica may load any more."""
        self._staged = None
        used = {self._current.name, Path(self._weights.read_previous().path).name}
        for path in self._run_dir.glob(f"{STAGED}*"):
            if path.name not in used:
                shutil.rmtree(path, ignore_errors=True)

    def _read(self, command: ReadTensor) -> Any:
        checkpoint = open_checkpoint(self._current)
        if command.name not in checkpoint.names():
            raise TransferError(
                f"there is no tensor {command.name!r} in {self._current.name}", "name"
            )
        if checkpoint.quantized(command.name) is not None:
            raise TransferError(f"{command.name!r} is quantized", "name")
        rows = checkpoint.tensor(command.name, torch.float32)[: command.num_rows]
        if rows.numel() > MAX_VALUES:
            raise TransferError(
                f"these rows have {rows.numel()} values, more than {MAX_VALUES}", "truncate_size"
            )
        return rows.tolist()


def _exit_at_end_of_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def main(config_path: str) -> None:
    """Serve until the frontend that started this process exits."""
    config = load_config(config_path)
    name_process("weight receiver")
    configure_logging("weight receiver", config.frontend.log_level, config.frontend.log_format)
    ignore_stop_signals()
    threading.Thread(target=_exit_at_end_of_input, daemon=True).start()
    Receiver(config).serve()


if __name__ == "__main__":
    main(sys.argv[1])
