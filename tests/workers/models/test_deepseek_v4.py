"""The published form of DeepSeek-V4 has other tensor names than transformers', and two kinds of quantized matrices."""

import json
import re

import pytest
import torch
from engine.protocol.errors import ConfigError
from safetensors.torch import load_file, save_file
from support.checkpoints.quantized import FORMATS
from support.families import assert_same, expected_logits, make_reference, prompt
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
