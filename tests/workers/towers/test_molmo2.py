"""Molmo 2 gives the logits of transformers, for text and for images of any size."""

import random
from itertools import product

import numpy as np
import pytest
import torch
from engine.frontend.media.layouts.pixels import Tile
from engine.frontend.media.processor import process_image
from engine.frontend.model_source.images.read import read_image_processor
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.checkpoint.field_names import read_text_config
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.protocol.encoder_inputs.payloads import ImagePayload
from engine.protocol.errors import CheckpointError, EngineError
from engine.workers.batch.spans import Spans
from support.media.pictures import random_picture
from support.vision.molmo import MARKS, OLMO, PATCH, molmo2_directory, reference_images
from support.workers.decoders import Runner, load_decoder, load_native_decoder
from support.workers.towers import load_tower, media_logits

pytestmark = pytest.mark.slow

torch.set_num_threads(1)


@pytest.fixture(scope="module", params=[({}, True), (OLMO, True), ({}, False)])
def saved(request, tmp_path_factory):
    text, is_original = request.param
    path = tmp_path_factory.mktemp("model")
    return molmo2_directory(path, text, is_original=is_original)


def test_logits_of_text_equal_those_of_transformers(saved):
    path, model = saved
    # Prompts may have the tokens that the model never writes.
    num_tokens = model.config.text_config.vocab_size
    prompt = random.Random(1).choices(range(num_tokens + len(MARKS)), k=60)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt])).logits[0]
    for load in (load_decoder, load_native_decoder):
        runner = Runner(load(path, max_model_len=256), 1, max_tokens=256)
        chunks = prompt[:25], prompt[25:]
        found = torch.cat([runner.step({0: chunk})[0] for chunk in chunks])
        torch.testing.assert_close(found[:, :num_tokens], expected, atol=1e-4, rtol=1e-4)
        assert found.shape[1] == num_tokens + len(MARKS)
        assert found[:, num_tokens:].max() < -1e20


def _processor(path, **overrides):
    config = ConfigFields.read(path / "config.json")
    return read_image_processor(path, config, read_text_config(config), overrides)


def _tiles(payload):
    """Return the pixels of the whole image and of the tiles of the canvas."""
    whole, canvas = (
        torch.frombuffer(bytearray(each.pixels), dtype=torch.uint8).view(each.height, -1, 3)
        for each in (payload, payload.fine)
    )
    starts = (range(0, length - 43, 12) for length in canvas.shape[:2])
    tiles = [canvas[top : top + 44, left : left + 44] for top, left in product(*starts)]
    return torch.stack([whole, *tiles]).float()


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_logits_of_images_equal_those_of_transformers(saved, load):
    path, model = saved
    processor = _processor(path)
    num_tokens = model.config.text_config.vocab_size
    decoder = load(path, max_model_len=1024)
    tower = load_tower(path, decoder, load)
    rng = random.Random(3)
    # One tile, a row of them, and a grid.
    for width, height in ((30, 40), (200, 50), (90, 130)):
        image = random_picture(width, height)
        [tile] = [part for part in process_image(image, processor) if isinstance(part, Tile)]
        ids = np.frombuffer(tile.payload.token_ids, np.int32).tolist()
        start = 5
        prompt = [*rng.choices(range(num_tokens), k=start), *ids]
        stop = len(prompt)
        prompt += rng.choices(range(num_tokens), k=7)
        arguments = reference_images(image)
        # Pixels that are rounded to another value would change the logits.
        patches = (_tiles(tile.payload) / 255 - 0.5) / 0.5
        patches = patches.unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH)).transpose(2, 3)
        arguments["pixel_values"] = patches.reshape(arguments["pixel_values"].shape)
        is_image = np.arange(len(prompt))
        is_image = (is_image >= start) & (is_image < stop)
        with torch.inference_mode():
            expected = model(
                input_ids=torch.tensor([prompt]),
                mm_token_type_ids=torch.from_numpy(is_image[None].astype(np.int64)),
                **arguments,
            ).logits[0]
        outputs = tower(tile.payload)
        assert len(outputs) == tile.num_outputs == stop - start
        runner = Runner(decoder, 1, max_tokens=1024)
        runner.spans = Spans(decoder.spec.span_kind)
        inputs = [EncoderInput(start, stop - start, b"", 0)]
        runner.spans.add_request(0, len(prompt), inputs)
        found = media_logits(runner, prompt, is_image, outputs, [3, stop + 1])
        torch.testing.assert_close(found[:, :num_tokens], expected, atol=1e-4, rtol=1e-4)


def test_prompts_and_pixels_equal_those_of_transformers(saved):
    path, _ = saved
    processor, rng = _processor(path), random.Random(1)
    sizes = [(32, 44), (44, 32), (1, 300), (33, 1)]
    sizes += [(rng.randrange(1, 300), rng.randrange(1, 300)) for _ in range(60)]
    num_different = num_values = 0
    for size in sizes:
        [tile] = process_image(random_picture(*size), processor)
        expected = reference_images(random_picture(*size))
        whole_rows, whole_columns, rows, columns = expected["image_grids"][0].tolist()
        row = ["<im_patch>"] * whole_columns + ["<im_col>"] * processor.ends_whole_rows
        texts = ["<low_res_im_start>", *row * whole_rows, "<im_end>", "<im_start>"]
        texts += [*(["<im_patch>"] * columns + ["<im_col>"]) * rows, "<im_end>"]
        assert [text or "<im_patch>" for text in tile.texts] == texts
        assert len(texts) == tile.num_outputs <= processor.num_outputs
        patches = expected["pixel_values"].view(-1, 11, 11, PATCH, PATCH, 3).transpose(2, 3)
        values = ((patches * 0.5 + 0.5) * 255).round().reshape(-1, 44, 44, 3)
        difference = (_tiles(tile.payload) - values).abs()
        assert difference.max() <= 1
        num_different, num_values = (
            num_different + difference.sum(),
            num_values + difference.numel(),
        )
    # Means that are halfway between two values may be rounded to either.
    assert num_different < 1e-3 * num_values


def test_unknown_settings_are_refused(saved):
    path, _ = saved
    decoder = load_decoder(path, max_model_len=256)
    tower = load_tower(path, decoder)
    ones = (1.0, 1.0, 1.0)
    image = ImagePayload(44, 44, bytes(3 * 44 * 44), 1.0, ones, ones)
    with pytest.raises(EngineError, match="the canvas must have 44 pixels and multiples of 12"):
        tower(image)
    with pytest.raises(ValueError, match="it reads one image a prompt, not 2"):
        process_image(random_picture(50, 50), _processor(path), 2)
    for values, message in (
        ({"overlap_margins": [3, 4]}, r"overlap_margins must be \[4, 4\]"),
        ({"pooling_size": [3, 3]}, r"pooling_size must be \[2, 2\]"),
        ({"size": {"height": 48, "width": 48}}, "height must be 44, as in the vision tower"),
    ):
        with pytest.raises(CheckpointError, match=message):
            _processor(path, **values)
