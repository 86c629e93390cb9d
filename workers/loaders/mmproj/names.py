"""Translate the names of tensors in mmproj files to those of Hugging Face checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from .audio_names import audio_renamer, is_audio_tensor
from .query_formers import window_names

_TOWER = "vision_tower."
PATCHES = f"{_TOWER}embeddings.patch_embedding.weight"
_NAMES = {
    "v.patch_embd": f"{_TOWER}embeddings.patch_embedding",
    "v.position_embd": f"{_TOWER}embeddings.position_embedding",
    "v.class_embd": f"{_TOWER}embeddings.class_embedding",
    "v.pre_ln": f"{_TOWER}pre_layrnorm",
    "v.post_ln": f"{_TOWER}post_layernorm",
    "mm.model.fc": "connector.modality_projection.proj",
    "mm.0": "multi_modal_projector.linear_1",
    "mm.1": "multi_modal_projector.linear_1",
    "mm.2": "multi_modal_projector.linear_2",
    "mm.model.mlp.0": "multi_modal_projector.layer_norm",
    "mm.model.mlp.1": "multi_modal_projector.linear_1",
    "mm.model.mlp.3": "multi_modal_projector.linear_2",
    "mm.input_projection": "multi_modal_projector.mm_input_projection_weight",
    "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
    "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
    "mm.input_norm": "multi_modal_projector.norm",
    "v.std_bias": f"{_TOWER}std_bias",
    "v.std_scale": f"{_TOWER}std_scale",
}
_GEMMA4_NAMES = {**_NAMES, "mm.input_projection": "connector.modality_projection.proj"}
_RESAMPLER_NAMES = {
    **_NAMES,
    "resampler.kv": "resampler.kv_proj",
    **{f"resampler.attn.{x}": "resampler.attn.in_proj" for x in "qkv"},
    "resampler.attn.out": "resampler.attn.out_proj",
}
UNIFIED = "embed_vision."
_UNIFIED_NAMES = {
    "v.patch_embd": f"{UNIFIED}patch_dense",
    "v.patch_norm.1": f"{UNIFIED}patch_ln1",
    "v.patch_norm.2": f"{UNIFIED}patch_ln2",
    "v.patch_norm.3": f"{UNIFIED}pos_norm",
    "v.position_embd": f"{UNIFIED}pos_embedding",
    "mm.input_projection": f"{UNIFIED}embedding_projection",
}
_JANUS_NAMES = {**_NAMES, "mm.1": "multi_modal_projector.linear_2"}
_MERGER = f"{_TOWER}vit_merger."
_MINICPM_NAMES = {
    **_NAMES,
    "mm.input_norm": "multi_modal_projector.layer_norm",
    "mm.up": "multi_modal_projector.linear_1",
    "mm.down": "multi_modal_projector.linear_2",
    **{f"v.vit_merger.attn_{x}": f"{_MERGER}self_attn.{x}_proj" for x in "qkv"},
    "v.vit_merger.attn_out": f"{_MERGER}self_attn.out_proj",
    "v.vit_merger.ds_ffn_down": f"{_MERGER}linear_2",
    "v.vit_merger.ds_ffn_up": f"{_MERGER}linear_1",
    "v.vit_merger.ds_ln": f"{_MERGER}pre_norm",
    "v.vit_merger.ln1": f"{_MERGER}layer_norm1",
}
_LFM2_NAMES = {**_NAMES, "mm.input_norm": "multi_modal_projector.layer_norm"}
_LLAMA4_NAMES = {
    **_NAMES,
    "mm.model.fc": "multi_modal_projector.linear_1",
    "mm.model.mlp.1": "multi_modal_projector.fc1",
    "mm.model.mlp.2": "multi_modal_projector.fc2",
}
_LDP_BLOCK = {
    "0.0": "depthwise",
    "0.1": "norm1",
    "1.fc1": "fc1",
    "1.fc2": "fc2",
    "2.0": "pointwise",
    "2.1": "norm2",
}
_LDP_NAMES = {
    **_NAMES,
    **{
        f"mm.model.mb_block.{i + 1}.block.{theirs}": f"multi_modal_projector.blocks.{i}.{ours}"
        for i in range(2)
        for theirs, ours in _LDP_BLOCK.items()
    },
}
_LDP2_NAMES = {
    **_NAMES,
    "mm.model.mlp.0": "multi_modal_projector.linear_1",
    "mm.model.mlp.2": "multi_modal_projector.linear_2",
    "mm.model.peg.0": "multi_modal_projector.depthwise",
}
_GLM_EDGE_NAMES = {
    **_NAMES,
    "adapter.boi": "multi_modal_projector.boi",
    "adapter.eoi": "multi_modal_projector.eoi",
    "adapter.conv": "multi_modal_projector.conv",
    "adapter.linear.linear": "multi_modal_projector.linear_proj.linear_proj",
    "adapter.linear.gate": "multi_modal_projector.linear_proj.gate_proj",
    **{
        f"adapter.linear.{name}": f"multi_modal_projector.linear_proj.{name}"
        for name in ("dense_4h_to_h", "dense_h_to_4h", "norm1")
    },
}
_OTHER_NAMES = {
    "adapter": _GLM_EDGE_NAMES,
    "gemma4uv": _UNIFIED_NAMES,
    "gemma4v": _GEMMA4_NAMES,
    "janus_pro": _JANUS_NAMES,
    "ldp": _LDP_NAMES,
    "ldpv2": _LDP2_NAMES,
    "lfm2": _LFM2_NAMES,
    "llama4": _LLAMA4_NAMES,
    "minicpmv4_6": _MINICPM_NAMES,
    "resampler": _RESAMPLER_NAMES,
}
_LAYER_NAMES = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_post_norm": "output_norm1",
    "ffn_post_norm": "output_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_gate": "mlp.gate_proj",
    "ffn_down": "mlp.fc2",
    "ls1": "lambda_1",
    "ls2": "lambda_2",
}
_VISUAL = "visual."
_GRID_NAMES = {
    "v.patch_embd": f"{_VISUAL}patch_embed.proj",
    "v.position_embd": f"{_VISUAL}pos_embed",
    "v.post_ln": f"{_VISUAL}merger.norm",
    "mm.0": f"{_VISUAL}merger.fc1",
    "mm.2": f"{_VISUAL}merger.fc2",
}
_DOTS_NAMES = {
    **_GRID_NAMES,
    "v.pre_ln": f"{_VISUAL}patch_norm",
    "mm.post_norm": f"{_VISUAL}final_norm",
    "mm.input_norm": f"{_VISUAL}merger.norm",
}
_GLM_NAMES = {
    **_GRID_NAMES,
    "v.norm_embd": f"{_VISUAL}patch_norm",
    "mm.patch_merger": f"{_VISUAL}merger.square",
    "mm.model.fc": f"{_VISUAL}merger.proj",
    "mm.post_norm": f"{_VISUAL}merger.post_projection_norm",
    **{f"mm.{name}": f"{_VISUAL}merger.{name}_proj" for name in ("gate", "up", "down")},
}
_PADDLE_NAMES = {
    **_GRID_NAMES,
    "v.post_ln": f"{_VISUAL}final_norm",
    "mm.input_norm": f"{_VISUAL}merger.norm",
    "mm.1": f"{_VISUAL}merger.fc1",
    "mm.2": f"{_VISUAL}merger.fc2",
}
_YOUTU_NAMES = {
    **_GRID_NAMES,
    "v.post_ln": f"{_VISUAL}final_norm",
    "mm.input_norm": f"{_VISUAL}merger.norm",
}
_HUNYUAN_NAMES = {
    **_GRID_NAMES,
    "mm.0": f"{_VISUAL}merger.square",
    "mm.2": f"{_VISUAL}merger.proj",
    "mm.image_begin": f"{_VISUAL}merger.image_begin",
    "mm.image_end": f"{_VISUAL}merger.image_end",
    "mm.model.fc": f"{_VISUAL}merger.mlp",
    "mm.post_norm": f"{_VISUAL}merger.after_rms",
    "mm.pre_norm": f"{_VISUAL}merger.before_rms",
    "v.image_newline": f"{_VISUAL}merger.image_newline",
}
_MINIMAX_NAMES = {
    **_GRID_NAMES,
    "v.pre_ln": f"{_VISUAL}patch_norm",
    "mm.1": f"{_VISUAL}merger.fc1",
    "mm.2": f"{_VISUAL}merger.fc2",
    "mm.merger.fc1": f"{_VISUAL}merger.fc3",
    "mm.merger.fc2": f"{_VISUAL}merger.fc4",
}
_MUSE_NAMES = {
    **_GRID_NAMES,
    "v.post_ln": f"{_VISUAL}final_norm",
    "v.pre_ln": f"{_VISUAL}patch_norm",
    **{f"mm.{i}": f"{_VISUAL}merger.fc{i + 1}" for i in range(3)},
}
_NEMOTRON_NAMES = {
    **_GRID_NAMES,
    "mm.model.mlp.0": f"{_VISUAL}merger.norm",
    "mm.model.mlp.1": f"{_VISUAL}merger.fc1",
    "mm.model.mlp.3": f"{_VISUAL}merger.fc2",
    "v.class_embd": f"{_VISUAL}registers.weight",
}
_STEP_NAMES = {
    **_GRID_NAMES,
    "v.pre_ln": f"{_VISUAL}patch_norm",
    **{f"mm.{i}": f"{_VISUAL}merger.conv{i + 1}" for i in range(2)},
    "mm.model.fc": f"{_VISUAL}merger.proj",
}
_LING_NAMES = {**_GRID_NAMES, "mm.input_norm": f"{_VISUAL}merger.norm"}
_OTHER_GRID_NAMES = {
    "dots3note_v": _DOTS_NAMES,
    "dots_ocr": _DOTS_NAMES,
    "exaone4_5": _GRID_NAMES,
    "glm4v": _GLM_NAMES,
    "glm5v": _GLM_NAMES,
    "hunyuanvl": _HUNYUAN_NAMES,
    "ling3vl": _LING_NAMES,
    "mimovl": _GRID_NAMES,
    "minimax_m3": _MINIMAX_NAMES,
    "muse-glimmer": _MUSE_NAMES,
    "nemotron_v2_vl": _NEMOTRON_NAMES,
    "paddleocr": _PADDLE_NAMES,
    "step3vl": _STEP_NAMES,
    "youtuvl": _YOUTU_NAMES,
}
_WITH_SPLIT_LAYERS = ("hunyuanvl", "minimax_m3", "muse-glimmer", "paddleocr", "youtuvl")
"""Types of projectors whose checkpoints store queries, keys and values apart."""

_GRID_LAYER_NAMES = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_q": "attn.qkv",
    "attn_k": "attn.qkv",
    "attn_v": "attn.qkv",
    "attn_out": "attn.proj",
    "attn_q_norm": "attn.q_norm",
    "attn_k_norm": "attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_gate_inp": "mlp.gate_weight",
    "exp_probs_b": "mlp.router_bias",
    **{f"ffn_{name}_exps": f"mlp.experts.{name}_proj" for name in ("gate", "up", "down")},
    "ls1": "lambda_1",
    "ls2": "lambda_2",
}
_SPLIT_LAYER_NAMES = {f"attn_{x}": f"attn.{x}_proj" for x in "qkv"}
_KIMI_NAMES = {
    "v.patch_embd": f"{_TOWER}patch_embed.proj",
    "v.position_embd": f"{_TOWER}patch_embed.pos_emb",
    "v.post_ln": f"{_TOWER}encoder.final_layernorm",
    "mm.input_norm": "multi_modal_projector.pre_norm",
    "mm.1": "multi_modal_projector.linear_1",
    "mm.2": "multi_modal_projector.linear_2",
}
KIMI_POSITIONS = f"{_TOWER}patch_embed.pos_emb.weight"
_KIMI_LAYER_NAMES = {
    "ln1": "norm0",
    "ln2": "norm1",
    "attn_qkv": "wqkv",
    "attn_q": "wqkv",
    "attn_k": "wqkv",
    "attn_v": "wqkv",
    "attn_out": "wo",
    "ffn_up": "mlp.fc0",
    "ffn_down": "mlp.fc1",
}
_SAM = "model.sam_model."
_CLIP = "model.vision_model."
_DEEPSEEK_NAMES = {
    "v.class_embd": f"{_CLIP}embeddings.class_embedding",
    "v.image_newline": "model.image_newline",
    "v.patch_embd": f"{_CLIP}embeddings.patch_embedding",
    "v.position_embd": f"{_CLIP}embeddings.position_embedding",
    "v.pre_ln": f"{_CLIP}pre_layrnorm",
    "v.view_seperator": "model.view_seperator",
    "v.sam.net_2": f"{_SAM}net_2",
    "v.sam.net_3": f"{_SAM}net_3",
    "v.sam.patch_embd": f"{_SAM}patch_embed.proj",
    "v.sam.pos_embd": f"{_SAM}pos_embed",
    **{f"v.sam.neck.{i}": f"{_SAM}neck.{i}" for i in range(4)},
    "mm.model.fc": "model.projector.layers",
}
_DEEPSEEK_LAYER_NAMES = {
    **{f"attn_{x}": "self_attn.qkv_proj" for x in ("qkv", "q", "k", "v")},
    "attn_out": "self_attn.out_proj",
    "ffn_down": "mlp.fc2",
    "ffn_up": "mlp.fc1",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
}
_OCR2_LAYERS = "model.qwen2_model.model.model."
_OCR2_NAMES = {
    **_DEEPSEEK_NAMES,
    "v.post_ln": f"{_OCR2_LAYERS}norm",
    **{f"v.resample_query_{side}": f"model.qwen2_model.query_{side}" for side in (768, 1024)},
}
_OCR2_LAYER_NAMES = {
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    "attn_out": "self_attn.o_proj",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    "ln1": "input_layernorm",
    "ln2": "post_attention_layernorm",
}
_SAM_LAYER_NAMES = {
    "attn.out": "attn.proj",
    "attn.pos_h": "attn.rel_pos_h",
    "attn.pos_w": "attn.rel_pos_w",
    "attn.qkv": "attn.qkv",
    "mlp.lin1": "mlp.lin1",
    "mlp.lin2": "mlp.lin2",
    "post_ln": "norm2",
    "pre_ln": "norm1",
}
_SAM_TENSOR = re.compile(r"v\.sam\.blk\.(\d+)\.(.+)\.(weight|bias)")
_DEEPSTACK = re.compile(r"v\.deepstack\.(\d+)\.(\w+)\.(weight|bias)")
_LAST_PARTS = ("attn_k", "attn_v", "weight.1", "attn.k", "attn.v", "ffn_up")
"""Marks of tensors that are parts of one in a Hugging Face checkpoint, after its first part and in their order."""

_SINKS = re.compile(r"v\.blk\.(\d+)\.attn_sinks")
_LAYER_TENSOR = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias|(?:in|out)put_m(?:in|ax))")
# Tensors whose names have no suffix, such as ".weight", in a Hugging Face checkpoint.
_PLAIN = (
    "class_embedding",
    "projector.boi",
    "projector.eoi",
    "lambda_1",
    "lambda_2",
    "gate_weight",
    "router_bias",
    "mm_input_projection_weight",
    "pos_embedding",
    "std_bias",
    "std_scale",
)


def tensor_renamer(
    kind: str,
    audio_kind: str,
    names: Collection[str],
    *,
    swaps_mlps: bool,
    offsets: Sequence[int] = (),
) -> Callable[[str], str]:
    """Return a function from the name of a tensor in the file to that in a Hugging Face checkpoint.

    Args:
        kind: The type of the projector of images.
        audio_kind: The type of the projector of audio clips.
        names: The names of all tensors of the file.
        swaps_mlps: True if the names of the two matrices of an MLP are swapped.
        offsets: For each projection of Granite 4 Vision, the place in a square at which it reads patches, or -1.
    """
    rename: Callable[[str], str] = partial(
        _hf_name, names=_OTHER_NAMES.get(kind, _NAMES), swaps_mlps=swaps_mlps
    )
    if kind.startswith("qwen"):
        is_omni = kind.startswith("qwen2") and any(map(is_audio_tensor, names))
        rename = _grid_names(names, _GRID_NAMES, _SPLIT_LAYER_NAMES if is_omni else {})
    elif kind in _OTHER_GRID_NAMES:
        own = _SPLIT_LAYER_NAMES if kind in _WITH_SPLIT_LAYERS else {}
        rename = _grid_names(names, _OTHER_GRID_NAMES[kind], own)
    elif kind.startswith("kimi"):
        rename = partial(
            _name_in_layers,
            names=_KIMI_NAMES,
            layer_names=_KIMI_LAYER_NAMES,
            layers=f"{_TOWER}encoder.blocks",
        )
    elif kind == "granite4_vision":
        rename = window_names(rename, offsets)
    elif kind == "gemma3nv":
        rename = _mobilenet_name
    elif kind == "deepseekocr":
        rename = partial(
            _name_in_layers,
            names=_DEEPSEEK_NAMES,
            layer_names=_DEEPSEEK_LAYER_NAMES,
            layers=f"{_CLIP}transformer.layers",
        )
    elif kind == "deepseekocr2":
        rename = partial(
            _name_in_layers,
            names=_OCR2_NAMES,
            layer_names=_OCR2_LAYER_NAMES,
            layers=f"{_OCR2_LAYERS}layers",
        )
    hear = audio_renamer(audio_kind)
    return lambda name: hear(name) if is_audio_tensor(name) else rename(name)


def part_number(name: str) -> int:
    """Return the place of a tensor among the parts of one."""
    return next((i for i, mark in enumerate(_LAST_PARTS, 1) if mark in name), 0)


def _grid_names(
    names: Collection[str], table: Mapping[str, str], own: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str], str]:
    """Return a function that names the tensors of a Qwen-VL or dots.ocr as its checkpoint does.

    `table` has the names of the tensors outside of layers, and `own` those in layers that differ from Qwen-VL's.
    """
    matches = [_DEEPSTACK.fullmatch(name) for name in names]
    kept = sorted({int(match[1]) for match in matches if match})
    has_gate = any(".ffn_gate." in name for name in names)
    up, down = ("up_proj", "down_proj") if has_gate else ("fc1", "fc2")
    layer_names = {**_GRID_LAYER_NAMES, **own, "ffn_up": f"mlp.{up}", "ffn_down": f"mlp.{down}"}

    def rename(name: str) -> str:
        if match := _DEEPSTACK.fullmatch(name):
            index = kept.index(int(match[1]))
            return f"{_VISUAL}deepstack_merger_list.{index}.{match[2]}.{match[3]}"
        if match := _SINKS.fullmatch(name):
            return f"{_VISUAL}blocks.{match[1]}.attn.sinks"
        if match := _LAYER_TENSOR.fullmatch(name):
            if match[2] not in layer_names:
                return name
            found = f"{_VISUAL}blocks.{match[1]}.{layer_names[match[2]]}"
            return found if found.endswith(_PLAIN) else f"{found}.{match[3]}"
        if name in table:
            return table[name]
        stem, _, last = name.removesuffix(".1").rpartition(".")
        return f"{table[stem]}.{last}" if stem in table else name

    return rename


def _mobilenet_name(name: str) -> str:
    """Return Gemma 3n's name for a tensor."""
    if name.startswith("mm."):
        stem, _, last = name.removeprefix("mm.").rpartition(".")
        return f"embed_vision.{_GEMMA3N_PROJECTION.get(stem, stem)}.{last}"
    tower = name.removeprefix("v.").replace("blk.", "blocks.", 1)
    return f"model.vision_tower.timm_model.{tower}"


_GEMMA3N_PROJECTION = {
    "hard_emb_norm": "hard_embedding_norm",
    "input_projection": "embedding_projection",
    "soft_emb_norm": "soft_embedding_norm",
}


def _name_in_layers(
    name: str, names: Mapping[str, str], layer_names: Mapping[str, str], layers: str
) -> str:
    """Return the name of a tensor in the checkpoint of a Kimi or a DeepSeek-OCR, or that in the file without one.

    `layers` is the name of the layers, whose tensors have `layer_names`. Other tensors have `names`.
    """
    if match := _LAYER_TENSOR.fullmatch(name):
        if match[2] not in layer_names:
            return name
        return f"{layers}.{match[1]}.{layer_names[match[2]]}.{match[3]}"
    if match := _SAM_TENSOR.fullmatch(name):
        if match[2] not in _SAM_LAYER_NAMES:
            return name
        found, last = f"{_SAM}blocks.{match[1]}.{_SAM_LAYER_NAMES[match[2]]}", match[3]
    else:
        stem, _, last = name.rpartition(".")
        if stem not in names:
            stem, last = name, ""
        found = names.get(stem, name)
    return found if found.endswith(_BARE) or not last else f"{found}.{last}"


_BARE = (
    "class_embedding",
    "image_newline",
    "view_seperator",
    "pos_embed",
    "rel_pos_h",
    "rel_pos_w",
)
"""The ends of DeepSeek-OCR's names without a suffix, such as ".weight"."""


def _hf_name(name: str, names: Mapping[str, str], *, swaps_mlps: bool) -> str:
    """Return CLIP's name for a tensor, or the name in the file if CLIP has none."""
    if match := _LAYER_TENSOR.fullmatch(name):
        stem = match[2]
        if swaps_mlps:
            stem = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}.get(stem, stem)
        if stem not in _LAYER_NAMES:
            return name
        hf, last = f"{_TOWER}encoder.layers.{match[1]}.{_LAYER_NAMES[stem]}", match[3]
    else:
        stem, _, last = name.rpartition(".")
        if stem not in names:
            stem, last = name, "weight"
        if stem not in names:
            return name
        hf = names[stem]
    if hf.endswith("in_proj"):
        return f"{hf}_{last}"
    return hf if hf.endswith(_PLAIN) else f"{hf}.{last}"
