"""A token's hidden state depends only on the tokens before it, bit for bit."""

import os
import random
from collections.abc import Sequence

import pytest
import torch
from engine.workers.layers.layer_spec import LayerSpec
from engine.workers.layers.rope import RopeSpec
from support.checkpoints.random import random_checkpoint
from support.workers.batches import Scheduled, attention_batch, positions
from support.workers.isas import FUSED_WITHOUT_BF16, ISAS, PORTABLE, select_isa
from support.workers.native_decoders import (
    BLOCK_SIZE,
    ROPE,
    latent_spec,
    native_decoder,
    small_spec,
)

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

SPEC = small_spec(
    layers=(LayerSpec(ROPE), LayerSpec(ROPE, 70), LayerSpec(ROPE)), intermediate_size=160
)
FORMATS = {
    "float32": {"dtype": torch.float32, "cache_dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16, "cache_dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16, "cache_dtype": torch.float16},
    "int8": {"quantization": "int8", "cache_dtype": torch.bfloat16},
    "int4": {"quantization": "int4", "cache_dtype": torch.bfloat16},
    "int8 cache": {"quantization": "int8", "cache_dtype": torch.int8},
}


class Engine:
    """Runs requests over a cache whose blocks they own or share."""

    def __init__(self, decoder, num_blocks=400):
        self.decoder = decoder
        shape = decoder.attention.kv_cache_shape(num_blocks)
        dtype = decoder.attention.dtype
        self.kv_caches = [torch.zeros(shape, dtype=dtype) for _ in decoder.spec.layers]

    def step(self, requests: Sequence[tuple[list[int], int, int, list[int]]]):
        """Run tokens [start, stop) of each (tokens, start, stop, blocks); return their states."""
        scheduled = [Scheduled(start, stop - start, b) for _, start, stop, b in requests]
        batch = attention_batch(scheduled, BLOCK_SIZE)
        hidden = self.decoder.forward(
            torch.tensor([t for tokens, start, stop, _ in requests for t in tokens[start:stop]]),
            positions(scheduled),
            self.kv_caches,
            [self.decoder.attention.build(batch, w) for w in self.decoder.spec.windows_by_group],
        )
        return hidden.split([stop - start for _, start, stop, _ in requests])


def prompt(length, seed=0):
    return random.Random(seed).choices(range(97), k=length)


def whole(decoder, tokens):
    blocks = list(range(1, 2 + len(tokens) // BLOCK_SIZE))
    return Engine(decoder).step([(tokens, 0, len(tokens), blocks)])[0]


def assert_same_bits(states, expected):
    assert torch.equal(states.view(torch.int32), expected.view(torch.int32))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("checkpoint"), SPEC)


@pytest.fixture(scope="module", params=[*FORMATS, "latent, bfloat16", "latent, int8 cache"])
def decoders(request, tmp_path_factory):
    """Load decoders with one thread and with two."""
    kind, _, name = request.param.rpartition(", ")
    spec, options = latent_spec(64) if kind else SPEC, FORMATS[name]
    checkpoint = random_checkpoint(tmp_path_factory.mktemp("checkpoint"), spec)
    return [native_decoder(spec, checkpoint, num_threads=n, **options) for n in (1, 2)]


def test_random_batches_and_chunks_do_not_change_states(decoders):
    """Chunks have any size and share steps with any others, on one thread or two."""
    prompts = [prompt(length, length) for length in (1, 15, 16, 64, 65, 130, 200, 290, 330, 64)]
    expected = [whole(decoders[0], tokens) for tokens in prompts]
    for seed in range(12):
        rng = random.Random(seed)
        engine = Engine(decoders[seed % 2])
        free = rng.sample(range(1, 400), 399)
        blocks = [[free.pop() for _ in range(1 + len(p) // BLOCK_SIZE)] for p in prompts]
        done = [0] * len(prompts)
        while unfinished := [i for i, p in enumerate(prompts) if done[i] < len(p)]:
            requests, chosen = [], rng.sample(unfinished, rng.randint(1, len(unfinished)))
            for i in chosen:
                size = rng.choice([1, 1, 2, rng.randint(1, 30), rng.randint(1, 330)])
                stop = min(done[i] + size, len(prompts[i]))
                requests.append((prompts[i], done[i], stop, blocks[i]))
            states = engine.step(requests)
            for i, (_, start, stop, _), state in zip(chosen, requests, states, strict=True):
                assert_same_bits(state, expected[i][start:stop])
                done[i] = stop


def test_a_shared_prefix_does_not_change_states(decoders):
    prefix, tails = prompt(160), [prompt(40, 1), prompt(1, 2), prompt(77, 3)]
    engine = Engine(decoders[1])
    shared = list(range(1, 11))
    engine.step([(prefix, 0, 160, shared)])
    tokens = [prefix + tail for tail in tails]
    blocks = [shared + list(range(20 + 10 * i, 30 + 10 * i)) for i in range(3)]
    states = engine.step([(t, 160, len(t), b) for t, b in zip(tokens, blocks, strict=True)])
    for t, state in zip(tokens, states, strict=True):
        assert_same_bits(state, whole(decoders[0], t)[160:])


def test_a_block_may_be_filled_and_read_in_the_same_step(tmp_path):
    """No token attends to a block before its last key is stored.

    The rows that fill it take longer than those that read it.
    """
    spec = small_spec(hidden_size=256, intermediate_size=768, layers=(LayerSpec(ROPE),) * 3)
    checkpoint = random_checkpoint(tmp_path, spec)
    alone, pair = (
        native_decoder(spec, checkpoint, num_threads=n, **FORMATS["int4"]) for n in (1, 2)
    )
    prefix, shared, long_context = prompt(48), [1, 2, 3], list(range(100, 120))
    readers = [([*prefix, i], 48, 49, [*shared, 60 + i]) for i in range(8)]
    expected = [whole(alone, tokens)[48:] for tokens, *_ in readers]
    engine = Engine(pair)
    engine.step([(prefix, 0, 47, shared)])
    beside = [(prompt(321, i), 320, 321, [*long_context, 10 + i]) for i in range(7)]
    for _ in range(50):
        engine.step([([*prefix[:47], 0], 47, 48, shared)])
        states = engine.step([(prefix, 47, 48, shared), *beside, *readers])
        for state, row in zip(states[8:], expected, strict=True):
            assert_same_bits(state, row)


def test_partitions_and_slices_do_not_change_states(decoders):
    """Decoding splits long contexts among threads, and long steps run in slices."""
    tokens = prompt(2300)
    expected = whole(decoders[0], tokens)
    assert_same_bits(whole(decoders[1], tokens), expected)
    engine, blocks = Engine(decoders[1]), list(range(1, 146))
    other = (prompt(600, 1), list(range(200, 240)))
    stops = [1000, 1023, 1024, 1025, 2040, *range(2041, 2060), 2298, 2299, 2300]
    start = 0
    for i, stop in enumerate(stops):
        company = [(other[0], 0, 600, other[1])] if i % 3 == 0 else []
        states = engine.step([*company, (tokens, start, stop, blocks)])
        assert_same_bits(states[-1], expected[start:stop])
        start = stop


@pytest.mark.parametrize("isa", sorted({ISAS[0], ISAS[-1]}))
def test_preempted_threads_do_not_change_states(isa, checkpoint):
    """There are many more threads than processors. Work of a preempted thread is computed again by others."""
    select_isa(isa)
    options = FORMATS["int4"]
    crowd = native_decoder(SPEC, checkpoint, num_threads=4 * (os.cpu_count() or 1), **options)
    prompts = [prompt(1500, seed) for seed in range(2)] + [
        prompt(300, seed) for seed in range(2, 12)
    ]
    alone = native_decoder(SPEC, checkpoint, num_threads=1, **options)
    expected = [whole(alone, tokens) for tokens in prompts]
    blocks = [list(range(1 + 95 * i, 96 + 95 * i)) for i in range(len(prompts))]
    steps = [(0, 250), *((n, n + 1) for n in range(250, 290)), (290, 300)]
    steps_of_two = [(300, 1490), *((n, n + 1) for n in range(1490, 1500))]
    for _ in range(6):
        engine = Engine(crowd, num_blocks=1200)
        for start, stop in steps + steps_of_two:
            running = 12 if stop <= 300 else 2
            requests = [(prompts[i], start, stop, blocks[i]) for i in range(running)]
            for state, whole_state in zip(engine.step(requests), expected, strict=False):
                assert_same_bits(state, whole_state[start:stop])


def test_more_threads_than_processors_do_not_change_states(checkpoint):
    """Pieces of such steps move between threads, and some are computed twice."""
    options = FORMATS["int4"]
    num_threads = 2 * (os.cpu_count() or 1)
    crowd = native_decoder(SPEC, checkpoint, num_threads=num_threads, **options)
    alone = native_decoder(SPEC, checkpoint, num_threads=1, **options)
    prompts = [prompt(20 + seed % 60, seed) for seed in range(20 * num_threads)]
    expected = [whole(alone, tokens) for tokens in prompts]
    blocks = [list(range(1 + 5 * i, 6 + 5 * i)) for i in range(len(prompts))]
    for _ in range(4):
        engine = Engine(crowd, num_blocks=2 + 5 * len(prompts))
        first_step = [(t, 0, len(t) - 10, b) for t, b in zip(prompts, blocks, strict=True)]
        for state, (_, _, stop, _), e in zip(
            engine.step(first_step), first_step, expected, strict=True
        ):
            assert_same_bits(state, e[:stop])
        for left in range(10, 0, -1):
            step = [(t, len(t) - left, len(t) - left + 1, b) for t, _, _, b in first_step]
            for state, (_, start, stop, _), e in zip(
                engine.step(step), step, expected, strict=True
            ):
                assert_same_bits(state, e[start:stop])


def test_one_long_context_among_short_ones_does_not_change_states(decoders):
    """Only the long context is split among threads."""
    long, short = prompt(2300), [prompt(40, seed) for seed in range(20)]
    engine, blocks = Engine(decoders[1]), list(range(1, 146))
    tails = [[150 + 3 * i, 151 + 3 * i, 152 + 3 * i] for i in range(20)]
    engine.step([(long, 0, 2297, blocks)])
    engine.step([(tokens, 0, 37, tail) for tokens, tail in zip(short, tails, strict=True)])
    expected = [whole(decoders[0], tokens) for tokens in (*short, long)]
    for i in range(3):
        requests = [(t, 37 + i, 38 + i, tail) for t, tail in zip(short, tails, strict=True)]
        states = engine.step([*requests, (long, 2297 + i, 2298 + i, blocks)])
        for state, whole_state, start in zip(states, expected, [37] * 20 + [2297], strict=True):
            assert_same_bits(state, whole_state[start + i : start + i + 1])


def test_previous_block_contents_have_no_effect(decoders):
    tokens = prompt(100)
    engine = Engine(decoders[1])
    for cache in engine.kv_caches:
        cache.fill_(100 if cache.dtype == torch.int8 else 1e3)
    blocks = list(range(1, 8))
    for start, stop in ((0, 50), (50, 51), (51, 100)):
        (state,) = engine.step([(tokens, start, stop, blocks)])
        assert_same_bits(state, whole(decoders[0], tokens)[start:stop])


def test_logits_do_not_depend_on_the_batch(decoders):
    hidden = whole(decoders[0], prompt(130))
    logits = decoders[0].compute_logits(hidden)
    for decoder in decoders:
        for rows in (range(130), [5], [7, 3, 9], range(20, 90)):
            assert_same_bits(decoder.compute_logits(hidden[list(rows)]), logits[list(rows)])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["bfloat16", "int4", "int8 cache"])
def test_states_are_invariant_with_every_instruction_set(name, isa, checkpoint):
    select_isa(isa)
    tokens, blocks = prompt(150), list(range(1, 11))
    decoder = native_decoder(SPEC, checkpoint, num_threads=2, **FORMATS[name])
    expected = whole(decoder, tokens)
    engine, start = Engine(decoder), 0
    for stop in (40, 41, 42, 107, 149, 150):
        (state,) = engine.step([(tokens, start, stop, blocks)])
        assert_same_bits(state, expected[start:stop])
        start = stop


HEADS = {
    "one a key": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16},
    "four a key": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 80},
    "seven a key": {"num_heads": 7, "num_kv_heads": 1, "head_dim": 64},
    "capped": {"head_dim": 48, "attention_softcap": 3.0},
    "odd": {"head_dim": 40},
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("heads", HEADS)
def test_any_number_and_size_of_heads_is_invariant(heads, isa, tmp_path):
    """Heads are computed for one token, for a few and for many."""
    select_isa(isa)
    rope = RopeSpec(10_000.0, HEADS[heads]["head_dim"])
    spec = small_spec(layers=(LayerSpec(rope), LayerSpec(rope, 70)), **HEADS[heads])
    decoder = native_decoder(
        spec, random_checkpoint(tmp_path, spec), num_threads=2, **FORMATS["bfloat16"]
    )
    tokens, blocks = prompt(150), list(range(1, 11))
    expected = whole(decoder, tokens)
    engine, start = Engine(decoder), 0
    for stop in (63, 64, 65, 68, 84, 85, 149, 150):
        (state,) = engine.step([(tokens, start, stop, blocks)])
        assert_same_bits(state, expected[start:stop])
        start = stop


@pytest.mark.parametrize(
    "name, isas",
    [
        ("int8 cache", [isa for isa in ISAS if isa != PORTABLE]),
        ("bfloat16", [isa for isa in ISAS if isa in FUSED_WITHOUT_BF16]),
        ("int4", [isa for isa in ISAS if isa in FUSED_WITHOUT_BF16]),
    ],
)
def test_instruction_sets_with_fused_products_agree_bit_for_bit(name, isas, checkpoint):
    """Integer sums are exact and float sums have one order, so results differ only by fused operations."""
    states = []
    for isa in isas:
        select_isa(isa)
        decoder = native_decoder(SPEC, checkpoint, num_threads=2, **FORMATS[name])
        states.append(whole(decoder, prompt(150)))
    for state in states:
        assert_same_bits(state, states[0])
