"""Decide which full blocks are cached under which hash, and which requests may use them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, groupby

from ...protocol.arrays import int32_view
from ...protocol.block_hash import HashBlocks
from ...protocol.kv_cache_groups import AttentionKind, KVCacheGroup
from ..state.request import Request
from ..state.slots import Slots
from .block_pool import NULL_BLOCK, BlockPool
from .block_tables import RequestBlocks
from .cached_prefix import (
    EXTERNAL,
    ON_CPU,
    CachedPrefix,
    Deferred,
    FindExternal,
    find_cached_prefix,
    group_key,
    group_keys,
)
from .cpu_offload import CPUOffload
from .event_log import KVEventLog


class PrefixCache:
    """Makes full blocks of known tokens findable, and finds the longest cached prefix of a request."""

    def __init__(
        self,
        pool: BlockPool,
        host: CPUOffload | None,
        slots: Slots,
        groups: tuple[KVCacheGroup, ...],
        block_size: int,
        *,
        enabled: bool,
        events: KVEventLog | None,
        hash_blocks: HashBlocks,
    ) -> None:
        self._pool = pool
        self._cpu_offload = host
        self._slots = slots
        self._groups = groups
        self._block_size = block_size
        self._is_simple = [group.kind for group in groups] == [AttentionKind.FULL]
        self._is_plain = self._is_simple and host is None
        kinds = [group.kind for group in groups]
        windows = (AttentionKind.FULL, AttentionKind.SLIDING_WINDOW, AttentionKind.CHUNKED_LOCAL)
        self._token_group = next((kinds.index(kind) for kind in windows if kind in kinds), None)
        """A group with a block for every block of tokens; full attention, if there is any."""
        self.enabled = enabled
        self._events = events
        self._hash_blocks = hash_blocks
        self.no_prefix = CachedPrefix(0, ([],) * len(groups))
        self._new_states: list[tuple[int, bytes]] = []
        self._num_prefilled = [0] * len(slots.requests)
        self._output_states: dict[tuple[int, int], bytes] = {}
        self.num_cached_blocks = [0] * len(slots.requests)
        """For each slot, the number of its first blocks that other requests can find."""

    def find_prefix(self, request: Request) -> CachedPrefix:
        """Return the longest cached prefix of a request that leaves at least one token to compute."""
        limit = (request.num_tokens - 1) // self._block_size
        if not limit or not request.root_hash:
            return self.no_prefix
        digests = request.block_hashes
        if self._is_plain and not (digests and self._pool.is_cached(digests[0])):
            return self.no_prefix
        if not self.may_read(request):
            return self.no_prefix
        if self._is_plain:
            found = self._pool.find_cached_blocks(digests[:limit])
            return CachedPrefix(len(found), (found,))
        return find_cached_prefix(
            self._pool,
            self._groups,
            self._block_size,
            digests[:limit],
            self._pool.get_cached_block if self._cpu_offload is None else self._lookup,
        )

    def count_shared_blocks(self, request: Request) -> int:
        """Return how many first blocks of a request are cached in a group that has a block for each of them."""
        group = self._token_group
        if group is None or not request.root_hash or not self.may_read(request):
            return 0
        return len(self._pool.find_cached_blocks(group_keys(request.block_hashes, group)))

    def find_longer_prefix(
        self,
        request: Request,
        num_blocks: int,
        find_external: FindExternal,
        last_key: bytes = b"",
    ) -> CachedPrefix | Deferred | None:
        """Return a prefix of more than `num_blocks` blocks if a KV connector can load its missing blocks, else None.

        `find_external` returns a byte for each key, 1 if the connector can load the block; b"" if it can load none; and
        None if it defers its answer, which defers the answer of this method. `last_key` is the connector's key of the
        block with the last tokens, which need not be full. The last token is computed in this block, so it is used only
        if the request gets its own copy.
        """
        limit, num_last = divmod(request.num_tokens - 1, self._block_size)
        digests = request.block_hashes[:limit]
        if last_key and num_last and len(digests) == limit and self._lookup(last_key) is None:
            digests = [*digests, last_key]
        if len(digests) <= num_blocks or not self.may_read(request):
            return None
        keys = [
            key
            for number, group in enumerate(self._groups)
            if group.kind is not AttentionKind.CROSS
            for key in group_keys(digests, number)
            if self._lookup(key) is None
        ]
        mask = find_external(keys)
        if mask is None:
            return Deferred.DEFERRED
        external = set(compress(keys, mask))
        if not external:
            return None

        def look_up(key: bytes) -> int | None:
            block = self._lookup(key)
            return EXTERNAL if block is None and key in external else block

        found = find_cached_prefix(self._pool, self._groups, self._block_size, digests, look_up)
        return found if found.num_blocks > num_blocks else None

    def _lookup(self, key: bytes) -> int | None:
        """Return the block with this content, or `ON_CPU` if only CPU memory has it, or None."""
        block = self._pool.get_cached_block(key)
        if (
            block is None
            and self._cpu_offload is not None
            and self._cpu_offload.find_block(key) is not None
        ):
            return ON_CPU
        return block

    def may_read(self, request: Request) -> bool:
        """Return whether a request may start from cached blocks."""
        return self.enabled and request.root_hash != b"" and not request.computes_whole_prompt

    def may_write(self, request: Request) -> bool:
        """Return whether a request's blocks may be cached for others."""
        return self.enabled and request.root_hash != b"" and not request.has_untrusted_blocks

    def cache_new_requests(
        self,
        requests: Sequence[Request],
        tables: Sequence[RequestBlocks],
        starts: Sequence[int],
        num_tokens: Sequence[int],
    ) -> list[int]:
        """Cache the blocks of newly admitted requests. Return for each how many of its first blocks are findable."""
        rows = zip(requests, tables, starts, num_tokens, strict=True)
        if not self._is_simple or self._events is not None:
            return [
                self.cache_blocks(request, table, start, count)
                if self.may_write(request)
                else start
                for request, table, start, count in rows
            ]
        num_cached: list[int] = []
        blocks: list[int] = []
        keys: list[bytes] = []
        for request, table, start, count in rows:
            if self.enabled and request.root_hash and not request.has_untrusted_blocks:
                new = request.block_hashes[start : count // self._block_size]
                keys += new
                blocks += table[0][start : start + len(new)]
                start += len(new)
            num_cached.append(start)
        if keys:
            self._pool.cache_blocks(blocks, keys)
        return num_cached

    def cache_blocks(
        self, request: Request, tables: RequestBlocks, start: int, num_tokens: int
    ) -> int:
        """Make full, hashed blocks findable, from index `start` to the end of the first `num_tokens` tokens.

        Return the number of the request's first blocks that are findable now.
        """
        end = num_tokens // self._block_size
        if end <= start:
            return start
        hashes = request.block_hashes
        if end > len(hashes):
            end = len(hashes)
            if end <= start:
                return start
        if start and self._is_simple and not self._pool.is_cached(hashes[start - 1]):
            # The previous block is no longer cached, so a search would never reach these blocks.
            return end
        if self._events is not None:
            self._log_stored(self._events, request, tables[0], start, end)
        if self._is_simple:
            self._pool.cache_blocks(tables[0][start:end], hashes[start:end])
        else:
            for group, table in enumerate(tables):
                self._cache_in_group(group, table, start, end, hashes, num_tokens)
        return end

    def _cache_in_group(
        self,
        group: int,
        table: list[int],
        start: int,
        end: int,
        hashes: list[bytes],
        num_tokens: int,
    ) -> None:
        kind = self._groups[group].kind
        if kind is AttentionKind.CROSS:
            return
        if kind is AttentionKind.STATE_SPACE:
            # The block holds the state of its digest only if the last computed token is the last token of the block.
            block = table[end - 1]
            if num_tokens == end * self._block_size and block != NULL_BLOCK:
                self._new_states.append((block, group_key(hashes[end - 1], group)))
            return
        blocks, keys = table[start:end], group_keys(hashes[start:end], group)
        if NULL_BLOCK in blocks:
            held = [(block, key) for block, key in zip(blocks, keys, strict=True) if block]
            blocks, keys = [block for block, _ in held], [key for _, key in held]
        self._pool.cache_blocks(blocks, keys)

    def cache_states(self) -> None:
        """Make the recurrent states findable that the scheduled steps leave in full blocks.

        Unlike keys and values, which later tokens only append to, a state is complete only when its step has ended.
        """
        for block, key in self._new_states:
            self._pool.cache_blocks([block], [key])
        self._new_states.clear()

    def start_output(self, request: Request) -> None:
        """Record that a request got its slot. The states of its later tokens are cached one at a time."""
        self._num_prefilled[request.slot] = request.num_tokens
        for group in range(len(self._groups)):
            self._output_states.pop((request.slot, group), None)

    def cache_output_state(self, slot: int, group: int, num_blocks: int, block: int) -> None:
        """Make the state after the first blocks of a running request findable, replacing its previous state.

        The last token of these blocks must be an output token. The next turn of a conversation continues from the last
        such state, so one per request suffices.
        """
        num_tokens = num_blocks * self._block_size
        if num_tokens <= self._num_prefilled[slot] or block == NULL_BLOCK:
            return
        request = self._slots.requests[slot]
        if request is None or not self.may_write(request):
            return
        if request.num_prompt_tokens + self._slots.num_output_tokens[slot] < num_tokens:
            return
        self.hash_output(request, num_tokens)
        key = group_key(request.block_hashes[num_blocks - 1], group)
        previous = self._output_states.pop((slot, group), None)
        if previous is not None:
            self._pool.uncache_blocks([previous])
        if not self._pool.is_cached(key):
            self._output_states[slot, group] = key
        self._pool.cache_blocks([block], [key])

    def hash_output(self, request: Request, num_tokens: int) -> None:
        """Hash the full blocks of the first `num_tokens` tokens of a running request."""
        num_output = max(0, num_tokens - request.num_prompt_tokens)
        output = self._slots.output_token_ids(request.slot)[:num_output]
        request.hash_output_blocks(output, self._block_size, self._hash_blocks)

    def hash_waiting_output(self, request: Request) -> None:
        """Hash the full blocks of a waiting request that has output, such as one resubmitted from another replica."""
        if self.may_write(request):
            output = int32_view(request.output_token_ids)
            request.hash_output_blocks(output, self._block_size, self._hash_blocks)

    def invalidate_blocks(self, request: Request, num_valid_blocks: int) -> None:
        """Make all blocks of a request unfindable, except the first `num_valid_blocks`."""
        self.cache_states()
        end = self.num_cached_blocks[request.slot] if request.slot >= 0 else None
        digests = request.block_hashes[num_valid_blocks:end]
        for group in range(len(self._groups)):
            keys = group_keys(digests, group)
            self._pool.uncache_blocks(keys)
            if self._cpu_offload is not None:
                self._cpu_offload.remove_blocks(keys)
        request.has_untrusted_blocks = True

    def _log_stored(
        self, events: KVEventLog, request: Request, table: list[int], start: int, end: int
    ) -> None:
        """Log the blocks between `start` and `end` that become findable, as runs of consecutive blocks."""
        hashes, size = request.block_hashes, self._block_size
        output = (
            self._slots.output_token_ids(request.slot)
            if request.slot >= 0
            else int32_view(request.output_token_ids)
        )
        prompt = int32_view(request.prompt_token_ids)
        fresh = (
            index
            for index in range(start, end)
            if table[index] != NULL_BLOCK and not self._pool.is_cached(hashes[index])
        )
        for _, run in groupby(enumerate(fresh), lambda item: item[1] - item[0]):
            indices = [index for _, index in run]
            first, last = indices[0], indices[-1] + 1
            parent = hashes[first - 1] if first else None
            tokens = prompt[first * size : last * size].tolist()
            if (num_output := last * size - len(prompt)) > 0:
                tokens += output[max(first * size - len(prompt), 0) : num_output].tolist()
            events.record_stored(hashes[first:last], parent, tokens)
