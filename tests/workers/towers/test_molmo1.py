"""Molmo 1 gives the logits of its authors' code for images of any size, and their images and prompts."""

import random

import numpy as np
import pytest
import torch
from engine.frontend.media.layouts.pixels import Tile
from engine.frontend.media.media_reader import MediaReader
from engine.frontend.media.processor import process_image
from engine.frontend.media.prompt_images import PromptImages
from engine.frontend.model_source.images.read import read_image_processor
from engine.frontend.tokenizer.load import load_tokenizer
from engine.protocol.checkpoint.field_names import read_text_config
from engine.protocol.checkpoint.files import read_model_config
from support.checkpoints.tiny import sentencepiece_tokenizer
from support.media.pictures import random_picture
from support.own_code.own_towers.molmo import TEXTS, molmo
from support.workers.decoders import Runner, load_decoder, load_native_decoder
from support.workers.towers import load_tower, media_logits
from torch.nn import functional as F

pytestmark = pytest.mark.slow

torch.set_num_threads(1)


def _processor(path, **overrides):
    config = read_model_config(path)
    return read_image_processor(path, config, read_text_config(config), overrides)


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
@pytest.mark.parametrize("is_olmo", [False, True])
def test_logits_equal_those_of_the_authors_code(tmp_path, load, is_olmo):
    reference = molmo(tmp_path, is_olmo=is_olmo)
    processor, rng = _processor(tmp_path), random.Random(3)
    prompt, payloads, is_image = [1], [], [False]
    # One tile, a row of them and a grid, with margins at all ends.
    for width, height in ((30, 40), (150, 50), (70, 130)):
        image = random_picture(width, height)
        [tile] = [x for x in process_image(image, processor, 3) if isinstance(x, Tile)]
        ids = np.frombuffer(tile.payload.token_ids, np.int32).tolist()
        prompt += [*ids, rng.randrange(90)]
        is_image += [*[True] * len(ids), False]
        payloads.append(tile.payload)
    prompt += rng.choices(range(90), k=5)
    is_image = np.array(is_image + [False] * 5)
    expected = reference.logits(prompt, [payloads])
    decoder = load(tmp_path, max_model_len=2048)
    tower = load_tower(tmp_path, decoder, load)
    encoded = torch.cat([tower(payload) for payload in payloads])
    logits = media_logits(Runner(decoder, 1, max_tokens=2048), prompt, is_image, encoded, [40])
    torch.testing.assert_close(logits[:, : expected.shape[1]], expected, atol=1e-4, rtol=1e-4)
    assert logits[:, expected.shape[1] :].max() < -1e20


def test_images_keep_their_shape_between_black_margins(tmp_path):
    molmo(tmp_path)
    processor, rng = _processor(tmp_path), random.Random(1)
    assert processor.mean == (0.48145466, 0.4578275, 0.40821073)
    sizes = [(48, 48), (20, 200), (200, 20)]
    for size in sizes + [(rng.randrange(20, 300), rng.randrange(20, 300)) for _ in range(30)]:
        [tile] = process_image(random_picture(*size), processor)
        assert len(tile.texts) == tile.num_outputs <= processor.num_outputs
        pixels = np.array(random_picture(*size)).transpose(2, 0, 1)[None].copy() / np.float32(255)
        for payload in (tile.payload, tile.payload.fine):
            scale = min(
                np.float32(payload.height) / np.float32(size[1]),
                np.float32(payload.width) / np.float32(size[0]),
            )
            width, height = (max(1, int(np.float32(each) * scale)) for each in size)
            resized = F.interpolate(
                torch.from_numpy(pixels), (height, width), mode="bilinear", antialias=True
            )[0]
            top, left = (payload.height - height) // 2, (payload.width - width) // 2
            right, bottom = payload.width - width - left, payload.height - height - top
            expected = F.pad(resized.clamp(0, 1), (left, right, top, bottom))
            shape = payload.height, payload.width, 3
            found = np.frombuffer(payload.pixels, np.uint8).reshape(shape).transpose(2, 0, 1)
            assert np.abs(found - 255 * expected.numpy()).max() < 1.1


def test_images_precede_the_text_of_a_prompt(tmp_path):
    tokenizer = sentencepiece_tokenizer()
    size = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [*TEXTS]})
    tokenizer.save_pretrained(tmp_path)
    molmo(tmp_path, vocab_size=size)
    processor = _processor(tmp_path)
    places = PromptImages(processor, load_tokenizer(tmp_path))
    reader = MediaReader(places.reader_config)
    images = [reader.prepare_image(random_picture(*size), 2) for size in ((40, 40), (40, 30))]
    row = "<im_patch>" * 5 + "<im_col>"
    whole = f"<im_start>{row * 5}<im_end>"
    found = places.expand(" User: <|image|> the quick\n<|image|>fox Assistant:", images)
    assert found == f"<bos>{whole * 4} User:  the quick\nfox Assistant:"
    assert places.expand(" User: a", []) == " User: a"
