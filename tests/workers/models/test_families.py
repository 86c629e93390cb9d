"""Every family gives the logits of transformers, however its tokens are cut into steps."""

import random

import pytest
import torch
import transformers
from support.decoders import Runner, load_decoder

torch.set_num_threads(1)

NUM_TOKENS = 60
SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
PHI3_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.5, 3.5, 4.5],
    "partial_rotary_factor": 1.0,
}
CONFIGS = {
    "llama2": ("Llama", {"tie_word_embeddings": False}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("Mistral", {"sliding_window": 11}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 10,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 8,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 10,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": None}),
    "phi3-longrope-short": (
        "Phi3",
        {"rope_parameters": PHI3_LONG, "original_max_position_embeddings": 256},
    ),
    "phi3-longrope-long": (
        "Phi3",
        {"rope_parameters": PHI3_LONG, "original_max_position_embeddings": 32},
    ),
    "phi3-partial": (
        "Phi3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.75,
            }
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
        },
    ),
}


def make_reference(name):
    """A random transformers model in which no norm, bias or multiplier is without effect."""
    family, differences = CONFIGS[name]
    config = getattr(transformers, f"{family}Config")(**SMALL | differences)
    family = family.removesuffix("Text")
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(
        config, attn_implementation="eager"
    )
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name or parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.8, 0.3)
        else:
            torch.nn.init.normal_(parameter, 0, 0.15)
    return model.eval()


@pytest.fixture(scope="module", params=CONFIGS)
def models(request, tmp_path_factory):
    """(our decoder, the transformers model)"""
    path = tmp_path_factory.mktemp(request.param)
    reference = make_reference(request.param)
    reference.save_pretrained(path)
    return load_decoder(path), reference


def prompt(length, seed=0):
    return random.Random(seed).choices(range(SMALL["vocab_size"]), k=length)


def expected_logits(reference, tokens):
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0].float()


def assert_same(logits, expected):
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_one_shot_prefill(models):
    decoder, reference = models
    tokens = prompt(NUM_TOKENS)
    assert_same(Runner(decoder).step({0: tokens})[0], expected_logits(reference, tokens))


@pytest.mark.parametrize("seed", range(3))
def test_chunked_prefill(models, seed):
    decoder, reference = models
    tokens = prompt(NUM_TOKENS)
    rng, runner, parts = random.Random(seed), Runner(decoder), []
    while sum(map(len, parts)) < NUM_TOKENS:
        start = sum(map(len, parts))
        parts.append(runner.step({0: tokens[start : start + rng.randint(1, 20)]})[0])
    assert_same(torch.cat(parts), expected_logits(reference, tokens))


def test_token_by_token(models):
    decoder, reference = models
    tokens, runner = prompt(NUM_TOKENS), Runner(decoder)
    logits = torch.cat([runner.step({0: [token]})[0] for token in tokens])
    assert_same(logits, expected_logits(reference, tokens))


def test_mixed_batches(models):
    """Requests join, leave, prefill and decode in the same steps, in changing order."""
    decoder, reference = models
    lengths = [60, 43, 57, 60, 35]
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    rng, runner = random.Random(1), Runner(decoder, len(prompts))
    logits = [[] for _ in prompts]
    while any(runner.computed[i] < lengths[i] for i in range(len(prompts))):
        unfinished = [i for i in range(len(prompts)) if runner.computed[i] < lengths[i]]
        chunks = {}
        for i in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            size = rng.choice([1, 1, rng.randint(2, 25)])
            chunks[i] = prompts[i][runner.computed[i] : runner.computed[i] + size]
        for i, part in runner.step(chunks).items():
            logits[i].append(part)
    # The frequencies of LongRoPE depend on the length in transformers: only the longest compare.
    for i, length in enumerate(lengths):
        if length > 32:
            assert_same(torch.cat(logits[i]), expected_logits(reference, prompts[i]))


def test_greedy_text(models):
    decoder, reference = models
    tokens = prompt(40)
    with torch.inference_mode():
        expected = reference.generate(
            torch.tensor([tokens]), max_new_tokens=64, do_sample=False, use_cache=False
        )
    assert Runner(decoder).greedy(tokens, 64) == expected[0, len(tokens) :].tolist()
