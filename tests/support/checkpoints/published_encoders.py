"""Encoders that transformers has no class for: changed encoders of transformers, in the form that is published."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from gguf import GGUFWriter, PoolingType, get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES
from safetensors.torch import load_file, save_file
from support.gguf.finish import finish
from torch import Tensor, nn
from torch.nn import functional as F

Tensors = dict[str, Tensor]

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
}
_NUM_EXPERTS = 5


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gated_layers = nn.Linear(48, 160, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gated_layers(x).chunk(2, -1)
        return F.gelu(gate) * up


class _GatedLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_gated_layer = nn.Linear(48, 160, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.up_gated_layer(x).chunk(2, -1)
        return F.gelu(gate) * up


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(48, 80), nn.Linear(80, 48)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return hidden


class _Mixture(nn.Module):
    """Experts of which every token chooses two, whose weights are not normed, and one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(48, _NUM_EXPERTS, bias=False)
        self.w1, self.w2 = (nn.Parameter(torch.empty(_NUM_EXPERTS, 80, 48)) for _ in range(2))
        self.bias = nn.Parameter(torch.empty(48))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        best = scores.topk(2, -1).indices
        weights = torch.zeros_like(scores).scatter(-1, best, scores.gather(-1, best))
        hidden = F.gelu(torch.einsum("btd,efd->btef", x, self.w1))
        return torch.einsum("btef,efd,bte->btd", hidden, self.w2, weights) + self.bias


def _as_jina2(reference: Any) -> None:
    """Give a BERT ALiBi in both directions instead of positions, and gates."""
    slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])
    reference.embeddings.position_embeddings = nn.Embedding(256, 48, _weight=torch.zeros(256, 48))
    for layer in reference.encoder.layer:
        layer.intermediate = _Gated()

    def add_mask(_model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positions = torch.arange(args[0].shape[1])
        distances = (positions[:, None] - positions).abs()
        return args, kwargs | {"attention_mask": -slopes[None, :, None, None] * distances}

    reference.register_forward_pre_hook(add_mask, with_kwargs=True)


def _as_jina2_code(reference: Any) -> None:
    """Give a Jina v2 norms of queries and keys, and another norm of attention's output."""
    _as_jina2(reference)

    def add_input(module: Any, args: tuple[Any, ...], output: Tensor) -> Any:
        return module.layer_norm_1(output + args[1])

    for layer in reference.encoder.layer:
        layer.intermediate = _GatedLast()
        attention = layer.attention.self
        attention.query, attention.key = (
            nn.Sequential(each, nn.LayerNorm(48, eps=1e-5))
            for each in (attention.query, attention.key)
        )
        layer.attention.output.layer_norm_1 = nn.LayerNorm(48, eps=1e-5)
        layer.attention.output.register_forward_hook(add_input)


def _as_nomic2(reference: Any) -> None:
    """Give a NomicBERT MLPs without gates, and experts in every second layer."""
    for index, layer in enumerate(reference.layers):
        layer.mlp = _Mixture() if index % 2 else _Mlp()
        for name in "qkvo":
            projection = getattr(layer.self_attn, f"{name}_proj")
            projection.bias = nn.Parameter(torch.empty(48))


def _nomic2_tensors(tensors: Tensors) -> Tensors:
    changed = {}
    for name, weight in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace(".q_", f".{x}_")] for x in "qkv"]
            name, weight = name.replace("q_proj", "Wqkv"), torch.cat(parts)
        if re.search(r"\.[kv]_proj\.", name):
            continue
        changed[name] = weight.flatten(0, 1) if weight.ndim == 3 else weight
    return changed


def _as_neobert(reference: Any) -> None:
    """Give a EuroBERT the frequencies of a NeoBERT."""
    reference.rotary_emb.inv_freq = 10_000 ** (-torch.arange(0, 8, 2) / 8)


def _neobert_tensors(tensors: Tensors) -> Tensors:
    """Put queries, keys and values of each head together, whose neighboring elements are rotated, and the gates."""
    changed = {}
    for name, weight in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace(".q_", f".{x}_")].unflatten(0, (6, 8)) for x in "qkv"]
            parts[:2] = [
                each.unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2) for each in parts[:2]
            ]
            name, weight = name.replace("q_proj", "qkv"), torch.cat(parts, 1).flatten(0, 1)
        if ".gate_proj." in name:
            parts = [weight, tensors[name.replace("gate", "up")]]
            name, weight = name.replace("gate_proj", "w12"), torch.cat(parts)
        if not re.search(r"\.[kv]_proj\.|\.up_proj\.", name):
            changed[name] = weight
    return changed


class _Encoder(NamedTuple):
    base: str
    prepare: Callable[[Any], None]
    config: dict[str, Any]
    names: tuple[tuple[str, str], ...]
    change: Callable[[Tensors], Tensors]


_JINA2: dict[str, Any] = {
    "architectures": ["JinaBertForMaskedLM"],
    "model_type": "bert",
    "position_embedding_type": "alibi",
    "feed_forward_type": "geglu",
    "hidden_act": "gelu",
    "type_vocab_size": 2,
}


def _jina2_tensors(tensors: Tensors) -> Tensors:
    return {k: v for k, v in tensors.items() if not re.search("position|pooler", k)}


PUBLISHED_ENCODERS = {
    "jina-bert-v2": _Encoder(
        "Bert",
        _as_jina2,
        _JINA2,
        (
            (r"intermediate\.gated", "mlp.gated"),
            (r"(layer\.\d+)\.output\.dense", r"\1.mlp.wo"),
            (r"(layer\.\d+)\.output\.LayerNorm", r"\1.mlp.layernorm"),
        ),
        _jina2_tensors,
    ),
    "jina-bert-v2-code": _Encoder(
        "Bert",
        _as_jina2_code,
        _JINA2
        | {
            "auto_map": {
                "AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"
            }
        },
        (
            (r"intermediate\.up_gated", "mlp.up_gated"),
            (r"(query|key)\.0", r"\1"),
            (r"query\.1", "layer_norm_q"),
            (r"key\.1", "layer_norm_k"),
            (r"attention\.output\.layer_norm_1", "layer_norm_1"),
            (r"(layer\.\d+)\.output\.dense", r"\1.mlp.down_layer"),
            (r"(layer\.\d+)\.output\.LayerNorm", r"\1.layer_norm_2"),
        ),
        _jina2_tensors,
    ),
    "neo-bert": _Encoder(
        "EuroBert",
        _as_neobert,
        {
            "architectures": ["NeoBERTLMHead"],
            "model_type": "neobert",
            "intermediate_size": 115,
            "norm_eps": 1e-5,
        },
        (
            (r"embed_tokens", "encoder"),
            (r"^layers\.", "transformer_encoder."),
            (r"^norm\.", "layer_norm."),
            (r"self_attn\.qkv", "qkv"),
            (r"self_attn\.o_proj", "wo"),
            (r"input_layernorm", "attention_norm"),
            (r"post_attention_layernorm", "ffn_norm"),
            (r"mlp\.w12", "ffn.w12"),
            (r"mlp\.down_proj", "ffn.w3"),
            (r"^", "model."),
        ),
        _neobert_tensors,
    ),
    "nomic-bert-moe": _Encoder(
        "NomicBert",
        _as_nomic2,
        {
            "architectures": ["NomicBertModel"],
            "model_type": "nomic_bert",
            "activation_function": "gelu",
            "rotary_emb_base": 1000,
            "type_vocab_size": 2,
            "qkv_proj_bias": True,
            "mlp_fc1_bias": True,
            "moe_every_n_layers": 2,
            "moe_top_k": 2,
            "num_experts": _NUM_EXPERTS,
            "num_shared_experts": 0,
            "expert_choice_router": False,
            "moe_normalize_expert_weights": False,
        },
        (
            (r"^layers", "encoder.layers"),
            (r"embeddings\.LayerNorm", "emb_ln"),
            (r"self_attn\.o_proj", "attn.out_proj"),
            (r"self_attn\.", "attn."),
            (r"post_attention_layernorm", "norm1"),
            (r"post_mlp_layernorm", "norm2"),
            (r"mlp\.router", "mlp.router.layer"),
            (r"mlp\.(w1|w2)", r"mlp.experts.mlp.\1"),
            (r"mlp\.bias", "mlp.experts.bias"),
        ),
        _nomic2_tensors,
    ),
}


def save_encoder(name: str, path: Path) -> Any:
    """Save a random encoder in the form that it is published in, and return one that is equal to it."""
    encoder = PUBLISHED_ENCODERS[name]
    model_class = getattr(transformers, f"{encoder.base}Model")
    config = model_class.config_class(**SIZES)
    reference = model_class._from_config(config, attn_implementation="eager").eval()
    encoder.prepare(reference)
    torch.manual_seed(0)
    for key, parameter in reference.named_parameters():
        if "position" not in key:
            is_vector = parameter.ndim == 1
            nn.init.normal_(parameter, 0.8 * is_vector, 0.3 if is_vector else 0.15)
    (path / "config.json").write_text(json.dumps(SIZES | encoder.config))
    renamed = {}
    for key, weight in encoder.change(dict(reference.state_dict())).items():
        if key.endswith("_ids"):
            continue
        for pattern, replacement in encoder.names:
            key = re.sub(pattern, replacement, key)
        renamed[key] = weight.contiguous()
    save_file(renamed, path / "model.safetensors")
    return reference


def write_encoder(directory: Path, architecture: str, *, splits_gates: bool = False) -> Path:
    """Write the encoder in `directory` as llama.cpp's converter does, and return the file.

    If `splits_gates`, the gates of Jina v2 are apart, as in files of earlier converters.
    """
    path = directory / "model.gguf"
    architecture = architecture.removesuffix("-code")
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(48)
    writer.add_feed_forward_length(80)
    writer.add_block_count(4)
    writer.add_head_count(6)
    (writer.add_layer_norm_rms_eps if architecture == "neo-bert" else writer.add_layer_norm_eps)(
        1e-5
    )
    writer.add_causal_attention(False)
    writer.add_pooling_type(PoolingType.MEAN)
    if architecture == "nomic-bert-moe":
        writer.add_rope_freq_base(1000.0)
        writer.add_moe_every_n_layers(2)
        writer.add_expert_count(_NUM_EXPERTS)
        writer.add_expert_used_count(2)
    arch = next(arch for arch, text in MODEL_ARCH_NAMES.items() if text == architecture)
    names = get_tensor_name_map(arch, 4)
    for name, weight in load_file(directory / "model.safetensors").items():
        if name.endswith("experts.bias"):
            continue
        name = name.removeprefix("model.")
        if match := re.fullmatch(r"encoder\.layers\.(\d+)\.mlp\.experts\.mlp\.w(\d)", name):
            experts = weight.unflatten(0, (_NUM_EXPERTS, -1))
            matrices = experts if match[2] == "1" else experts.transpose(1, 2)
            part = "up" if match[2] == "1" else "down"
            writer.add_tensor(
                f"blk.{match[1]}.ffn_{part}_exps.weight", matrices.contiguous().numpy()
            )
            continue
        found = names.get_name(name, (".weight", ".bias"))
        assert found is not None, name
        if splits_gates and "gated_layer" in name:
            order = ("up", "gate") if "up_gated_layer" in name else ("gate", "up")
            for part, rows in zip(order, weight.chunk(2), strict=True):
                writer.add_tensor(found.replace("ffn_up", f"ffn_{part}"), rows.numpy())
            continue
        writer.add_tensor(found, weight.numpy())
    return finish(writer)
