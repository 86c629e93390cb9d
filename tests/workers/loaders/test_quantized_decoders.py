"""Decoders of quantized checkpoints give the logits of their values."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.quantized import quantize_directory
from support.families import assert_same, expected_logits, make_reference, prompt
from support.workers.decoders import Runner, load_decoder, load_native_decoder

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

NUM_TOKENS = 60


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("fp8-blocks", 0.01), ("compressed-fp8", 0.01), ("compressed-nvfp4", 0.05)],
)
def test_native_logits_of_quantized_experts_are_those_of_their_values(name, tolerance, tmp_path):
    """Weights keep their values. Activations are rounded to bf16, beside four-bit weights to eight bits."""
    differences = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    differences |= {"moe_intermediate_size": 64, "use_sliding_window": False}
    make_reference("qwen3-moe", **differences).save_pretrained(tmp_path)
    quantize_directory(tmp_path, name)
    tokens = prompt(NUM_TOKENS)
    logits, expected = (
        Runner(load(tmp_path)).step({0: tokens})[0] for load in (load_native_decoder, load_decoder)
    )
    assert torch.linalg.norm(logits - expected) <= tolerance * torch.linalg.norm(expected)


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
@pytest.mark.parametrize("has_zeros", [True, False])
def test_biases_of_quantized_modules_are_read_also_if_they_are_zero(load, has_zeros, tmp_path):
    """GPTQ stores biases of zeros for all modules. Those of queries, keys and values belong to Qwen2."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    reference = make_reference("qwen2", **sizes)
    for name, parameter in reference.named_parameters():
        if name.endswith("_proj.bias") and has_zeros:
            parameter.data.zero_()
    reference.save_pretrained(tmp_path)
    reference.load_state_dict(quantize_directory(tmp_path, "gptq"), strict=False)
    tokens = prompt(NUM_TOKENS)
    logits, expected = (
        Runner(load(tmp_path)).step({0: tokens})[0],
        expected_logits(reference, tokens),
    )
    # The native backend rounds activations to eight bits.
    assert torch.linalg.norm(logits - expected) < 0.05 * torch.linalg.norm(expected)


@pytest.mark.parametrize("name", ["gptq", "fp8", "compressed-int4"])
def test_values_in_two_quantized_modules_are_those_of_the_modules(name, tmp_path):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}
    (tmp_path / "dense").mkdir()
    make_reference("zaya", **sizes).save_pretrained(tmp_path)
    modules = ("qkv_proj.v_proj_current", "qkv_proj.v_proj_delayed")
    config = (tmp_path / "config.json").read_text()
    meaning = quantize_directory(tmp_path, name, modules)
    assert sum(key.endswith("v_proj_delayed.weight") for key in meaning) > 1
    # GPTQ adds biases of zeros, which the family lacks.
    weights = {key: x for key, x in meaning.items() if not re.search(r"v_proj_\w+\.bias", key)}
    save_file(weights, tmp_path / "dense" / "model.safetensors")
    (tmp_path / "dense" / "config.json").write_text(config)
    tokens = prompt(NUM_TOKENS)
    logits, expected = (
        Runner(load_decoder(path)).step({0: tokens})[0] for path in (tmp_path, tmp_path / "dense")
    )
    assert_same(logits, expected)


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_quantizers_turn_the_matrices_of_gpt2(load, tmp_path):
    reference = make_reference("gpt2", hidden_size=64, num_attention_heads=2)
    reference.save_pretrained(tmp_path)
    modules = ("c_attn", "c_proj", "c_fc")

    def turned(weights):
        names = tuple(f"{x}.weight" for x in modules)
        return {key: x.T.contiguous() if key.endswith(names) else x for key, x in weights.items()}

    file = tmp_path / "model.safetensors"
    save_file(turned(load_file(file)), file)
    reference.load_state_dict(turned(quantize_directory(tmp_path, "gptq", modules)), strict=False)
    tokens = prompt(NUM_TOKENS)
    logits, expected = (
        Runner(load(tmp_path)).step({0: tokens})[0],
        expected_logits(reference, tokens),
    )
    assert torch.linalg.norm(logits - expected) < 0.05 * torch.linalg.norm(expected)


@pytest.mark.parametrize("name", ["awq", "gptq-asymmetric"])
def test_rows_of_a_quantized_matrix_may_be_one_block(name, tmp_path):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 32}
    make_reference("llama2", **sizes).save_pretrained(tmp_path)
    quantize_directory(tmp_path, name)
    logits, expected = (
        Runner(load(tmp_path)).step({0: prompt(NUM_TOKENS)})[0]
        for load in (load_native_decoder, load_decoder)
    )
    # The native backend rounds activations to eight bits.
    assert torch.linalg.norm(logits - expected) < 0.05 * torch.linalg.norm(expected)


@pytest.mark.parametrize("name", ["gptq-2", "gptq-3", "gptq-asymmetric"])
def test_activations_beside_few_bits_are_as_exact_as_beside_four(name, tmp_path):
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 256}
    make_reference("llama2", **sizes, num_hidden_layers=1).save_pretrained(tmp_path)
    quantize_directory(tmp_path, name)
    logits, expected = (
        Runner(load(tmp_path)).step({0: prompt(NUM_TOKENS)})[0]
        for load in (load_native_decoder, load_decoder)
    )
    assert torch.linalg.norm(logits - expected) < 0.03 * torch.linalg.norm(expected)
