"""A worker without a model: it applies the deltas and checks what a model could only feel.

The "KV entry" of a position is a fingerprint of all tokens up to it, so a wrong block table, a block
written by two requests or a false prefix hit shows at once. The next token is a function of that
fingerprint, so a request's output is right exactly if it is the output of the request run alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec
import numpy as np
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.kv_cache_groups import FULL_ATTENTION, AttentionKind, KVCacheGroup
from engine.protocol.messages import (
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from engine.protocol.sampling_params import SamplingParams

MASK = (1 << 64) - 1


def extend(fingerprint: int, token_id: int) -> int:
    x = (fingerprint ^ (token_id + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & MASK
    return (x ^ x >> 29) * 0x94D049BB133111EB & MASK


def seed_fingerprint(params: SamplingParams) -> int:
    """What a test gives different seeds must never share a block."""
    return extend(1, params.seed or 0)


def choose_token(fingerprint: int, vocab_size: int, allowed: np.ndarray | None = None) -> int:
    """The model: the next token, or the first allowed one after it."""
    token_id = (fingerprint >> 20) % vocab_size
    if allowed is not None:
        while not allowed[token_id]:
            token_id = (token_id + 1) % vocab_size
    return token_id


class Row:
    def __init__(self, data: NewRequestData, table_width: int) -> None:
        self.params = data.sampling_params
        self.request_id = data.request_id
        self.num_prompt_tokens = data.num_prompt_tokens
        self.token_ids = int32_view(data.token_ids).tolist()
        self.num_computed_tokens = data.num_computed_tokens
        self.block_tables = []
        for block_ids in data.block_ids:
            blocks = int32_view(block_ids).tolist()
            self.block_tables.append(blocks + [0] * (table_width - len(blocks)))
        self.fingerprints: list[int] = []
        fingerprint = seed_fingerprint(self.params)
        for token_id in self.token_ids:
            fingerprint = extend(fingerprint, token_id)
            self.fingerprints.append(fingerprint)

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.fingerprints.append(extend(self.fingerprints[-1], token_id))


class ModelWorker:
    """Every message passes through its encoding, as on a socket."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        groups: tuple[KVCacheGroup, ...] = FULL_ATTENTION,
        num_host_blocks: int = 0,
    ) -> None:
        self.groups = groups
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.rows: dict[int, Row] = {}
        self.table_width = 256
        self.kv_cache = [[0] * block_size for _ in range(num_blocks)]
        self.host_cache = [[0] * block_size for _ in range(num_host_blocks)]
        self.batch: list[int] = []
        self.step = 0
        self.fail_next: dict[int, str] = {}
        self.num_prompt_tokens_computed = 0
        self._waiting: deque[SchedulerOutput] = deque()
        self._outputs: deque[ModelRunnerOutput] = deque()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode_step = msgspec.msgpack.Decoder(SchedulerOutput).decode
        self._decode_output = msgspec.msgpack.Decoder(ModelRunnerOutput).decode

    @property
    def is_idle(self) -> bool:
        """Whether every step that was submitted has been executed."""
        return not self._waiting

    def submit(self, step: SchedulerOutput) -> None:
        self._waiting.append(self._decode_step(self._encode(step)))
        while self._waiting and not self._waiting[0].grammar_slots:
            self._outputs.append(self._execute(self._waiting.popleft(), None))

    def submit_grammar(self, grammar: GrammarOutput) -> None:
        step = self._waiting.popleft()
        assert step.step == grammar.step
        num_slots = len(step.grammar_slots) // 4
        words = np.frombuffer(grammar.bitmask, "<u4").reshape(num_slots, -1)
        bits = (words[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1
        allowed = bits.reshape(num_slots, -1)[:, : self.vocab_size].astype(bool)
        masks = dict(zip(int32_view(step.grammar_slots).tolist(), allowed, strict=True))
        self._outputs.append(self._execute(step, masks))
        while self._waiting and not self._waiting[0].grammar_slots:
            self._outputs.append(self._execute(self._waiting.popleft(), None))

    def next_output(self) -> ModelRunnerOutput:
        return self._decode_output(self._encode(self._outputs.popleft()))

    def _execute(
        self, step: SchedulerOutput, masks: dict[int, np.ndarray] | None
    ) -> ModelRunnerOutput:
        assert step.step == self.step + 1
        self.step = step.step
        self._copy_blocks(step)
        for slot in int32_view(step.removed_slots).tolist():
            del self.rows[slot]
        for data in step.new_requests:
            assert data.slot not in self.rows, "a slot with a request was given away"
            assert len(data.block_ids) == len(self.groups)
            self.rows[data.slot] = Row(data, self.table_width)
        for group, slot, index, block in int32_view(step.block_updates).reshape(-1, 4).tolist():
            table = self.rows[slot].block_tables[group]
            assert (table[index] == 0) != (block == 0), "a block was replaced"
            table[index] = block
        if step.slots is not None:
            self.batch = int32_view(step.slots).tolist()
        assert len(set(self.batch)) == len(self.batch)
        counts = dict.fromkeys(range(len(self.batch)), 1)
        chunks = int32_view(step.chunks).reshape(-1, 2).tolist()
        assert all(count > 1 for _, count in chunks)
        counts.update(chunks)
        self._check_states()
        self._write_kv(counts)
        self._check_visible(counts)
        sampled = []
        failed = []
        for position, slot in enumerate(self.batch):
            row = self.rows[slot]
            row.num_computed_tokens += counts[position]
            assert row.num_computed_tokens <= len(row.token_ids)
            if row.num_computed_tokens == len(row.token_ids):
                allowed = masks.get(slot) if masks else None
                token_id = choose_token(row.fingerprints[-1], self.vocab_size, allowed)
                row.append(token_id)
                sampled.append(token_id)
            if slot in self.fail_next:
                failed.append((slot, self.fail_next.pop(slot)))
        return ModelRunnerOutput(step.step, int32_bytes(sampled), failed_slots=failed)

    def _copy_blocks(self, step: SchedulerOutput) -> None:
        copies_out = int32_view(step.host_copies_out).reshape(-1, 2).tolist()
        copies_in = int32_view(step.host_copies_in).reshape(-1, 2).tolist()
        for copies in (copies_out, copies_in):
            targets = [target for _, target in copies]
            assert len(set(targets)) == len(targets), "two copies to one block"
        for block, host_block in copies_out:
            assert block != 0
            self.host_cache[host_block] = list(self.kv_cache[block])
        for host_block, block in copies_in:
            assert block != 0
            self.kv_cache[block] = list(self.host_cache[host_block])

    def _place(self, table: list[int], position: int) -> tuple[int, int]:
        block = table[position // self.block_size]
        assert block != 0, "a token has no block"
        return block, position % self.block_size

    def _check_states(self) -> None:
        """A state is read before any of the step is written: no request may rely on another's of the same step."""
        for row in map(self.rows.__getitem__, self.batch):
            for group, table in zip(self.groups, row.block_tables, strict=True):
                last = row.num_computed_tokens - 1
                if group.kind is AttentionKind.STATE_SPACE and last >= 0:
                    state = self.kv_cache[self._place(table, last)[0]][self.block_size - 1]
                    assert state == row.fingerprints[last], "wrong state"

    def _check_visible(self, counts: dict[int, int]) -> None:
        """Keys and values that the step's tokens see: others of the same step may have written them."""
        for position, row in enumerate(map(self.rows.__getitem__, self.batch)):
            start = row.num_computed_tokens
            for group, table in zip(self.groups, row.block_tables, strict=True):
                if group.kind in (AttentionKind.STATE_SPACE, AttentionKind.CROSS):
                    continue
                for index in range(group.first_visible(start), start + counts[position]):
                    block, offset = self._place(table, index)
                    assert self.kv_cache[block][offset] == row.fingerprints[index], "wrong KV entry"

    def _write_kv(self, counts: dict[int, int]) -> None:
        written = set()
        for position, slot in enumerate(self.batch):
            row = self.rows[slot]
            start, count = row.num_computed_tokens, counts[position]
            self.num_prompt_tokens_computed += max(
                0, min(start + count, row.num_prompt_tokens) - start
            )
            for group, table in zip(self.groups, row.block_tables, strict=True):
                for index, place in self._written(group, table, start, start + count):
                    assert place not in written, "a block has two writers"
                    written.add(place)
                    self.kv_cache[place[0]][place[1]] = row.fingerprints[index]

    def _written(
        self, group: KVCacheGroup, table: list[int], start: int, end: int
    ) -> Iterator[tuple[int, tuple[int, int]]]:
        """The tokens of a chunk that are written, and where to."""
        if group.kind is AttentionKind.CROSS:
            num_blocks = -(-group.size // self.block_size)
            assert all(table[:num_blocks]) and not any(table[num_blocks:])
            if start == 0:
                yield from ((0, (block, 0)) for block in table[:num_blocks])
        elif group.kind is AttentionKind.STATE_SPACE:
            yield end - 1, (self._place(table, end - 1)[0], self.block_size - 1)
        else:
            yield from ((index, self._place(table, index)) for index in range(start, end))
