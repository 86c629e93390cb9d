"""NaN and infinity in a damaged model reach the logits or are rejected at load."""

import math
import struct

import numpy as np
import pytest
import torch
from engine.protocol.checkpoint.gguf import BLOCK_SIZES
from engine.protocol.checkpoint.gguf import GGMLQuantizationType as SourceType
from engine.protocol.errors import CheckpointError
from engine.workers.cpu.packing import WeightFormat, WeightMemory, allocate_packed, pack_rows
from engine.workers.layers.layer_spec import LayerSpec
from support.checkpoints.random import random_checkpoint
from support.workers.decoders import Runner
from support.workers.isas import ISAS, select_isa
from support.workers.native_decoders import ROPE, native_decoder, small_spec, torch_decoder

pytestmark = pytest.mark.slow

CACHES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]
NOT_FINITE = [math.nan, math.inf, -math.inf]
# A NaN whose last bits are set, which flipped bits in float32 may leave.
ODD_NAN = struct.unpack("f", struct.pack("I", 0x7F8003FF))[0]


def spoiled(path, spec, name, value, index=5):
    def spoil(tensors):
        tensors[name].view(-1)[index] = value

    return random_checkpoint(path, spec, edit=spoil)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache_dtype", CACHES)
def test_nonfinite_attention_input_makes_logits_nan(isa, cache_dtype, tmp_path):
    select_isa(isa)
    spec = small_spec(qkv_bias=True, layers=(LayerSpec(ROPE),) * 2)
    for part in "qkv":
        for value in (*NOT_FINITE, ODD_NAN):
            checkpoint = spoiled(tmp_path, spec, f"layers.1.self_attn.{part}_proj.bias", value)
            native = native_decoder(spec, checkpoint, cache_dtype=cache_dtype, num_threads=1)
            runner = Runner(native, 2)
            for tokens in ([*range(70)], [3], [4, 5, 6, 7, 8, 9]):
                assert runner.step({0: tokens})[0].isnan().all(), (part, value)


@pytest.mark.parametrize("cache_dtype", CACHES)
def test_nan_keys_do_not_affect_the_next_owner_of_their_block(cache_dtype, tmp_path):
    def spoil_a_token(tensors):
        tensors["embed_tokens.weight"][7] = torch.nan

    spec = small_spec(tie_word_embeddings=False)
    checkpoint = random_checkpoint(tmp_path, spec, edit=spoil_a_token)
    runner = Runner(native_decoder(spec, checkpoint, cache_dtype=cache_dtype, num_threads=1))
    assert runner.step({0: [7, 7, 7, 7, 7]})[0].isnan().all()
    runner.computed[0] = 0
    after_others = runner.step({0: [1, 2, 3]})[0]
    fresh = Runner(native_decoder(spec, checkpoint, cache_dtype=cache_dtype, num_threads=1))
    assert torch.equal(after_others, fresh.step({0: [1, 2, 3]})[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("value", [math.nan, ODD_NAN])
def test_soft_caps_preserve_nans(isa, value, tmp_path):
    select_isa(isa)
    spec = small_spec(attention_softcap=3.0, final_softcap=5.0, qkv_bias=True)
    for name in ("norm.weight", "layers.2.self_attn.q_proj.bias"):
        checkpoint = spoiled(tmp_path, spec, name, value)
        for dtype in (torch.float32, torch.bfloat16):
            runner = Runner(native_decoder(spec, checkpoint, dtype=dtype, num_threads=1))
            assert runner.step({0: [1, 2, 3]})[0].isnan().all()


def test_keys_and_values_out_of_range_are_clamped(tmp_path):
    def enlarge(tensors):
        tensors["layers.0.self_attn.k_proj.weight"].mul_(1e5)
        tensors["layers.0.self_attn.v_proj.weight"].mul_(-1e5)

    spec = small_spec(layers=(LayerSpec(ROPE),))
    checkpoint = random_checkpoint(tmp_path, spec, edit=enlarge)
    for isa in ISAS:
        select_isa(isa)
        narrow, wide = (
            Runner(native_decoder(spec, checkpoint, cache_dtype=dtype, num_threads=1))
            for dtype in (torch.float16, torch.float32)
        )
        for runner in (narrow, wide):
            runner.step({0: [*range(20)]})
        stored, exact = (
            runner.kv_caches[0].view(runner.decoder.attention.dtype) for runner in (narrow, wide)
        )
        assert exact.abs().max() > 65504
        assert torch.equal(stored, exact.clamp(-65504, 65504).half())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("value", NOT_FINITE)
def test_quantization_rejects_nonfinite_weights(quantization, value, tmp_path):
    spec = small_spec()
    checkpoint = spoiled(tmp_path, spec, "layers.1.mlp.down_proj.weight", value)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight.*NaN"):
        native_decoder(spec, checkpoint, quantization=quantization, num_threads=1)


def test_infinite_half_precision_weights_are_rejected(tmp_path):
    """The largest finite half must not replace an infinity."""
    spec = small_spec()
    checkpoint = spoiled(tmp_path, spec, "layers.1.mlp.down_proj.weight", math.inf)
    with pytest.raises(CheckpointError, match="down_proj"):
        native_decoder(spec, checkpoint, dtype=torch.float16, num_threads=1)


@pytest.mark.parametrize(
    ("stored_as", "weight_format", "halves"),
    [
        (SourceType.Q4_0, WeightFormat.U4, [0]),
        (SourceType.Q4_1, WeightFormat.U4_OFFSET, [0, 2]),
        (SourceType.Q5_0, WeightFormat.U5_OFFSET, [0]),
        (SourceType.Q5_1, WeightFormat.U5_OFFSET, [0, 2]),
        (SourceType.Q8_0, WeightFormat.U8, [0]),
        (SourceType.Q4_K, WeightFormat.U4_OFFSET, [0, 2]),
        (SourceType.Q5_K, WeightFormat.U5_OFFSET, [0, 2]),
        (SourceType.Q6_K, WeightFormat.U6, [208]),
    ],
)
def test_blocks_must_have_finite_scales(stored_as, weight_format, halves):
    elements, size = BLOCK_SIZES[stored_as]
    blocks = np.zeros((3, 2, size), np.uint8)

    def can_be_packed():
        weight = allocate_packed(weight_format, 3, 2 * elements, WeightMemory())
        return pack_rows(weight, stored_as, blocks.reshape(3, -1))

    assert can_be_packed()
    for half in halves:
        for value in NOT_FINITE:
            blocks[1, 1, half : half + 2] = np.array([value], np.float16).view(np.uint8)
            assert not can_be_packed()
        blocks[1, 1, half : half + 2] = np.array([1], np.float16).view(np.uint8)
        assert can_be_packed()


@pytest.mark.parametrize("part", "qkv")
@pytest.mark.parametrize("value", NOT_FINITE)
def test_nonfinite_attention_input_makes_logits_of_the_torch_decoder_nan(part, value, tmp_path):
    spec = small_spec(qkv_bias=True)
    checkpoint = spoiled(tmp_path, spec, f"layers.2.self_attn.{part}_proj.bias", value)
    runner = Runner(torch_decoder(spec, checkpoint))
    for tokens in ([*range(20)], [3]):
        assert runner.step({0: tokens})[0].isnan().all()
