"""The worker side of the direct connector for two model workers: blocks move when the test says."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from engine.core.scheduler.scheduler import Scheduler
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.kv_transfer.direct import EARLIER, DirectCommands, DirectFetch
from engine.protocol.worker_messages import KVConnectorOutput


class Exchange:
    """The half of one worker. It checks that offered blocks keep their content until they are withdrawn.

    Attributes:
        peers: The halves of all workers by replica; None for a dead one.
        loss: The probability that a fetch fails at a block.
    """

    def __init__(
        self, kv_cache: list[list[Any]], peers: list[Exchange | None], rng: random.Random
    ) -> None:
        self._kv_cache = kv_cache
        self.peers = peers
        self._rng = rng
        self.loss = 0.0
        self.offered: dict[bytes, tuple[int, list[Any]]] = {}
        self.held: dict[str, int] = {}
        self._last_keys: dict[int, bytes] = {}
        self.ended: set[str] = set()
        self.fetched: set[str] = set()
        self._fetches: list[tuple[DirectFetch, list[tuple[bytes, int]]]] = []
        self.reports: list[KVConnectorOutput] = []
        self.num_fetched = 0

    def receive(self, metadata: bytes) -> None:
        """Do nothing: fetches begin with their step."""

    def begin_step(self, metadata: bytes) -> None:
        if not metadata:
            return
        commands = msgspec.msgpack.decode(metadata, type=DirectCommands)
        if commands.clears:
            self.offered.clear()
        for key in commands.withdrawn:
            del self.offered[key]
        for key, block in zip(
            commands.offered, int32_view(commands.offered_blocks).tolist(), strict=True
        ):
            self.offered[key] = block, list(self._kv_cache[block])
        for transfer_id, key, block in commands.last_blocks:
            self._last_keys[transfer_id] = key
            self.offered[key] = block, list(self._kv_cache[block])
        for transfer_id in commands.expired:
            self._withdraw_last(transfer_id)
        self.ended |= {*commands.ended, *(name for name, _ in commands.held)}
        self.held.update(commands.held)
        gone = set(commands.expired)
        self.held = {name: each for name, each in self.held.items() if each not in gone}
        for name in self.fetched & self.held.keys():
            self.release(name)
        for fetch in commands.fetches:
            blocks = int32_view(fetch.block_ids).tolist()
            self._fetches.append((fetch, list(zip(fetch.keys, blocks, strict=True))))

    def end_step(self) -> KVConnectorOutput | None:
        for block, content in self.offered.values():
            assert self._kv_cache[block] == content, "an offered block was overwritten"
        return None

    def release(self, name: str) -> None:
        self.fetched.add(name)
        transfer_id = self.held.pop(name, None)
        if transfer_id is not None:
            self._withdraw_last(transfer_id)
            self.reports.append(KVConnectorOutput(finished_sending=[transfer_id]))

    def _withdraw_last(self, transfer_id: int) -> None:
        self.offered.pop(self._last_keys.pop(transfer_id, b""), None)

    def move(self) -> None:
        """Move some blocks of each fetch that is under way."""
        for fetch, left in list(self._fetches):
            peer = self.peers[fetch.source.replica]
            for _ in range(self._rng.randrange(4)):
                if not left:
                    break
                key, block = left[0]
                found = peer and peer.offered.get(key)
                is_lost = self._rng.random() < self.loss
                if found is not None and not is_lost:
                    self._kv_cache[block][:] = found[1]
                    self.num_fetched += 1
                    del left[0]
                elif (
                    peer is None
                    or is_lost
                    or fetch.source.name in peer.ended
                    or fetch.source.epoch == EARLIER
                ):
                    self._end(fetch, left)
                    break
                else:
                    break
            else:
                if not left:
                    self._end(fetch, left)

    def _end(self, fetch: DirectFetch, left: list[tuple[bytes, int]]) -> None:
        self._fetches = [each for each in self._fetches if each[0] is not fetch]
        invalid = int32_bytes([block for _, block in left])
        self.reports.append(
            KVConnectorOutput(finished_recving=[fetch.transfer_id], invalid_block_ids=invalid)
        )
        if (peer := self.peers[fetch.source.replica]) is not None:
            peer.release(fetch.source.name)

    def deliver(self, scheduler: Scheduler, now: float) -> None:
        """Send the reports to the scheduler, encoded as on a socket."""
        reports, self.reports = self.reports, []
        for report in reports:
            decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=KVConnectorOutput)
            scheduler.update_from_connector(0, decoded, now)

    @property
    def is_idle(self) -> bool:
        return not (self._fetches or self.reports)
