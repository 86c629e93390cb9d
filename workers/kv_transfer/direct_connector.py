"""The worker side of the direct KV connector: a thread that sends blocks to other replicas and fetches theirs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import zmq

from ...protocol.arrays import int32_bytes, int32_view
from ...protocol.cluster_key import ClusterKey, admit_clients, cluster_key_of
from ...protocol.errors import ConfigError
from ...protocol.kv_transfer.direct import (
    DIRECT_CONNECTOR,
    NIXL,
    SOCKETS,
    DirectCommands,
    DirectFetch,
    DirectReport,
    DirectSource,
    PullSettings,
)
from ...protocol.worker_messages import KVConnectorOutput
from ..device.waking_queue import WakingQueue
from .block_client import BlockClient, JointTransfer, Transfer
from .block_format import BlockFormat
from .block_regions import PeerRank
from .block_server import BlockServer
from .connector import ConnectorContext, KVConnector, register_connector
from .offered_blocks import OfferedBlocks

if TYPE_CHECKING:
    from .block_memory import BlockMemory, Fence
    from .nixl_staging import NixlStaging

logger = logging.getLogger(__name__)

PATIENCE_S: Final = 60.0
"""Default of `fetch_timeout_s`: seconds without a block after which a fetch fails."""

READ_TICK_MS: Final = 1
"""Milliseconds between two looks at blocks that NIXL moves."""

TICK_MS: Final = 200
"""Milliseconds between two checks for fetches that make no progress."""

CLOSE_S: Final = 2.0

_MESSAGES_AT_ONCE: Final = 16


class DirectConnector(KVConnector):
    """Offers blocks on a socket in the engine's private directory and, if `kv_port` is set, to other engines.

    Other engines must have the same cluster key, by which the connection is encrypted.

    Raises:
        ConfigError: A socket cannot be bound, or there is no key for other engines.
    """

    def __init__(self, context: ConnectorContext) -> None:
        self._config, self._rank = context.config, context.rank
        self._memory: BlockMemory = context.memory
        transfer = context.transfer
        self._reports: WakingQueue[KVConnectorOutput] = WakingQueue()
        self._decode = msgspec.msgpack.Decoder(DirectCommands).decode
        self._offered = OfferedBlocks(self._memory)
        self._writes = threading.Lock()
        """Lock that is held while a block of the current generation is written, or a report is made."""
        self._generation = 0
        self._fetches: list[DirectFetch] = []
        self._last_keys: dict[int, bytes] = {}
        """The key of the last, incomplete block of each request that is held, by transfer id."""
        self._num_bytes_received = self._num_errors = 0
        self._num_bytes_reported = 0
        self._actions: WakingQueue[Callable[[], None]] = WakingQueue()
        self._is_closing = False
        self._key: ClusterKey | None = cluster_key_of(context.config)
        if transfer.kv_port and self._key is None:
            raise ConfigError(
                f"kv_port {transfer.kv_port} needs --cluster-key FILE, the same for all engines; create the "
                "file with engine keygen"
            )
        self._context: zmq.Context[Any] = zmq.Context()
        extra = transfer.kv_connector_extra_config
        self.staging = self._create_staging(extra)
        """The memory through which NIXL moves blocks; None if sockets do it."""
        self._regions = context.regions
        format = BlockFormat(
            self._memory, context.fingerprint, self._config.cache.block_size, context.regions
        )
        self._server = BlockServer(self._offered, format, self.staging)
        self._listen(context)
        patience_s = extra.get("fetch_timeout_s", PATIENCE_S)
        if not isinstance(patience_s, int | float):
            raise ConfigError(f"fetch_timeout_s must be a number of seconds, got {patience_s!r}")
        self._client = BlockClient(
            self._context,
            format,
            self._secure,
            self._write,
            self._end,
            float(patience_s),
            self.staging,
        )
        self._thread = threading.Thread(target=self._run, name="KV exchange", daemon=True)
        self._thread.start()

    def _create_staging(self, extra: Mapping[str, object]) -> NixlStaging | None:
        """Return the memory through which NIXL moves blocks; None if sockets do it."""
        transport = extra.get("transport", SOCKETS)
        if transport == SOCKETS:
            return None
        backends = extra.get("backends", ["UCX"])
        if transport != NIXL or not isinstance(backends, list):
            raise ConfigError(
                f"transport must be {SOCKETS!r} or {NIXL!r}, and backends a list of names; got "
                f"{transport!r} and {backends!r}"
            )
        # Imports a package that is not always installed.
        from .nixl_staging import NixlStaging

        return NixlStaging(self._memory.block_bytes, [str(each) for each in backends])

    def _listen(self, context: ConnectorContext) -> None:
        transfer = context.transfer
        addresses = [self._config.kv_address(context.core_index, context.rank)]
        pull = msgspec.convert(transfer.kv_connector_extra_config, PullSettings)
        offers = transfer.kv_role != "kv_consumer" or pull.bidirectional_kv_xfer
        if self._key is not None and transfer.kv_port and offers:
            admit_clients(self._context, self._key)
            number = context.core_index * self._config.parallel.workers_per_core + context.rank
            host = f"[{transfer.kv_ip}]" if ":" in transfer.kv_ip else transfer.kv_ip
            addresses.append(f"tcp://{host}:{transfer.kv_port + number}")
        for address in addresses:
            listener = self._server.listen(self._context, address)
            if address.startswith("tcp") and self._key is not None:
                self._key.secure_server(listener)
            try:
                listener.bind(address)
            except zmq.ZMQError as error:
                raise ConfigError(f"cannot listen on {address}: {error.strerror}") from None

    def _secure(self, dealer: zmq.Socket[bytes], address: str) -> None:
        if self._key is not None and address.startswith("tcp"):
            self._key.secure_client(dealer)

    # Called by the worker's main thread

    @property
    def fd(self) -> int:
        """A file descriptor that is readable while there are reports."""
        return self._reports.fd

    def begin_step(self, metadata: bytes) -> None:
        """Apply the changes of offered blocks."""
        if not metadata:
            return
        commands = self._decode(metadata)
        if commands.clears:
            self._offered.clear()
        if commands.withdrawn:
            self._offered.withdraw(commands.withdrawn)
        if commands.offered:
            self._offered.offer(commands.offered, int32_view(commands.offered_blocks).tolist())
        if commands.last_blocks:
            self._last_keys.update({each: key for each, key, _ in commands.last_blocks})
            _, keys, blocks = zip(*commands.last_blocks, strict=True)
            self._offered.offer(keys, blocks)
        self._withdraw_last(commands.expired)
        if commands.offered or commands.ended or commands.held or commands.expired:
            self._actions.put(lambda: self._apply(commands))
        self._fetches = commands.fetches

    def _withdraw_last(self, transfer_ids: Sequence[int]) -> None:
        """Withdraw the last, incomplete blocks of requests that are no longer held."""
        keys = [self._last_keys.pop(each) for each in transfer_ids if each in self._last_keys]
        if keys:
            self._offered.withdraw(keys)

    def start_loads(self) -> None:
        """Start to fetch blocks."""
        fetches, self._fetches = self._fetches, []
        if fetches:
            fence, generation = self._memory.fence(), self._generation
            for fetch in fetches:
                self._actions.put(partial(self._fetch, fetch, generation, fence))

    def take_reports(self) -> list[KVConnectorOutput]:
        """Return the reports since the last call."""
        return list(self._reports.take())

    def reset(self) -> None:
        """Discard all transfers, and withdraw all blocks."""
        with self._writes:
            self._generation += 1
            self._reports.clear()
        self._offered.clear()
        self._last_keys.clear()
        self._actions.put(partial(self._server.reset, self.epoch))
        self._actions.put(self._client.reset)

    def close(self) -> None:
        """Stop the thread."""
        self._is_closing = True
        self._actions.put(lambda: None)
        self._thread.join(CLOSE_S)

    # The connector's thread

    def _run(self) -> None:
        while not self._is_closing:
            poller = zmq.Poller()
            poller.register(self._actions.fd, zmq.POLLIN)
            for each in (*self._server.sockets, *self._client.sockets):
                poller.register(each, zmq.POLLIN)
            ready = [each for each, _ in poller.poll(self._patience_ms())]
            try:
                self._handle(ready)
            except Exception:
                logger.exception("exchanging KV-cache blocks failed")
                self._client.fail_all()
        self._client.close()
        if self.staging is not None:
            self.staging.close()
        for each in self._server.sockets:
            each.close()
        self._context.destroy(linger=0)

    def _patience_ms(self) -> int | None:
        """Return the milliseconds after which there may be something to do without a message; None for never."""
        if self.staging is not None and self.staging.is_active:
            return READ_TICK_MS
        return TICK_MS if self._client.is_busy or self._server.has_waiting else None

    def _handle(self, ready: list[Any]) -> None:
        for action in self._actions.take():
            action()
        sent: list[int] = []
        for each in ready:
            if each in self._server.sockets:
                for _ in range(_MESSAGES_AT_ONCE):
                    sent += self._server.receive(each)
                    if not each.get(zmq.EVENTS) & zmq.POLLIN:
                        break
            elif not isinstance(each, int):
                self._client.receive(each)
        if self.staging is not None and self.staging.is_active:
            self.staging.progress()
        self._report_sent(sent)
        self._client.give_up_late()
        self._server.give_up_unknown()

    def _apply(self, commands: DirectCommands) -> None:
        self._server.add_offered([*commands.offered, *(key for _, key, _ in commands.last_blocks)])
        sent = self._server.hold_requests(commands.held)
        self._server.end_requests([*commands.ended, *(name for name, _ in commands.held)])
        self._server.expire(commands.expired)
        self._report_sent(sent)

    def _report_sent(self, transfer_ids: list[int]) -> None:
        if transfer_ids:
            self._withdraw_last(transfer_ids)
            with self._writes:
                self._put(KVConnectorOutput(finished_sending=transfer_ids))

    def _fetch(self, fetch: DirectFetch, generation: int, fence: Fence) -> None:
        size = fetch.source.tp_size
        if size in (0, self._config.parallel.tensor_parallel_size):
            transfer = Transfer(fetch, generation, fence)
            self._start(transfer, self._address_of(fetch.source, self._rank))
            return
        stage = self._rank // self._config.parallel.tensor_parallel_size
        joint = JointTransfer(size)
        if fetch.keys:
            with self._writes:
                if generation == self._generation:
                    self._memory.clear(int32_view(fetch.block_ids).tolist(), fence)
        for rank in range(size):
            source = PeerRank(rank, size)
            part = fetch
            if self._regions is None or not self._regions.has_part_of(source):
                # The source waits until all ranks have ended their fetches.
                part = DirectFetch(fetch.transfer_id, fetch.source, [], b"")
            transfer = Transfer(part, generation, fence, source, joint)
            self._start(transfer, self._address_of(fetch.source, stage * size + rank))

    def _start(self, transfer: Transfer, address: str | None) -> None:
        try:
            if address is not None:
                self._client.fetch(address, transfer)
                return
        except zmq.ZMQError as error:
            logger.warning("cannot fetch blocks from %s: %s", address, error.strerror)
        self._end(transfer)

    def _address_of(self, source: DirectSource, rank: int) -> str | None:
        """Return the address of the worker `rank` at a source, or None if it cannot have one."""
        parallel = self._config.parallel
        if source.replica >= 0:
            if source.replica >= parallel.data_parallel_size:
                return None
            return self._config.kv_address(source.replica, rank)
        if self._key is None:
            return None
        host = f"[{source.host}]" if ":" in source.host else source.host
        return f"tcp://{host}:{source.port + rank}"

    def _write(self, transfer: Transfer, position: int, data: memoryview) -> None:
        """Write a received block, unless another core has taken over since its fetch began."""
        key, block = transfer.keys[position], transfer.missing[position]
        with self._writes:
            if transfer.generation != self._generation:
                return
            source, regions = transfer.source, self._regions
            if source is not None and regions is not None:
                self._memory.change(
                    block, lambda parts: regions.write(key, parts, source, data), transfer.fence
                )
            elif len(data) != self._memory.block_bytes:
                raise ValueError(f"{len(data)} bytes received for a block")
            else:
                self._memory.write([block], np.frombuffer(data, np.uint8)[None], transfer.fence)
            self._num_bytes_received += len(data)

    def _end(self, transfer: Transfer) -> None:
        missing, joint = list(transfer.missing.values()), transfer.joint
        if joint is not None:
            joint.num_left -= 1
            joint.missing.update(missing)
            if joint.num_left:
                return
            missing = sorted(joint.missing)
        with self._writes:
            if transfer.generation == self._generation:
                self._num_errors += bool(missing)
                self._put(
                    KVConnectorOutput(
                        finished_recving=[transfer.transfer_id],
                        invalid_block_ids=int32_bytes(missing),
                    )
                )

    def _put(self, output: KVConnectorOutput) -> None:
        """Report `output` together with the counts since the last report. The caller holds `_writes`."""
        num_sent = self._server.num_bytes_sent
        report = DirectReport(
            self._num_bytes_received, num_sent - self._num_bytes_reported, self._num_errors
        )
        self._num_bytes_received, self._num_bytes_reported, self._num_errors = 0, num_sent, 0
        if report != _NOTHING:
            output.data = msgspec.msgpack.encode(report)
        self._reports.put(output)


_NOTHING: Final = DirectReport()

register_connector(DIRECT_CONNECTOR, DirectConnector)
