"""Models without experts that transformers has no class for, and whose sizes or names are their own."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import torch
import transformers
from support.families.published import changes
from support.families.published.form import Published
from support.families.published.loops import IQUEST_LOOP
from support.families.published.plamo import PLAMO
from support.families.published.talkie import TALKIE
from torch import nn

_ROTARY = {"rope_type": "default", "rope_theta": 1e4}
_GPT2_NAMES = (
    (r"(model|transformer)\.(word_embeddings|embed_tokens)", "transformer.wte"),
    (r"(model|transformer)\.(layers|h)\.", "transformer.h."),
    (r"(model|transformer)\.(norm|ln_f)", "transformer.ln_f"),
    (r"input_layernorm", "ln_1"),
    (r"post_attention_layernorm", "ln_2"),
    (r"self_attn\.qkv_proj|self_attention\.query_key_value", "attn.c_attn"),
    (r"self_attn\.o_proj|self_attention\.dense", "attn.c_proj"),
)
_WIDTH, _EMBEDDING_SCALE = 0.5, 3.0
HEADS, KV_HEADS, FACTORS, SIZES = (4, 6, 8), (2, 2, 4), (1.0, 1.7, 2.0), (48, 80, 96)


class _GatedMlp(nn.Module):
    """An MLP that adds its output to the residual stream, as those of BLOOM do."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_fc2, self.c_proj = nn.Linear(48, 80), nn.Linear(48, 80), nn.Linear(80, 48)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0, 0.15)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        hidden = self.c_fc(x) * nn.functional.silu(self.c_fc2(x))
        return residual + self.c_proj(hidden)


class _HeadNorm(nn.Module):
    """A layer norm of heads, each of which has its own weights and biases."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.empty(num_heads, 8).normal_(0.8, 0.3)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:]) * self.weight + self.bias


def _as_chameleon(reference: transformers.PreTrainedModel) -> None:
    """Give a Qwen3 other norms of heads, and never let it generate the tokens of images, which begin with the fifth."""
    for layer in reference.model.layers:
        layer.self_attn.q_norm, layer.self_attn.k_norm = _HeadNorm(6), _HeadNorm(2)
    bias = torch.zeros(97)
    bias[4 : 4 + reference.config.num_images] = -1e30
    reference.lm_head.register_forward_hook(lambda _module, _args, logits: logits + bias)


def _as_plamo(reference: transformers.PreTrainedModel) -> None:
    """Let attention and MLP of a Llama read the same normed hidden states."""

    def forward(layer: nn.Module, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        normed = layer.input_layernorm(x)
        attended, _ = layer.self_attn(normed, **kwargs)
        total: torch.Tensor = x + attended + layer.mlp(normed)
        return total

    for layer in reference.model.layers:
        layer.forward = functools.partial(forward, layer)
        layer.post_attention_layernorm = None


class _Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * _EMBEDDING_SCALE


def _as_jais(reference: transformers.PreTrainedModel) -> None:
    """Give a BLOOM gates, factors on embeddings and logits, and attention that is scaled by the size of a head."""
    reference.transformer.word_embeddings_layernorm = _Scaled()
    for layer in reference.transformer.h:
        layer.mlp = _GatedMlp()
        layer.self_attention.inv_norm_factor = 1 / layer.self_attention.head_dim
    reference.lm_head.register_forward_hook(lambda _module, _args, logits: logits * _WIDTH)


def _with_columns(tensors: changes.Tensors) -> changes.Tensors:
    """Store the layers' matrices as [inputs, outputs], with all queries before all keys and values."""
    changed = {}
    for name, weight in tensors.items():
        if "query_key_value" in name:
            weight = weight.unflatten(0, (6, 3, -1)).transpose(0, 1).flatten(0, 2)
        changed[name] = weight.T if weight.ndim == 2 and ".h." in name else weight
    return changed


def _with_neighbors(tensors: changes.Tensors) -> changes.Tensors:
    """Store heads so that neighboring elements are rotated together."""
    changed = {}
    for name, weight in tensors.items():
        if re.search(r"self_attn\.(q_proj|k_proj|query_layernorm|key_layernorm)\.", name):
            weight = weight.unflatten(0, (-1, 2, 8)).transpose(1, 2).flatten(0, 2)
        changed[name] = weight
    return changed


def _as_openelm(reference: transformers.PreTrainedModel) -> None:
    """Give the layers of a Qwen3 different numbers of heads, and MLPs of different sizes."""
    for index, layer in enumerate(reference.model.layers):
        own = copy.deepcopy(reference.config)
        own.num_attention_heads, own.num_key_value_heads = HEADS[index], KV_HEADS[index]
        own.intermediate_size = SIZES[index]
        layer.self_attn, layer.mlp = type(layer.self_attn)(own, index), type(layer.mlp)(own)
        for module in (layer.self_attn, layer.mlp):
            for parameter in module.parameters():
                nn.init.normal_(parameter, 0.8 if parameter.ndim == 1 else 0, 0.15)


def _with_fused_gates(tensors: changes.Tensors) -> changes.Tensors:
    changed = changes.with_fused_qkv(tensors)
    for name in [name for name in changed if "gate_proj" in name]:
        up = changed.pop(name.replace("gate_proj", "up_proj"))
        changed[name.replace("gate_proj", "proj_1")] = torch.cat((changed.pop(name), up))
    return changed


def _without_gates(reference: transformers.PreTrainedModel) -> None:
    """Make the MLPs of a DeepSeek-V2 square ReLUs."""

    def square(mlp: Any, x: torch.Tensor) -> torch.Tensor:
        squared: torch.Tensor = mlp.down_proj(mlp.up_proj(x).relu().square())
        return squared

    for layer in reference.model.layers:
        layer.mlp.gate_proj = None
        layer.mlp.forward = square.__get__(layer.mlp)


def _as_spark(reference: transformers.PreTrainedModel) -> None:
    """Make a Laguna with dense layers norm no queries and keys, and its gates sigmoids."""
    for layer in reference.model.layers:
        attention = layer.self_attn
        attention.q_norm = attention.k_norm = nn.Identity()
        attention.g_proj = nn.Linear(48, 6, reference.config.attention_bias)
        for parameter in attention.g_proj.parameters():
            nn.init.normal_(parameter, 0, 0.3)
        # The softplus of this is the sigmoid.
        attention.g_proj.register_forward_hook(lambda _m, _args, x: x.sigmoid().expm1().log())


def _with_own_biases(reference: transformers.PreTrainedModel) -> None:
    """Take the biases of a Llama's first products, and leave those of the last ones."""
    for layer in reference.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for module in (attention.q_proj, attention.k_proj, attention.v_proj):
            module.bias = None
        mlp.gate_proj.bias = mlp.up_proj.bias = None


def _with_pairs(tensors: changes.Tensors) -> changes.Tensors:
    """Put the rows of each key head and of its value head into one matrix."""
    changed = {}
    for name, weight in tensors.items():
        if ".k_proj." in name:
            parts = (tensors[name.replace(".k_", f".{x}_")].unflatten(0, (2, -1)) for x in "kv")
            name, weight = name.replace(".k_", ".kv_"), torch.cat([*parts], 1).flatten(0, 1)
        if ".v_proj." not in name:
            changed[name] = weight
    return changed


def _with_factors(reference: transformers.PreTrainedModel) -> None:
    reference.model.embed_tokens.register_forward_hook(lambda _m, _args, x: _EMBEDDING_SCALE * x)
    reference.lm_head.register_forward_hook(lambda _module, _args, logits: logits * _WIDTH)


def _as_refact(reference: transformers.PreTrainedModel) -> None:
    changes.with_slopes(reference, power=1.0)
    changes.with_layer_norms(reference)
    for module in reference.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_parameter("bias", None)


def _with_joined_keys_and_values(tensors: changes.Tensors) -> changes.Tensors:
    """Join keys with values, and gates with the elements that they multiply."""
    joined = {}
    for first, second, name in (
        ("self_attn.k_proj", "self_attn.v_proj", "attn.kv"),
        ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
    ):
        for key in [key for key in tensors if first in key]:
            parts = tensors.pop(key), tensors.pop(key.replace(first, second))
            joined[key.replace(first, name)] = torch.cat(parts)
    return tensors | joined


PUBLISHED_DENSE = {
    "GPTRefact": Published(
        "llama2",
        {"num_key_value_heads": 1, "intermediate_size": 256, "tie_word_embeddings": True},
        {
            "model_type": "gpt_refact",
            "intermediate_size": None,
            "num_key_value_heads": None,
            "rms_norm_eps": None,
            "layer_norm_epsilon": 1e-5,
            "multi_query": True,
        },
        (
            (r"self_attn\.q_proj", "attn.q"),
            (r"mlp\.down_proj", "mlp.c_proj"),
            *_GPT2_NAMES,
        ),
        _with_joined_keys_and_values,
        prepare=_as_refact,
    ),
    "Chameleon": Published(
        "qwen3",
        {"head_dim": 8, "num_images": 6, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
        {
            "model_type": "chameleon",
            "vocabulary_map": {"a": 0, "IMGIMGBA": 9, "IMGIMGA": 4},
            "layer_types": None,
        },
        prepare=_as_chameleon,
    ),
    "IQuestLoopCoder": IQUEST_LOOP,
    "Plamo": Published("llama2", {}, {"model_type": "plamo"}, prepare=_as_plamo),
    # The file has the head, but not the embedding.
    "CodeShell": Published(
        "starcoder2",
        {"sliding_window": None, "tie_word_embeddings": True},
        {
            "model_type": "codeshell",
            "num_key_value_heads": None,
            "num_query_groups": 2,
            "group_query_attention": True,
            "position_embedding_type": "rope",
        },
        (
            *_GPT2_NAMES,
            (r"transformer\.wte", "lm_head"),
        ),
        changes.with_fused_qkv,
    ),
    "JAIS": Published(
        "bloom",
        {},
        {
            "model_type": "jais",
            "position_embedding_type": "alibi",
            "activation_function": "swiglu",
            "intermediate_size": None,
            "n_inner": 80,
            "mup_scale_qk_dot_by_d": True,
            "mup_embeddings_scale": _EMBEDDING_SCALE,
            "mup_output_alpha": 2.0,
            "mup_width_scale": _WIDTH / 2,
        },
        _GPT2_NAMES,
        _with_columns,
        suffix="LMHeadModel",
        prepare=_as_jais,
    ),
    "Maincoder": Published(
        "hunyuan",
        {"rope_parameters": _ROTARY},
        {"model_type": "maincoder", "use_qk_norm": True},
        ((r"query_layernorm", "q_norm"), (r"key_layernorm", "k_norm")),
        _with_neighbors,
    ),
    "Nanbeige": Published(
        "llama2",
        {"head_dim": 16},
        {"model_type": "nanbeige", "num_loops": 3, "skip_loop_final_norm": False},
        prepare=changes.with_three_passes,
    ),
    "OpenELM": Published(
        "qwen3",
        {"tie_word_embeddings": True},
        {
            "model_type": "openelm",
            "hidden_size": None,
            "model_dim": 48,
            "num_hidden_layers": None,
            "num_transformer_layers": 3,
            "num_attention_heads": None,
            "num_query_heads": list(HEADS),
            "num_key_value_heads": None,
            "num_kv_heads": list(KV_HEADS),
            "intermediate_size": None,
            "ffn_multipliers": list(FACTORS),
            "ffn_dim_divisor": 16,
            "ffn_with_glu": True,
            "normalize_qk_projections": True,
            "hidden_act": None,
            "activation_fn_name": "swish",
            "rope_parameters": None,
            "rope_freq_constant": 10_000,
            "max_position_embeddings": None,
            "max_context_length": 256,
            "tie_word_embeddings": None,
            "share_input_output_layers": True,
        },
        (
            (r"model\.embed_tokens", "transformer.token_embeddings"),
            (r"model\.", "transformer."),
            (r"input_layernorm", "attn_norm"),
            (r"post_attention_layernorm", "ffn_norm"),
            (r"self_attn\.o_proj", "attn.out_proj"),
            (r"self_attn\.", "attn."),
            (r"mlp\.down_proj", "ffn.proj_2"),
            (r"mlp\.", "ffn."),
        ),
        _with_fused_gates,
        prepare=_as_openelm,
    ),
    "PLM": Published(
        "deepseek-v2",
        {"first_k_dense_replace": 3, "rope_parameters": _ROTARY},
        {"model_type": "plm", "hidden_act": "relu2", "n_routed_experts": None},
        prepare=_without_gates,
    ),
    **PLAMO,
    "Talkie": TALKIE,
    "Spark2_5": Published(
        "laguna",
        {
            "num_attention_heads_per_layer": [6, 6, 6],
            "mlp_layer_types": ["dense"] * 3,
            "hidden_act": "gelu",
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "default",
                    "rope_theta": 5e6,
                    "partial_rotary_factor": 0.25,
                },
                "sliding_attention": {
                    "rope_type": "default",
                    "rope_theta": 2e4,
                    "partial_rotary_factor": 1.0,
                },
            },
        },
        {
            "model_type": "spark2_5",
            "headwise_attn_output_gate": True,
            "gate_attn_act_mode": "sigmoid",
            "rope_parameters": {
                "full_attention": {"rope_theta": 5_000_000, "partial_rotary_factor": 0.25},
                "sliding_attention": {"rope_theta": 20_000, "partial_rotary_factor": 1.0},
            },
        },
        (
            (r"embed_tokens", "embedding"),
            (r"self_attn\.qkv_proj", "self_attn.q_k_v_proj"),
            (r"self_attn\.o_proj", "self_attn.out_proj"),
        ),
        changes.with_fused_qkv,
        prepare=_as_spark,
    ),
    "Solar": Published(
        "llama2",
        {"num_hidden_layers": 7},
        {
            "model_type": "solar",
            "bskcn_1": [1, 2, 4, 9],
            "bskcn_2": [2],
            "bskcn_3": [3, 5],
            "bskcn_4": [4],
            "bskcn_tv": [0.9, 0.8],
            "sliding_window": 9,
        },
        prepare=changes.with_means_of_states,
    ),
    "Step1": Published(
        "llama2",
        {"num_key_value_heads": 2},
        {
            "model_type": "step1",
            "num_key_value_heads": None,
            "num_attention_groups": 2,
            "max_position_embeddings": None,
            "max_seq_len": 256,
        },
        prepare=functools.partial(changes.with_slopes, power=0.5),
    ),
    "TeleChat2": Published(
        "llama-biases",
        # The base is 1e4 * 7 ** (12 / 10), because texts of 64 tokens were the first to train with.
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4 * 7**1.2}},
        {
            "model_type": "telechat",
            "attention_bias": None,
            "mlp_bias": None,
            "rope_parameters": None,
            "rms_norm_eps": None,
            "layer_norm_epsilon": 1e-6,
            "num_hidden_layers": None,
            "n_layer": 3,
            "num_attention_heads": None,
            "n_head": 6,
            "intermediate_size": None,
            "ffn_hidden_size": 80,
            "hidden_act": None,
            "max_position_embeddings": None,
            "training_seqlen": 256,
            "base_seqlen": 64,
        },
        (
            (r"model\.embed_tokens", "transformer.word_embeddings"),
            (r"model\.layers\.", "transformer.h."),
            (r"model\.norm", "transformer.ln_f"),
            (r"self_attn\.q_proj", "self_attention.query"),
            (r"self_attn\.kv_proj", "self_attention.key_value"),
            (r"self_attn\.o_proj", "self_attention.dense"),
        ),
        _with_pairs,
        prepare=_with_own_biases,
    ),
    "TeleFLM": Published(
        "llama2",
        {},
        {
            "model_type": "teleflm",
            "use_mup": True,
            "input_mult": _EMBEDDING_SCALE,
            "output_mult": 2 * _WIDTH,
            "mup_scale_factor": 2.0,
        },
        prepare=_with_factors,
    ),
}
