"""Tiny random models that read images, as files on disk, with a real tokenizer and image processor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from support.tiny_checkpoints import sentencepiece_tokenizer

TEXT_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "model_type": "llama",
}
TOWER_SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 8,
}
TILE = 64
INTERNVL_MARKS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
MARKS = ["<fake_token_around_image>", "<global-img>", "<image>", "<end_of_utterance>"] + [
    f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)
]
MODELS = ("idefics3", "smolvlm", "llava-clip", "llava-siglip", "internvl")

_PARTS = "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
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

    `tower` and `decoder` are the sizes of its parts. `factor` squared patches become one row.
    """
    tile = tower["image_size"]
    tokenizer = sentencepiece_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<image>", image_mark(kind))
    if kind.startswith("internvl"):
        tokenizer.add_special_tokens(
            {"additional_special_tokens": [*MARKS, *INTERNVL_MARKS.values()]}
        )
    image_token = tokenizer.convert_tokens_to_ids(image_mark(kind))
    ids = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    text = {"vocab_size": len(tokenizer)} | dict(decoder) | ids
    if kind in ("idefics3", "smolvlm"):
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
        others = {"processor_class": f"{name}Processor", "image_seq_len": 16}
    elif kind.startswith("internvl"):
        is_rms = kind == "internvl-rms"
        config = transformers.InternVLConfig(
            vision_config=dict(tower)
            | {"model_type": "internvl_vision", "use_qk_norm": is_rms, "attention_bias": not is_rms}
            | {"norm_type": "rms_norm" if is_rms else "layer_norm", "use_mean_pooling": is_rms},
            text_config=text | {"model_type": "qwen2"},
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
    else:
        name = kind.removeprefix("llava-")
        config = transformers.LlavaConfig(
            vision_config=dict(tower) | {"model_type": f"{name}_vision_model"},
            text_config=text,
            image_token_index=image_token,
            image_token_id=image_token,
            vision_feature_select_strategy="default" if name == "clip" else "full",
            vision_feature_layer=-2,
            tie_word_embeddings=False,
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
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
            "num_additional_image_tokens": int(name == "clip"),
            "image_token": "<image>",
        }
    model = getattr(transformers, _class(kind))(config)
    model = model.float().eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    (directory / "processor_config.json").write_text(json.dumps(others))
    return directory, model


def image_processor(path: Path, kind: str, **overrides: Any) -> Any:
    """Return transformers' image processor with Pillow for a directory that `vision_directory` wrote."""
    fields = json.loads((path / "preprocessor_config.json").read_text()) | overrides
    name = fields.pop("image_processor_type")
    if kind == "internvl":
        fields["crop_to_patches"] = True
    family = {"GotOcr2": "got_ocr2"}.get(
        name.removesuffix("ImageProcessor"), name.removesuffix("ImageProcessor").lower()
    )
    module = import_module(f"transformers.models.{family}.image_processing_pil_{family}")
    return getattr(module, f"{name}Pil")(**fields)


def image_mark(kind: str) -> str:
    """Return the token that stands for an image."""
    return "<IMG_CONTEXT>" if kind.startswith("internvl") else "<image>"


def _class(kind: str) -> str:
    names = {"idefics3": "Idefics3", "smolvlm": "SmolVLM", "internvl": "InternVL", "llava": "Llava"}
    return names[kind.split("-")[0]] + "ForConditionalGeneration"
