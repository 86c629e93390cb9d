"""Models that read images give the logits of transformers."""

import random

import numpy as np
import pytest
import torch
from engine.protocol.errors import EngineError
from engine.protocol.messages import ImagePayload
from engine.workers.loaders.open_checkpoint import open_checkpoint
from engine.workers.vision.placed import Placed
from engine.workers.vision.tower import VisionTower
from support.decoders import CPU, Runner, load_decoder, load_native_decoder
from support.vision_checkpoints import MODELS, TILE, vision_directory

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
MEAN, STD = (0.5, 0.4, 0.3), (0.5, 0.25, 0.3)


@pytest.fixture(scope="module", params=[*MODELS, "internvl-rms"])
def model(request, tmp_path_factory):
    return vision_directory(tmp_path_factory.mktemp("model"), request.param)


def _image(seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (TILE, TILE, 3), np.uint8)
    payload = ImagePayload(TILE, TILE, pixels.tobytes(), 1 / 255, MEAN, STD)
    normalized = (pixels.astype(np.float32) / 255 - np.float32(MEAN)) / np.float32(STD)
    return payload, torch.from_numpy(normalized.transpose(2, 0, 1).copy())


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_logits_equal_those_of_transformers(model, load, tmp_path):
    path, reference = model
    decoder = load(path, max_model_len=512)
    tower = VisionTower(decoder.spec.encoder, open_checkpoint(path), CPU, torch.float32)
    images = [_image(seed) for seed in (1, 2)]
    encoded = torch.cat([tower(payload) for payload, _ in images])
    size = tower.spec.num_outputs
    rng = random.Random(3)
    image_token = reference.config.image_token_id
    text = [[rng.randrange(4, 300) for _ in range(count)] for count in (5, 3, 9)]
    prompt = text[0] + [image_token] * size + text[1] + [image_token] * size + text[2]
    pixels = torch.stack([pixels for _, pixels in images])
    if reference.config.model_type in ("idefics3", "smolvlm"):
        pixels = pixels[None]
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([prompt]), pixel_values=pixels).logits[0]
    runner = Runner(decoder, 1, max_tokens=512)
    rows = np.cumsum(np.array(prompt) == image_token).astype(np.int32) - 1
    rows[np.array(prompt) != image_token] = -1
    found = []
    # The first chunk ends within the first image, the second within the other.
    for start, end in ((0, 9), (9, 9 + size), (9 + size, len(prompt))):
        decoder.placed = Placed(rows[start:end].copy(), encoded)
        found.append(runner.step({0: prompt[start:end]})[0])
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-4)


def test_an_image_of_another_size_is_refused(model):
    path, _ = model
    decoder = load_decoder(path, max_model_len=512)
    tower = VisionTower(decoder.spec.encoder, open_checkpoint(path), CPU, torch.float32)
    with pytest.raises(EngineError, match="has 8 x 4 pixels, the model reads 64 x 64"):
        tower(ImagePayload(8, 4, bytes(96), 1 / 255, MEAN, STD))
