"""Models of several families with a layer for multi-token prediction, whose reference is a layer of another model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from engine.protocol.config import ProposerMethod, SpeculativeConfig
from safetensors.torch import load_file
from support.draft_heads import Fusion, add_tensors, randomize
from support.families.experts import EXPERTS, GROUPS, LATENT
from support.families.recurrent import NEMOTRON_H
from support.models_with_heads import Head, run_layer, write_model
from support.tiny_checkpoints import QWEN3
from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama

SIZE = QWEN3["hidden_size"]


class Names(NamedTuple):
    """The stored names of a layer: the prefix of each part, and patterns of names in the model and replacements."""

    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str | None
    layer: dict[str, str]
    projection_bias: bool = False


def write_prediction_layer(
    path: Path,
    family: str,
    fields: dict[str, Any],
    names: Names,
    run: Callable[[Any, Tensor], Tensor],
) -> Head:
    """Write a model with a layer that has the weights of layers of a second model, which `run` computes."""
    kind = f"{family}Config", f"{family}ForCausalLM"
    model = write_model(path, *kind, fields)
    donor = write_model(path / "donor", *kind, fields)
    randomize(donor)
    donor.save_pretrained(path / "donor")
    fusion = Fusion(SIZE, has_norms=True, has_bias=names.projection_bias)
    norm = llama.LlamaRMSNorm(SIZE, 1e-5) if names.norm else nn.Identity()
    for module in (fusion, norm):
        randomize(module)
    eps = getattr(model.config, "rms_norm_eps", None) or model.config.layer_norm_epsilon
    for module in (fusion.embedding_norm, fusion.hidden_norm, norm):
        module.variance_epsilon = eps
    tensors = {}
    for name, tensor in load_file(path / "donor" / "model.safetensors").items():
        for pattern, replacement in names.layer.items():
            if re.match(pattern, name):
                tensors[re.sub(f"^{pattern}", replacement, name)] = tensor
                break
    for name, tensor in fusion.state_dict().items():
        part, rest = name.split(".")
        tensors[f"{getattr(names, part)}.{rest}"] = tensor
    if names.norm:
        tensors[f"{names.norm}.weight"] = norm.weight.detach()
    add_tensors(path, tensors)

    def predict(embedded_TD: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        out = norm(run(donor, fusion(embedded_TD, hidden_TD, has_hidden_first=False)))
        return out, out

    has_states = family in ("BailingHybrid", "NemotronH")
    return Head(
        model,
        path,
        SpeculativeConfig(3, ProposerMethod.MTP),
        predict,
        has_states=has_states,
        block_size=96 if has_states else 16,
    )


def hunyuan3_mtp(path: Path) -> Head:
    """The layer of Hunyuan 3 behind the last one, with experts; Ling 2 has the same names."""
    start = "model.layers.3."
    names = Names(
        *(start + part for part in ("enorm", "hnorm", "eh_proj", "final_layernorm")),
        {r"model\.layers\.2\.": start},
    )
    fields = EXPERTS | {
        "head_dim": 16,
        "num_shared_experts": 2,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
    }
    return write_prediction_layer(
        path,
        "HYV3",
        fields,
        names,
        lambda donor, x: run_layer(donor.model.layers[2], donor.model.rotary_emb, x),
    )


def ling3_mtp(path: Path) -> Head:
    """The layer of Ling 3, which has latent attention, in a model that begins with a recurrent layer."""
    start = "model.layers.4."
    names = Names(
        *(start + part for part in ("enorm", "hnorm", "eh_proj", "final_layernorm")),
        {r"model\.layers\.3\.": start},
    )
    fields = LATENT | GROUPS
    fields |= {
        "q_lora_rank": None,
        "head_dim": 14,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "layer_group_size": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
    }
    return write_prediction_layer(
        path,
        "BailingHybrid",
        fields,
        names,
        lambda donor, x: run_layer(donor.model.layers[3], donor.model.rotary_emb, x),
    )


def exaone_mtp(path: Path) -> Head:
    """The layer of K-EXAONE, which has a window and no experts."""
    names = Names(
        *("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
        {r"model\.layers\.0\.": "mtp.layers.0."},
    )
    fields = EXPERTS | {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 9,
        "sliding_window_pattern": 3,
        "first_k_dense_replace": 1,
        "n_group": 3,
        "topk_group": 2,
        "tie_word_embeddings": False,
    }
    return write_prediction_layer(
        path,
        "ExaoneMoe",
        fields,
        names,
        lambda donor, x: run_layer(donor.model.layers[0], donor.model.rotary_emb, x, 9),
    )


def mimo2_mtp(path: Path) -> Head:
    """The layer of MiMo-V2, which has a window, other heads than layers without, and no experts."""
    start = "model.mtp.layers.0."
    names = Names(
        *(start + part for part in ("enorm", "hnorm", "eh_proj", "final_layernorm")),
        {
            r"model\.layers\.1\.post_attention_layernorm\.": f"{start}pre_mlp_layernorm.",
            r"model\.layers\.1\.": start,
        },
    )
    fields = {
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "head_dim": 12,
        "v_head_dim": 8,
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "attention_bias": True,
        "tie_word_embeddings": False,
    }

    def run(donor: Any, x_TD: Tensor) -> Tensor:
        rope = donor.model.rotary_emb
        return run_layer(
            donor.model.layers[1],
            lambda x, positions: rope(x, positions, layer_type="sliding_attention"),
            x_TD,
            9,
        )

    return write_prediction_layer(path, "MiMoV2Flash", fields, names, run)


class _Half(nn.Module):
    """The second half of a layer of LongCat-Flash."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, **inputs: Any) -> Tensor:
        layer = self.layer
        x = x + layer.self_attn[1](layer.input_layernorm[1](x), **inputs)[0]
        return x + layer.mlps[1](layer.post_attention_layernorm[1](x))


def longcat_mtp(path: Path) -> Head:
    """The layer of LongCat-Flash, which is half of a layer of the model, without experts."""
    layer = "model.mtp.layers.0."
    names = Names(
        f"{layer}enorm.m",
        f"{layer}hnorm.m",
        f"{layer}eh_proj",
        "model.mtp.norm",
        {
            r"model\.layers\.1\.mlps\.1\.": f"{layer}transformer_layer.mlp.",
            r"model\.layers\.1\.(self_attn|\w+_layernorm)\.1\.": rf"{layer}\1.",
            r"model\.embed_tokens\.": "model.mtp.embed_tokens.",
        },
    )
    fields = LATENT | {
        "num_hidden_layers": 4,
        "n_routed_experts": 5,
        "zero_expert_num": 3,
        "head_dim": 8,
        "moe_topk": 3,
        "num_attention_heads": 6,
        "expert_ffn_hidden_size": 24,
        "ffn_hidden_size": 40,
        "tie_word_embeddings": False,
    }
    return write_prediction_layer(
        path,
        "LongcatFlash",
        fields,
        names,
        lambda donor, x: run_layer(_Half(donor.model.layers[1]), donor.model.rotary_emb, x),
    )


class _Blocks(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, **inputs: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, attention_mask=inputs["attention_mask"])
        return x


def nemotron_h_mtp(path: Path) -> Head:
    """The two layers of Nemotron-H, one with attention and one with experts."""
    names = Names(
        *(f"mtp.layers.0.{part}" for part in ("enorm", "hnorm", "eh_proj")),
        "mtp.layers.1.final_layernorm",
        {
            r"(model|backbone)\.layers\.2\.": "mtp.layers.0.",
            r"(model|backbone)\.layers\.4\.": "mtp.layers.1.",
        },
    )
    fields = NEMOTRON_H | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
        "num_hidden_layers": 5,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "tie_word_embeddings": False,
    }
    return write_prediction_layer(
        path,
        "NemotronH",
        fields,
        names,
        lambda donor, x: run_layer(
            _Blocks(donor.model.layers[2], donor.model.layers[4]), lambda x, positions: None, x
        ),
    )


def ernie_mtp(path: Path) -> Head:
    """The layer of ERNIE 4.5, which has no experts, and no final norm."""
    names = Names(
        *(f"model.mtp_{part}.0" for part in ("emb_norm", "hidden_norm", "linear_proj")),
        None,
        {r"model\.layers\.0\.": "model.mtp_block.0."},
        projection_bias=True,
    )
    fields = {
        "moe_num_experts": 5,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "head_dim": 16,
        "use_bias": True,
        "tie_word_embeddings": False,
    }
    return write_prediction_layer(
        path,
        "Ernie4_5_Moe",
        fields,
        names,
        lambda donor, x: run_layer(donor.model.layers[0], donor.model.rotary_emb, x),
    )


PREDICTION_LAYERS = [
    *(hunyuan3_mtp, ling3_mtp, exaone_mtp, mimo2_mtp, longcat_mtp, nemotron_h_mtp, ernie_mtp),
]
