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
from engine.protocol.messages import (
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from support.fingerprints import BAD, extend, fingerprints
from support.model_connector import ModelTransfers


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
        self.block_table = [0] * table_width
        for index, block in enumerate(int32_view(data.block_ids[0]).tolist()):
            self.block_table[index] = block
        self.lora_name = data.lora_name
        self.fingerprints = fingerprints(self.token_ids, self.params.seed, data.lora_name)

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.fingerprints.append(extend(self.fingerprints[-1], token_id))


class ModelWorker:
    """Every message passes through its encoding, as on a socket."""

    def __init__(self, *, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.rows: dict[int, Row] = {}
        self.kv_cache = [[0] * block_size for _ in range(num_blocks)]
        self.transfers = ModelTransfers(self.kv_cache)
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
        for slot in int32_view(step.removed_slots).tolist():
            del self.rows[slot]
        for data in step.new_requests:
            assert data.slot not in self.rows, "a slot with a request was given away"
            self.rows[data.slot] = Row(data, len(self.kv_cache))
        for group, slot, index, block in int32_view(step.block_updates).reshape(-1, 4).tolist():
            assert group == 0
            assert self.rows[slot].block_table[index] == 0, "a block was replaced"
            self.rows[slot].block_table[index] = block
        if step.slots is not None:
            self.batch = int32_view(step.slots).tolist()
        assert len(set(self.batch)) == len(self.batch)
        counts = dict.fromkeys(range(len(self.batch)), 1)
        chunks = int32_view(step.chunks).reshape(-1, 2).tolist()
        assert all(count > 1 for _, count in chunks)
        counts.update(chunks)
        self.transfers.begin_step(step.kv_connector_metadata)
        self._write_kv(counts)
        sampled = []
        failed = []
        for position, slot in enumerate(self.batch):
            row = self.rows[slot]
            row.num_computed_tokens += counts[position]
            self._check_kv(row)
            assert row.num_computed_tokens <= len(row.token_ids)
            if row.num_computed_tokens == len(row.token_ids):
                allowed = masks.get(slot) if masks else None
                token_id = choose_token(row.fingerprints[-1], self.vocab_size, allowed)
                row.append(token_id)
                sampled.append(token_id)
            if slot in self.fail_next:
                failed.append((slot, self.fail_next.pop(slot)))
        return ModelRunnerOutput(
            step.step,
            int32_bytes(sampled),
            failed_slots=failed,
            kv_connector_output=self.transfers.end_step(),
        )

    def _places(self, row: Row, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        for position in range(start, end):
            block = row.block_table[position // self.block_size]
            assert block != 0, "a token was scheduled without a block"
            yield position, block, position % self.block_size

    def _write_kv(self, counts: dict[int, int]) -> None:
        written = set()
        for position, slot in enumerate(self.batch):
            row = self.rows[slot]
            start = row.num_computed_tokens
            self.num_prompt_tokens_computed += max(
                0, min(start + counts[position], row.num_prompt_tokens) - start
            )
            is_bad = self._has_bad_kv(row, start)
            for index, block, offset in self._places(row, start, start + counts[position]):
                assert (block, offset) not in written, "a block has two writers"
                written.add((block, offset))
                self.kv_cache[block][offset] = BAD if is_bad else row.fingerprints[index]

    def _has_bad_kv(self, row: Row, end: int) -> bool:
        places = self._places(row, 0, end)
        return any(self.kv_cache[block][offset] == BAD for _, block, offset in places)

    def _check_kv(self, row: Row) -> None:
        """Entries that depend on a failed load are known to be wrong; the scheduler must drop what comes of them."""
        if self._has_bad_kv(row, row.num_computed_tokens):
            row.fingerprints[-1] = 0
            return
        for index, block, offset in self._places(row, 0, row.num_computed_tokens):
            assert self.kv_cache[block][offset] == row.fingerprints[index], "wrong KV entry"
