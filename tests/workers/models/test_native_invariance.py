"""Native programs give a token the same states, bit for bit, whatever shares its step and its blocks."""

import random
from itertools import product

import pytest
import torch
from support.families import CONFIGS, make_multimodal, make_reference, prompt
from support.workers.decoders import Runner, load_native_decoder

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 11}
"""Tokens of an entry, of which those of a layer with a choice fill parts of a sequence."""


SIZES = {
    "Glm5Next": {"linear_head_dim": 4, "kv_lora_rank": 256},
    "Qwen4Exp": {
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "head_dim": 256,
        "indexer_head_dim": 128,
    },
    "inkling": {"head_dim": 64, "swa_head_dim": 64},
}
"""Sizes with which the recurrent states of models fit into small blocks."""


BLOCK_SIZES = {"inkling": 32, "zaya": 64}
"""Larger blocks where states need them."""


def make(name, **differences):
    """Return a random model of transformers."""
    if name in CONFIGS:
        return make_reference(name, **SIZES.get(name, {}), **differences)
    return make_multimodal(name, **SIZES.get(name, {}), **differences)


NAMES = [
    "axk2",
    "cohere2-moe",
    "dots3-note",
    "gemma3n",
    "gemma4-moe",
    "gemma4-shared",
    "glm5",
    "Glm5Next",
    "hy4",
    "laguna",
    "longcat",
    "minimax-m3",
    "MistralLarge4",
    "Qwen4Exp",
]


# Compressed attention has no cache of eight bits, and the states of others do not fit into small blocks of it.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *product(NAMES, [torch.bfloat16, torch.int8]),
        *product(["deepseek-v4", "inkling", "zaya"], [torch.bfloat16]),
    ],
)
def test_native_states_do_not_depend_on_the_batch(name, dtype, tmp_path):
    """In a cache of layers with different heads, the previous contents of a block must have no effect.

    The keys that a token attends to may not depend on the batch, either.
    """
    make(name).save_pretrained(tmp_path)
    decoders = [
        load_native_decoder(
            tmp_path,
            dtype=torch.bfloat16,
            cache_dtype=dtype,
            block_size=BLOCK_SIZES.get(name, 16),
            num_threads=n,
        )
        for n in (1, 2)
    ]
    prompts = [prompt(length, length) for length in (60, 33, 47)]
    expected = [Runner(decoders[0]).hidden({0: tokens}) for tokens in prompts]
    rng, runner = random.Random(2), Runner(decoders[1], len(prompts))
    for kv_cache in runner.kv_caches if name.startswith(("gemma4", "deepseek-v4")) else []:
        kv_cache.view(torch.uint8).fill_(255)
    while unfinished := [i for i, p in enumerate(prompts) if runner.computed[i] < len(p)]:
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        starts = {i: runner.computed[i] for i in chosen}
        chunks = {
            i: prompts[i][start : start + rng.choice([1, 2, 25])] for i, start in starts.items()
        }
        states = runner.hidden(chunks).split([len(chunk) for chunk in chunks.values()])
        for (i, chunk), state in zip(chunks.items(), states, strict=True):
            assert torch.equal(state, expected[i][starts[i] : starts[i] + len(chunk)])


@pytest.mark.parametrize(
    ("name", "differences"),
    [
        ("minimax-m3", {"index_block_size": 8}),
        ("deepseek-v3.2", {}),
        ("Glm5Next", {"index_topk": 32, "index_kpool": 8}),
        ("Qwen4Exp", {"indexer_budget": 32, "indexer_compress_ratio": 8}),
        ("deepseek-v4", {"index_topk": 32, "compress_rates": RATES}),
    ],
)
def test_chosen_keys_do_not_depend_on_how_the_choice_is_divided(name, differences, tmp_path):
    """Threads share the keys of a token in decoding, but not those of a prompt."""
    make(name, **differences).save_pretrained(tmp_path)
    decoder = load_native_decoder(tmp_path, block_size=16, num_threads=2, max_model_len=4096)
    tokens = prompt(2100)
    expected = Runner(decoder, max_tokens=2112).hidden({0: tokens})[2090:]
    runner = Runner(decoder, max_tokens=2112)
    runner.hidden({0: tokens[:2090]})
    states = [runner.hidden({0: [token]}) for token in tokens[2090:]]
    assert torch.equal(torch.cat(states), expected)
