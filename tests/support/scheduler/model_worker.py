"""A worker without a model: it applies the deltas and checks the KV cache.

The "KV entry" of a position is a fingerprint of all tokens up to it, so a wrong block table, a block
written by two requests or a false prefix hit shows at once. The next token is a function of that
fingerprint, so a request's output is right exactly if it is the output of the request run alone.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from engine.core.state.request import source_size
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.protocol.kv_cache_groups import FULL_ATTENTION, AttentionKind, KVCacheGroup
from engine.protocol.worker_messages import (
    DraftTokenIds,
    GrammarOutput,
    HeldRequest,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from support.scheduler.fingerprints import BAD, extend, extend_at, fingerprints, places_of
from support.scheduler.model_connector import ModelTransfers


def choose_token(fingerprint: int, vocab_size: int, allowed: np.ndarray | None = None) -> int:
    """The model: the next token, or the first allowed one after it."""
    token_id = (fingerprint >> 20) % vocab_size
    if allowed is not None:
        while not allowed[token_id]:
            token_id = (token_id + 1) % vocab_size
    return token_id


class Row:
    def __init__(self, data: NewRequestData, table_width: int, lora_name: str = "") -> None:
        self.params = data.sampling_params
        self.request_id = data.request_id
        self.arrival_time = data.arrival_time
        self.num_prompt_tokens = data.num_prompt_tokens
        self.token_ids = int32_view(data.token_ids).tolist()
        self.num_computed_tokens = data.num_computed_tokens
        self.block_tables = []
        for block_ids in data.block_ids:
            blocks = int32_view(block_ids).tolist()
            self.block_tables.append(blocks + [0] * (table_width - len(blocks)))
        self.lora_number, self.lora_name = data.lora_number, lora_name
        self.prediction = int32_view(data.predicted_token_ids).tolist()
        self.drafts: list[int] = []
        self.forced: list[int] = []
        self.encoder_inputs: list[EncoderInput] = []
        self.grow(data.encoder_inputs)

    def grow(self, inputs: Sequence[EncoderInput]) -> None:
        self.encoder_inputs += inputs
        self.places = places_of(self.encoder_inputs)
        self.fingerprints = fingerprints(
            self.token_ids, self.params.seed, self.lora_name, self.encoder_inputs
        )

    def append(self, token_id: int) -> None:
        place = len(self.token_ids)
        self.token_ids.append(token_id)
        self.fingerprints.append(extend_at(self.fingerprints[-1], token_id, place, self.places))
        # Forced tokens may start with the first token.
        self.forced = self.forced[1:] if self.forced[:1] == [token_id] else []


def propose_by_chance(rng: random.Random, vocab_size: int, most: int) -> Callable[[Row], list[int]]:
    """Return drafts of which a random number is right."""

    def propose(row: Row) -> list[int]:
        fingerprint = row.fingerprints[-1]
        drafts = []
        for _ in range(rng.randrange(most + 1)):
            token_id = choose_token(fingerprint, vocab_size)
            if row.params.structured_output is not None and rng.random() < 0.5:
                token_id = (token_id + 1) % vocab_size
            drafts.append(token_id if rng.random() < 0.7 else rng.randrange(vocab_size))
            fingerprint = extend(fingerprint, drafts[-1])
        return drafts

    return propose


def propose_prediction(row: Row) -> list[int]:
    """Draft what the client predicts in the place of the next tokens."""
    return row.prediction[len(row.token_ids) - row.num_prompt_tokens :][:3]


def _state(group: KVCacheGroup, entries: list[int]) -> dict[int, int]:
    """Return the state after the last entry: it also serves as that after earlier ones of its segment."""
    first = len(entries) - len(entries) % max(group.size, 1) - 1
    return {last: entries[last] for last in range(max(first, 0), len(entries))}


class ModelWorker:
    """A worker whose messages are all encoded and decoded, as on a socket.

    `propose` says which drafts follow a row's tokens; `remembers_drafts` when the scheduler leaves them to the worker.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        groups: tuple[KVCacheGroup, ...] = FULL_ATTENTION,
        num_host_blocks: int = 0,
        propose: Callable[[Row], list[int]] | None = None,
        remembers_drafts: bool = False,
        most_drafts: int = 0,
    ) -> None:
        self.groups = groups
        self.propose = propose
        self.remembers_drafts = remembers_drafts
        self.most_drafts = most_drafts
        self.rejected: deque[list[tuple[Row, int]]] = deque()
        """Drafts that were rejected, for each output that was not taken yet."""
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.rows: dict[int, Row] = {}
        self.table_width = 256
        self.kv_cache: list[list[Any]] = [[0] * block_size for _ in range(num_blocks)]
        self.cpu_offload: list[list[Any]] = [[0] * block_size for _ in range(num_host_blocks)]
        self.encoder_cache: dict[bytes, int] = {}
        """Sizes of the outputs by content."""
        self.loras: dict[int, str] = {}
        """Names of adapters by number."""
        self._lora_answers: list[tuple[int, str | None]] = []
        self.transfers = ModelTransfers(self.kv_cache)
        self.batch: list[int] = []
        self.step = 0
        self.is_late = False
        """True if steps are executed only when their output is requested, not as soon as possible."""
        self.fail_next: dict[int, str] = {}
        self.nan_next: set[int] = set()
        """Slots whose next logits are NaN. Their KV cache is correct nevertheless."""
        self.num_prompt_tokens_computed = 0
        self._waiting: deque[SchedulerOutput] = deque()
        self._outputs: deque[ModelRunnerOutput] = deque()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode_step = msgspec.msgpack.Decoder(SchedulerOutput).decode
        self._decode_output = msgspec.msgpack.Decoder(ModelRunnerOutput).decode

    @property
    def is_idle(self) -> bool:
        """True if every step that was submitted has been executed."""
        return not self._waiting

    def release_requests(self) -> list[HeldRequest]:
        """Prepare for another core: steps of the previous one that were not executed are dropped."""
        held = []
        for row in self.rows.values():
            num_blocks = -(-row.num_computed_tokens // self.block_size)
            tables = tuple(int32_bytes(table[:num_blocks]) for table in row.block_tables)
            held.append(
                HeldRequest(row.request_id, row.arrival_time, row.num_computed_tokens, tables)
            )
        self.rows, self.batch, self.step = {}, [], 0
        self._lora_answers = []
        self.encoder_cache = {}
        self.fail_next.clear()
        self.nan_next.clear()
        self.rejected.clear()
        self._waiting.clear()
        self._outputs.clear()
        return msgspec.msgpack.decode(msgspec.msgpack.encode(held), type=list[HeldRequest])

    def submit(self, step: SchedulerOutput) -> None:
        self._waiting.append(self._decode_step(self._encode(step)))
        self.transfers.receive(step.kv_connector_metadata)
        if not self.is_late:
            self._run_on()

    def _run_on(self) -> None:
        """Execute all steps that need not wait."""
        while self._waiting and not self._waiting[0].grammar_slots:
            self._outputs.append(self._execute(self._waiting.popleft(), None))

    def submit_grammar(self, grammar: GrammarOutput) -> None:
        step = self._waiting.popleft()
        assert step.step == grammar.step
        batch = self.batch if step.slots is None else int32_view(step.slots).tolist()
        drafts = dict(int32_view(step.drafts).reshape(-1, 2).tolist())
        slots = int32_view(step.grammar_slots).tolist()
        num_rows = [1 + drafts.get(batch.index(slot), 0) for slot in slots]
        words = np.frombuffer(grammar.bitmask, "<u4").reshape(sum(num_rows), -1)
        bits = (words[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1
        allowed = bits.reshape(len(words), -1)[:, : self.vocab_size].astype(bool)
        split = np.split(allowed, np.cumsum(num_rows)[:-1])
        masks = dict(zip(slots, split, strict=True))
        if grammar.forced is not None:
            tokens = iter(int32_view(grammar.forced.token_ids).tolist())
            counts = int32_view(grammar.forced.num_tokens).tolist()
            for slot, count in zip(int32_view(grammar.forced.slots).tolist(), counts, strict=True):
                self.rows[slot].forced = list(islice(tokens, count))
        self._outputs.append(self._execute(step, masks))
        if not self.is_late:
            self._run_on()

    def next_output(self) -> ModelRunnerOutput:
        if not self._outputs:
            self._outputs.append(self._execute(self._waiting.popleft(), None))
        self.rejected.popleft()
        return self._decode_output(self._encode(self._outputs.popleft()))

    def _execute(
        self, step: SchedulerOutput, masks: dict[int, np.ndarray] | None
    ) -> ModelRunnerOutput:
        counts = self._apply(step)
        scheduled_drafts = dict(int32_view(step.drafts).reshape(-1, 2).tolist())
        for position, count in scheduled_drafts.items():
            counts[position] -= count
        drafts = self._find_drafts(step, scheduled_drafts)
        self._check_states()
        self._write_kv(counts, drafts)
        self._check_visible(counts)
        sampled, num_sampled, num_verified, failed, nan_slots = [], [], [], [], []
        rejected: list[tuple[Row, int]] = []
        predictions: list[tuple[int, int, int]] = []
        for position, slot in enumerate(self.batch):
            row = self.rows[slot]
            row.num_computed_tokens += counts[position]
            assert row.num_computed_tokens <= len(row.token_ids)
            if row.num_computed_tokens == len(row.token_ids):
                allowed = masks.get(slot) if masks else None
                tokens = self._verify(row, drafts.get(position, []), allowed)
                sampled += tokens
                num_sampled.append(len(tokens))
                num_verified.append(len(drafts.get(position, [])))
                if row.prediction and num_verified[-1]:
                    num_right = len(tokens) - 1
                    predictions.append((slot, num_right, num_verified[-1] - num_right))
                if slot in self.nan_next:
                    self.nan_next.remove(slot)
                    nan_slots.append(slot)
                rejected.append((row, scheduled_drafts.get(position, 0) + 1 - len(tokens)))
                row.drafts = row.forced[: self.most_drafts]
                if self.propose and not row.drafts:
                    row.drafts = self.propose(row)
            else:
                assert position not in drafts
            if slot in self.fail_next:
                failed.append((slot, self.fail_next.pop(slot)))
        self.rejected.append(rejected)
        return ModelRunnerOutput(
            step.step,
            int32_bytes(sampled),
            num_sampled=int32_bytes(num_sampled) if drafts else b"",
            num_verified=int32_bytes(num_verified) if self.remembers_drafts and drafts else b"",
            nan_slots=int32_bytes(nan_slots),
            failed_slots=failed,
            drafts=self._describe_drafts(),
            kv_connector_output=self.transfers.end_step(),
            prediction_counts=int32_bytes(predictions),
            seconds=1e-3 * (9 + len(sampled)),
        )

    def _apply(self, step: SchedulerOutput) -> dict[int, int]:
        """Apply a step's changes. Return how many tokens each row of the batch computes, drafts included."""
        assert step.step == self.step + 1
        self.step = step.step
        self._copy_blocks(step)
        self._load_loras(step)
        for slot in int32_view(step.removed_slots).tolist():
            del self.rows[slot]
        for data in step.new_requests:
            assert data.slot not in self.rows, "a slot with a request was given away"
            assert len(data.block_ids) == len(self.groups)
            lora_name = self.loras[data.lora_number] if data.lora_number >= 0 else ""
            self.rows[data.slot] = Row(data, self.table_width, lora_name)
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
        self._fill_encoder_cache(step)
        for data in step.new_requests:
            self._fill_cross_blocks(self.rows[data.slot])
        return counts

    def take_lora_answers(self) -> list[tuple[int, str | None]]:
        """Return the number of each adapter that was loaded since the last call, and the error."""
        answers, self._lora_answers = self._lora_answers, []
        return answers

    def _load_loras(self, step: SchedulerOutput) -> None:
        for number, lora in ((load.number, load.adapter) for load in step.lora_loads):
            # An earlier core may have loaded the same adapter under another number.
            used = {row.lora_number for slot, row in self.rows.items() if slot in self._kept(step)}
            assert number not in used, "an adapter in use was replaced"
            is_bad = lora.name.startswith("bad")
            self.loras[number] = lora.name
            self._lora_answers.append((number, f"{lora.name} is damaged" if is_bad else None))

    def _kept(self, step: SchedulerOutput) -> set[int]:
        """Return the slots that keep their request."""
        return self.rows.keys() - set(int32_view(step.removed_slots).tolist())

    def _fill_encoder_cache(self, step: SchedulerOutput) -> None:
        work = step.encoders
        if work is None:
            return
        for slot, appended in work.appended:
            self.rows[slot].grow(appended)
        for content_hash in work.freed_hashes:
            del self.encoder_cache[content_hash]
        computed = int32_view(work.computed).reshape(-1, 2).tolist()
        loaded = int32_view(work.loaded).reshape(-1, 2).tolist()
        for slot, index in computed + loaded:
            item = self.rows[slot].encoder_inputs[index]
            self.encoder_cache[item.content_hash] = item.size

    def _fill_cross_blocks(self, row: Row) -> None:
        """Store the source of a request that takes a slot."""
        for group, table in zip(self.groups, row.block_tables, strict=True):
            if group.kind is AttentionKind.CROSS:
                size = source_size(row.encoder_inputs) if group.is_optional else group.size
                num_blocks = -(-size // self.block_size)
                assert all(table[:num_blocks]) and not any(table[num_blocks:])
                if group.is_optional:
                    for item in row.encoder_inputs:
                        if item.position < row.num_computed_tokens < item.read_until:
                            assert item.content_hash in self.encoder_cache
                    continue
                (item,) = row.encoder_inputs
                assert item.content_hash in self.encoder_cache, "an encoder output is missing"
                for block in table[:num_blocks]:
                    self.kv_cache[block] = [item.content_hash] * self.block_size

    def _check_encoder_inputs(self, row: Row, end: int) -> None:
        for item in row.encoder_inputs:
            start = row.num_computed_tokens
            last = item.position + item.num_tokens
            if item.position < end and last > start:
                assert item.content_hash in self.encoder_cache, "an encoder output is missing"

    def _find_drafts(self, step: SchedulerOutput, counts: dict[int, int]) -> dict[int, list[int]]:
        """Return the drafts of each position in the batch that has any scheduled. There may be fewer."""
        rows = {position: self.rows[self.batch[position]] for position in counts}
        if self.remembers_drafts:
            assert not step.draft_token_ids
            drafts = {position: rows[position].drafts[:count] for position, count in counts.items()}
        else:
            token_ids = iter(int32_view(step.draft_token_ids).tolist())
            drafts = {
                position: list(islice(token_ids, count)) for position, count in counts.items()
            }
        return {
            position: of_row[: self._most_drafts(rows[position], len(of_row))]
            for position, of_row in drafts.items()
        }

    def _most_drafts(self, row: Row, num_drafts: int) -> int:
        """Return how many drafts of a row can be rejected."""
        most, num_tokens = (
            np.array([num_drafts], np.int32),
            np.array([len(row.token_ids)], np.int32),
        )
        for group in self.groups:
            most = group.limit_drafts(most, num_tokens, self.block_size)
        return int(most[0])

    def _verify(self, row: Row, drafts: list[int], allowed: np.ndarray | None) -> list[int]:
        """Return the model's tokens after those of the row, up to the first that differs from the drafts."""
        tokens: list[int] = []
        for index, draft in enumerate((*drafts, None)):
            mask = allowed[index] if allowed is not None else None
            tokens.append(choose_token(row.fingerprints[-1], self.vocab_size, mask))
            row.append(tokens[-1])
            if tokens[-1] != draft:
                break
        row.num_computed_tokens += len(tokens) - 1
        return tokens

    def _describe_drafts(self) -> DraftTokenIds | None:
        rows = {slot: self.rows[slot].drafts for slot in self.batch if self.rows[slot].drafts}
        if not rows:
            return None
        return DraftTokenIds(
            self.step,
            int32_bytes(list(rows)),
            int32_bytes([len(drafts) for drafts in rows.values()]),
            int32_bytes([token_id for drafts in rows.values() for token_id in drafts]),
        )

    def _copy_blocks(self, step: SchedulerOutput) -> None:
        copies_out = int32_view(step.host_copies_out).reshape(-1, 2).tolist()
        copies_in = int32_view(step.host_copies_in).reshape(-1, 2).tolist()
        for copies in (copies_out, copies_in):
            targets = [target for _, target in copies]
            assert len(set(targets)) == len(targets), "two copies to one block"
        for block, host_block in copies_out:
            assert block != 0
            self.cpu_offload[host_block] = list(self.kv_cache[block])
        # Connectors copy the blocks that the step has freed, too.
        self.transfers.begin_step(step.kv_connector_metadata)
        for host_block, block in copies_in:
            assert block != 0
            self.kv_cache[block] = list(self.cpu_offload[host_block])

    def _place(self, table: list[int], position: int) -> tuple[int, int]:
        block = table[position // self.block_size]
        assert block != 0, "a token has no block"
        return block, position % self.block_size

    def _check_states(self) -> None:
        """Check that no request reads a state that another one writes in the same step."""
        for row in map(self.rows.__getitem__, self.batch):
            for group, table in zip(self.groups, row.block_tables, strict=True):
                last = row.num_computed_tokens - 1
                if group.kind is AttentionKind.STATE_SPACE and last >= 0:
                    state = self.kv_cache[self._place(table, last)[0]][0]
                    assert state[last] == row.fingerprints[last], "wrong state"

    def _check_visible(self, counts: dict[int, int]) -> None:
        """Check the keys and values that the step's tokens attend to, including those written in the same step."""
        for position, row in enumerate(map(self.rows.__getitem__, self.batch)):
            start = row.num_computed_tokens
            if self._has_bad_kv(row, start + counts[position]):
                # The scheduler must drop the result.
                row.fingerprints[-1] = 0
                continue
            for group, table in zip(self.groups, row.block_tables, strict=True):
                if group.kind is AttentionKind.STATE_SPACE:
                    continue
                if group.is_optional:
                    others = range(start + 1, start + counts[position])
                    assert all(item.position not in others for item in row.encoder_inputs)
                    continue
                if group.kind is AttentionKind.CROSS:
                    source = row.encoder_inputs[0].content_hash
                    blocks = table[: -(-group.size // self.block_size)]
                    assert all(set(self.kv_cache[block]) == {source} for block in blocks)
                    continue
                for index in range(group.first_visible(start), start + counts[position]):
                    block, offset = self._place(table, index)
                    assert self.kv_cache[block][offset] == row.fingerprints[index], "wrong KV entry"

    def _write_kv(self, counts: dict[int, int], drafts: dict[int, list[int]]) -> None:
        written = set()
        for position, slot in enumerate(self.batch):
            row = self.rows[slot]
            start, count = row.num_computed_tokens, counts[position]
            self.num_prompt_tokens_computed += max(
                0, min(start + count, row.num_prompt_tokens) - start
            )
            self._check_encoder_inputs(row, start + count)
            entries = row.fingerprints[start : start + count]
            for token_id in drafts.get(position, []):
                entries.append(extend(entries[-1], token_id))
            is_bad = self._has_bad_kv(row, start)
            end = start + len(entries)
            for group, table in zip(self.groups, row.block_tables, strict=True):
                for index, place in self._written(group, table, start, end):
                    assert place not in written, "a block has two writers"
                    written.add(place)
                    entry: Any = BAD if is_bad else entries[index - start]
                    if group.kind is AttentionKind.STATE_SPACE:
                        entry = _state(group, row.fingerprints[:start] + entries)
                    self.kv_cache[place[0]][place[1]] = entry

    def _has_bad_kv(self, row: Row, end: int) -> bool:
        """Return whether entries come from a failed load of a connector, or depend on one."""
        if self.groups != FULL_ATTENTION:
            return False
        places = (self._place(row.block_tables[0], index) for index in range(end))
        return any(self.kv_cache[block][offset] == BAD for block, offset in places)

    def _written(
        self, group: KVCacheGroup, table: list[int], start: int, end: int
    ) -> Iterator[tuple[int, tuple[int, int]]]:
        """Return the tokens of a chunk that are written, and their places."""
        if group.kind is AttentionKind.CROSS:
            return
        if group.kind is AttentionKind.STATE_SPACE:
            yield end - 1, (self._place(table, end - 1)[0], 0)
        else:
            yield from ((index, self._place(table, index)) for index in range(start, end))
