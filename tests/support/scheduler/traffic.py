"""Seeded random traffic for a scheduler under check."""

from __future__ import annotations

import random
from collections.abc import Callable
from hashlib import sha256
from typing import TypeVar

from engine.protocol.config import (
    LoadFailurePolicy,
    PreemptionMode,
    ProposerMethod,
    SchedulingPolicy,
    SpeculativeConfig,
)
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.protocol.kv_cache_groups import FULL_ATTENTION, AttentionKind, KVCacheGroup
from engine.protocol.sampling_params import GrammarKind, ReturnedStates, StatesOf, StructuredOutput
from support.scheduler.harness import Harness
from support.scheduler.model_connector import (
    ChanceEncoderCache,
    chance_connector,
    find_bad_blocks_by_chance,
)
from support.scheduler.model_worker import propose_by_chance

H = TypeVar("H", bound=Harness)
FULL = KVCacheGroup()
HYBRIDS = (
    (KVCacheGroup(AttentionKind.SLIDING_WINDOW, 6),),
    (FULL, KVCacheGroup(AttentionKind.SLIDING_WINDOW, 5)),
    (FULL, *(KVCacheGroup(AttentionKind.SLIDING_WINDOW, 9),) * 2),
    (FULL, KVCacheGroup(AttentionKind.CHUNKED_LOCAL, 8)),
    (FULL, KVCacheGroup(AttentionKind.STATE_SPACE)),
    (FULL, KVCacheGroup(AttentionKind.STATE_SPACE, 4)),
    (FULL, KVCacheGroup(AttentionKind.CROSS, 7)),
    (
        KVCacheGroup(AttentionKind.CHUNKED_LOCAL, 7),
        KVCacheGroup(AttentionKind.SLIDING_WINDOW, 1),
        KVCacheGroup(AttentionKind.STATE_SPACE),
        KVCacheGroup(AttentionKind.STATE_SPACE),
    ),
    (FULL, *(KVCacheGroup(AttentionKind.STATE_SPACE, 3),) * 2),
)
"""Groups of layers that see different parts of a sequence."""


def proposers(groups: tuple[KVCacheGroup, ...]) -> tuple[ProposerMethod | None, ...]:
    """Return the proposers that are supported with these groups."""
    sizes = [group.size for group in groups if group.kind is AttentionKind.STATE_SPACE]
    if sizes:
        return (ProposerMethod.NGRAM if min(sizes) > 1 else None,)
    return tuple(ProposerMethod)


SALTS = (None, None, "red", "blue")


def random_harness(rng: random.Random, make_harness: Callable[..., H] = Harness) -> H:
    """Return a harness with random limits, from comfortable to absurd."""
    block_size = rng.choice((1, 2, 4, 8))
    budget = rng.choice((1, 3, 16, 64, 256))
    has_connector = rng.random() < 0.7
    vocab_size = rng.choice((16, 64, 512))
    num_drafts = rng.choice((0, 0, 1, 4))
    # A prompt must have a fair chance to be computed between two preemptions.
    preemption = rng.choice((0.0, 0.0, 0.05, 0.3)) if budget >= 64 else 0.0
    groups = rng.choice((FULL_ATTENTION, FULL_ATTENTION, *HYBRIDS))
    num_host_blocks = rng.choice((0, 0, 3, 50))
    if groups != FULL_ATTENTION or num_host_blocks:
        has_connector = False
    proposer = rng.choice(proposers(groups))
    if not proposer:
        num_drafts = 0
    harness = make_harness(
        groups=groups,
        num_host_blocks=num_host_blocks,
        preemption_mode=rng.choice(tuple(PreemptionMode)),
        num_blocks=rng.choice((9, 17, 40, 200)) * max(1, 4 // block_size) * len(groups) + 1,
        block_size=block_size,
        max_model_len=rng.choice((24, 64, 128)),
        vocab_size=vocab_size,
        max_in_flight=rng.choice((1, 2, 2, 3, 4)),
        enable_prefix_caching=rng.random() < 0.8,
        max_num_seqs=rng.choice((1, 2, 5, 16)),
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=rng.choice((0, 0, 1, 5)) if not preemption else 0,
        inject_preemption=preemption,
        policy=rng.choice(tuple(SchedulingPolicy)),
        max_num_seqs_per_tenant=rng.choice((0, 0, 1, 3)),
        max_num_queued_reqs_per_tenant=rng.choice((0, 0, 0, 4)),
        priority_preemption=rng.random() < 0.7,
        tenant_weights={"a": 2.0},
        max_num_partial_prefills=rng.choice((0, 0, 1, 3)),
        max_long_partial_prefills=rng.choice((0, 1)),
        scheduler_delay_factor=rng.choice((0.0, 0.0, 0.5, 3.0)),
        watermark=rng.choice((0.0, 0.0, 0.1, 0.5)),
        prefill_step_ms=rng.choice((0.0, 1.0, 3_000.0)),
        max_loras=(max_loras := rng.choice((1, 2))),
        max_cpu_loras=rng.choice((8, max_loras)),
        connector=chance_connector(rng) if has_connector else None,
        encoder_connector=ChanceEncoderCache(rng) if rng.random() < 0.5 else None,
        load_failure_policy=rng.choice((*LoadFailurePolicy, LoadFailurePolicy.RECOMPUTE)),
        transfer_timeout_s=rng.choice((3.0, 1000.0)),
        load_timeout_s=3.0 if vocab_size == 64 else 1000.0,
        max_num_encoder_input_tokens=rng.choice((0, 4, 9)),
        encoder_cache_size=rng.choice((0, 4, 12)),
        disable_chunked_mm_input=rng.random() < 0.3,
        async_scheduling=rng.random() < 0.5,
        num_micro_batches=rng.choice((1, 1, 2, 3)),
        speculative=SpeculativeConfig(num_drafts, proposer) if num_drafts and proposer else None,
        propose=propose_by_chance(rng, vocab_size, num_drafts) if num_drafts else None,
    )
    harness.worker.transfers.find_bad_blocks = find_bad_blocks_by_chance(rng)
    harness.worker.transfers.get_delay = lambda: rng.choice((0, 1, 5))
    harness.worker.is_late = rng.random() < 0.5
    return harness


class Traffic:
    """Random actions on a harness, which are repeatable for a given generator."""

    def __init__(self, harness: Harness, rng: random.Random) -> None:
        self.harness = harness
        self.rng = rng

    def add(self) -> None:
        rng, harness = self.rng, self.harness
        salt = rng.choice(SALTS)
        length = rng.choice((1, 2, 5, 9, 17, 33, 70))
        # Prompts share prefixes with those of the same salt, which the model derives from the seed.
        prompt = [position % 7 + 1 for position in range(length)]
        for _ in range(rng.choice((0, 0, 1, 2))):
            prompt[rng.randrange(length)] = rng.randrange(harness.vocab_size)
        harness.add(
            prompt,
            rng.choice((1, 2, 5, 20, None)),
            client=rng.choice((0, 0, 1, 2)),
            priority=rng.randrange(-2, 3),
            tenant=rng.choice("abcd"),
            deadline=rng.choice((0.0, 0.0, 0.0, harness.now + rng.randrange(200))),
            salt=salt,
            inputs=self.inputs(length),
            lora_name=rng.choice(("", "", "", "x", "y", "z")),
            seed=SALTS.index(salt),
            eos=rng.choice(((), (3,), (2, 5))),
            stop_token_ids=rng.choice(((), (7, 9))),
            min_tokens=rng.choice((0, 0, 1)),
            ignore_eos=rng.random() < 0.1,
            returned_states=(
                ReturnedStates(rng.choice(list(StatesOf)), in_file=True)
                if rng.random() < 0.1
                else None
            ),
            structured_output=(
                StructuredOutput(GrammarKind.JSON_OBJECT, is_isolated=rng.random() < 0.3)
                if rng.random() < 0.15
                else None
            ),
        )

    def inputs(self, length: int) -> list[EncoderInput]:
        """Return the source of a request for an encoder-decoder model; a few requests of others have inputs."""
        rng = self.rng
        groups = self.harness.scheduler.kv_cache_manager.groups
        if any(group.kind is AttentionKind.CROSS for group in groups) or rng.random() < 0.04:
            clip = rng.choice((b"word", b"song"))
            return [EncoderInput(0, 0, sha256(clip).digest(), rng.choice((1, 4)))]
        return self.encoder_inputs(length) if rng.random() < 0.2 else []

    def encoder_inputs(self, length: int) -> list[EncoderInput]:
        """Return inputs with repeated contents and any length."""
        rng = self.rng
        inputs, position = [], 0
        while True:
            position += rng.randrange(6)
            num_tokens = rng.choice((1, 4, 9))
            if position + num_tokens > length:
                return inputs
            content = rng.choice((b"cat", b"dog", b"sea", b"%d" % rng.randrange(1000)))
            content_hash = sha256(content).digest()
            inputs.append(EncoderInput(position, num_tokens, content_hash, len(content) + 1))
            position += num_tokens

    def abort(self) -> None:
        live = list(self.harness.scheduler.requests)
        if live:
            self.harness.abort(self.rng.choice(live))

    def act(self) -> None:
        """Perform one random action."""
        harness = self.harness
        draw = self.rng.random()
        if draw < 0.25:
            self.add()
        elif draw < 0.28:
            self.abort()
        elif draw < 0.36:
            harness.compile_grammars()
        elif draw < 0.365:
            harness.scheduler.reset_prefix_cache(self.rng.random() < 0.5, harness.now)
        elif draw < 0.68:
            if harness.num_in_flight < harness.max_in_flight:
                harness.schedule()
        elif harness.num_in_flight:
            harness.update()


def run_traffic(seed: int, num_actions: int) -> int:
    """Run random traffic on a random harness until all requests have ended, and return the number of steps."""
    rng = random.Random(seed)
    harness = random_harness(rng)
    traffic = Traffic(harness, rng)
    for _ in range(num_actions):
        traffic.act()
        if len(harness.scheduler.requests) > 60:
            harness.step()
    harness.drain(100_000)
    return len(harness.steps)
