"""A tiny Molmo 2 as files on disk, and the inputs that transformers reads for an image.

Transformers' processor needs torchvision, unlike its functions.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from support.checkpoints.tiny import sentencepiece_tokenizer
from support.vision.checkpoints import CHAT_TEMPLATE
from torch.nn import functional as F

MARKS = ("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<low_res_im_start>", "<|image|>")
PATCH = 4
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Molmo2ImageProcessor",
    "size": {"height": 11 * PATCH, "width": 11 * PATCH},
    "patch_size": PATCH,
    "max_crops": 6,
}
OLMO = {
    "norm_after": True,
    "qk_norm_type": "olmo",
    "attention_bias": True,
    "rope_scaling_layers": [1],
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
"""The differences of a decoder that is like OLMo 2."""

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_HEADS = {"hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 24}
_TOWER = _HEADS | {
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "image_size": [11 * PATCH] * 2,
    "patch_size": PATCH,
}
_ADAPTER = _HEADS | {
    "intermediate_size": 40,
    "text_hidden_size": 64,
    "vision_feature_layer": [2, 0],
}


def molmo2_directory(
    directory: Path, text: Mapping[str, Any] | None = None, *, is_original: bool = True
) -> tuple[Path, Any]:
    """Write a model, in the published layout if `is_original`. Return its directory and transformers' model.

    `text` replaces fields of the decoder's config. The model never writes the tokens of `MARKS`.
    """
    tokenizer = sentencepiece_tokenizer()
    size = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS]})
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<image>", "<|image|>")
    tokenizer.save_pretrained(directory)
    ids = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    names = (
        "image_start_token_id",
        "image_end_token_id",
        "image_patch_id",
        "image_col_id",
        "low_res_image_start_token_id",
    )
    vocabulary = {"vocab_size": size, "additional_vocab_size": len(MARKS)}
    config = transformers.Molmo2Config(
        text_config=_TEXT | vocabulary | ids | dict(text or {}),
        vision_config=_TOWER,
        adapter_config=_ADAPTER,
        **{name: size + index for index, name in enumerate(names)},
    )
    torch.manual_seed(0)
    model = transformers.Molmo2ForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    )
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 0.8 if "norm" in name else 0.0, 0.2)
    model.eval().save_pretrained(directory, save_original_format=is_original)
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    tokens = {} if is_original else {"use_single_crop_col_tokens": False}
    (directory / "processor_config.json").write_text(json.dumps(tokens))
    return directory, model


def reference_images(image: Image.Image) -> dict[str, torch.Tensor]:
    """Return the arguments of transformers' model for an image."""
    known = _functions()
    backend = SimpleNamespace(resize=_resize, rescale_and_normalize=_normalize)
    crops = partial(known["_build_overlapping_crops"], backend)
    backend = SimpleNamespace(**vars(backend), _build_overlapping_crops=crops)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    grids, patches, pooling = known["_image_batch_to_patches_and_grids"](
        backend,
        pixels,
        max_crops=PROCESSOR["max_crops"],
        overlap_margins=[4, 4],
        crop_size=PROCESSOR["size"]["height"],
        resample=2,
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        image_patch_size=PATCH,
        image_pooling_w=2,
        image_pooling_h=2,
    )
    return {"pixel_values": patches[0], "image_token_pooling": pooling[0], "image_grids": grids}


def _resize(image: torch.Tensor, size: Any, resample: int, antialias: bool) -> torch.Tensor:
    assert (resample, antialias) == (2, False)
    return F.interpolate(image, (size.height, size.width), mode="bilinear")


def _normalize(image: torch.Tensor, *_: Any) -> torch.Tensor:
    return (image / 255 - 0.5) / 0.5


@cache
def _functions() -> dict[str, Any]:
    """Return the functions and methods of the module of the processor."""
    directory = Path(transformers.__file__).parent / "models" / "molmo2"
    tree = ast.parse((directory / "image_processing_molmo2.py").read_text())
    known: dict[str, Any] = {"math": math, "itertools": itertools, "torch": torch, "F": F}
    known["SizeDict"] = SimpleNamespace
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list, node.returns = [], None
            for argument in (*node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
            if node.args.kwarg is not None:
                node.args.kwarg.annotation = None
            exec(ast.unparse(node), known)
    return known
