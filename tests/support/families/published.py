"""Families that transformers has no class for, as models of another family in the form that they are published in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from support.families import make_reference
from support.families.dense import LLAMA3

Tensors = dict[str, torch.Tensor]


def _unchanged(tensors: Tensors) -> Tensors:
    return tensors


@dataclass(frozen=True)
class Published:
    """A family, and how its files differ from those of the model `base` of `CONFIGS`.

    Attributes:
        base: The model of `CONFIGS`.
        differences: What is different in that model's config.
        config: The fields of the published config, without those that are None.
        names: Regular expressions and their replacements in the names of tensors.
        change: Changes the tensors before they are renamed.
        section: The section of the published config that has the fields of the text decoder.
        suffix: The end of the architecture's name; by default that of transformers.
        prepare: Changes the model of transformers before it is saved.
    """

    base: str
    differences: Mapping[str, Any]
    config: Mapping[str, Any]
    names: tuple[tuple[str, str], ...] = ()
    change: Callable[[Tensors], Tensors] = field(default=_unchanged)
    section: tuple[str, ...] = ()
    suffix: str | None = None
    prepare: Callable[[transformers.PreTrainedModel], None] | None = None


def _with_grouped_rows(tensors: Tensors) -> Tensors:
    """Put the rows of two key/value heads, each with those of its three query heads, into one matrix."""
    changed = {}
    for name, weight in tensors.items():
        if ".q_proj." in name:
            parts = (tensors[name.replace(".q_", f".{x}_")].unflatten(0, (2, -1)) for x in "qkv")
            name, weight = name.replace(".q_proj.", ".wqkv."), torch.cat([*parts], 1).flatten(0, 1)
        if not re.search(r"\.[kv]_proj\.", name):
            changed[name] = weight
    return changed


def _with_fused_qkv(tensors: Tensors) -> Tensors:
    """Put queries, keys and values into one matrix, in this order."""
    changed = {}
    for name, weight in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace(".q_", f".{x}_")] for x in "qkv"]
            name, weight = name.replace(".q_proj.", ".qkv_proj."), torch.cat(parts)
        if not re.search(r"\.[kv]_proj\.", name):
            changed[name] = weight
    return changed


def _with_alibi(reference: transformers.PreTrainedModel) -> None:
    """Make a Llama with six heads use ALiBi instead of rotations, and rows of unit length in its head."""
    reference.model.rotary_emb.inv_freq.zero_()
    slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])

    def add_mask(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positions = torch.arange(args[0].shape[1])
        distances = positions[:, None] - positions
        mask = -slopes[:, None, None] * distances.abs()
        mask.masked_fill_(distances < 0, torch.finfo(torch.float32).min)
        return args, kwargs | {"attention_mask": mask[None]}

    reference.register_forward_pre_hook(add_mask, with_kwargs=True)
    head = reference.lm_head.weight.data
    head.copy_(torch.nn.functional.normalize(head))


def _with_layer_norms(reference: transformers.PreTrainedModel) -> None:
    """Give a Llama layer norms with biases instead of RMS norms."""
    for name, module in list(reference.named_modules()):
        if name.endswith("norm"):
            norm = torch.nn.LayerNorm(module.weight.numel(), 1e-5)
            for parameter in norm.parameters():
                torch.nn.init.normal_(parameter, 0.8, 0.3)
            reference.set_submodule(name, norm)


def _with_grouped_norms(reference: transformers.PreTrainedModel) -> None:
    """Let the norms of a Llama divide each third of a hidden state by its own root mean square."""

    def norm(module: torch.nn.Module, args: tuple[torch.Tensor], _output: Any) -> torch.Tensor:
        thirds = args[0].unflatten(-1, (3, -1))
        normed = torch.nn.functional.rms_norm(thirds, thirds.shape[-1:], eps=1e-6)
        return normed.flatten(-2) * module.weight

    for name, module in reference.named_modules():
        if name.endswith("norm"):
            module.register_forward_hook(norm)


def _with_three_passes(reference: transformers.PreTrainedModel) -> None:
    """Make a GLM-4 compute its layers and its final norm three times."""

    def repeat(model: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if kwargs.get("inputs_embeds") is None:
            for _ in range(2):
                output = model(inputs_embeds=output.last_hidden_state, use_cache=False)
        return output

    reference.model.register_forward_hook(repeat, with_kwargs=True)


def _with_rotated_halves(tensors: Tensors) -> Tensors:
    """Store the rows of queries and keys of six and two heads so that the halves of a head are rotated together."""
    changed = {"model.early_exit_gate.weight": torch.zeros(1, 48)}
    for name, weight in tensors.items():
        if match := re.search(r"\.([qk])_proj\.", name):
            heads = weight.unflatten(0, (6 if match[1] == "q" else 2, -1, 2))
            weight = heads.transpose(1, 2).flatten(0, 2)
        changed[name] = weight
    return changed


def _with_longer_head(tensors: Tensors) -> Tensors:
    return _with_fused_qkv(tensors) | {"lm_head.weight": 3 * tensors["lm_head.weight"]}


_BLOCKS = [
    {"attention": {"n_heads_in_group": group}, "ffn": {"ffn_mult": factor}}
    for group, factor in ((3, 7.9), (None, 15.9), (3, None), (None, None), (6, 15.9))
]


def _without_unused_blocks(tensors: Tensors) -> Tensors:
    """Leave out what `_BLOCKS` do not have, and what `_disable_blocks` made ineffective."""
    unused = r"layers\.([13]\.(self_attn|input_layernorm)|[23]\.(mlp|post_attention_layernorm))\."
    changed = {name: x for name, x in tensors.items() if not re.search(unused, name)}
    for name, weight in changed.items():
        if "layers.0.mlp." in name:
            changed[name] = weight[:, :256] if "down" in name else weight[:256]
        if re.search(r"layers\.4\.self_attn\.[kv]_proj\.", name):
            changed[name] = weight[:8]
    return changed


def _disable_blocks(reference: transformers.PreTrainedModel) -> None:
    """Make a Llama compute what the smaller layers of `_BLOCKS` do."""
    layers = reference.model.layers
    with torch.no_grad():
        for index in (1, 3):
            layers[index].self_attn.o_proj.weight.zero_()
        for index in (2, 3):
            layers[index].mlp.down_proj.weight.zero_()
        layers[0].mlp.down_proj.weight[:, 256:] = 0
        for module in (layers[4].self_attn.k_proj, layers[4].self_attn.v_proj):
            module.weight[8:] = module.weight[:8]


_TALKER = {"talker.model.embed_tokens.weight": torch.zeros(3, 4)}


def _with_talker(tensors: Tensors) -> Tensors:
    return {f"thinker.{name}": weight for name, weight in tensors.items()} | _TALKER


def _with_adapters(tensors: Tensors) -> Tensors:
    names = ("layers.0.self_attn.qkv_proj.lora_A.speech.weight", "embed_tokens_extend.x.bias")
    return tensors | {f"model.{name}": torch.zeros(2) for name in names}


def _axes(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}


def _with_tower(tensors: Tensors) -> Tensors:
    return tensors | {"vision_model.embeddings.weight": torch.zeros(3, 4)}


def _with_ling_matrices(tensors: Tensors) -> Tensors:
    """Store queries, keys and values in one matrix, and all other matrices apart."""
    stored = {}
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        fused = ("gate_proj", "up_proj") if "input_linear" in name else ("down_proj",)
        prefix = module.rpartition(".")[0]
        if ".q_proj." in name:
            parts = [tensors[name.replace(".q_", f".{x}_")] for x in "qkv"]
            stored[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat(parts)
        elif weight.ndim == 3:
            for i, each in enumerate(weight):
                for part, rows in zip(fused, each.chunk(len(fused)), strict=True):
                    stored[f"{prefix}.experts.{i}.{part}.weight"] = rows
        elif "_linear" in name:
            for part, rows in zip(fused, weight.chunk(len(fused)), strict=True):
                stored[f"{prefix}.{part}.weight"] = rows
        elif not re.search(r"\.[kv]_proj\.", name):
            stored[name] = weight
    return stored


def _with_next_token_layer(tensors: Tensors) -> Tensors:
    """Store each expert by itself, and add a layer for multi-token prediction."""
    stored = {"model.mtp.layers.0.eh_proj.weight": torch.zeros(3, 4)}
    for name, weight in tensors.items():
        if not re.search(r"experts\.(gate_up|down)_proj$", name):
            stored[name] = weight
            continue
        for i, each in enumerate(weight):
            parts = (
                dict(zip(("w1", "w3"), each.chunk(2), strict=True))
                if "up" in name
                else {"w2": each}
            )
            prefix = name.rpartition(".")[0]
            stored |= {f"{prefix}.{i}.{part}.weight": x for part, x in parts.items()}
    return stored


_IN_LANGUAGE_MODEL = ((r"^(model\.|lm_head)", r"language_model.\1"),)
_THINKER = ("thinker_config", "text_config")
_QKV_IN_PACK = ((r"qkv_proj", "W_pack"),)
LING = {
    "intermediate_size": 80,
    "shared_intermediate_size": 80,
    "attention_multiplier": 8**-0.5,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "tie_word_embeddings": False,
}
PUBLISHED = {
    "ChatGLM": Published(
        "glm",
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {
            "model_type": "chatglm",
            "rms_norm_eps": None,
            "head_dim": None,
            "num_key_value_heads": None,
            "num_hidden_layers": None,
            "intermediate_size": None,
            "max_position_embeddings": None,
            "vocab_size": None,
            "rope_parameters": None,
            "attention_bias": None,
            "layernorm_epsilon": 1.5625e-07,
            "kv_channels": 16,
            "multi_query_group_num": 2,
            "num_layers": 3,
            "ffn_hidden_size": 80,
            "seq_length": 256,
            "padded_vocab_size": 97,
            "rope_ratio": 50,
            "add_qkv_bias": True,
            "multi_query_attention": True,
        },
        (
            (r"model\.embed_tokens", "transformer.embedding.word_embeddings"),
            (r"model\.(layers|norm)", r"transformer.encoder.\1"),
            (r"encoder\.norm", "encoder.final_layernorm"),
            (r"lm_head", "transformer.output_layer"),
            (r"self_attn\.qkv_proj", "self_attention.query_key_value"),
            (r"self_attn\.o_proj", "self_attention.dense"),
            (r"mlp\.gate_up_proj", "mlp.dense_h_to_4h"),
            (r"mlp\.down_proj", "mlp.dense_4h_to_h"),
        ),
        _with_fused_qkv,
        suffix="Model",
    ),
    "BailingMoeV3": Published("ling3", {}, {"gated_attention_proj_granularity_type": "head_wise"}),
    "BaiChuan": Published(
        "llama2",
        {"num_key_value_heads": 6},
        {"model_type": "baichuan"},
        _QKV_IN_PACK,
        _with_fused_qkv,
    ),
    "Baichuan": Published(
        "llama2",
        {"num_key_value_heads": 6},
        {
            "model_type": "baichuan",
            "z_loss_weight": 0,
            "max_position_embeddings": None,
            "model_max_length": 256,
        },
        _QKV_IN_PACK,
        _with_longer_head,
        prepare=_with_alibi,
    ),
    "InternLM": Published(
        "llama-biases",
        {"mlp_bias": False},
        {"model_type": "internlm", "attention_bias": None, "bias": True},
    ),
    "K2Horizon": Published(
        "llama2",
        {},
        {"model_type": "k2_horizon", "layernorm_num_groups": 3, "num_experts": 0},
        prepare=_with_grouped_norms,
    ),
    "MiMoV2": Published(
        "mimo-v2",
        {},
        {"model_type": "mimo_v2", "attention_projection_layout": "fused_qkv"},
        change=_with_fused_qkv,
    ),
    "Orion": Published(
        "llama2",
        {"rms_norm_eps": 1e-5},
        {"model_type": "orion"},
        prepare=_with_layer_norms,
    ),
    "Ouro": Published(
        "glm4",
        {"partial_rotary_factor": 1.0},
        {"model_type": "ouro", "total_ut_steps": 3, "early_exit_threshold": 1.0},
        (
            (r"post_self_attn_layernorm", "input_layernorm_2"),
            (r"post_mlp_layernorm", "post_attention_layernorm_2"),
        ),
        _with_rotated_halves,
        prepare=_with_three_passes,
    ),
    "Param2MoE": Published(
        "ling2",
        {"n_group": 1, "topk_group": 1, "partial_rotary_factor": 1.0},
        {"model_type": "param2moe", "score_function": "sigmoid", "n_group": None},
    ),
    "QWen": Published(
        "qwen2",
        {"num_key_value_heads": 6},
        {
            "model_type": "qwen",
            "intermediate_size": 160,
            "rms_norm_eps": None,
            "layer_norm_epsilon": 1e-6,
            "rope_parameters": None,
            "rotary_emb_base": 1e4,
            "kv_channels": 8,
            "seq_length": 128,
        },
        (
            (r"model\.embed_tokens", "transformer.wte"),
            (r"model\.layers", "transformer.h"),
            (r"model\.norm", "transformer.ln_f"),
            (r"input_layernorm", "ln_1"),
            (r"post_attention_layernorm", "ln_2"),
            (r"self_attn\.qkv_proj", "attn.c_attn"),
            (r"self_attn\.o_proj", "attn.c_proj"),
            (r"mlp\.up_proj", "mlp.w1"),
            (r"mlp\.gate_proj", "mlp.w2"),
            (r"mlp\.down_proj", "mlp.c_proj"),
        ),
        _with_fused_qkv,
        suffix="LMHeadModel",
    ),
    "MiniCPM": Published(
        "granite",
        {
            "residual_multiplier": 1.4 / 3**0.5,
            "logits_scaling": 3.0,
            "attention_multiplier": 8**-0.5,
        },
        {"model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16},
    ),
    "InternLM2": Published(
        "llama2",
        {},
        {"model_type": "internlm2", "bias": False},
        (
            (r"embed_tokens", "tok_embeddings"),
            (r"^lm_head", "output"),
            (r"self_attn\.o_proj", "attention.wo"),
            (r"self_attn\.wqkv", "attention.wqkv"),
            (r"input_layernorm", "attention_norm"),
            (r"post_attention_layernorm", "ffn_norm"),
            (r"mlp\.gate_proj", "feed_forward.w1"),
            (r"mlp\.up_proj", "feed_forward.w3"),
            (r"mlp\.down_proj", "feed_forward.w2"),
        ),
        _with_grouped_rows,
    ),
    "DeciLM": Published(
        "llama3",
        {
            "num_hidden_layers": 5,
            "intermediate_size": 512,
            "tie_word_embeddings": False,
            "rope_parameters": LLAMA3,
        },
        {
            "model_type": "nemotron-nas",
            "block_configs": _BLOCKS,
            "num_key_value_heads": None,
            "intermediate_size": None,
        },
        change=_without_unused_blocks,
        prepare=_disable_blocks,
    ),
    "Phi4MM": Published(
        "phi3-partial",
        {},
        {"model_type": "phi4mm"},
        ((r"qkv_proj\.weight", "qkv_proj.base_layer.weight"),),
        _with_adapters,
    ),
    "Qwen2_5Omni": Published(
        "qwen2",
        {"tie_word_embeddings": False},
        {"model_type": "qwen2_5_omni_text", "rope_parameters": _axes(2, 1, 1)},
        change=_with_talker,
        section=_THINKER,
    ),
    "InternVLChat": Published(
        "qwen2",
        {},
        {"model_type": "qwen2"},
        _IN_LANGUAGE_MODEL,
        _with_tower,
        ("llm_config",),
        "Model",
    ),
    "Apertus1p5": Published(
        "apertus-1.5",
        {},
        {},
        ((r"^model\.", "model.language_model."),),
        section=("text_config",),
    ),
    # A Granite without multipliers has the layers of the first Ling.
    "BailingMoe": Published(
        "granite-moe-shared",
        LING,
        {
            "model_type": "bailing_moe",
            "num_local_experts": None,
            "shared_intermediate_size": None,
            "num_experts": 4,
            "moe_intermediate_size": 80,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
        },
        (
            (r"embed_tokens", "word_embeddings"),
            (r"self_attn\.o_proj", "attention.dense"),
            (r"self_attn\.qkv_proj", "attention.query_key_value"),
            (r"block_sparse_moe\.router\.layer", "mlp.gate"),
            (r"block_sparse_moe\.", "mlp."),
            (r"shared_mlp\.", "mlp.shared_experts."),
        ),
        _with_ling_matrices,
    ),
    "KimiVL": Published("deepseek-v3", {}, {}, _IN_LANGUAGE_MODEL, _with_tower, ("text_config",)),
    "MiniMaxM3Sparse": Published(
        "minimax-m3",
        # All blocks are chosen, so there is no need for the indexers.
        {"index_topk_blocks": 43},
        {
            "model_type": "minimax_m3",
            "hidden_act": "swigluoai",
            "rope_parameters": None,
            "rope_theta": 1e4,
            "rotary_dim": 8,
            "mlp_layer_types": None,
            "moe_layer_freq": [0, 1, 1],
            "layer_types": None,
            "sparse_attention_config": {
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 12,
                "sparse_block_size": 6,
                "sparse_topk_blocks": 43,
                "sparse_local_block": 1,
                "sparse_attention_freq": [0, 1, 1],
            },
            **dict.fromkeys(
                (
                    "index_head_dim",
                    "index_block_size",
                    "index_topk_blocks",
                    "index_local_blocks",
                    "index_n_heads",
                )
            ),
        },
        (
            *_IN_LANGUAGE_MODEL,
            (r"self_attn\.indexer\.", "self_attn.index_"),
            (r"mlp\.gate\.e_score", "mlp.e_score"),
            (r"mlp\.(experts|gate\.|shared_experts|e_score)", r"block_sparse_moe.\1"),
        ),
        _with_next_token_layer,
        ("text_config",),
    ),
    "Qwen3OmniMoe": Published(
        "qwen3-moe-all",
        {},
        {"model_type": "qwen3_omni_moe_text", "rope_parameters": _axes(4, 2, 2)},
        change=_with_talker,
        section=_THINKER,
    ),
}


def save_published(name: str, path: Path) -> transformers.PreTrainedModel:
    """Save a random model of a family in the form that it is published in, and return one that is equal to it."""
    family = PUBLISHED[name]
    reference = make_reference(family.base, **family.differences)
    if family.prepare is not None:
        family.prepare(reference)
    reference.save_pretrained(path)
    config = json.loads((path / "config.json").read_text()) | family.config
    config = {key: value for key, value in config.items() if value is not None}
    for section in reversed(family.section):
        config = {section: config}
    suffix = family.suffix or ("ForConditionalGeneration" if family.section else "ForCausalLM")
    config["architectures"] = [f"{name}{suffix}"]
    (path / "config.json").write_text(json.dumps(config))
    renamed = {}
    for stored, weight in family.change(load_file(path / "model.safetensors")).items():
        for pattern, replacement in family.names:
            stored = re.sub(pattern, replacement, stored)
        renamed[stored] = weight.contiguous()
    save_file(renamed, path / "model.safetensors")
    return reference
