"""Translate the names of an audio tower's tensors in mmproj files to those of Hugging Face checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

from .query_formers import former_name

_PREFIXES: Final = ("a.", "mm.a.")
_LAYER: Final = re.compile(r"a\.blk\.(\d+)\.(\w+)")
_TENSOR: Final = re.compile(r"(.+?)(\.(?:weight|bias|(?:in|out)put_m(?:in|ax)))?")


class _Names(NamedTuple):
    """The names of a kind of tower: of the tensors outside of layers, of those in layers, and of what holds layers."""

    outside: Mapping[str, str]
    layer: Mapping[str, str]
    layers: str


_WHISPER: Final = _Names(
    {
        **{f"a.conv1d.{i}": f"audio_tower.conv{i}" for i in (1, 2)},
        **{f"a.conv2d.{i}": f"audio_tower.conv2d{i}" for i in (1, 2, 3)},
        **{f"mm.a.mlp.{i}": f"multi_modal_projector.linear_{i}" for i in range(4)},
        "a.conv_out": "audio_tower.conv_out",
        "a.position_embd": "audio_tower.embed_positions",
        "a.post_ln": "audio_tower.layer_norm",
        "mm.a.fc": "multi_modal_projector.linear",
        "mm.a.norm_mid": "multi_modal_projector.ln_mid",
        "mm.a.norm_pre": "multi_modal_projector.ln_pre",
    },
    {
        **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
        "attn_out": "self_attn.out_proj",
        "ffn_down": "fc2",
        "ffn_up": "fc1",
        "ln1": "self_attn_layer_norm",
        "ln2": "final_layer_norm",
    },
    "audio_tower.layers",
)
_GLM_ASR: Final = _WHISPER._replace(
    outside={**_WHISPER.outside, "mm.a.norm_pre": "audio_tower.layer_norm"}
)
_DOTS3: Final = _WHISPER._replace(
    outside={**_WHISPER.outside, "mm.a.mlp.3": "multi_modal_projector.linear_2"},
    layer={**_WHISPER.layer, "ffn_gate": "fc1"},
)
_STEM: Final = "audio_tower.subsample_conv_projection."
_MLPS: Final = {"": "ffw_layer_start", "_1": "ffw_layer_end"}
_UNIVERSAL: Final = _Names(
    {
        **{f"a.conv1d.{i}": f"{_STEM}conv_{i}.conv" for i in (0, 1)},
        **{f"a.conv1d.{i}.norm": f"{_STEM}conv_{i}.norm" for i in (0, 1)},
        "a.input_projection": f"{_STEM}input_proj_linear",
        "a.pre_encode.out": "audio_tower.output_proj",
        "mm.a.input_projection": "embed_audio.embedding_projection",
    },
    {
        **{f"attn_{x}": f"attention.attn.{x}_proj" for x in "qkv"},
        **{f"ffn_norm{end}": f"{name}.pre_layer_norm" for end, name in _MLPS.items()},
        **{f"ffn_up{end}": f"{name}.ffw_layer_1" for end, name in _MLPS.items()},
        **{f"ffn_down{end}": f"{name}.ffw_layer_2" for end, name in _MLPS.items()},
        **{f"ffn_post_norm{end}": f"{name}.post_layer_norm" for end, name in _MLPS.items()},
        "attn_k_rel": "attention.attn.relative_position_embedding.pos_proj",
        "attn_out": "attention.post",
        "attn_post_norm": "attention.post_norm",
        "attn_pre_norm": "attention.pre_attn_norm",
        "conv_dw": "lconv1d.depthwise_conv1d",
        "conv_norm": "lconv1d.pre_layer_norm",
        "conv_pw1": "lconv1d.linear_start",
        "conv_pw2": "lconv1d.linear_end",
        "ln2": "norm",
        "norm_conv": "lconv1d.conv_norm",
        "per_dim_scale": "attention.attn.per_dim_scale",
    },
    "audio_tower.conformer",
)
_GRANITE: Final = _Names(
    {
        "a.enc_ctc_out": "encoder.out",
        "a.enc_ctc_out_mid": "encoder.out_mid",
        "a.input_projection": "encoder.input_linear",
        "a.proj_linear": "projector.linear",
        "a.proj_norm": "projector.qformer.layernorm",
        "a.proj_query": "projector.query",
    },
    {
        "attn_k": "attn.to_kv",
        "attn_out": "attn.to_out",
        "attn_q": "attn.to_q",
        "attn_rel_pos_emb": "attn.rel_pos_emb.weight",
        "attn_v": "attn.to_kv",
        "conv_dw": "conv.depth_conv.conv",
        **dict.fromkeys(("conv_norm", "conv_norm_var"), "conv.batch_norm"),
        "conv_pw1": "conv.up_conv",
        "conv_pw2": "conv.down_conv",
        **{
            f"ffn_{ours}{end}": f"ff{number}.{theirs}"
            for number, end in ((1, ""), (2, "_1"))
            for ours, theirs in (("down", "down_proj"), ("norm", "pre_norm"), ("up", "up_proj"))
        },
        "ln1": "attn.pre_norm",
        "ln2": "post_norm",
        "norm_conv": "conv.norm",
    },
    "encoder.layers",
)
_FAST: Final = _Names(
    {
        **{f"a.conv1d.{i}": f"encoder.subsampling.layers.{i}" for i in (0, 2, 3, 5, 6)},
        "a.pre_encode.out": "encoder.subsampling.linear",
        **{f"mm.a.mlp.{i}": f"projection.linear{i}" for i in (1, 2)},
        "mm.a.norm_pre": "projection.norm",
    },
    {
        **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
        "attn_out": "self_attn.o_proj",
        "conv_dw": "conv.depthwise_conv",
        "conv_norm": "conv.norm",
        "conv_norm_mean": "conv.norm.running_mean",
        "conv_norm_var": "conv.norm.running_var",
        "conv_pw1": "conv.pointwise_conv1",
        "conv_pw2": "conv.pointwise_conv2",
        **{
            f"ffn_{ours}{end}": f"feed_forward{number}.{theirs}"
            for number, end in ((1, ""), (2, "_1"))
            for ours, theirs in (("down", "linear2"), ("up", "linear1"))
        },
        "ffn_norm": "norm_feed_forward1",
        "ffn_norm_1": "norm_feed_forward2",
        "linear_pos": "self_attn.relative_k_proj",
        "ln1": "norm_self_att",
        "ln2": "norm_out",
        "norm_conv": "norm_conv",
        "pos_bias_u": "self_attn.bias_u",
        "pos_bias_v": "self_attn.bias_v",
    },
    "encoder.layers",
)
_LFM2: Final = _FAST._replace(
    outside={
        **_FAST.outside,
        "mm.a.mlp.0": "projection.norm",
        "mm.a.mlp.1": "projection.linear1",
        "mm.a.mlp.3": "projection.linear2",
    }
)
_OTHERS: Final = {
    "dots3note_a": _DOTS3,
    "gemma4a": _UNIVERSAL,
    "gemma4ua": _UNIVERSAL,
    "glma": _GLM_ASR,
    "granite_speech": _GRANITE,
    "lfm2a": _LFM2,
    "parakeet": _FAST,
}
_PLAIN: Final = "per_dim_scale"
"""The end of names that have no suffix, such as ".weight", in a Hugging Face checkpoint."""


def is_audio_tensor(name: str) -> bool:
    """Return whether a tensor belongs to an audio tower, by its name in the file."""
    return name.startswith(_PREFIXES)


def audio_renamer(kind: str) -> Callable[[str], str]:
    """Return a function from the name of such a tensor to that in a Hugging Face checkpoint.

    `kind` is the type of the projector. Names that have no other one are returned as they are.
    """
    return partial(_rename, names=_OTHERS.get(kind, _WHISPER))


def _rename(name: str, names: _Names) -> str:
    match = _TENSOR.fullmatch(name)
    assert match is not None
    stem, end = match[1], match[2] or ""
    if (layer := _LAYER.fullmatch(stem)) is not None:
        found = names.layer.get(layer[2])
        found = found and f"{names.layers}.{layer[1]}.{found}"
    elif (former := former_name(name)) is not None:
        return former
    else:
        found = names.outside.get(stem)
    if found is None:
        return name
    return found if found.endswith(_PLAIN) else found + end
