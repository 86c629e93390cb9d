"""The scheduler side of the direct KV connector, by which replicas fetch KV-cache blocks from each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Final

import msgspec

from ....protocol.arrays import int32_bytes
from ....protocol.config import KVTransferConfig
from ....protocol.kv_transfer.direct import (
    DIRECT_CONNECTOR,
    EARLIER,
    MAX_NAME_CHARS,
    ONE_WAY,
    DirectCommands,
    DirectFetch,
    DirectReport,
    DirectSource,
    PullSettings,
    request_name,
)
from ....protocol.messages import EngineCoreRequest, FinishReason
from ....protocol.worker_messages import SchedulerOutput
from ...state.request import RUNNING, Request
from ..connector import BlockConnector, RequestEnd, register_connector

_MAX_PORT: Final = 65535

NO_TRANSFER: Final = -1
"""The transfer id of a fetch that no request waits for."""

_decode_report = msgspec.msgpack.Decoder(DirectReport).decode
_encode = msgspec.msgpack.Encoder().encode


class DirectTransfer(BlockConnector):
    """Offers every cached block to other replicas as soon as it is complete, until it is about to be overwritten.

    A request with `do_remote_decode` is computed on behalf of another replica. When it ends, its blocks are held until
    the other replica has fetched them. The same holds for a request that moves to another replica. A request with
    `do_remote_prefill` fetches its blocks, even while the other replica is still computing them.

    If `pull` says that transfers are bidirectional, a request that another engine has prefilled tells its client where
    its blocks are, output included. With the next turn of the conversation, the client passes this on to the engine
    that prefills, which fetches what is left of them. They are not held in the meantime.

    Args:
        role: `kv_producer` to offer blocks, `kv_consumer` to fetch them, `kv_both` for both.
        engine_id: The name of this engine in the answers to requests.
        host: The address at which other engines reach the workers; "" if they cannot.
        port: The port of the first worker.
        tp_size: The number of tensor-parallel ranks of the workers.
        pull: The settings for blocks of earlier turns.
    """

    def __init__(
        self,
        role: str = "kv_both",
        engine_id: str = "",
        host: str = "",
        port: int = 0,
        pull: PullSettings = ONE_WAY,
        tp_size: int = 1,
    ) -> None:
        self._tp_size = tp_size
        self._offers = role != "kv_consumer" or pull.bidirectional_kv_xfer
        self._fetches = role != "kv_producer"
        self._pull = pull
        self._engine_id, self._host, self._port = engine_id, host, port
        self._block_size = 1
        self._step = 1
        """The number of the next step."""
        self._find_block: Callable[[bytes], int | None] = lambda key: None
        self._pending: dict[bytes, int] = {}
        """The keys of blocks to be offered, with the number of the step that was next when each became findable."""
        self._offered: dict[bytes, int] = {}
        self._ends: list[tuple[str, int, int]] = []
        """Ended requests: name, transfer id (-1 if nothing is held), and the number of the step that was next."""
        self._last_blocks: dict[int, tuple[bytes, int]] = {}
        """The key and number of the last, incomplete block of each ended request that is held, by transfer id."""
        self._fetching: set[int] = set()
        """The transfer ids of requests that have started a fetch."""
        self._commands = DirectCommands()
        self._counts: Counter[str] = Counter()

    def observe_pool(self, find_block: Callable[[bytes], int | None], block_size: int) -> None:
        """Receive the function that returns the block with a given content key, and the tokens in a block."""
        self._find_block, self._block_size = find_block, block_size

    # Changes of the prefix cache

    def blocks_cached(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Offer blocks once they are complete."""
        if self._offers:
            offered = self._offered
            for key in keys:
                if key not in offered:
                    self._pending[key] = self._step

    def block_evicted(self, key: bytes, block_id: int) -> None:
        """Withdraw a block before the next step overwrites it."""
        self._pending.pop(key, None)
        self._withdraw(key)

    def copy_dropped(self, key: bytes, block_id: int) -> None:
        """Offer another copy of a block in place of this one."""
        if self._offered.get(key) == block_id:
            self._withdraw(key)
            self._pending[key] = self._step

    def blocks_removed(self, keys: Iterable[bytes]) -> None:
        """Withdraw blocks that may be wrong."""
        for key in keys:
            self._pending.pop(key, None)
            self._withdraw(key)

    def cache_cleared(self) -> None:
        """Withdraw all blocks."""
        self._pending.clear()
        self._offered.clear()
        self._commands.withdrawn.clear()
        self._commands.clears = self._offers

    def _withdraw(self, key: bytes) -> None:
        if self._offered.pop(key, None) is not None:
            self._commands.withdrawn.append(key)

    # Calls about requests

    def find_blocks(self, request: Request, keys: Sequence[bytes]) -> bytes:
        """Return 1 for every block that another replica has computed, or b"" if there is none.

        That replica may lack a block after all, which is known only when the block is fetched.
        """
        params = request.kv_transfer_params
        if not params:
            return b""
        if self._fetches and params.get("do_remote_prefill") is True:
            return b"\1" * len(keys) if _source_of(params) is not None else b""
        if self._pull.bidirectional_kv_xfer and _names_earlier_turn(params):
            return self._find_earlier(request, keys, params)
        return b""

    def last_block_key(self, request: Request) -> bytes:
        """Return the key of the last block of a prompt that a prefill replica computes for this request alone."""
        params = request.kv_transfer_params
        if not params or params.get("fetches_last_block") is not True or request.output_token_ids:
            return b""
        if request.is_resubmitted or request.transfer_id in self._fetching:
            # The block may have been fetched before, and is not offered after that.
            return b""
        source = _source_of(params)
        if not (self._fetches and source is not None and request.block_hashes):
            return b""
        key = _partial_block_key(request, source.name, self._block_size)
        return key or request.block_hashes[-1]

    def _find_earlier(
        self, request: Request, keys: Sequence[bytes], params: Mapping[str, object]
    ) -> bytes:
        """Return 1 for each block of the turn before, unless they are too few to be worth a transfer."""
        num_tokens = params.get("remote_num_tokens")
        num_blocks = num_tokens // self._block_size if isinstance(num_tokens, int) else 0
        digests = request.block_hashes[:num_blocks]
        if not digests:
            return b""
        size, earlier = len(digests[0]), set(digests)
        mask = bytes(key[:size] in earlier for key in keys)
        num_missing = len({key[:size] for key in keys} & earlier)
        is_worthwhile = num_missing * self._block_size >= self._pull.kv_recompute_threshold
        return mask if num_missing and is_worthwhile else b""

    def load_blocks(
        self, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> None:
        """Fetch blocks with the next step's metadata."""
        params = request.kv_transfer_params or {}
        source = _source_of(params)
        assert source is not None
        if _names_earlier_turn(params):
            source = msgspec.structs.replace(source, epoch=EARLIER)
        self._fetching.add(request.transfer_id)
        self._commands.fetches.append(
            DirectFetch(request.transfer_id, source, list(keys), int32_bytes(list(block_ids)))
        )

    def request_finished(
        self, request: Request, block_ids: Sequence[int], reason: FinishReason
    ) -> RequestEnd:
        """Hold the blocks of a request that another replica continues.

        The answer says where they can be fetched, and also where those are that the next turn may need.
        """
        params = request.kv_transfer_params or {}
        is_moved = reason is FinishReason.MOVED
        if params:
            self._end_fetch(request, params)
        if not self._offers:
            return RequestEnd()
        is_whole = is_moved or reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not (is_moved or params.get("do_remote_decode") is True):
            if not (self._pull.bidirectional_kv_xfer and params and self._host and is_whole):
                return RequestEnd()
            return RequestEnd(
                False, self._describe(request, block_ids, _name_of(request, {}), False)
            )
        name = _name_of(request, {} if is_moved else params)
        if not (is_whole and block_ids and request.status is RUNNING):
            self._ends.append((name, -1, self._step))
            return RequestEnd()
        self._ends.append((name, request.transfer_id, self._step))
        key = b"" if is_moved else _partial_block_key(request, name, self._block_size)
        if key:
            last = block_ids[request.num_prompt_tokens // self._block_size]
            self._last_blocks[request.transfer_id] = key, last
        return RequestEnd(True, self._describe(request, block_ids, name, True))

    def _describe(
        self, request: Request, block_ids: Sequence[int], name: str, is_prefill: bool
    ) -> dict[str, object]:
        """Return the parameters of a request that fetches the blocks of this one, as vLLM's proxies pass them on."""
        answer: dict[str, object] = {
            "do_remote_prefill": is_prefill,
            "do_remote_decode": not is_prefill,
            "remote_engine_id": self._engine_id,
            "remote_block_ids": [list(block_ids)],
            "remote_request_id": name,
            "remote_num_tokens": request.num_held_tokens,
        }
        if self._host:
            answer |= {
                "remote_host": self._host,
                "remote_port": self._port,
                "tp_size": self._tp_size,
            }
        return answer

    def _end_fetch(self, request: Request, params: Mapping[str, object]) -> None:
        """Let the source release the blocks of a request that ended without fetching them."""
        if request.transfer_id in self._fetching:
            self._fetching.remove(request.transfer_id)
        elif self._fetches and params.get("do_remote_prefill") is True:
            source = _source_of(params)
            if source is not None:
                # A fetch of zero blocks completes immediately, and the source is notified of it.
                self._commands.fetches.append(DirectFetch(request.transfer_id, source, [], b""))

    def request_refused(self, message: EngineCoreRequest) -> None:
        """Let the source release the blocks of a request that will not fetch them."""
        params = message.kv_transfer_params or {}
        if self._fetches and params.get("do_remote_prefill") is True:
            source = _source_of(params)
            if source is not None:
                self._commands.fetches.append(DirectFetch(NO_TRANSFER, source, [], b""))

    def transfer_expired(self, transfer_id: int) -> None:
        """Report to the workers that the blocks are no longer held for a fetch."""
        self._last_blocks.pop(transfer_id, None)
        self._commands.expired.append(transfer_id)

    # Messages to and from the workers

    def needs_step(self) -> bool:
        """Return whether there is something to offer or to fetch."""
        commands = self._commands
        return bool(self._pending or self._ends or commands.fetches or commands.clears)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> bytes:
        """Return the commands for the workers, encoded."""
        step = scheduler_output.step
        self._step = step + 1
        commands = self._commands
        if self._pending:
            self._offer_complete(step)
        if self._ends:
            self._report_ends(step)
        if commands == _NO_COMMANDS:
            return b""
        self._commands = DirectCommands()
        return _encode(commands)

    def _offer_complete(self, step: int) -> None:
        """Offer the blocks that earlier steps have filled."""
        ready = [key for key, since in self._pending.items() if since < step]
        blocks = []
        for key in ready:
            del self._pending[key]
            block = self._find_block(key)
            if block is not None:
                self._offered[key] = block
                self._commands.offered.append(key)
                blocks.append(block)
        self._commands.offered_blocks = int32_bytes(blocks)

    def _report_ends(self, step: int) -> None:
        """Report the requests that ended before the last step. Their last blocks have been offered by now."""
        left = []
        for end in self._ends:
            name, transfer_id, since = end
            if since >= step:
                left.append(end)
            elif transfer_id < 0:
                self._commands.ended.append(name)
            else:
                self._commands.held.append((name, transfer_id))
                if last := self._last_blocks.pop(transfer_id, None):
                    self._commands.last_blocks.append((transfer_id, *last))
        self._ends = left

    def receive(self, rank: int, data: bytes) -> None:
        """Add a worker's counts of bytes and failed fetches to the statistics."""
        report = _decode_report(data)
        self._counts["received_bytes"] += report.num_bytes_received
        self._counts["sent_bytes"] += report.num_bytes_sent
        self._counts["failed_fetches"] += report.num_errors

    def take_stats(self) -> dict[str, float]:
        """Return counts since the last call."""
        counts, self._counts = self._counts, Counter()
        return {name: float(count) for name, count in counts.items() if count}


_NO_COMMANDS: Final = DirectCommands()


def _name_of(request: Request, params: Mapping[str, object]) -> str:
    """Return the name under which another replica fetches the blocks of a request."""
    name = params.get("remote_request_id")
    if (
        isinstance(name, str)
        and 0 < len(name) <= MAX_NAME_CHARS
        and not _names_earlier_turn(params)
    ):
        return name
    return request_name(*request.key, request.arrival_time)


def _partial_block_key(request: Request, name: str, block_size: int) -> bytes:
    """Return the key of the last block of a prompt if it is not full, else b"".

    It contains the name of the request that computes the prompt, so no other request offers a block under this key.
    """
    num_full = request.num_prompt_tokens // block_size
    tokens = request.prompt_token_ids[4 * num_full * block_size :]
    if not (tokens and request.prompt_block_hashes):
        return b""
    parent = request.block_hashes[num_full - 1]
    return sha256(parent + tokens + name.encode()).digest()


def _names_earlier_turn(params: Mapping[str, object]) -> bool:
    """Return whether a request to be prefilled names an engine with blocks of the turn before."""
    return params.get("do_remote_decode") is True and params.get("remote_host") is not None


def _source_of(params: Mapping[str, object]) -> DirectSource | None:
    """Return the replica that has the blocks of a request, or None if the parameters name none."""
    name, replica = params.get("remote_request_id"), params.get("replica")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        return None
    if isinstance(replica, int) and replica >= 0:
        epoch = params.get("replica_epoch")
        return DirectSource(name, replica, epoch=epoch if isinstance(epoch, int) else 0)
    host, port = params.get("remote_host"), params.get("remote_port")
    if isinstance(port, str) and port.isdecimal():
        port = int(port)
    if isinstance(host, str) and host and isinstance(port, int) and 0 < port <= _MAX_PORT:
        size = params.get("tp_size")
        return DirectSource(name, -1, host, port, tp_size=size if isinstance(size, int) else 0)
    return None


def _create(config: KVTransferConfig) -> DirectTransfer:
    tp_size = config.kv_connector_extra_config.get("tp_size", 1)
    assert isinstance(tp_size, int)
    return DirectTransfer(
        config.kv_role,
        config.engine_id or "",
        config.kv_ip if config.kv_port else "",
        config.kv_port,
        msgspec.convert(config.kv_connector_extra_config, PullSettings),
        tp_size,
    )


register_connector(DIRECT_CONNECTOR, _create)
