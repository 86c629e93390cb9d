"""Families that transformers has no class for give the logits of models with the same mathematics."""

import json
import re

import gguf
import numpy as np
import pytest
import torch
from engine.workers.batch.spans import Spans
from engine.workers.cpu.packing import PackedWeight, WeightMemory
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from support.checkpoints.quantized import FORMATS, quantize_directory
from support.families import (
    assert_same,
    expected_logits,
    make_multimodal,
    make_reference,
    prompt,
    save_reference,
)
from support.families.experts import LONG
from support.families.multimodal import MULTIMODAL
from support.families.published import PUBLISHED, save_published
from support.gguf.gemma import write_gemma
from support.gguf.hybrid import write_hybrid
from support.gguf.published import write_published
from support.gguf.quantizers import quantize
from support.gguf.saved import LIKE_OTHER_LAYERS, write_saved
from support.gguf.streams import write_streams
from support.gguf.writer import write_gguf
from support.suite.reachable import reachable
from support.workers.decoders import Runner, load_decoder, load_native_decoder
from torch import Tensor

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

NUM_TOKENS = 60
IN_TORCH = (
    "PanguProMoEV2",
    "Chameleon",
    "Doge",
    "GigaChat35",
    "IQuestQ1",
    "IQuestLoopCoder",
    "JetNemotron",
    "LongcatFlashNgram",
    "Motif",
    "Phi3Small",
    "Phi4Flash",
    "Step3Text",
    "Step5",
)
"""Families for which there are no native programs."""


@pytest.mark.parametrize(
    ("name", "load"),
    [
        (name, load)
        for name in PUBLISHED
        for load in (load_decoder, load_native_decoder)
        if load is load_decoder or name not in IN_TORCH
    ],
)
def test_logits_of_families_without_a_class_in_transformers(name, load, tmp_path):
    reference = save_published(name, tmp_path)
    tokens = prompt(NUM_TOKENS)
    logits = Runner(load(tmp_path)).step({0: tokens})[0]
    assert_same(logits, expected_logits(reference, tokens))


def test_heads_find_their_blocks_of_keys_in_chunks_beside_other_requests(tmp_path):
    """The blocks of Phi-3-small are counted from the start of a sequence, not of a step."""
    reference = save_published("Phi3Small", tmp_path)
    texts = [prompt(NUM_TOKENS, seed) for seed in range(2)]
    runner, parts = Runner(load_decoder(tmp_path), 2), [[], []]
    sizes = [(7, 1), (1, 13), (11, 2), (1, 1), (5, 1), (1, 9), (3, 1)]
    for step in sizes:
        start = runner.computed.copy()
        chunks = {i: texts[i][start[i] : start[i] + size] for i, size in enumerate(step)}
        for i, logits in runner.step(chunks).items():
            parts[i].append(logits)
    for text, logits in zip(texts, parts, strict=True):
        computed = torch.cat(logits)
        assert_same(computed, expected_logits(reference, text)[: len(computed)])


def test_heads_may_share_what_is_subtracted(tmp_path):
    """In Motif 2, each fifth head is subtracted from the four before it."""
    heads = {"num_attention_heads": 12, "num_noise_heads": 4, "num_key_value_heads": 4}
    reference = save_published("Motif", tmp_path, **heads)
    tokens = prompt(NUM_TOKENS)
    logits = Runner(load_decoder(tmp_path)).step({0: tokens})[0]
    assert_same(logits, expected_logits(reference, tokens))


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("BailingMoe", "BailingMoEForCausalLM"),
        ("K2Horizon", "XllmForCausalLM"),
        ("KimiK3", "KimiK3LinearForCausalLM"),
        ("MuseGlimmer", "MuseGlimmerForCausalLM"),
        ("llama2", "TorchNativeLlamaForCausalLM"),
        ("llama2", "YiVLForCausalLM"),
        ("mixtral", "QuantMixtralForCausalLM"),
        ("phi3-partial", "TorchNativePhi3ForCausalLM"),
    ],
)
def test_architectures_may_have_the_names_of_other_servers(name, architecture, tmp_path):
    if name in PUBLISHED:
        reference = save_published(name, tmp_path)
    else:
        reference = (make_multimodal if name in MULTIMODAL else make_reference)(name)
        save_reference(reference, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config = config.get("text_config", {}) | config | {"architectures": [architecture]}
    config = {k: v for k, v in config.items() if k not in ("text_config", "vision_config")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = prompt(NUM_TOKENS)
    logits = Runner(load_native_decoder(tmp_path)).step({0: tokens})[0]
    assert_same(logits, expected_logits(reference, tokens))


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
@pytest.mark.parametrize(
    ("name", "architecture", "differences"),
    [
        ("Arctic", "arctic", {"moe_layer_frequency": 1}),
        ("BaiChuan", "cogvlm", {}),
        ("Baichuan", "baichuan", {"num_hidden_layers": 40}),
        ("Baichuan", "refact", {}),
        ("Chameleon", "chameleon", {"num_images": 93}),
        ("CodeShell", "codeshell", {}),
        ("Grok1", "grok", {}),
        ("KORMo", "qwen2", {}),
        ("GroveMoe", "grovemoe", {}),
        ("InternLM", "pangu-embedded", {}),
        ("JAIS", "jais", {}),
        ("K2Horizon", "k2-horizon", {}),
        ("Maincoder", "maincoder", {}),
        ("Maple", "maple", {}),
        ("Nanbeige", "nanbeige", {}),
        ("OpenELM", "openelm", {}),
        ("Orion", "orion", {}),
        ("PLM", "plm", {}),
        ("Plamo", "plamo", {}),
        ("Plamo2", "plamo2", {"layer_types": ["full_attention"] * 5}),
        ("Plamo3", "plamo3", {}),
        ("QWen", "qwen", {}),
        ("SmallThinker", "smallthinker", {}),
        ("Spark2_5", "spark2_5", {"attention_bias": False}),
        ("Talkie", "talkie", {}),
    ],
)
def test_gguf_files_of_these_families_give_the_same_logits(
    name, architecture, differences, load, tmp_path
):
    reference = save_published(name, tmp_path, **differences)
    tokens = prompt(NUM_TOKENS)
    load = load_decoder if name in IN_TORCH else load
    logits = Runner(load(write_published(tmp_path, architecture))).step({0: tokens})[0]
    assert_same(logits, expected_logits(reference, tokens))


@pytest.mark.parametrize("name", ["exaone", "iquest-coder", "sarvam-mla", "sarvam-moe"])
def test_checkpoints_may_name_the_class_that_computes_them_in_transformers(name, tmp_path):
    reference = make_reference(name)
    reference.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["architectures"] == [type(reference).__name__]
    tokens = prompt(NUM_TOKENS)
    logits = Runner(load_decoder(tmp_path)).step({0: tokens})[0]
    assert_same(logits, expected_logits(reference, tokens))


@pytest.mark.parametrize("name", ["axk1", "ernie-moe", "granite-moe", "lfm2-moe", "minimax-m2"])
def test_checkpoints_may_have_the_names_of_tensors_in_memory(name, tmp_path):
    reference = make_reference(name)
    reference.save_pretrained(tmp_path, save_original_format=False)
    tokens = prompt(NUM_TOKENS)
    logits = Runner(load_decoder(tmp_path)).step({0: tokens})[0]
    assert_same(logits, expected_logits(reference, tokens))


def _refined_web(config):
    names = {"n_head": "num_attention_heads", "n_head_kv": "num_kv_heads"}
    old = {name: config.pop(other) for name, other in names.items()}
    config.pop("new_decoder_architecture")
    config.pop("num_key_value_heads", None)
    return old | {"architectures": ["RWForCausalLM"], "model_type": "RefinedWeb"}


def _stablelm_epoch(config):
    rope = config.pop("rope_parameters")
    return {
        "architectures": ["StableLMEpochForCausalLM"],
        "model_type": "stablelm_epoch",
        "rope_pct": rope["partial_rotary_factor"],
        "rope_theta": rope["rope_theta"],
        "norm_eps": config.pop("layer_norm_eps"),
    }


def _minimax_text(config):
    names = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
    old = {
        f"layernorm_{other}_{end}": config.pop(f"{name}_{end}_factor")
        for name, other in names.items()
        for end in ("alpha", "beta")
    }
    kinds = config.pop("layer_types")
    return old | {
        "architectures": ["MiniMaxText01ForCausalLM"],
        "model_type": "minimax_text_01",
        "attn_type_list": [int(kind == "full_attention") for kind in kinds],
        "postnorm": True,
        "shared_intermediate_size": 0,
    }


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("falcon-groups", _refined_web),
        ("minimax", _minimax_text),
        ("stablelm-parallel", _stablelm_epoch),
    ],
)
def test_configs_with_the_names_of_the_time_before_transformers_had_the_model(name, old, tmp_path):
    reference = make_reference(name)
    save_reference(reference, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["transformers_version"] = "4.27.4"
    config |= old(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = prompt(NUM_TOKENS)
    logits = Runner(load_decoder(tmp_path)).step({0: tokens})[0]
    assert_same(logits, expected_logits(reference, tokens))


ONE_FACTOR = {
    f"{kind}_{end}_factor": factor
    for kind in ("full_attn", "linear_attn", "mlp")
    for end, factor in (("alpha", 3.5), ("beta", 1.0))
}
"""The factors of a MiniMax-01, which has one for all inputs of blocks in GGUF files."""
IN_GGUF = {
    "KimiK3": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_expert_group": 1,
        "topk_group": 1,
        "tie_word_embeddings": False,
    },
    "deepseek-v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
        "rope_parameters": LONG,
    },
}
"""Models with several streams, and differences from `CONFIGS` that a GGUF file can express."""


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
@pytest.mark.parametrize("name", IN_GGUF)
def test_gguf_files_of_models_with_streams_give_the_same_logits(name, load, tmp_path):
    if name in PUBLISHED:
        reference = save_published(name, tmp_path, **IN_GGUF[name])
    else:
        reference = make_reference(name, **IN_GGUF[name])
        save_reference(reference, tmp_path)
    tokens = prompt(NUM_TOKENS)
    logits = Runner(load(write_streams(tmp_path))).step({0: tokens})[0]
    assert_same(logits, expected_logits(reference, tokens))


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
@pytest.mark.parametrize(
    ("name", "architecture", "differences"),
    [
        ("dots3-note", "dots3note", LIKE_OTHER_LAYERS),
        ("Glm5Next", "glm5-next", {"linear_num_heads": 6}),
        ("Glm5Next", "glm5next", {"linear_num_heads": 6}),
        ("hrm-text", "hrm_text", {}),
        ("hy4", "hy_v4", {}),
        ("minimax", "minimax-01", ONE_FACTOR),
        ("Ouro", "ouro", {}),
    ],
)
def test_gguf_files_of_looped_and_sparse_models_give_the_same_logits(
    name, architecture, differences, load, tmp_path
):
    if name in PUBLISHED:
        reference = save_published(name, tmp_path, **differences)
    else:
        make = make_multimodal if name in MULTIMODAL else make_reference
        reference = make(name, **differences)
        save_reference(reference, tmp_path)
    tokens = prompt(NUM_TOKENS)
    logits = Runner(load(write_saved(tmp_path, architecture))).step({0: tokens})[0]
    assert_same(logits, expected_logits(reference, tokens))


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_all_tokens_of_a_prompt_of_hrm_text_attend_to_each_other(load, tmp_path):
    reference = make_reference("hrm-text")
    save_reference(reference, tmp_path)
    decoder, tokens, count = load(tmp_path), prompt(NUM_TOKENS), 40
    runner = Runner(decoder)
    runner.spans = Spans(decoder.spec.span_kind)
    runner.spans.add_request(0, count, [])
    logits = [runner.step({0: part})[0] for part in (tokens[:count], tokens[count:])]
    types = torch.tensor([[int(i < count) for i in range(NUM_TOKENS)]])
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens]), token_type_ids=types).logits[0]
    assert_same(torch.cat(logits), expected)


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
@pytest.mark.parametrize(
    ("name", "differences"),
    [
        ("qwen4", {"output_gate_type": "sigmoid"}),
        ("qwen4-ngrams", {"ple_layer_ids": [3], "seed": 99, "ngram_vocab_size_base": 20}),
    ],
)
def test_gguf_files_of_qwen4_give_the_same_logits(name, differences, load, tmp_path):
    """They state the constants of the hashes, and end with a layer that drafts tokens."""
    reference = make_reference(name, **differences)
    tokens = prompt(NUM_TOKENS)
    logits = Runner(load(write_gguf(tmp_path / "m.gguf", reference))).step({0: tokens})[0]
    assert_same(logits, expected_logits(reference, tokens))


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
@pytest.mark.parametrize(
    ("name", "write", "table", "differences"),
    [
        (
            "qwen4-ngrams",
            write_hybrid,
            "model.layers.2.ple.ple_embedding.ngram_embedding",
            {"ple_layer_ids": [3], "ple_embed_dim": 128, "ngram_vocab_size_base": 20_000},
        ),
        (
            "gemma3n",
            write_gemma,
            "model.embed_tokens_per_layer",
            {"vocab_size": 3000, "vocab_size_per_layer_input": 3000},
        ),
    ],
)
def test_tables_of_a_gguf_file_stay_quantized_in_memory(
    name, write, table, differences, load, tmp_path
):
    reference = make_reference(name, **differences)
    weight = reference.get_submodule(table).weight
    path = write(tmp_path / "m.gguf", reference, table_type=GGMLQuantizationType.Q8_0)
    stored = quantize(weight.detach().numpy(), GGMLQuantizationType.Q8_0)
    values = gguf.quants.dequantize(stored, GGMLQuantizationType.Q8_0)
    weight.data = torch.from_numpy(values).view(weight.shape)
    decoder, tokens = load(path), prompt(NUM_TOKENS)
    assert_same(Runner(decoder).step({0: tokens})[0], expected_logits(reference, tokens))
    matrices = [x.array if isinstance(x, PackedWeight) else x for x in reachable(decoder)]
    sizes = [x.nbytes for x in matrices if isinstance(x, np.ndarray | Tensor)]
    reserved = WeightMemory().allocate(1).base.nbytes
    assert max(size for size in sizes if size != reserved) < weight.nbytes / 3


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_a_gguf_file_may_have_experts_of_several_sizes(load, tmp_path):
    reference = save_published("NemotronHPuzzle", tmp_path)
    reference.config.block_configs = PUBLISHED["NemotronHPuzzle"].config["block_configs"]
    tokens = prompt(NUM_TOKENS)
    logits = Runner(load(write_gguf(tmp_path / "m.gguf", reference))).step({0: tokens})[0]
    assert_same(logits, expected_logits(reference, tokens))


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_parts_of_a_matrix_may_have_fp8_blocks_of_their_own(load, tmp_path):
    """The matrices of MiMo-V2.5 are stored as they were divided among devices."""
    reference = save_published("MiMoV2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for i, layer in enumerate(reference.model.layers):
        attention = layer.self_attn
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        weights = zip(*(module.weight.data.chunk(2) for module in projections), strict=True)
        stored = [FORMATS["fp8-blocks"].store(torch.cat(parts)) for parts in weights]
        heights = [len(module.weight) // 2 for module in projections]
        values = zip(*(meaning.split(heights) for _, meaning in stored), strict=True)
        for module, parts in zip(projections, values, strict=True):
            module.weight.data = torch.cat(parts)
        biases = zip(*(module.bias.data.chunk(2) for module in projections), strict=True)
        module = f"model.layers.{i}.self_attn.qkv_proj"
        tensors[f"{module}.bias"] = torch.cat([each for parts in biases for each in parts])
        for name in stored[0][0]:
            tensors[f"{module}.{name}"] = torch.cat([parts[name] for parts, _ in stored])
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = FORMATS["fp8-blocks"].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = prompt(NUM_TOKENS)
    logits, expected = (
        Runner(load(tmp_path)).step({0: tokens})[0],
        expected_logits(reference, tokens),
    )
    # The activations beside weights of eight bits are rounded, too.
    assert torch.linalg.norm(logits - expected) < 0.01 * torch.linalg.norm(expected)


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("fp8-mxfp8", {"weight": "", "weight_scale_inv": "_scale"}),
        ("modelopt-nvfp4", {"weight": "", "weight_scale": ".scale", "weight_scale_2": ".scale2"}),
        (
            "compressed-nvfp4",
            {name: f".{name}" for name in ("weight_packed", "weight_scale", "weight_global_scale")},
        ),
    ],
)
def test_stacked_experts_may_be_quantized(kind, names, load, tmp_path):
    """The experts of Inkling 2 are, with rows of gate and up projections in turns."""
    reference = make_reference(
        "inkling2", hidden_size=64, intermediate_size=32, moe_intermediate_size=32
    )
    save_reference(reference, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    meanings = {}
    for name in [name for name in tensors if re.search(r"experts\.w(13|2)_weight$", name)]:
        stored, values = zip(*map(FORMATS[kind].store, tensors.pop(name)), strict=True)
        meanings[name] = torch.stack(values)
        for own, end in names.items():
            tensors[name + end] = torch.stack([each[own] for each in stored])
        if kind == "modelopt-nvfp4":
            tensors[f"{name}.input_amax"] = torch.ones(())
    for i, layer in enumerate(reference.model.layers):
        experts = layer.mlp.experts
        gate_up, down = (meanings[f"model.llm.layers.{i}.mlp.experts.w{n}_weight"] for n in (13, 2))
        experts.gate_up_proj.data = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1)
        experts.down_proj.data = down
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = FORMATS[kind].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = prompt(NUM_TOKENS)
    logits, expected = (
        Runner(load(tmp_path)).step({0: tokens})[0],
        expected_logits(reference, tokens),
    )
    errors = (logits - expected).norm(dim=1) / expected.norm(dim=1)
    if "nvfp4" in kind and load is load_native_decoder:
        # Natively, activations beside four bits are rounded to eight bits, so that later tokens choose other experts.
        assert errors[:20].median() < 0.03
    else:
        assert errors.max() < 0.02


@pytest.mark.parametrize("name", ["bnb-nf4-nested", "bnb-int8"])
@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_fused_projections_of_bitsandbytes_give_the_logits_of_their_values(load, name, tmp_path):
    reference = make_reference("phi3", tie_word_embeddings=True)
    reference.save_pretrained(tmp_path)
    reference.load_state_dict(quantize_directory(tmp_path, name), strict=False)
    tokens = prompt(NUM_TOKENS)
    logits, expected = (
        Runner(load(tmp_path)).step({0: tokens})[0],
        expected_logits(reference, tokens),
    )
    # The native backend rounds the scales of integers to float16.
    assert torch.linalg.norm(logits - expected) <= 2e-3 * torch.linalg.norm(expected)
