"""In bfloat16 on a CPU, a token's logits do not depend on the rest of its step, bit for bit."""

import random

import pytest
import torch
import transformers
from support.families import make_reference
from support.workers.decoders import Runner, load_decoder

pytestmark = pytest.mark.slow

NUM_TOKENS = 40


@pytest.fixture(scope="module", params=["long rows", "entries"])
def decoder(request, tmp_path_factory):
    """Load a decoder whose MLP rows are so long that oneDNN would sum a single one differently, or with entries."""
    path = tmp_path_factory.mktemp("model")
    if request.param == "entries":
        make_reference("deepseek-v4", vocab_size=128).save_pretrained(path)
        return load_decoder(path, dtype=torch.bfloat16, max_model_len=2048, block_size=16)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=96,
        intermediate_size=1536,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return load_decoder(path, dtype=torch.bfloat16, max_model_len=2048, block_size=16)


@pytest.fixture(autouse=True, params=[1, 2], ids="{} threads".format)
def num_threads(request):
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def prompt(length, seed=0):
    return random.Random(seed).choices(range(128), k=length)


@pytest.fixture(scope="module")
def alone(decoder):
    """Return the logits of the prompt in one step of one thread."""
    torch.set_num_threads(1)
    return Runner(decoder).step({0: prompt(NUM_TOKENS)})[0]


def test_logits_token_by_token_equal_those_of_one_step(decoder, alone):
    runner = Runner(decoder)
    logits = [runner.step({0: [token]})[0] for token in prompt(NUM_TOKENS)]
    assert torch.equal(torch.cat(logits), alone)


def test_logits_in_any_batch_and_chunks_equal_those_of_one_step(decoder, alone):
    rng, runner, logits = random.Random(0), Runner(decoder, 4), []
    others = [prompt(256, seed) for seed in (1, 2, 3)]
    tokens = prompt(NUM_TOKENS)
    while runner.computed[0] < NUM_TOKENS:
        chunks = {0: tokens[runner.computed[0] :][: rng.choice([1, 2, 17])]}
        for i, other in enumerate(others, 1):
            if rng.random() < 0.7:
                chunks[i] = other[runner.computed[i] :][: rng.choice([1, 1, 3])]
        logits.append(runner.step(chunks)[0])
    assert torch.equal(torch.cat(logits), alone)


def test_logits_of_long_contexts_equal_those_of_one_step(decoder):
    """At about 1024 keys, oneDNN starts to split its sums."""
    tokens = prompt(1060)
    expected = Runner(decoder, max_tokens=1100).step({0: tokens})[0]
    runner = Runner(decoder, max_tokens=1100)
    logits = [runner.step({0: tokens[:1000]})[0]]
    logits += [runner.step({0: [token]})[0] for token in tokens[1000:1030]]
    logits += [runner.step({0: tokens[1030:]})[0]]
    assert torch.equal(torch.cat(logits), expected)
