"""Transformers' image processors with Pillow, for the models of `vision_checkpoints`."""

from __future__ import annotations

import json
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch


def image_processor(path: Path, kind: str, **overrides: Any) -> Any:
    """Return transformers' image processor with Pillow for a directory that `vision_directory` wrote."""
    fields = json.loads((path / "preprocessor_config.json").read_text()) | overrides
    name = fields.pop("image_processor_type")
    if kind == "gemma4_unified":
        return partial(_merged_patches, image_processor_class("Gemma4")(**fields))
    if kind in ("internvl", "internvl_chat", "aya_vision"):
        fields["crop_to_patches"] = True
    return image_processor_class(name.removesuffix("ImageProcessor"))(**fields)


def image_processor_class(name: str) -> Any:
    """Return transformers' class of an image processor with Pillow for the models of this name."""
    families = {"GotOcr2": "got_ocr2", "LlavaNext": "llava_next"}
    families["GraniteDocling"] = "granite_docling"
    families |= {"LlavaOnevision": "llava_onevision", "VideoLlama3": "video_llama_3"}
    family = families.get(name, name.lower())
    module = import_module(f"transformers.models.{family}.image_processing_pil_{family}")
    return getattr(module, f"{name}ImageProcessorPil")


def _merged_patches(processor: Any, images: Any, return_tensors: str = "pt") -> dict[str, Any]:
    """Return what the processor of Gemma 4's unified models makes of images, with Pillow.

    Squares of 2 x 2 patches are merged.
    """
    found = processor(images, return_tensors="pt")
    patches, places = [], []
    for each, at in zip(found["pixel_values"], found["image_position_ids"], strict=True):
        columns, rows = (int(count) + 1 for count in at.max(0).values)
        side = int((each.shape[1] // 3) ** 0.5)
        grid = each[: rows * columns].view(rows // 2, 2, columns // 2, 2, side, side, 3)
        patches.append(grid.permute(0, 2, 1, 4, 3, 5, 6).flatten(2).flatten(0, 1))
        at = torch.cartesian_prod(torch.arange(rows // 2), torch.arange(columns // 2)).view(-1, 2)
        places.append(at.flip(1))
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "pixel_values": pad(patches, True),
        "image_position_ids": pad(places, True, -1),
        "num_soft_tokens_per_image": [len(each) for each in places],
    }
