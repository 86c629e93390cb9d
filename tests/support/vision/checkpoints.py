"""Tiny random models that read images, as files on disk, with a real tokenizer and image processor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from safetensors.torch import load_file, save_file
from support.checkpoints.mistral_files import write_mistral_files
from support.checkpoints.tiny import DECODER_SIZES, sentencepiece_tokenizer
from support.families.multimodal import MULTIMODAL
from support.media.image_marks import (
    COHERE_MARKS,
    GEMMA_MARKS,
    LLAMA4_MARKS,
    MARKS,
    family_marks,
    image_mark,
)
from support.vision.granite_vision import blip2, granite4_vision, granite_docling
from support.vision.normed_projector import NORMED_MODELS, NormedProjector
from support.vision.published_internvl import as_nvlm, as_published, rename

TEXT_SIZES = DECODER_SIZES | {"model_type": "llama"}
TOWER_SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 8,
}
TILE = 64
_Parts: TypeAlias = tuple[Any, dict[str, Any], dict[str, Any]]
"""The config of a model and the fields of its image processor and of its processor."""

_PARTS = "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}<image>{% elif p.type == 'video' %}<video>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: "
    + _PARTS
    + "\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def vision_directory(
    directory: Path,
    kind: str,
    *,
    tower: Mapping[str, int] = TOWER_SIZES,
    decoder: Mapping[str, Any] = TEXT_SIZES,
    factor: int = 2,
) -> tuple[Path, Any]:
    """Write a model of one of `MODELS`. Return its directory and transformers' model.

    Mistral's models may end in "-own" and LLaVA's in "-published", for their own formats, and others in "-renamed", for
    names as in memory.
    `tower` and `decoder` are the sizes of its parts. A square of `factor` x `factor` patches becomes one row.
    """
    kind, has_own_format = kind.removesuffix("-own"), kind.endswith("-own")
    kind, is_renamed = kind.removesuffix("-renamed"), kind.endswith("-renamed")
    kind, is_published = kind.removesuffix("-published"), kind.endswith("-published")
    tokenizer = sentencepiece_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<image>", image_mark(kind))
    tokenizer.add_special_tokens({"additional_special_tokens": family_marks(kind)})
    if kind.startswith("gemma"):
        names = {f"{name}_token": mark for name, mark in GEMMA_MARKS.items()}
        tokenizer.init_kwargs |= names
        for name, mark in names.items():
            setattr(tokenizer, name, mark)
            setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(mark))
    if kind == "cohere2_vision":
        tokenizer.init_kwargs |= {f"{name}_token": mark for name, mark in COHERE_MARKS.items()}
    ids = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    text = {"vocab_size": len(tokenizer)} | dict(decoder) | ids
    parts = _PARTS_BY_FAMILY[kind.split("-")[0]]
    config, processor, others = parts(kind, dict(tower), text, tokenizer, factor)
    if has_own_format:
        config.vision_config.hidden_act = "silu"
    model = getattr(transformers, _class(kind))(config)
    if kind in NORMED_MODELS:
        model.model.multi_modal_projector = NormedProjector(config, NORMED_MODELS[kind])
    if kind == "internvl_chat-nvlm":
        as_nvlm(model, text["intermediate_size"])
    model = model.float().eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith(("put_min", "put_max")):
                buffer.fill_(-1.0 if name.endswith("min") else 1.0)
            elif name.endswith(("std_bias", "std_scale")):
                buffer.normal_(0.5, 0.15)
    if has_own_format:
        write_mistral_files(model, directory)
        tokenizer.save_pretrained(directory)
        return directory, model
    model.save_pretrained(directory, save_original_format=not is_renamed)
    if kind == "qianfan_ocr":
        # Transformers renames layers of the decoder like those of the tower.
        file, wrong = directory / "model.safetensors", "language_model.model.encoder."
        tensors = load_file(file)
        assert any(name.startswith(wrong) for name in tensors)
        save_file({k.replace(wrong, "language_model.model."): x for k, x in tensors.items()}, file)
    if kind.startswith("internvl_chat"):
        as_published(directory, kind)
    rename(directory, kind, is_published=is_published)
    tokenizer.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    (directory / "processor_config.json").write_text(json.dumps(others))
    return directory, model


def _idefics3(
    kind: str, tower: dict[str, int], text: dict[str, Any], tokenizer: Any, factor: int
) -> _Parts:
    tile = tower["image_size"]
    image_token = tokenizer.convert_tokens_to_ids(image_mark(kind))
    name = "Idefics3" if kind == "idefics3" else "SmolVLM"
    config = getattr(transformers, f"{name}Config")(
        vision_config=dict(tower),
        text_config=text,
        image_token_id=image_token,
        scale_factor=factor,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    processor: dict[str, Any] = {
        "do_convert_rgb": True,
        "do_image_splitting": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_processor_type": f"{name}ImageProcessor",
        "max_image_size": {"longest_edge": tile},
        "resample": 1,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": 4 * tile},
    }
    if kind == "smolvlm":
        processor["video_sampling"] = {"fps": 1, "max_frames": 6, "video_size": {}}
    others = {"processor_class": f"{name}Processor", "image_seq_len": 16}
    return config, processor, others


def _internvl(
    kind: str, tower: dict[str, int], text: dict[str, Any], tokenizer: Any, factor: int
) -> _Parts:
    tile = tower["image_size"]
    image_token = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    is_rms, is_published = kind == "internvl-rms", kind.startswith("internvl_chat")
    own, decoder = ("internvl_vision", "qwen2")
    if kind == "qianfan_ocr":
        own, decoder = ("qianfan_ocr_vision", "qwen3")
        text = text | {"head_dim": 16}
    if is_published:
        decoder = "gpt_oss"
        kinds = ["sliding_attention", "full_attention"]
        text = text | {"head_dim": 16, "num_local_experts": 4, "layer_types": kinds}
    config = getattr(transformers, _class(kind).replace("ForConditionalGeneration", "Config"))(
        vision_config=dict(tower)
        | {"model_type": own, "use_qk_norm": is_rms, "attention_bias": not is_rms}
        | {
            "norm_type": "rms_norm" if is_rms else "layer_norm",
            "use_mean_pooling": is_rms or is_published,
        },
        text_config=text | {"model_type": decoder},
        image_token_id=image_token,
        image_seq_length=16,
        tie_word_embeddings=False,
    )
    processor = {
        "crop_to_patches": False,
        "image_processor_type": "GotOcr2ImageProcessor",
        "max_patches": 12,
        "size": {"height": tile, "width": tile},
    }
    others = {"processor_class": "InternVLProcessor", "image_seq_length": 16}
    if is_published:
        processor |= {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    return config, processor, others


def _cohere(
    kind: str, tower: dict[str, int], text: dict[str, Any], tokenizer: Any, factor: int
) -> _Parts:
    tile = tower["image_size"]
    name = "AyaVision" if kind == "aya_vision" else "Cohere2Vision"
    field = "image_token_index" if kind == "aya_vision" else "image_token_id"
    config = getattr(transformers, f"{name}Config")(
        vision_config=dict(tower) | {"model_type": "siglip_vision_model", "vision_use_head": False},
        text_config=text | {"model_type": "cohere2", "sliding_window": 24},
        downsample_factor=factor,
        alignment_intermediate_size=56,
        tie_word_embeddings=False,
        **{field: tokenizer.convert_tokens_to_ids(COHERE_MARKS["image"])},
    )
    processor_name = "GotOcr2" if kind == "aya_vision" else name
    processor = {
        "image_processor_type": f"{processor_name}ImageProcessor",
        "max_patches": 6,
        "size": {"height": tile, "width": tile},
    }
    others = {"processor_class": f"{name}Processor"}
    if kind == "aya_vision":
        sizes = {"patch_size": tower["patch_size"], "img_size": tile, "downsample_factor": factor}
        others |= sizes
    return config, processor, others


def _aria(
    kind: str, tower: dict[str, int], text: dict[str, Any], tokenizer: Any, factor: int
) -> _Parts:
    # The processor makes no other sizes than these.
    sizes = {490: 6, 980: 9}
    tower |= {"image_size": 980, "patch_size": 98}
    config = transformers.AriaConfig(
        vision_config=tower | {"model_type": "idefics3_vision"},
        text_config=text | {"model_type": "aria_text", "moe_num_experts": 4, "head_dim": 16},
        vision_feature_layer=-2,
        projector_patch_to_query_dict={25: 6, 100: 9},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    processor = {"image_processor_type": "AriaImageProcessor", "min_image_size": 336}
    return config, processor, {"processor_class": "AriaProcessor", "size_conversion": sizes}


def _llava(
    kind: str, tower: dict[str, int], text: dict[str, Any], tokenizer: Any, factor: int
) -> _Parts:
    tile = tower["image_size"]
    image_token = tokenizer.convert_tokens_to_ids(image_mark(kind))
    is_vip = kind == "vipllava"
    name = "clip" if is_vip else kind.removeprefix("llava-")
    strategy = "default" if name == "clip" else "full"
    config = (transformers.VipLlavaConfig if is_vip else transformers.LlavaConfig)(
        vision_config=dict(tower) | {"model_type": f"{name}_vision_model"},
        text_config=text,
        image_token_index=image_token,
        image_token_id=image_token,
        vision_feature_layer=[-1, 1, -2] if is_vip else -2,
        tie_word_embeddings=False,
        **({} if is_vip else {"vision_feature_select_strategy": strategy}),
    )
    processor = {
        "crop_size": {"height": tile, "width": tile},
        "do_center_crop": name == "clip",
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": f"{'CLIP' if name == 'clip' else 'Siglip'}ImageProcessor",
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": tile} if name == "clip" else {"height": tile, "width": tile},
    }
    if name == "siglip":
        del processor["crop_size"], processor["do_center_crop"]
    others = {
        "processor_class": "LlavaProcessor",
        "patch_size": tower["patch_size"],
        "vision_feature_select_strategy": strategy,
        "num_additional_image_tokens": int(name == "clip"),
        "image_token": "<image>",
    }
    return config, processor, others


def _gemma(
    kind: str, tower: dict[str, int], text: dict[str, Any], tokenizer: Any, factor: int
) -> _Parts:
    tile = tower["image_size"]
    text = text | {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 3}
    if kind == "paligemma":
        text |= {"model_type": "gemma"}
    elif kind == "paligemma2":
        text |= {"model_type": "gemma2", "sliding_window": 24}
    else:
        text |= {"model_type": "gemma3_text", "sliding_window": 24}
        text["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    vision = dict(tower) | {"model_type": "siglip_vision_model"}
    num_outputs = (tile // tower["patch_size"]) ** 2
    name = "Gemma3" if kind == "gemma3" else "PaliGemma"
    marks = {"image_token_index": tokenizer.convert_tokens_to_ids("<image>")}
    if kind == "gemma3":
        num_outputs //= 4
        marks |= {
            f"{each}_token_index": tokenizer.convert_tokens_to_ids(GEMMA_MARKS[each])
            for each in ("boi", "eoi")
        }
        marks["mm_tokens_per_image"] = num_outputs
    else:
        vision |= {"projection_dim": 64, "vision_use_head": False}
        marks["projection_dim"] = 64
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision, text_config=text, tie_word_embeddings=False, **marks
    )
    processor = {
        "image_processor_type": f"{'Gemma3' if kind == 'gemma3' else 'Siglip'}ImageProcessor",
        "image_seq_length": num_outputs,
        "size": {"height": tile, "width": tile},
    }
    return (
        config,
        processor,
        {"processor_class": f"{name}Processor", "image_seq_length": num_outputs},
    )


def _gemma4(
    kind: str, tower: dict[str, int], text: dict[str, Any], tokenizer: Any, factor: int
) -> _Parts:
    text = text | {"head_dim": 16, "global_head_dim": 16, "num_hidden_layers": 3}
    text |= {"model_type": "gemma4_text", "sliding_window": 24, "hidden_size_per_layer_input": 8}
    text |= {"vocab_size_per_layer_input": text["vocab_size"], "num_kv_shared_layers": 0}
    text["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention"]
    text["use_bidirectional_attention"] = "vision"
    if kind == "gemma4_unified":
        text = {name: text[name] for name in text if "per_layer" not in name}
        text["model_type"] = "gemma4_unified_text"
    vision = {name: tower[name] for name in tower if name != "image_size"}
    num_heads = tower["num_attention_heads"]
    vision |= {"head_dim": tower["hidden_size"] // num_heads, "num_key_value_heads": num_heads}
    vision |= {"pooling_kernel_size": 2}
    vision |= {"position_embedding_size": 256, "standardize": True, "use_clipped_linears": True}
    marks = {
        f"{each}_token_id": tokenizer.convert_tokens_to_ids(GEMMA_MARKS[each])
        for each in ("boi", "eoi", "image")
    }
    if kind == "gemma4_unified":
        vision = {"patch_size": tower["patch_size"], "pooling_kernel_size": 2}
        vision |= {"mm_embed_dim": 40, "output_proj_dims": 40, "mm_posemb_size": 80}
    name = _class(kind).removesuffix("ForConditionalGeneration")
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision,
        text_config=text,
        audio_config=None,
        tie_word_embeddings=False,
        **marks,
        **dict.fromkeys(("boa_token_id", "audio_token_id"), 1),
        video_token_id=tokenizer.convert_tokens_to_ids("<video>"),
        eoa_token_index=1,
    )
    processor = {
        "image_processor_type": f"{name}ImageProcessor",
        "max_soft_tokens": 70,
        "patch_size": tower["patch_size"],
        "pooling_kernel_size": 2,
    }
    return config, processor, {"processor_class": f"{name}Processor"}


def _pixtral(
    kind: str, tower: dict[str, int], text: dict[str, Any], tokenizer: Any, factor: int
) -> _Parts:
    tile = tower["image_size"]
    name = _class(kind).removesuffix("ForConditionalGeneration")
    merge = {} if kind == "pixtral" else {"spatial_merge_size": 2}
    text |= {"model_type": "mistral", "sliding_window": None, "head_dim": 16}
    if kind == "mistral_large4":
        decoder, sizes = MULTIMODAL["MistralLarge4"]
        text |= sizes | {"model_type": decoder}
        tower = tower | {"hidden_act": "silu"}
    if kind == "lighton_ocr":
        merge["image_token_id"] = tokenizer.convert_tokens_to_ids("[IMG]")
    config = getattr(transformers, f"{name}Config")(
        vision_config=dict(tower) | {"model_type": "pixtral"},
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        **({} if merge else {"vision_feature_select_strategy": "full"}),
        **merge,
    )
    processor = {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": tower["patch_size"], "width": tower["patch_size"]},
        "size": {"longest_edge": 2 * tile},
    }
    others = {"processor_class": "PixtralProcessor", "patch_size": tower["patch_size"]} | merge
    others.pop("image_token_id", None)
    return config, processor, others


def _anyres(
    kind: str, tower: dict[str, int], text: dict[str, Any], tokenizer: Any, factor: int
) -> _Parts:
    tile = tower["image_size"]
    is_next = kind.startswith("llava_next")
    name = _class(kind).removesuffix("ForConditionalGeneration")
    grids = [[tile * rows, tile * columns] for rows, columns in ((1, 1), (1, 2), (2, 1), (2, 2))]
    tower_kind = "clip" if is_next else "siglip"
    video = tokenizer.convert_tokens_to_ids("<video>")
    own = {} if is_next else {"video_token_index": video, "vision_aspect_ratio": "anyres_max_2"}
    text |= {"model_type": "qwen2"} if kind == "llava_onevision" else {}
    config = getattr(transformers, f"{name}Config")(
        vision_config=dict(tower) | {"model_type": f"{tower_kind}_vision_model"},
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=grids,
        vision_feature_select_strategy="default" if is_next else "full",
        tie_word_embeddings=False,
        **own,
    )
    processor = {
        "image_processor_type": f"{name.removesuffix('Video')}ImageProcessor",
        "image_grid_pinpoints": grids,
        "size": {"shortest_edge": tile} if is_next else {"height": tile, "width": tile},
    }
    half = {f"image_{name}": [0.5] * 3 for name in ("mean", "std")}
    processor |= {"crop_size": {"height": tile, "width": tile}} if is_next else half
    strategy = config.vision_feature_select_strategy
    others = {"processor_class": f"{name}Processor", "vision_feature_select_strategy": strategy}
    if is_next:
        others |= {"patch_size": tower["patch_size"], "num_additional_image_tokens": 1}
    else:
        others |= {"num_image_tokens": (tile // tower["patch_size"]) ** 2}
        others |= {"vision_aspect_ratio": "anyres_max_2"}
    return config, processor, others


def _llama4(
    kind: str, tower: dict[str, int], text: dict[str, Any], tokenizer: Any, factor: int
) -> _Parts:
    tile, size = tower["image_size"], tower["hidden_size"]
    text = text | {"model_type": "llama4_text", "head_dim": 16, "intermediate_size_mlp": 40}
    text |= {"num_local_experts": 4, "interleave_moe_layer_step": 2, "attention_chunk_size": 64}
    config = transformers.Llama4Config(
        vision_config=dict(tower)
        | {"intermediate_size": 4 * size, "projector_input_dim": 56, "projector_output_dim": 56}
        | {"vision_output_dim": 56},
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(LLAMA4_MARKS["patch"]),
        boi_token_index=1,
        eoi_token_index=1,
        tie_word_embeddings=False,
    )
    processor = {
        "image_processor_type": "Llama4ImageProcessor",
        "max_patches": 6,
        "resize_to_max_canvas": False,
        "size": {"height": tile, "width": tile},
    }
    others = {"processor_class": "Llama4Processor", "patch_size": tower["patch_size"]}
    return config, processor, others


_PARTS_BY_FAMILY = {
    "aria": _aria,
    "blip2": blip2,
    "aya_vision": _cohere,
    "cohere2_vision": _cohere,
    "llama4": _llama4,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "internvl": _internvl,
    "internvl_chat": _internvl,
    "qianfan_ocr": _internvl,
    "llava": _llava,
    "vipllava": _llava,
    "gemma3": _gemma,
    "paligemma": _gemma,
    "paligemma2": _gemma,
    "gemma4": _gemma4,
    "gemma4_unified": _gemma4,
    "granite4_vision": granite4_vision,
    "granite_docling": granite_docling,
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision", *NORMED_MODELS), _anyres),
    "pixtral": _pixtral,
    "mistral3": _pixtral,
    "mistral_large4": _pixtral,
    "lighton_ocr": _pixtral,
}


def _class(kind: str) -> str:
    names = {"idefics3": "Idefics3", "smolvlm": "SmolVLM", "llava": "Llava"}
    names |= dict.fromkeys(("internvl", "internvl_chat"), "InternVL")
    names |= {"aria": "Aria", "blip2": "Blip2", "llava_next_video": "LlavaNextVideo"}
    names |= {"vipllava": "VipLlava", "lighton_ocr": "LightOnOcr", "aya_vision": "AyaVision"}
    names |= {"cohere2_vision": "Cohere2Vision", "qianfan_ocr": "QianfanOCR"}
    names |= {"gemma3": "Gemma3", "gemma4": "Gemma4", "pixtral": "Llava", "mistral3": "Mistral3"}
    names |= {"gemma4_unified": "Gemma4Unified", "mistral_large4": "MistralLarge4"}
    names |= {"granite4_vision": "Granite4Vision", "granite_docling": "GraniteDocling"}
    names |= {"llama4": "Llama4", "llava_next": "LlavaNext", "llava_onevision": "LlavaOnevision"}
    names |= dict.fromkeys(NORMED_MODELS, "LlavaOnevision")
    names |= dict.fromkeys(("paligemma", "paligemma2"), "PaliGemma")
    return names[kind.split("-")[0]] + "ForConditionalGeneration"
