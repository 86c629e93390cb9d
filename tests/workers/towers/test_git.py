"""GIT gives the logits of transformers for prompts that begin with an image, and refuses another image."""

import random

import numpy as np
import pytest
import torch
import transformers
from engine.frontend.media.layouts.pixels import Tile
from engine.frontend.media.processor import process_image
from engine.frontend.model_source.images.read import read_image_processor
from engine.protocol.checkpoint.field_names import with_common_names
from engine.protocol.checkpoint.files import read_model_config
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.workers.batch.spans import Spans
from support.media.pictures import random_picture
from support.own_code.known_towers.git import git
from support.own_code.model import normalized
from support.workers.decoders import Runner, load_decoder, load_native_decoder
from support.workers.towers import load_tower, media_logits

torch.set_num_threads(1)


def _tile(path, width, height, num_images=1):
    config = read_model_config(path)
    processor = read_image_processor(path, config, with_common_names(config), {})
    image = random_picture(width, height)
    [tile] = [x for x in process_image(image, processor, num_images) if isinstance(x, Tile)]
    reference = transformers.CLIPImageProcessorPil.from_pretrained(path)
    expected = reference(image, return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(normalized(tile.payload), expected, atol=1e-6, rtol=0)
    return tile


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_logits_equal_those_of_transformers(tmp_path, load):
    reference, rng = git(tmp_path), random.Random(3)
    tile = _tile(tmp_path, 90, 40)
    assert tile.num_outputs == 10
    prompt = [reference.image_token] * 10 + rng.choices(range(1, 96), k=12)
    expected = reference.logits(prompt, [[tile.payload]])
    decoder = load(tmp_path, max_model_len=250)
    tower = load_tower(tmp_path, decoder, load)
    runner = Runner(decoder, 1, max_tokens=250)
    runner.spans = Spans(decoder.spec.span_kind)
    runner.spans.add_request(0, len(prompt), [EncoderInput(0, 10, b"", 1)])
    is_image = np.array(prompt) == reference.image_token
    logits = media_logits(runner, prompt, is_image, tower(tile.payload), [10, 15])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_another_image_is_refused(tmp_path):
    git(tmp_path)
    with pytest.raises(ValueError, match="it reads one image a prompt, not 2"):
        _tile(tmp_path, 30, 30, num_images=2)
