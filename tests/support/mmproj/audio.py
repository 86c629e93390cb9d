"""Write the audio tower of a transformers model as the mmproj file that llama.cpp's converter would make of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, GGUFReader, GGUFWriter, get_tensor_name_map
from gguf.constants import GGUFValueType
from support.gguf.finish import finish
from support.own_code.audio import meralion, ultravox
from torch.nn.functional import softplus

PROJECTORS = {
    "audioflamingo3": "musicflamingo",
    "dots3_note": "dots3note_a",
    "gemma4": "gemma4a",
    "gemma4_unified": "gemma4ua",
    "glmasr": "glma",
    "granite_speech": "granite_speech",
    "lfm2_audio": "lfm2a",
    "meralion2": "meralion",
    "nemotron_h_omni": "parakeet",
    "qwen2_5_omni": "qwen2a",
    "qwen2_audio": "qwen2a",
    "qwen3_asr": "qwen3a",
    "qwen3_omni": "qwen3a",
    "ultravox": "ultravox",
    "voxtral": "voxtral",
}
_NAMES = (
    (r"^model\.(?!embed_audio)", ""),
    (r"^multi_modal_projector\.", "audio.multi_modal_projector."),
)
_STACKS = {"meralion2": meralion.STACK, "ultravox": ultravox.STACK}
_QWEN3 = ((r"^audio\.multi_modal_projector\.linear_", "audio_tower.proj"),)
_GEMMA4 = ((r"^audio_tower\.", "conformer."), (r"\.linear\.", "."))
_SUFFIXES = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")


def write_audio_mmproj(path: Path, model: Any, kind: str, images: Path | None = None) -> Path:
    """Write the audio tower of `model`, of this kind of `support.audio.checkpoints`, to `path` and return it.

    `images` is an mmproj file with the model's vision tower, whose content is written, too.
    """
    config: Any = None
    is_fast = kind in ("lfm2_audio", "nemotron_h_omni")
    if kind == "lfm2_audio":
        config = model.conformer.config
    elif kind != "granite_speech":
        has_tower = kind in ("meralion2", "ultravox")
        config = model.audio_tower.config if has_tower else model.config.audio_config
    writer = GGUFWriter(path, "clip")
    projector = PROJECTORS[kind]
    key = "clip.projector_type" if images is None else "clip.audio.projector_type"
    writer.add_string(key, projector)
    writer.add_bool("clip.has_audio_encoder", True)
    if images is not None:
        _copy(writer, images)
    sizes = {
        "num_mel_bins": "num_mel_bins",
        "embedding_length": "d_model",
        "feed_forward_length": "encoder_ffn_dim",
        "block_count": "encoder_layers",
        "attention.head_count": "encoder_attention_heads",
    }
    others = {
        "d_model": "hidden_size",
        "encoder_ffn_dim": "intermediate_size",
        "encoder_layers": "num_hidden_layers",
        "encoder_attention_heads": "num_attention_heads",
        "num_mel_bins": "feature_size",
    }
    for name, field in () if kind == "granite_speech" else sizes.items():
        value = getattr(config, field, None) or getattr(config, others.get(field, ""), None)
        writer.add_uint32(f"clip.audio.{name}", value or 0)
    writer.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-5)
    if kind in _STACKS:
        writer.add_uint32("clip.audio.projector.stack_factor", _STACKS[kind])
    if kind == "granite_speech":
        _write_granite(writer, model)
    if is_fast:
        _write_fast(writer, model, config, is_nemotron=kind == "nemotron_h_omni")
    if kind == "dots3_note":
        _write_dots3(writer, model)
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, 4)
    rules = _NAMES
    if kind.startswith("qwen3"):
        rules = (*_NAMES, *_QWEN3)
    elif kind == "gemma4":
        rules = (*_NAMES, *_GEMMA4)
    for name, tensor in model.state_dict().items():
        if (
            is_fast
            or kind in ("dots3_note", "granite_speech")
            or not re.search(r"audio|multi_modal_projector", name)
        ):
            continue
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        if name.endswith("audio_bos_eos_token.weight"):
            continue
        tensor = tensor.float()
        if kind == "glmasr" and (name := _glm_name(name)) and re.search(r"\.[qk]_proj\.", name):
            # The authors rotate pairs of neighbors, transformers pairs of elements in two halves.
            halves = tensor.unflatten(0, (config.num_attention_heads, 2, -1))
            pairs = halves[:, 0].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
            tensor = torch.stack((pairs, halves[:, 1]), 1).flatten(0, 2)
        if name.endswith("per_dim_scale"):
            name, tensor = f"{name}.weight", softplus(tensor)
        if re.search(r"conv[12]\.bias$", name):
            tensor = tensor[:, None]
        elif re.search(r"conv2d\d\.bias$", name):
            tensor = tensor[:, None, None]
        elif "depthwise_conv1d" in name:
            tensor = tensor.squeeze(1)
        found = names.get_name(name, _SUFFIXES)
        assert found is not None, name
        writer.add_tensor(found, (tensor if tensor.ndim else tensor[None]).contiguous().numpy())
    if kind == "glmasr":
        # This table is in the file, but the layers rotate queries and keys instead.
        positions = torch.zeros(config.max_position_embeddings, config.hidden_size)
        writer.add_tensor("a.position_embd.weight", positions.numpy())
    if kind.startswith(("qwen2_5", "qwen3")):
        # The tower computes these positions itself.
        writer.add_tensor("a.position_embd.weight", torch.zeros(16, config.d_model).numpy())
    return finish(writer)


_FAST_LAYER = r"^(a\.blk\.\d+\.)"
_FAST = (
    (r"^.*projection\.norm\.|^.*embed_audio\.layer_norm\.", "mm.a.norm_pre."),
    (r"^.*embed_audio\.linear_", "mm.a.mlp."),
    (r"^audio_adapter\.model\.", "mm.a.mlp."),
    (r"^.*(audio_tower|conformer)\.", ""),
    (r"^subsampling\.layers\.", "a.conv1d."),
    (r"^subsampling\.linear\.", "a.pre_encode.out."),
    (r"^layers\.", "a.blk."),
    (_FAST_LAYER + r"self_attn\.([qkv])_proj", r"\1attn_\2"),
    (_FAST_LAYER + r"self_attn\.o_proj", r"\1attn_out"),
    (_FAST_LAYER + r"self_attn\.relative_k_proj", r"\1linear_pos"),
    (_FAST_LAYER + r"self_attn\.bias_", r"\1pos_bias_"),
    (_FAST_LAYER + r"norm_feed_forward1", r"\1ffn_norm"),
    (_FAST_LAYER + r"norm_feed_forward2", r"\1ffn_norm_1"),
    (_FAST_LAYER + r"feed_forward1\.linear1", r"\1ffn_up"),
    (_FAST_LAYER + r"feed_forward1\.linear2", r"\1ffn_down"),
    (_FAST_LAYER + r"feed_forward2\.linear1", r"\1ffn_up_1"),
    (_FAST_LAYER + r"feed_forward2\.linear2", r"\1ffn_down_1"),
    (_FAST_LAYER + r"norm_self_att", r"\1ln1"),
    (_FAST_LAYER + r"norm_out", r"\1ln2"),
    (_FAST_LAYER + r"conv\.norm\.running_", r"\1conv_norm_"),
    (_FAST_LAYER + r"conv\.norm", r"\1conv_norm"),
    (_FAST_LAYER + r"conv\.depthwise_conv", r"\1conv_dw"),
    (_FAST_LAYER + r"conv\.pointwise_conv", r"\1conv_pw"),
)
"""Patterns of names of Fast Conformers and their replacements."""


def _write_fast(writer: GGUFWriter, model: Any, config: Any, *, is_nemotron: bool) -> None:
    """Write the sizes and the tensors of the tower of Nemotron Omni or LFM2-Audio."""
    if is_nemotron:
        writer.add_uint32("clip.audio.subsampling_factor", config.subsampling_factor)
        writer.add_uint32("clip.audio.conv_kernel_size", config.conv_kernel_size)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if "batches" in name or not re.search(r"audio_tower|conformer|embed_audio|adapter", name):
            continue
        for pattern, replacement in _FAST:
            name = re.sub(pattern, replacement, name)
        tensors[name] = tensor.float()
    for name, tensor in tensors.items():
        if name.startswith("a.conv1d.") and name.endswith("bias"):
            tensor = tensor.view(1, -1, 1, 1) if is_nemotron else tensor[:, None, None]
        elif ".conv_pw" in name and name.endswith("weight"):
            tensor = tensor.squeeze(2)
        elif ".conv_dw.weight" in name:
            tensor = (
                tensor.view(1, 1, *tensor.squeeze(1).shape) if is_nemotron else tensor.squeeze(1)
            )
        elif "conv_norm" in name and not is_nemotron:
            # The statistics are in the weight and the bias.
            prefix = name.split("conv_norm")[0] + "conv_norm"
            scale = tensors[f"{prefix}.weight"] / (tensors[f"{prefix}_var"] + 1e-5).sqrt()
            if name.endswith((".weight", ".bias")):
                shift = tensors[f"{prefix}.bias"] - tensors[f"{prefix}_mean"] * scale
                tensor = scale if name.endswith("weight") else shift
            else:
                continue
        writer.add_tensor(name, tensor.contiguous().numpy())


_DOTS3 = (
    (r"^audio_tower\.layer_norm\.", "a.post_ln."),
    (r"^audio_tower\.conv_stem\.conv_out\.", "a.conv_out."),
    (r"^audio_tower\.adapter\.norm\.", "mm.a.norm_pre."),
    (r"^audio_tower\.adapter\.fc1\.", "mm.a.mlp.1."),
    (r"^audio_tower\.adapter\.fc2\.", "mm.a.mlp.3."),
    (r"^audio_tower\.layers\.", "a.blk."),
    (_FAST_LAYER + r"self_attn\.([qkv])_proj", r"\1attn_\2"),
    (_FAST_LAYER + r"self_attn\.o_proj", r"\1attn_out"),
    (_FAST_LAYER + r"input_layernorm", r"\1ln1"),
    (_FAST_LAYER + r"post_attention_layernorm", r"\1ln2"),
    (_FAST_LAYER + r"mlp\.down_proj", r"\1ffn_down"),
)
"""Patterns of names of the tower of dots3-note and their replacements."""


def _write_dots3(writer: GGUFWriter, model: Any) -> None:
    """Write the tensors of the tower of dots3-note."""
    for name, tensor in model.model.state_dict().items():
        if not name.startswith("audio_tower."):
            continue
        for pattern, replacement in _DOTS3:
            name = re.sub(pattern, replacement, name)
        if match := re.match(r"audio_tower\.conv_stem\.convs\.(\d)\.(weight|bias)", name):
            name = f"a.conv2d.{int(match[1]) + 1}.{match[2]}"
        parts = {name: tensor.float()}
        if ".mlp.gate_up_proj." in name:
            halves = zip(("gate", "up"), tensor.float().chunk(2), strict=True)
            parts = {name.replace("mlp.gate_up_proj", f"ffn_{x}"): half for x, half in halves}
        for each, part in parts.items():
            writer.add_tensor(each, part.contiguous().numpy())


def _write_granite(writer: GGUFWriter, model: Any) -> None:
    """Write the sizes and the tensors of Granite Speech's tower."""
    config = model.config
    encoder = config.encoder_config
    sizes = {
        "num_mel_bins": encoder.input_dim,
        "embedding_length": encoder.hidden_dim,
        "feed_forward_length": encoder.hidden_dim * encoder.feedforward_mult,
        "block_count": encoder.num_layers,
        "attention.head_count": encoder.num_heads,
        "chunk_size": encoder.context_size,
        "max_pos_emb": encoder.max_pos_emb,
        "projector.window_size": config.window_size,
        "projector.downsample_rate": config.downsample_rate,
        "projector.head_count": config.projector_config.num_attention_heads,
    }
    for name, value in sizes.items():
        writer.add_uint32(f"clip.audio.{name}", value)
    state = {name.removeprefix("model."): x for name, x in model.state_dict().items()}
    for name, tensor in state.items():
        if not name.startswith(("encoder.", "projector.")) or "batches" in name:
            continue
        for pattern, replacement in _GRANITE:
            name, count = re.subn(pattern, replacement, name)
            if count:
                break
        parts = {name: tensor.float()}
        if name.endswith(("running_mean", "running_var")):
            continue
        if (match := re.match(r"(.*)\.batch_norm\.(weight|bias)$", name)) is not None:
            # The statistics are in the weight and the bias.
            norm = {
                each: state[f"{match[1]}.batch_norm.{each}"]
                for each in ("weight", "bias", "running_mean", "running_var")
            }
            scale = norm["weight"] / (norm["running_var"] + 1e-5).sqrt()
            value = norm["bias"] - norm["running_mean"] * scale if match[2] == "bias" else scale
            layer = match[1].split(".")[2]
            parts = {f"a.blk.{layer}.conv_norm.{match[2]}": value}
        elif name.endswith("attn_kv.weight"):
            halves = zip("kv", tensor.float().chunk(2), strict=True)
            parts = {name.replace("attn_kv", f"attn_{x}"): half for x, half in halves}
        for each, part in parts.items():
            is_conv = ".conv_" in each and part.ndim == 3
            writer.add_tensor(each, (part.squeeze() if is_conv else part).contiguous().numpy())


_LAYER = r"^encoder\.layers\.(\d+)\."
_FORMER = r"^projector\.qformer\.encoder\.layer\.(\d+)\."
_GRANITE = (
    (r"^encoder\.input_linear\.", "a.input_projection."),
    (r"^encoder\.out\.", "a.enc_ctc_out."),
    (r"^encoder\.out_mid\.", "a.enc_ctc_out_mid."),
    (r"^projector\.linear\.", "a.proj_linear."),
    (r"^projector\.qformer\.layernorm\.", "a.proj_norm."),
    (r"^projector\.query$", "a.proj_query"),
    (_LAYER + r"attn\.pre_norm", r"a.blk.\1.ln1"),
    (_LAYER + r"attn\.rel_pos_emb\.weight", r"a.blk.\1.attn_rel_pos_emb"),
    (_LAYER + r"attn\.to_", r"a.blk.\1.attn_"),
    (_LAYER + r"conv\.depth_conv\.conv", r"a.blk.\1.conv_dw"),
    (_LAYER + r"conv\.up_conv", r"a.blk.\1.conv_pw1"),
    (_LAYER + r"conv\.down_conv", r"a.blk.\1.conv_pw2"),
    (_LAYER + r"conv\.norm", r"a.blk.\1.norm_conv"),
    (_LAYER + r"ff1\.pre_norm", r"a.blk.\1.ffn_norm"),
    (_LAYER + r"ff1\.(up|down)_proj", r"a.blk.\1.ffn_\2"),
    (_LAYER + r"ff2\.pre_norm", r"a.blk.\1.ffn_norm_1"),
    (_LAYER + r"ff2\.(up|down)_proj", r"a.blk.\1.ffn_\2_1"),
    (_LAYER + "post_norm", r"a.blk.\1.ln2"),
    (_FORMER + r"attention\.attention\.([qkv])\w+", r"a.proj_blk.\1.self_attn_\2"),
    (_FORMER + r"attention\.output\.dense", r"a.proj_blk.\1.self_attn_out"),
    (_FORMER + r"attention\.output\.LayerNorm", r"a.proj_blk.\1.self_attn_norm"),
    (_FORMER + r"crossattention\.attention\.([qkv])\w+", r"a.proj_blk.\1.cross_attn_\2"),
    (_FORMER + r"crossattention\.output\.dense", r"a.proj_blk.\1.cross_attn_out"),
    (_FORMER + r"crossattention\.output\.LayerNorm", r"a.proj_blk.\1.cross_attn_norm"),
    (_FORMER + r"intermediate_query\.dense", r"a.proj_blk.\1.ffn_up"),
    (_FORMER + r"output_query\.dense", r"a.proj_blk.\1.ffn_down"),
    (_FORMER + r"output_query\.LayerNorm", r"a.proj_blk.\1.ffn_norm"),
)
"""Patterns of names in checkpoints of Granite Speech and their replacements."""


def _copy(writer: GGUFWriter, images: Path) -> None:
    reader = GGUFReader(images)
    for field in reader.fields.values():
        if not field.name.startswith("clip."):
            continue
        name, value = field.name, field.contents()
        name = name.replace("clip.projector_type", "clip.vision.projector_type")
        kinds = field.types
        if kinds[0] == GGUFValueType.ARRAY:
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, kinds[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)


def _glm_name(name: str) -> str:
    """Return the name that the converter gives to a tensor of GLM-ASR's authors."""
    for pattern, replacement in (
        (r"^audio_tower\.norm\.", "audio.multi_modal_projector.ln_pre."),
        (r"\.self_attn\.o_proj\.", ".self_attn.out_proj."),
        (r"\.mlp\.(fc[12])\.", r".\1."),
        (r"\.input_layernorm\.", ".self_attn_layer_norm."),
        (r"\.post_attention_layernorm\.", ".final_layer_norm."),
    ):
        name = re.sub(pattern, replacement, name)
    return name
