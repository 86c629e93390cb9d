"""The published forms of DeepSeek-V4 and V4.1: names of tensors, quantized matrices, and configs that are refused."""

import json
import re

import pytest
import torch
from engine.protocol.errors import CheckpointError, ConfigError
from safetensors.torch import load_file, save_file
from support.checkpoints.quantized import FORMATS
from support.families import assert_same, expected_logits, make_reference, prompt
from support.families.published import save_published
from support.workers.decoders import Runner, load_decoder

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

NUM_TOKENS = 60


def test_published_float8_and_four_bit_matrices_have_their_values(tmp_path):
    """Experts have four bits, the projections of the compressor are not quantized, and the rest is float8."""
    sizes = {"hidden_size": 64, "head_dim": 32, "q_lora_rank": 48, "intermediate_size": 96}
    reference = make_reference("deepseek-v4", **sizes)
    reference.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    values = dict(stored)
    for name, matrix in values.items():
        kind = "fp8-four-bits" if ".experts." in name else "fp8-powers"
        if re.search(r"\.(w.|wo_.|attn\.w(q_.|kv)|indexer\.wq_b)\.weight$", name):
            del stored[name]
            parts, values[name] = FORMATS[kind].store(matrix)
            module = name.removesuffix("weight")
            stored |= {f"{module}{part}": x.contiguous() for part, x in parts.items()}
    save_file(values, tmp_path / "model.safetensors", {"format": "pt"})
    expected = expected_logits(type(reference).from_pretrained(tmp_path), prompt(NUM_TOKENS))
    # Transformers saves some tensors with other names than the publisher.
    other_names = {"model.": "", "embed_tokens": "embed", "hc_head.hc_": "hc_head_"}
    other_names[".attn.norm."] = ".attn.kv_norm."
    for ours, published in other_names.items():
        stored = {name.replace(ours, published): x for name, x in stored.items()}
    stored["mtp.0.e_proj.weight"] = torch.zeros(64, 64)
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"quantization_config": FORMATS["fp8-powers"].config, "expert_dtype": "fp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_same(Runner(load_decoder(tmp_path)).step({0: prompt(NUM_TOKENS)})[0], expected)


def test_a_cache_of_eight_bits_is_refused(tmp_path):
    make_reference("deepseek-v4").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="set --kv-cache-dtype auto"):
        load_decoder(tmp_path, dtype=torch.float8_e4m3fn)


def test_tables_of_ngrams_may_have_scales_of_their_own_for_each_row(tmp_path):
    """Other matrices of the published files share a scale among blocks of rows."""
    reference = save_published("DeepseekV41", tmp_path, engram_head_dim=32)
    tokens = prompt(NUM_TOKENS)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [x for x in tensors if x.endswith("engram.embed.weight")]:
        values = tensors[name]
        scale = torch.exp2(torch.log2(values.abs().amax(1, keepdim=True) / 448).ceil())
        tensors[name] = (values / scale).to(torch.float8_e4m3fn)
        tensors[name.replace("weight", "scale")] = scale.to(torch.float8_e8m0fnu)
        reference.tensors[name] = tensors[name].float() * scale
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = FORMATS["fp8-powers"].config | {"weight_block_size": [32, 32]}
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": quantization})
    )
    logits = Runner(load_decoder(tmp_path)).step({0: tokens})[0]
    assert_same(logits, expected_logits(reference, tokens))


@pytest.mark.parametrize(
    ("differences", "message"),
    [
        ({"kv_source_layer_ids": [2, 3]}, "layers of index_source_layer_ids"),
        ({"kv_source_layer_ids": [3]}, "layer 1 has compress_ratios 2"),
        ({"candidate_source_layer_id": 1}, "with the ratio of layer 3"),
        ({"candidate_topk_blocks": 1}, "index_topk"),
        ({"engram_num_embeddings": [128, 100]}, "at least 184 for layer 4"),
        ({"engram_layer_ids": [1, "4"]}, "engram_layer_ids"),
        ({"compress_ratios": [0, 2]}, "compress_ratios"),
    ],
)
def test_layers_that_cannot_share_are_refused(differences, message, tmp_path):
    save_published("DeepseekV41", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= differences
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_decoder(tmp_path)


def test_another_tokenizer_than_that_of_the_hashes_is_refused(tmp_path):
    save_published("DeepseekV41", tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace('"A1"', '"B1"'))
    with pytest.raises(CheckpointError, match="34 classes, but the config states 33"):
        load_decoder(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is missing"):
        load_decoder(tmp_path)


@pytest.mark.parametrize(
    "architecture", ["DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"]
)
def test_a_model_that_also_reads_images_serves_text(tmp_path, architecture):
    """DeepSeek-V4-Flash-Vision has a tower, embeddings of marks, and what image tokens add to the scores of experts."""
    reference = make_reference("deepseek-v4")
    reference.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    others = (
        "vision.patch_embed.proj.weight",
        "aligner.w1.bias",
        "layers.1.ffn.gate.bias_vl",
        *(f"image_{name}" for name in ("start", "end", "newline", "pad")),
    )
    save_file(load_file(file) | {name: torch.zeros(4) for name in others}, file)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": [architecture], "vision_n_layers": 2, "vision_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = prompt(NUM_TOKENS)
    assert_same(
        Runner(load_decoder(tmp_path)).step({0: tokens})[0], expected_logits(reference, tokens)
    )
