"""Images and prompts are processed exactly as by transformers."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import transformers
from engine.frontend.media.decode import to_rgb
from engine.frontend.media.layouts.pixels import Tile
from engine.frontend.media.processor import process_image
from engine.frontend.media.prompt_images import PromptImages
from engine.frontend.model_source.images.read import read_image_processor
from engine.frontend.tokenizer import load_tokenizer
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.errors import CheckpointError, ParameterError
from PIL import Image
from support.vision_checkpoints import (
    INTERNVL_MARKS,
    MODELS,
    image_mark,
    image_processor,
    vision_directory,
)

pytestmark = pytest.mark.slow

SIZES = [(64, 64), (30, 20), (200, 150), (151, 333), (1000, 40), (7, 900), (1, 1)]


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    path, _ = vision_directory(tmp_path_factory.mktemp("model"), request.param)
    return request.param, path


def _image(width, height):
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def _read(path, **overrides):
    config = ConfigFields.read(path / "config.json")
    return read_image_processor(path, config, config.section("text_config"), overrides)


def _tiles(image, config):
    parts = process_image(image, config)
    return [part.payload for part in parts if isinstance(part, Tile)]


def _normalized(tile):
    pixels = np.frombuffer(tile.pixels, np.uint8).reshape(tile.height, tile.width, 3)
    scaled = (pixels.astype(np.float64) * tile.scale).astype(np.float32)
    return ((scaled - np.float32(tile.mean)) / np.float32(tile.std)).transpose(2, 0, 1)


@pytest.mark.parametrize("size", SIZES)
def test_tiles_equal_those_of_transformers(model, size):
    kind, path = model
    image = _image(*size)
    expected = image_processor(path, kind)(image, return_tensors="np")["pixel_values"]
    expected = expected.reshape(-1, *expected.shape[-3:])
    tiles = _tiles(image, _read(path))
    assert len(tiles) == len(expected)
    for tile, pixels in zip(tiles, expected, strict=True):
        np.testing.assert_array_equal(_normalized(tile), pixels)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGBA", "CMYK"])
def test_colors_and_transparency_equal_those_of_transformers(mode, tmp_path):
    path, _ = vision_directory(tmp_path, "llava-siglip")
    image = _image(64, 64)
    if mode.endswith("A"):
        image.putalpha(Image.linear_gradient("L").resize((64, 64)))
    image = image.convert(mode)
    if mode == "P":
        image.info["transparency"] = image.getpixel((0, 0))
    [expected] = image_processor(path, "llava-siglip")(image, return_tensors="np")["pixel_values"]
    [tile] = _tiles(to_rgb(image), _read(path))
    np.testing.assert_array_equal(_normalized(tile), expected)


def test_images_that_are_not_split_equal_those_of_transformers(tmp_path):
    kind = "idefics3"
    path, _ = vision_directory(tmp_path, kind)
    image = _image(300, 200)
    processor = image_processor(path, kind, do_image_splitting=False)
    [[expected]] = processor(image, return_tensors="np")["pixel_values"]
    [tile] = _tiles(image, _read(path, do_image_splitting=False))
    np.testing.assert_array_equal(_normalized(tile), expected)


# The processor of SmolVLM needs a package for numbers as words; its prompts are those of Idefics3.
@pytest.mark.parametrize("kind", ["idefics3", "llava-clip", "llava-siglip", "internvl"])
def test_prompts_equal_those_of_transformers(kind, tmp_path):
    path, _ = vision_directory(tmp_path, kind)
    others = json.loads((path / "processor_config.json").read_text())
    name = others.pop("processor_class")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    mark = tokenizer.image_token = image_mark(kind)
    tokenizer.image_token_id = tokenizer.convert_tokens_to_ids(mark)
    images = [_image(200, 150), _image(64, 64)]
    text = f"the {mark} quick\n{mark}fox"
    processor_class = getattr(transformers, name)
    if kind == "internvl":
        # An object of this class needs torchvision, for videos.
        names = INTERNVL_MARKS | others | {"image_token": mark}
        tiles = image_processor(path, kind)(images)
        texts = [
            processor_class.replace_image_token(SimpleNamespace(**names), tiles, i)
            for i in range(len(images))
        ]
        before, between, after = text.split(mark)
        expected = tokenizer(f"{before}{texts[0]}{between}{texts[1]}{after}")["input_ids"]
    else:
        processor = processor_class(image_processor(path, kind), tokenizer, **others)
        expected = processor(images=[images], text=[text])["input_ids"][0]

    config = _read(path)
    places = PromptImages(config, load_tokenizer(path))
    prepared = [places.prepare(image) for image in images]
    found = load_tokenizer(path).encode(places.expand(text, prepared))
    assert list(found) == list(expected)
    inputs = places.inputs(found, prepared)
    covered = {item.position + i for item in inputs for i in range(item.num_tokens)}
    assert covered == {i for i, token in enumerate(found) if token == config.token_id}
    assert len({item.content_hash for item in inputs}) == len(inputs)
    with pytest.raises(ParameterError, match="have 2 images, but the prompt has 3 image tokens"):
        places.expand(text + mark, prepared)


def test_invalid_processor_fields_are_named(model):
    kind, path = model
    wrong = {"idefics3": {"max_image_size": {"longest_edge": 32}}}
    wrong["smolvlm"] = wrong["idefics3"]
    wrong["internvl"] = {"size": {"height": 32, "width": 32}}
    wrong["llava-clip"] = {"crop_size": 32}
    wrong["llava-siglip"] = {"size": {"height": 32, "width": 32}}
    with pytest.raises(CheckpointError, match=r"must be 64, which is vision_config\.image_size"):
        _read(path, **wrong[kind])
    with pytest.raises(CheckpointError, match="image_std must be three numbers"):
        _read(path, image_std=[0.5, 0.0, 0.5])
