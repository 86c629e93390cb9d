"""The process that receives weights from a trainer, as frontends see it."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Final

import msgspec

from ....protocol.config import CONFIG_FILE, EngineConfig
from ....protocol.weights.transfer import SOCKET, TransferCommand, TransferError, TransferReply

START_S: Final = 60.0
"""Maximum seconds until a new process listens."""
POLL_S: Final = 0.05
MARGIN_S: Final = 30.0
"""Seconds beyond the trainer's timeout after which a process that has not replied is killed."""


class WeightReceiver:
    """Starts the process and sends commands to it, or to the process that another frontend has started.

    The process ends with the frontend that started it. The served weights do not depend on it.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._path = str(Path(config.run_dir, SOCKET))
        self._process: Process | None = None

    async def execute(self, command: TransferCommand, *, starts: bool = False) -> TransferReply:
        """Execute a command. With `starts`, start the process if there is none.

        Raises:
            TransferError: The command failed, or there is no process.
        """
        settings = self._config.frontend.weight_transfer_config
        assert settings is not None
        try:
            reader, writer = await (self._connect_or_start() if starts else self._connect())
        except OSError:
            raise TransferError("no trainer has joined") from None
        try:
            async with asyncio.timeout(2 * settings.timeout_s + MARGIN_S):
                writer.write(msgspec.msgpack.encode(command))
                writer.write_eof()
                data = await reader.read()
            reply = msgspec.msgpack.decode(data, type=TransferReply)
        except (OSError, TimeoutError, msgspec.DecodeError):
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
            raise TransferError(
                "the process that receives weights has failed; join again"
            ) from None
        finally:
            writer.close()
        if reply.problem:
            raise TransferError(reply.problem, reply.param)
        return reply

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self._path)

    async def _connect_or_start(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await self._connect()
        except OSError:
            pass
        package = __package__.partition(".frontend")[0]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"{package}.workers.weight_transfer",
            str(Path(self._config.run_dir, CONFIG_FILE)),
            stdin=PIPE,
        )
        async with asyncio.timeout(START_S):
            while self._process.returncode is None:
                await asyncio.sleep(POLL_S)
                try:
                    return await self._connect()
                except OSError:
                    continue
        raise ConnectionRefusedError
