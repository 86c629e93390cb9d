"""Models that read images give the logits of transformers."""

import random
import re

import msgspec
import numpy as np
import pytest
import torch
from engine.frontend.media.layouts.pixels import Tile
from engine.frontend.media.processor import process_image
from engine.frontend.model_source.images.read import read_image_processor
from engine.protocol.checkpoint.files import read_model_config
from engine.protocol.config.images.settings import SpanKind
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.protocol.encoder_inputs.payloads import ImagePayload
from engine.protocol.errors import EngineError
from engine.workers.batch.spans import Spans
from support.media.image_marks import ANYRES_MODELS, GEMMA_MODELS, MODELS, SIZED_MODELS
from support.media.image_processors import image_processor
from support.media.pictures import random_picture
from support.vision.checkpoints import TILE, TOWER_SIZES, vision_directory
from support.vision.models import TOKEN_TYPES
from support.vision.normed_projector import NORMED_MODELS
from support.vision.published_internvl import VARIANTS
from support.vision.published_llava import PUBLISHED_MODELS
from support.workers.decoders import Runner, load_decoder, load_native_decoder
from support.workers.towers import load_tower, media_logits

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
MEAN, STD = (0.5, 0.4, 0.3), (0.5, 0.25, 0.3)


KINDS = (
    "aria",
    "blip2",
    "llama4",
    "cohere2_vision",
    *MODELS,
    "internvl-rms",
    "internvl-s1",
    "internvl_chat",
    *VARIANTS,
    "qianfan_ocr",
    "vipllava",
    *GEMMA_MODELS,
    *SIZED_MODELS,
    *(f"{kind}-own" for kind in SIZED_MODELS[:2]),
    *ANYRES_MODELS,
    *NORMED_MODELS,
    "llava_next_video",
    "granite4_vision-late",
    "mistral_large4-renamed",
    "granite_docling",
    *(f"{kind}-published" for kind in PUBLISHED_MODELS),
)
SIZES = {"gemma4": [(48, 32), (80, 64)], "pixtral": [(48, 24), (64, 64)]}
SIZES["gemma4_unified"] = [(48, 32), (128, 96)]
SIZES["mistral3"] = SIZES["mistral_large4"] = [(48, 32), (80, 64)]
SIZES["lighton_ocr"] = [(56, 40), (80, 64)]


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    directory, model = vision_directory(tmp_path_factory.mktemp("model"), request.param)
    return re.sub("-(own|late|published|renamed)$", "", request.param), directory, model


def _image(seed, width=TILE, height=TILE):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    payload = ImagePayload(width, height, pixels.tobytes(), 1 / 255, MEAN, STD)
    normalized = (pixels.astype(np.float32) / 255 - np.float32(MEAN)) / np.float32(STD)
    return payload, torch.from_numpy(normalized.transpose(2, 0, 1).copy())


def _in_bfloat16(payload):
    """Return the pixels as Llama 4's processor normalizes them."""
    pixels = torch.frombuffer(bytearray(payload.pixels), dtype=torch.uint8)
    pixels = pixels.view(payload.height, payload.width, 3).permute(2, 0, 1)
    mean, std = (torch.tensor(each).bfloat16()[:, None, None] for each in (MEAN, STD))
    return (pixels.bfloat16() * (1 / 255)).sub(mean).div(std).float()


def _tiles(path, picture):
    """Return the tiles of an image as a frontend makes them."""
    config = read_model_config(path)
    processor = read_image_processor(path, config, config.section("text_config"), {})
    [tile] = [part for part in process_image(picture, processor) if isinstance(part, Tile)]
    return tile.payload


def _reference_images(kind, pixels):
    """Return the arguments of transformers' model for images [3, height, width]."""
    sizes = [image.shape[1:] for image in pixels]
    if kind == "granite_docling":
        mask = torch.ones(1, len(pixels), dtype=torch.bool)
        return {"pixel_values": torch.stack(pixels)[None], "pixel_attention_mask": mask}
    if kind in ("idefics3", "smolvlm"):
        return {"pixel_values": torch.stack(pixels)[None]}
    if kind.startswith("gemma4"):
        # Gemma 4 normalizes again. Both models read patches with their pixels one after the other.
        side = 8 if kind == "gemma4" else 16
        own = [image.div(2).add(0.5) if kind == "gemma4" else image for image in pixels]
        patches = [image.unflatten(1, (-1, side)).unflatten(3, (-1, side)) for image in own]
        patches = [each.permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1) for each in patches]
        places = [
            torch.cartesian_prod(torch.arange(h // side), torch.arange(w // side)) for h, w in sizes
        ]
        pad = torch.nn.utils.rnn.pad_sequence
        return {
            "pixel_values": pad(patches, True),
            "image_position_ids": pad([each.flip(1) for each in places], True, -1),
        }
    if kind not in SIZED_MODELS:
        return {"pixel_values": torch.stack(pixels)}
    height, width = (max(sides) for sides in zip(*sizes, strict=True))
    padded = [
        torch.nn.functional.pad(image, (0, width - w, 0, height - h))
        for image, (h, w) in zip(pixels, sizes, strict=True)
    ]
    return {"pixel_values": torch.stack(padded), "image_sizes": torch.tensor(sizes)}


def _reference_logits(kind, reference, prompt, arguments):
    ids = torch.tensor([prompt])
    if kind != "llama4":
        return reference(input_ids=ids, **arguments).logits[0]
    # The model as a whole fails in transformers 5.24.
    features = reference.get_image_features(**arguments, return_dict=True).last_hidden_state
    outputs = reference.multi_modal_projector(features).flatten(0, 1)
    embeddings = reference.get_input_embeddings()(ids)
    is_image = (ids == reference.config.image_token_id)[..., None]
    embeddings = embeddings.masked_scatter(is_image, outputs)
    return reference.language_model(inputs_embeds=embeddings).logits[0]


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_logits_equal_those_of_transformers(model, load):
    kind, path, reference = model
    decoder = load(path, max_model_len=1024)
    spec = decoder.spec
    tower = load_tower(path, decoder, load)
    images = [_image(seed, *size) for seed, size in enumerate(SIZES.get(kind, [(TILE, TILE)] * 2))]
    arguments = _reference_images(kind, [pixels for _, pixels in images])
    if kind == "llama4":
        arguments = {"pixel_values": torch.stack([_in_bfloat16(each) for each, _ in images])}
    if kind in (*ANYRES_MODELS, *NORMED_MODELS, "llava_next_video", "aria"):
        pictures = [random_picture(*size) for size in ((150, 90), (70, 64), (60, 130))]
        arguments = dict(image_processor(path, kind)(pictures, return_tensors="pt"))
        for name in ("batch_num_images", "num_crops"):
            arguments.pop(name, None)
        payloads = [_tiles(path, picture) for picture in pictures]
        images = [(payload, torch.empty(0)) for payload in payloads]
    outputs = [tower(payload) for payload, _ in images]
    rng = random.Random(3)
    image_token = reference.config.image_token_id
    prompt, spans = [], []
    for count, output, (payload, _) in zip((5, 3, 2), outputs, images, strict=False):
        prompt += [rng.randrange(4, 300) for _ in range(count)]
        columns = len(output)
        if kind in SIZED_MODELS:
            columns = payload.width // tower.spec.side_factor
        start = len(prompt)
        for row in range(len(output) // columns):
            prompt += [9] * (row > 0) + [image_token] * columns
        spans.append((start, len(prompt)))
    prompt += [rng.randrange(4, 300) for _ in range(9)]
    is_image = torch.tensor(prompt) == image_token
    if kind in TOKEN_TYPES:
        arguments[TOKEN_TYPES[kind]] = is_image[None].long()
    if kind.startswith("paligemma"):
        # Four tokens follow the prompt.
        arguments["token_type_ids"] = torch.tensor([[0] * (len(prompt) - 4) + [1] * 4])
    with torch.inference_mode():
        expected = _reference_logits(kind, reference, prompt, arguments)
    runner = Runner(decoder, 1, max_tokens=1024)
    chunks = [9, 9 + spans[0][1]]
    if spec.span_kind is not None:
        chunks = [3, spans[0][1] + 1]
    if spec.span_kind is SpanKind.PROMPT:
        chunks = [len(prompt) - 4]
    if spec.span_kind is not None:
        runner.spans = Spans(spec.span_kind)
        inputs = [EncoderInput(start, end - start, b"", 0) for start, end in spans]
        runner.spans.add_request(0, chunks[0], inputs)
    # The first chunk ends within the first image, the second within the other, unless a span must not be divided.
    found = media_logits(runner, prompt, is_image, torch.cat(outputs), chunks)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_an_image_of_another_size_is_refused(model):
    _, path, _ = model
    decoder = load_decoder(path, max_model_len=512)
    tower = load_tower(path, decoder)
    with pytest.raises(
        EngineError, match=r"has 9 x 4 pixels, but the model reads (64|multiples|a grid|squares)"
    ):
        tower(ImagePayload(9, 4, bytes(108), 1 / 255, MEAN, STD))


def test_frames_of_a_video_are_reduced_as_by_transformers(tmp_path):
    # A frame has nine patches in each direction, of which five remain.
    sizes = TOWER_SIZES | {"image_size": 72}
    path, reference = vision_directory(tmp_path, "llava_onevision", tower=sizes)
    decoder = load_decoder(path, max_model_len=512)
    tower = load_tower(path, decoder)
    images = [_image(seed, 72, 72) for seed in range(3)]
    pixels = torch.stack([pixels for _, pixels in images])[None]
    with torch.inference_mode():
        [expected] = reference.model.get_video_features(pixels).pooler_output
    outputs = [
        tower(msgspec.structs.replace(payload, is_frame=True, is_last=index == 2))
        for index, (payload, _) in enumerate(images)
    ]
    assert [len(output) for output in outputs] == [25, 25, 26]
    torch.testing.assert_close(torch.cat(outputs), expected, atol=1e-4, rtol=1e-4)
