"""Models of several families with a layer for multi-token prediction, whose reference is a layer of another model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from engine.protocol.config import ProposerMethod, SpeculativeConfig
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import QWEN3, sentencepiece_tokenizer
from support.drafts.draft_heads import Fusion, add_tensors, randomize
from support.drafts.models_with_heads import Head, run_layer, write_model
from support.families.experts import EXPERTS, GROUPS, LATENT, WITH_EXPERTS
from support.families.indexers import WITH_INDEXERS
from support.families.multimodal import MULTIMODAL
from support.families.recurrent import NEMOTRON_H
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
    *,
    returns_normed: bool = True,
    norm_offset: float = 0.0,
    config: str | None = None,
    has_embedding: bool = False,
) -> Head:
    """Write a model with a layer that has the weights of layers of a second model, which `run` computes."""
    kind = f"{config or family}Config", f"{family}ForCausalLM"
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
        offset = norm_offset if part.endswith("norm") else 0.0
        tensors[f"{getattr(names, part)}.{rest}"] = tensor - offset
    if names.norm:
        tensors[f"{names.norm}.weight"] = norm.weight.detach() - norm_offset
    add_tensors(path, tensors)

    def predict(embedded_TD: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        out = run(donor, fusion(embedded_TD, hidden_TD, has_hidden_first=False))
        return norm(out), norm(out) if returns_normed else out

    has_states = family in ("BailingHybrid", "NemotronH")
    return Head(
        model,
        path,
        SpeculativeConfig(3, ProposerMethod.MTP),
        predict,
        embed=donor.get_input_embeddings() if has_embedding else None,
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


def glm5_mtp(path: Path) -> Head:
    """The layer of GLM-5, which chooses keys itself, in a model whose last layer does not."""
    start = "model.layers.3."
    names = Names(
        *(start + part for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
        {r"model\.layers\.1\.": start, r"lm_head\.": f"{start}shared_head.head."},
    )
    _, fields = WITH_INDEXERS["glm5"]
    fields = fields | {
        "indexer_types": ["full", "full", "shared"],
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
    }
    return write_prediction_layer(
        path,
        "GlmMoeDsa",
        fields,
        names,
        lambda donor, x: run_layer(donor.model.layers[1], donor.model.rotary_emb, x),
    )


def minimax3_mtp(path: Path) -> Head:
    """The layer of MiniMax-M3, which chooses blocks of keys."""
    start = "model.mtp.layers.0."
    names = Names(
        *(start + part for part in ("enorm", "hnorm", "eh_proj", "final_layernorm")),
        {r"(model\.)?(language_model\.)?layers\.2\.": f"{start}transformer_layer."},
    )
    _, fields = WITH_EXPERTS["minimax-m3"]
    return write_prediction_layer(
        path,
        "MiniMaxM3VL",
        fields | {"tie_word_embeddings": False},
        names,
        lambda donor, x: run_layer(donor.model.layers[2], donor.model.rotary_emb, x),
        returns_normed=False,
        norm_offset=1.0,
        config="MiniMaxM3VLText",
    )


def dots3_mtp(path: Path) -> Head:
    """The layer of Dots3-Note, which has a window, and an embedding of its own."""
    start = "model.layers.5."
    names = Names(
        *(start + part for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
        {
            r"(model\.)?(language_model\.)?layers\.3\.": start,
            r"(model\.)?(language_model\.)?embed_tokens\.": "model.mtp.embed_tokens.",
        },
    )
    _, fields = WITH_EXPERTS["dots3-note"]
    fields = fields | {
        "num_key_value_heads": 4,
        "mlp_layer_types": ["dense", *["sparse"] * 4],
        "tie_word_embeddings": False,
    }

    def run(donor: Any, x_TD: Tensor) -> Tensor:
        rope = donor.model.rotary_emb
        return run_layer(
            donor.model.layers[3],
            lambda x, positions: rope(x, positions, "sliding_attention"),
            x_TD,
            9,
        )

    return write_prediction_layer(
        path, "Dots3Note", fields, names, run, config="Dots3NoteText", has_embedding=True
    )


def step3_mtp(path: Path) -> Head:
    """The layer of Step 3.5, which has a window and an output projection of its own."""
    model, donor = (_step3_text(path / name) for name in (".", "donor"))
    start = "model.layers.5."
    config = model.config
    fusion = Fusion(SIZE, has_norms=True)
    norm = llama.LlamaRMSNorm(SIZE, config.rms_norm_eps)
    head = nn.Linear(SIZE, config.vocab_size, bias=False)
    for module in (donor.model, fusion, norm, head):
        randomize(module)
    for module in (fusion.embedding_norm, fusion.hidden_norm):
        module.variance_epsilon = config.rms_norm_eps
    layer = donor.model.layers[3]
    tensors = {f"{start}transformer.{name}": tensor for name, tensor in layer.state_dict().items()}
    tensors |= {
        f"{start}enorm.weight": fusion.embedding_norm.weight.detach() - 1,
        f"{start}hnorm.weight": fusion.hidden_norm.weight.detach() - 1,
        f"{start}eh_proj.weight": fusion.projection.weight.detach(),
        f"{start}transformer.shared_head.norm.weight": norm.weight.detach() - 1,
        f"{start}transformer.shared_head.output.weight": head.weight.detach(),
    }
    add_tensors(path, tensors)

    def run(embedded_TD: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        rope = donor.model.rotary_emb
        out = run_layer(
            layer,
            lambda x, positions: rope(x, positions, "sliding_attention"),
            fusion(embedded_TD, hidden_TD, has_hidden_first=False),
            9,
        )
        return norm(out), out

    return Head(
        model,
        path,
        SpeculativeConfig(3, ProposerMethod.MTP),
        run,
        logits=head,
        token_ids=torch.arange(config.vocab_size),
    )


def _step3_text(path: Path) -> Any:
    """Write the text of a Step 3.5 with the fields of three layers more than it has. Return its modules."""
    tokenizer = sentencepiece_tokenizer()
    _, fields = MULTIMODAL["Step3p7"]
    fields = QWEN3 | fields | {"vocab_size": len(tokenizer), "tie_word_embeddings": False}
    config = transformers.Step3p7Config(
        vision_config={"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1},
        text_config=fields | {"model_type": "step3p5"},
    )
    whole = transformers.Step3p7ForConditionalGeneration(config).float()
    randomize(whole)
    path.mkdir(exist_ok=True)
    whole.save_pretrained(path)
    tokenizer.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    text = {
        name.replace("language_model.", ""): x for name, x in tensors.items() if "visi" not in name
    }
    save_file(text, path / "model.safetensors")
    lists = {
        "layer_types": "sliding_attention",
        "swiglu_limits": 0.0,
        "swiglu_limits_shared": 0.3,
        "rope_theta": 5e5,
        "partial_rotary_factors": 1.0,
    }
    written = fields | {name: [*fields[name], *[last] * 3] for name, last in lists.items()}
    written |= {
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5",
        "num_nextn_predict_layers": 1,
        "mlp_layer_types": None,
        "moe_layers_enum": "1,2,4",
    }
    (path / "config.json").write_text(json.dumps(written))
    return SimpleNamespace(
        config=whole.config.text_config,
        model=whole.model.language_model,
        lm_head=whole.lm_head,
        get_input_embeddings=whole.get_input_embeddings,
        generate=whole.generate,
    )


PREDICTION_LAYERS = [
    *(hunyuan3_mtp, ling3_mtp, exaone_mtp, mimo2_mtp, longcat_mtp, nemotron_h_mtp, ernie_mtp),
    *(glm5_mtp, minimax3_mtp, dots3_mtp, step3_mtp),
]
