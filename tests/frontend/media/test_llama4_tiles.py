"""The tiles of Llama 4 are cut and put into prompts as by transformers."""

import ast
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from engine.frontend.media.layouts.pixels import Tile
from engine.frontend.media.media_reader import MediaReader
from engine.frontend.media.processor import process_image
from engine.frontend.media.prompt_images import PromptImages
from engine.frontend.model_source.images.read import read_image_processor
from engine.frontend.tokenizer.load import load_tokenizer
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.checkpoint.field_names import text_section
from PIL import Image
from support.vision.checkpoints import vision_directory
from transformers.models.llama4.processing_llama4 import Llama4Processor

pytestmark = pytest.mark.slow

SIZES = [(64, 64), (30, 20), (200, 150), (151, 333), (1000, 40), (7, 900), (1, 1), (128, 128)]
SIZES += [(129, 64), (65, 63)]


@pytest.mark.parametrize("fills", [False, True])
def test_tiles_of_llama4_equal_those_of_transformers(fills, tmp_path):
    path, _ = vision_directory(tmp_path, "llama4")
    fields = ConfigFields.read(path / "config.json")
    text = text_section(fields) or fields
    config = read_image_processor(path, fields, text, {"resize_to_max_canvas": fills})
    known = _llama4_functions()
    side = config.side
    tile_of = SimpleNamespace(height=side, width=side)
    grids = torch.tensor(known["find_supported_resolutions"](config.max_tiles, tile_of))
    for size in SIZES:
        pixels = np.random.default_rng(size[0]).integers(0, 256, (*size[::-1], 3), np.uint8)
        image = Image.fromarray(pixels)
        shape = image.height, image.width
        canvas = known["get_best_fit"](shape, grids, resize_to_max_canvas=fills).tolist()
        most = canvas
        if not fills:
            most = [min(max(own, side), whole) for own, whole in zip(shape, canvas, strict=True)]
        height, width = known["get_max_res_without_distortion"](shape, most)
        # Its images are resized by torchvision, which rounds as Pillow does up to one step.
        expected = np.zeros((*canvas, 3), np.uint8)
        resized = image.resize((max(width, 1), max(height, 1)), Image.Resampling.BILINEAR)
        expected[: resized.height, : resized.width] = resized
        rows, columns = canvas[0] // side, canvas[1] // side
        tiles = (
            expected.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
        )
        whole = [np.asarray(image.resize((side, side), Image.Resampling.BILINEAR))]
        found = [
            np.frombuffer(part.payload.pixels, np.uint8).reshape(side, side, 3)
            for part in process_image(image, config)
            if isinstance(part, Tile)
        ]
        np.testing.assert_array_equal(found, [*tiles, *(whole if rows * columns > 1 else [])])
        places = PromptImages(config, load_tokenizer(path))
        prepared = MediaReader(places.reader_config).prepare_image(image)
        num_outputs = config.num_outputs
        text = Llama4Processor._prompt_split_image(None, (rows, columns), num_outputs)
        assert prepared.text == text
        assert prepared.num_outputs == len(found) * num_outputs


def _llama4_functions():
    """Return the functions of the module of a processor, whose class needs torchvision."""
    directory = Path(transformers.__file__).parent / "models/llama4"
    tree = ast.parse((directory / "image_processing_llama4.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = {
        "torch": torch,
        "math": math,
        "defaultdict": defaultdict,
        "lru_cache": lambda **_: _same,
    }
    names |= {"SizeDict": object}
    exec("\n".join(map(ast.unparse, functions)), names)
    return names


def _same(function):
    return function
