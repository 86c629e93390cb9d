"""Every family gives the logits of transformers, however its tokens are split into steps."""

import json
import random
from functools import cache

import pytest
import torch
import transformers
from engine.protocol.checkpoint.gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from support.checkpoints.quantized import FORMATS
from support.families import (
    CONFIGS,
    SMALL,
    assert_same,
    expected_logits,
    make_multimodal,
    make_reference,
    prompt,
    save_multimodal,
    save_reference,
)
from support.families.dense import LLAMA3
from support.families.experts import LONG
from support.families.multimodal import MULTIMODAL
from support.families.native import NATIVE
from support.families.published import LING, PUBLISHED, WRITTEN, save_published
from support.gguf.writer import write_gguf
from support.workers.decoders import Runner, load_decoder, load_native_decoder
from transformers.models.mllama import MllamaTextConfig

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

NUM_TOKENS = 60
FROM_PUBLISHED = (
    "DeepseekV41",
    "GigaChat35",
    "Glm5Next",
    "IQuestQ1",
    "JetNemotron",
    "KimiK3",
    "LongcatFlashNgram",
    "MiniCPMSALA",
    "MistralLarge4",
    "PanguProMoEV2",
    "Step1",
    "Step5",
)
"""Families that transformers has no class for, whose cached states or keys have layouts of their own."""


class Reference:
    """A model of transformers, its checkpoint, and its logits."""

    def __init__(self, name, path, differences):
        self.path = path
        if name in WRITTEN or name in PUBLISHED:
            self.model = save_published(name, path)
        else:
            make = make_reference if name in CONFIGS else make_multimodal
            self.model = make(name, **differences)
            save_reference(self.model, path)
        self._logits = cache(lambda tokens: expected_logits(self.model, tokens))

    def logits(self, tokens):
        return self._logits(tuple(tokens))


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """The models of transformers by family, each made once, and those that a GGUF file can express."""

    def make(name, differs=False):
        path = tmp_path_factory.mktemp(name)
        return Reference(name, path, DIFFERENCES_IN_GGUF[name] if differs else {})

    return cache(make)


@pytest.fixture(
    scope="module",
    params=[*CONFIGS, *FROM_PUBLISHED, *(f"{x} native" for x in NATIVE)],
)
def models(request, references):
    """Engine's decoder and the model of transformers."""
    name, *native = request.param.split()
    reference = references(name)
    return (load_native_decoder if native else load_decoder)(reference.path), reference


@pytest.mark.parametrize("family", MULTIMODAL)
def test_text_logits_of_multimodal_models_equal_those_of_transformers(family, tmp_path):
    """The tensors of the vision tower are not read."""
    reference = save_multimodal(family, tmp_path)
    tokens = prompt(NUM_TOKENS)
    logits = Runner(load_decoder(tmp_path)).step({0: tokens})[0]
    assert_same(logits, expected_logits(reference, tokens))


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_text_of_a_model_with_cross_attention_passes_other_layers_only(load, tmp_path):
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    config = MllamaTextConfig(**SMALL | special, cross_attention_layers=[1], rope_parameters=LLAMA3)
    torch.manual_seed(0)
    reference = transformers.MllamaForCausalLM._from_config(config, attn_implementation="eager")
    for parameter in reference.eval().parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.15)
    reference.save_pretrained(tmp_path)
    tokens = prompt(NUM_TOKENS)
    logits = Runner(load(tmp_path)).step({0: tokens})[0]
    assert_same(logits, expected_logits(reference, tokens))


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_mxfp4_experts_give_the_logits_of_transformers(load, tmp_path):
    differences = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}
    reference = make_reference("gpt-oss", **differences)
    stored = {}
    for name, parameter in reference.named_parameters():
        if ".experts." not in name or name.endswith("_bias"):
            continue
        matrices = []
        for i, weight in enumerate(parameter.data):
            parts, values = FORMATS["mxfp4"].store(weight.T)
            parameter.data[i] = values.T
            matrices.append(parts)
        for part in matrices[0]:
            stored[f"{name}_{part}"] = torch.stack([parts[part] for parts in matrices])
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in stored}
    save_file(kept | stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = FORMATS["mxfp4"].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = prompt(NUM_TOKENS)
    logits, expected = (
        Runner(load(tmp_path)).step({0: tokens})[0],
        expected_logits(reference, tokens),
    )
    if load is load_decoder:
        return assert_same(logits, expected)
    # The activations of experts are rounded to eight bits.
    assert torch.linalg.norm(logits - expected) < 0.02 * torch.linalg.norm(expected)


def test_native_logits_from_a_quantized_gguf_file_of_gemma_are_close(tmp_path):
    """Inputs of layers and their table, streams and shared keys, with rows of whole blocks."""
    for name in ("gemma3n", "gemma4-shared"):
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
        sizes["hidden_size_per_layer_input"] = 32
        sizes |= {"laurel_rank": 32} if name == "gemma3n" else {}
        reference = make_reference(name, **sizes)
        path = write_gguf(tmp_path / f"{name}.gguf", reference, ggml_type=GGMLQuantizationType.Q8_0)
        logits, expected = (
            Runner(load(path)).step({0: prompt(NUM_TOKENS)})[0]
            for load in (load_native_decoder, load_decoder)
        )
        assert torch.linalg.norm(logits - expected) < 0.05 * torch.linalg.norm(expected), name


IN_GGUF = [
    "youtu",
    "mixtral-one",
    "qwen2-moe-all",
    "qwen3-moe-all",
    "olmoe",
    "granite-moe",
    "granite-moe-shared",
    "glm4-moe",
    "minimax-m2",
    "minimax-m3",
    "dots1",
    "ernie-moe",
    "hunyuan-moe",
    "gpt-oss",
    "gemma",
    "arcee",
    "ernie4.5",
    "exaone",
    "exaone4",
    "glm4",
    "seed-oss",
    "cohere",
    "cohere-norms",
    "cohere2",
    "mpt",
    "nemotron",
    "phi",
    "stablelm",
    "starcoder2",
    "gpt-neox",
    "bloom",
    "falcon",
    "falcon-groups",
    "falcon-one-norm",
    "apertus",
    "glm",
    "gpt-bigcode",
    "olmo",
    "olmo3",
    "glm4-moe-lite",
    "minicpm3",
    "bamba",
    "falcon-h1-without-norm",
    "granite-hybrid",
    "lfm2",
    "lfm2-moe",
    "nemotron-h",
    "nemotron-h-latent-experts",
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-moe",
    "gemma3n",
    "gemma4-dense",
    "gemma4-shared",
    "gemma4-moe",
    "afmoe",
    "exaone-moe",
    "glm5",
    "hunyuan3",
    "jais2",
    "ling2",
    "mamba2",
    "mellum",
    "mimo-v2",
    "granite-moe-windows",
    "laguna-elements",
    "ling3",
    "mamba",
    "falcon-mamba",
    "jamba",
]
YARN = LONG | {"mscale": 1.0}
DIFFERENCES_IN_GGUF = {
    "gpt2": {"scale_attn_by_inverse_layer_idx": False},
    "olmoe": {"clip_qkv": None},
    "mistral3": {
        "rope_parameters": YARN
        | {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16}
    },
    "deepseek-v2": {"rope_parameters": YARN, "q_lora_rank": 20},
    "deepseek-v3": {"rope_parameters": YARN, "attention_bias": False},
    "deepseek-v3.2": {"rope_parameters": YARN},
    "mistral4": {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.5}},
    "llama4": {"attention_chunk_size": 8192, "floor_scale": 8192},
    "phi-moe": {"router_jitter_noise": 0.01},
    "granite-hybrid-experts": {"position_embedding_type": "nope"},
    "falcon-h1": {"mamba_norm_before_gate": False},
    "kimi-linear": {"num_attention_heads": 3, "num_key_value_heads": 3},
    "bitnet": {"attention_bias": False, "hidden_act": "silu"},
    "granite-windows": {"layer_rope_theta": [1e4, 0, 1e4]},
    "laguna": {"moe_router_logit_softcapping": 0.0},
    "Step3p7": {"query_pre_attn_scalar": 16},
}
"""Differences from `CONFIGS` where a GGUF file cannot express a setting."""


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_gguf_files_of_earlier_converters_give_the_same_logits(name, load, tmp_path):
    reference = make_reference(name, **DIFFERENCES_IN_GGUF[name])
    decoder = load(write_gguf(tmp_path / "m.gguf", reference, splits_heads=False))
    tokens = prompt(NUM_TOKENS)
    assert_same(Runner(decoder).step({0: tokens})[0], expected_logits(reference, tokens))


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_gguf_files_with_a_tensor_per_expert_give_the_same_logits(load, tmp_path):
    reference = make_reference("mixtral", sliding_window=None)
    decoder = load(write_gguf(tmp_path / "m.gguf", reference, splits_experts=True))
    tokens = prompt(NUM_TOKENS)
    assert_same(Runner(decoder).step({0: tokens})[0], expected_logits(reference, tokens))


@pytest.mark.parametrize("architecture", ["bailingmoe", "deepseek2-ocr"])
def test_gguf_files_of_other_mixtures_give_the_logits_of_equal_layers(architecture, tmp_path):
    reference = make_reference("granite-moe-shared", **LING)
    path = write_gguf(tmp_path / "m.gguf", reference, published_as=architecture)
    tokens = prompt(NUM_TOKENS)
    logits = Runner(load_decoder(path)).step({0: tokens})[0]
    assert_same(logits, expected_logits(reference, tokens))


@pytest.mark.parametrize(
    ("architecture", "name", "differences"),
    [
        ("dream", "qwen2", {}),
        ("llada", "llama2", {}),
        ("llada-moe", "qwen3-moe", {"decoder_sparse_step": 1, "norm_topk_prob": False}),
        ("rnd1", "qwen3-moe", {"decoder_sparse_step": 1}),
    ],
)
def test_gguf_files_of_diffusion_models_give_the_logits_of_equal_layers(
    architecture, name, differences, tmp_path
):
    """Without a block to denoise, their tokens attend to earlier ones, as those of other decoders."""
    no_window = {} if name == "llama2" else {"use_sliding_window": False}
    reference = make_reference(name, **differences, **no_window)
    path = write_gguf(tmp_path / "m.gguf", reference, published_as=architecture)
    tokens = prompt(NUM_TOKENS)
    logits = Runner(load_native_decoder(path)).step({0: tokens})[0]
    assert_same(logits, expected_logits(reference, tokens))


def test_a_gguf_file_without_rope_scaling_has_none(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e4}
    reference = make_reference("gpt-oss", rope_parameters=rope)
    decoder = load_decoder(write_gguf(tmp_path / "m.gguf", reference))
    tokens = prompt(NUM_TOKENS)
    assert_same(Runner(decoder).step({0: tokens})[0], expected_logits(reference, tokens))


NATIVE_IN_GGUF = [
    f"{name} native"
    for name in (
        "deepseek-v2",
        "deepseek-v3",
        "bamba",
        "gemma3n",
        "gemma4-moe",
        "gemma4-shared",
        "granite-hybrid",
        "jamba",
        "kimi-linear",
        "lfm2",
        "minicpm3",
        "nemotron-h",
        "qwen3.5",
    )
]


@pytest.mark.parametrize("name", [*IN_GGUF, *DIFFERENCES_IN_GGUF, *NATIVE_IN_GGUF])
def test_logits_from_a_gguf_file_equal_those_of_transformers(name, references, tmp_path):
    name, *native = name.split()
    reference = references(name, differs=name in DIFFERENCES_IN_GGUF)
    path = write_gguf(tmp_path / "m.gguf", reference.model)
    decoder = (load_native_decoder if native else load_decoder)(path)
    tokens = prompt(NUM_TOKENS)
    assert_same(Runner(decoder).step({0: tokens})[0], reference.logits(tokens))


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_ternary_gguf_files_of_bitnet_cpp_give_the_logits_of_transformers(load, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    reference = make_reference("bitnet", **sizes, attention_bias=False)
    for name, parameter in reference.named_parameters():
        if "_proj." in name:
            scale = parameter.data.abs().mean()
            parameter.data = (parameter.data / scale).round().clamp(-1, 1) * scale
    path = write_gguf(tmp_path / "m.gguf", reference, published_as="bitnet-b1.58")
    tokens = prompt(NUM_TOKENS)
    logits, expected = (
        Runner(load(path)).step({0: tokens})[0],
        expected_logits(reference, tokens),
    )
    if load is load_decoder:
        return assert_same(logits, expected)
    # The activations are rounded to eight bits.
    assert torch.linalg.norm(logits - expected) < 0.05 * torch.linalg.norm(expected)


def test_native_logits_from_a_quantized_gguf_file_with_latent_attention_are_close(tmp_path):
    """The matrices of each head stay quantized. No layer has experts, whose choice would amplify rounding."""
    ranks = {"q_lora_rank": 64, "kv_lora_rank": 64, "first_k_dense_replace": 3}
    sizes = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "hidden_size": 64}
    sizes |= {"intermediate_size": 96}
    reference = make_reference("deepseek-v3", **ranks | sizes | DIFFERENCES_IN_GGUF["deepseek-v3"])
    path = write_gguf(tmp_path / "m.gguf", reference, ggml_type=GGMLQuantizationType.Q8_0)
    logits, expected = (
        Runner(load(path)).step({0: prompt(NUM_TOKENS)})[0]
        for load in (load_native_decoder, load_decoder)
    )
    assert torch.linalg.norm(logits - expected) < 0.05 * torch.linalg.norm(expected)


def test_tokens_and_logits_of_mixed_batches_equal_those_of_transformers(models):
    """Requests join, leave, prefill and decode in the same steps, in varying order.

    The last request continues with its likeliest tokens, which have to be the likeliest in transformers, too.
    """
    decoder, reference = models
    # In transformers, the frequencies of LongRoPE depend on the length of a text, but not above 32 tokens.
    texts = [prompt(length, seed) for seed, length in enumerate([60, 43, 57, 35])]
    # With this seed, few steps cover much: a prompt of 35 tokens starts whole, beside requests that prefill and decode;
    # two requests prefill beside one that decodes; all four decode in one step; one prefills alone; one decodes alone.
    rng, runner, generated = random.Random(2874), Runner(decoder, len(texts)), []
    logits = [[] for _ in texts]
    while unfinished := [i for i, text in enumerate(texts) if runner.computed[i] < len(text)]:
        chunks = {}
        for i in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            size = rng.choice([1, 1, rng.randint(2, 40)])
            chunks[i] = texts[i][runner.computed[i] : runner.computed[i] + size]
        for i, part in runner.step(chunks).items():
            logits[i].append(part)
        if runner.computed[-1] == len(texts[-1]) and len(generated) < 12:
            generated.append(int(logits[-1][-1][-1].argmax()))
            texts[-1].append(generated[-1])
    for parts, text in zip(logits, texts, strict=True):
        assert_same(torch.cat(parts), reference.logits(text))
    likeliest = reference.logits(texts[-1]).argmax(-1).tolist()
    assert generated == likeliest[-len(generated) - 1 : -1]
