"""The inputs that transformers' Molmo 2 reads for an image. Its processor needs torchvision, unlike its functions."""

from __future__ import annotations

import ast
import itertools
import math
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch.nn import functional as F


def reference_images(image: Image.Image, processor: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the arguments of transformers' model for an image."""
    known = _functions()
    backend = SimpleNamespace(resize=_resize, rescale_and_normalize=_normalize)
    crops = partial(known["_build_overlapping_crops"], backend)
    backend = SimpleNamespace(**vars(backend), _build_overlapping_crops=crops)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    grids, patches, pooling = known["_image_batch_to_patches_and_grids"](
        backend,
        pixels,
        max_crops=processor["max_crops"],
        overlap_margins=[4, 4],
        crop_size=processor["size"]["height"],
        resample=2,
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        image_patch_size=processor["patch_size"],
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
