"""Write models of transformers in Mistral's own format, after the facts of transformers' converters from it."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_NAMES = (
    (r"^(model\.)?(language_model\.)?(model\.)?", ""),
    (r"^lm_head\.", "output."),
    (r"^embed_tokens\.", "tok_embeddings."),
    (r"^(layers\.\d+\.)input_layernorm\.", r"\1attention_norm."),
    (r"^(layers\.\d+\.)post_attention_layernorm\.", r"\1ffn_norm."),
    (r"\.self_attn\.([qkvo])_proj\.", r".attention.w\1."),
    (r"\.self_attn\.q_([ab])_proj\.", r".attention.wq_\1."),
    (r"\.self_attn\.kv_a_proj_with_mqa\.", ".attention.wkv_a_with_mqa."),
    (r"\.self_attn\.kv_b_proj\.", ".attention.wkv_b."),
    (r"\.self_attn\.(q|kv)_a_layernorm\.", r".attention.\1_a_norm."),
    (r"\.(mlp|block_sparse_moe)\.(gate|experts|shared_experts)\.", r".feed_forward.\2."),
    (r"\.mlp\.", ".feed_forward."),
    (r"\.gate_proj\.", ".w1."),
    (r"\.down_proj\.", ".w2."),
    (r"\.up_proj\.", ".w3."),
    (r"^vision_tower\.", "vision_encoder."),
    (r"^(vision_encoder\..*\.attention)\.([qkvo])_proj\.", r"\1.w\2."),
    (r"^multi_modal_projector\.linear_1\.", "vision_language_adapter.w_in."),
    (r"^multi_modal_projector\.linear_2\.", "vision_language_adapter.w_out."),
    (r"^multi_modal_projector\.patch_merger\.", "patch_merger."),
    (r"^multi_modal_projector\.norm\.", "pre_mm_projector_norm."),
)
_AUDIO_LAYER = r"^(whisper_encoder\.transformer\.layers\.\d+\.)"
_AUDIO_NAMES = (
    (r"^audio_tower\.layers\.", "whisper_encoder.transformer.layers."),
    (r"^audio_tower\.(layer_)?norm\.", "whisper_encoder.transformer.norm."),
    (r"^audio_tower\.conv1\.", "whisper_encoder.conv_layers.0."),
    (r"^audio_tower\.conv2\.", "whisper_encoder.conv_layers.1."),
    (r"^audio_tower\.embedder\.conv1\.", "whisper_encoder.conv_layers.0.conv."),
    (r"^audio_tower\.embedder\.conv2\.", "whisper_encoder.conv_layers.1.conv."),
    (r"^multi_modal_projector\.linear_1\.", "audio_language_projection.0."),
    (r"^multi_modal_projector\.linear_2\.", "audio_language_projection.2."),
    (_AUDIO_LAYER + r"self_attn\.([qkv])_proj\.", r"\1attention.w\2."),
    (_AUDIO_LAYER + r"self_attn\.o(ut)?_proj\.", r"\1attention.wo."),
    (_AUDIO_LAYER + r"self_attn_layer_norm\.", r"\1attention_norm."),
    (_AUDIO_LAYER + r"final_layer_norm\.", r"\1ffn_norm."),
    (_AUDIO_LAYER + r"fc([12])\.", r"\1feed_forward.w\2."),
    (r"^layers(.*)\.ada_rms_norm\.linear1\.", r"layers\1.ada_rms_norm_t_cond.0."),
    (r"^layers(.*)\.ada_rms_norm\.linear2\.", r"layers\1.ada_rms_norm_t_cond.2."),
)
_AUDIO_PARTS = re.compile(r"whisper_encoder\.|audio_language_projection\.|tok_embeddings\.")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def write_mistral_files(model: Any, path: Path, *, num_files: int = 1, fp8: str = "") -> None:
    """Write params.json and the weights. `fp8` is the value of `qscheme_act`; "" for weights that are not quantized."""
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        tensors = {
            k: v for file in Path(saved).glob("*.safetensors") for k, v in load_file(file).items()
        }
    config = model.config.to_dict()
    text, vision = config.get("text_config", config), config.get("vision_config")
    audio = config.get("audio_config")
    is_causal = config["model_type"] == "voxtral_realtime"
    found: dict[str, torch.Tensor] = {}
    for name, tensor in _unstacked(tensors).items():
        other = name
        for pattern, replacement in (_NAMES[0], *(_AUDIO_NAMES if audio else ()), *_NAMES[1:]):
            other = re.sub(pattern, replacement, other)
        if "embed_positions" in other:
            # The sinusoids of Whisper, which Mistral's files do not have.
            continue
        if audio and _AUDIO_PARTS.match(other):
            prefix = (
                "mm_streams_embeddings.embedding_module" if is_causal else "mm_whisper_embeddings"
            )
            other = f"{prefix}.{other}"
        if text["model_type"] == "mistral4":
            other = re.sub(r"\.feed_forward\.(gate|experts|shared_experts)\.", r".\1.", other)
        part = re.search(r"\.attention\.w([qk])\.", other)
        # Latent attention rotates alternating rows in both formats.
        is_rotated = is_causal or "whisper_encoder" not in other
        if part and is_rotated and text["model_type"] != "mistral4":
            section = vision if other.startswith("vision") else text
            section = audio if "whisper_encoder" in other else section
            count = section["num_attention_heads"]
            if part[1] == "k":
                count = section.get("num_key_value_heads") or count
            halves = tensor.view(count, 2, -1, *tensor.shape[1:])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        found[other] = tensor.contiguous()
    params = _params(config, text, vision)
    if audio:
        params |= _audio_params(config, audio, is_causal=is_causal)
    if fp8:
        params["quantization"] = {"qformat_weight": "fp8_e4m3", "qscheme_act": fp8}
        found = _quantized(found, fp8)
    (path / "params.json").write_text(json.dumps(params))
    if num_files == 1:
        save_file(found, path / "consolidated.safetensors")
        return
    names = [f"consolidated-{i + 1:05}-of-{num_files:05}.safetensors" for i in range(num_files)]
    files = {name: names[i % num_files] for i, name in enumerate(found)}
    for each in names:
        save_file({name: found[name] for name, file in files.items() if file == each}, path / each)
    index = {"metadata": {}, "weight_map": files}
    (path / "consolidated.safetensors.index.json").write_text(json.dumps(index))


def _params(
    config: dict[str, Any], text: dict[str, Any], vision: dict[str, Any] | None
) -> dict[str, Any]:
    rope = text["rope_parameters"]
    params = {
        "dim": text["hidden_size"],
        "n_layers": text["num_hidden_layers"],
        "head_dim": text["head_dim"],
        "hidden_dim": text["intermediate_size"],
        "n_heads": text["num_attention_heads"],
        "n_kv_heads": text["num_key_value_heads"],
        "norm_eps": text["rms_norm_eps"],
        "vocab_size": text["vocab_size"],
        "rope_theta": rope["rope_theta"],
        "tied_embeddings": text["tie_word_embeddings"],
        "max_position_embeddings": text["max_position_embeddings"],
        "sliding_window": text.get("sliding_window"),
    }
    if text["model_type"] == "ministral":
        size = text["sliding_window"]
        params["sliding_window"] = [
            size if kind == "sliding_attention" else None for kind in text["layer_types"]
        ]
    if rope["rope_type"] == "yarn":
        params["yarn"] = {
            "factor": rope["factor"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta": rope.get("beta_fast", 32),
            "alpha": rope.get("beta_slow", 1),
            "apply_scale": rope.get("attention_factor") != 1.0,
        }
    if beta := rope.get("llama_4_scaling_beta"):
        length = rope["original_max_position_embeddings"]
        params["llama_4_scaling"] = {"beta": beta, "original_max_position_embeddings": length}
    if text["model_type"] == "mixtral":
        params["moe"] = {
            "num_experts": text["num_local_experts"],
            "num_experts_per_tok": text["num_experts_per_tok"],
        }
    if text["model_type"] == "mistral4":
        params |= {name: text[name] for name in _LATENT}
        params["moe"] = {
            "num_experts": text["n_routed_experts"],
            "num_experts_per_tok": text["num_experts_per_tok"],
            "first_k_dense_replace": text["first_k_dense_replace"],
            "expert_hidden_dim": text["moe_intermediate_size"],
            "num_shared_experts": text["n_shared_experts"],
            "routed_scale": text["routed_scaling_factor"],
            "route_every_n": 1,
            "num_expert_groups": 1,
            "num_expert_groups_per_tok": 1,
        }
    if vision is not None:
        merges = config["model_type"] == "mistral3"
        names = (
            "hidden_size",
            "image_size",
            "intermediate_size",
            "num_hidden_layers",
            "patch_size",
        )
        params["vision_encoder"] = {
            **{name: vision[name] for name in (*names, "num_attention_heads", "num_channels")},
            "rope_theta": vision["rope_parameters"]["rope_theta"],
            "image_token_id": config["image_token_index"],
            "adapter_bias": config["multimodal_projector_bias"],
            "max_image_size": 2 * vision["image_size"],
        }
        if merges:
            params["vision_encoder"] |= {
                "mm_projector_id": "patch_merge",
                "spatial_merge_size": config["spatial_merge_size"],
                "add_pre_mm_projector_layer_norm": True,
            }
    return params


def _audio_params(
    config: dict[str, Any], audio: dict[str, Any], *, is_causal: bool
) -> dict[str, Any]:
    encoder: dict[str, Any] = {
        "audio_encoding_args": {
            "sampling_rate": 16_000,
            "num_mel_bins": audio["num_mel_bins"],
            "hop_length": 160,
            "window_size": 400,
        },
        "dim": audio["hidden_size"],
        "n_layers": audio["num_hidden_layers"],
        "hidden_dim": audio["intermediate_size"],
        "n_heads": audio["num_attention_heads"],
        "head_dim": audio.get("head_dim", 64),
        "max_source_positions": None if is_causal else audio["max_source_positions"],
    }
    downsample = {"downsample_factor": config.get("downsample_factor", 4)}
    params: dict[str, Any] = {}
    if is_causal:
        params = {"ada_rms_norm_t_cond": True, "ada_rms_norm_t_cond_dim": 32}
        encoder["audio_encoding_args"]["global_log_mel_max"] = 1.5
        encoder |= {"causal": True, "pos_embed": "rope", "ffn_type": "swiglu"}
        encoder |= {"norm_type": "rms_norm", "norm_eps": audio["rms_norm_eps"]}
        encoder |= {"sliding_window": audio["sliding_window"]}
        encoder |= {"rope_theta": audio["rope_parameters"]["rope_theta"]}
    whisper = {"encoder_args": encoder, "downsample_args": downsample}
    return params | {"multimodal": {"whisper_model_args": whisper}}


def _unstacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with those of each expert instead of those of all experts."""
    found = {}
    for name, tensor in tensors.items():
        block, is_stacked, module = name.rpartition(".experts.")
        if not is_stacked or module not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        for i, matrix in enumerate(tensor):
            names = ["gate_proj", "up_proj"] if module == "gate_up_proj" else [module]
            for part, rows in zip(names, matrix.chunk(len(names)), strict=True):
                found[f"{block}.experts.{i}.{part}.weight"] = rows
    return found


def _quantized(tensors: dict[str, torch.Tensor], scheme: str) -> dict[str, torch.Tensor]:
    """Return the tensors with the matrices of layers in eight bits, and one scale for each."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if re.match(r"layers\..*\.(w\w+)\.weight$", name):
            scale = tensor.abs().max() / 448
            found[name] = (tensor / scale).to(torch.float8_e4m3fn)
            found[name.replace(".weight", ".qscale_weight")] = scale
            if scheme == "TENSOR":
                found[name.replace(".weight", ".qscale_act")] = torch.tensor(0.05)
    return found
