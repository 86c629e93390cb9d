"""Llama 3.2 Vision, whose layers read images by cross attention, gives the logits of transformers."""

from __future__ import annotations

from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from engine.frontend.media.layouts.pixels import Tile
from engine.frontend.media.media_reader import MediaReader
from engine.frontend.media.processor import process_image
from engine.frontend.media.prompt_images import PromptImages
from engine.frontend.model_source.images.read import read_image_processor
from engine.protocol.arrays import float32_view, int32_bytes, int32_view
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.checkpoint.field_names import read_text_config
from engine.protocol.checkpoint.files import read_model_config
from engine.protocol.config import CPUBackend, DeviceConfig
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import EncoderWork
from PIL import Image
from support.gpu.host_accelerator import HostAccelerator
from support.own_code.known_towers.vision_decoders import donut, formula_net, trocr
from support.own_code.own_towers.blip import blip
from support.own_code.own_towers.nemotron_parse import nemotron_parse
from support.vision.mllama import IMAGE, IMAGE_ID, NUM_TOKENS, mllama_directory, next_logprobs
from support.workers.worker_steps import Steps

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
SCORED = SamplingParams(temperature=0, logprobs=-1)
BACKENDS = {
    "native": {"device": DeviceConfig(cpu_backend=CPUBackend.NATIVE)},
    "torch": {"device": DeviceConfig(cpu_backend=CPUBackend.TORCH)},
    "device": {
        "device": DeviceConfig(cpu_backend=CPUBackend.TORCH),
        "accelerator": HostAccelerator(),
    },
}
PROMPTS = [
    # Text, an image, text, and two images that are read together.
    [3, 5, IMAGE_ID, 7, 11, 13, IMAGE_ID, IMAGE_ID, 2, 4],
    [8, 9, 10],
    [IMAGE_ID, 3, 8],
]
SIZES = [[(30, 21), (70, 20), (11, 90)], [], [(50, 50)]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return mllama_directory(tmp_path_factory.mktemp("mllama"))


class _Tokenizer:
    """A tokenizer with some known tokens."""

    def __init__(self, tokens):
        self._tokens = tokens

    def id_to_token(self, token_id):
        return self._tokens.get(token_id)


def _pictures(sizes):
    return [
        Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8))
        for width, height in sizes
    ]


def _inputs(path, prompt, pictures):
    """Return the encoder inputs of a prompt."""
    config = ConfigFields.read(path / "config.json")
    text = config.section("text_config").with_values({"vocab_size": NUM_TOKENS + 8})
    processor = read_image_processor(path, config, text, {})
    images = PromptImages(processor, _Tokenizer({IMAGE_ID: IMAGE}))
    reader = MediaReader(images.reader_config)
    prepared = [reader.prepare_image(picture, len(pictures)) for picture in pictures]
    assert [image.text for image in prepared] == [IMAGE] * len(pictures)
    return images.inputs(prompt, prepared) if prepared else []


def _skipped_attentions(steps):
    """Return how many operations of attention have never been computed by the native program."""
    program = steps.runner._model  # noqa: SLF001
    return [seconds for kind, seconds in program.profile() if kind == "attention"].count(0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_equal_those_of_transformers(saved, backend):
    path, model = saved
    steps = Steps(path, NUM_TOKENS + 8, block_size=16, max_model_len=1024, **BACKENDS[backend])
    pictures = [_pictures(sizes) for sizes in SIZES]
    inputs = [_inputs(path, prompt, each) for prompt, each in zip(PROMPTS, pictures, strict=True)]
    assert [item.follows for item in inputs[0]] == [False, False, True]
    assert [item.read_until for item in inputs[0]] == [6, 2**31 - 1, 2**31 - 1]
    texts = [list(prompt) for prompt in PROMPTS]

    def check(output, slots):
        tokens = int32_view(output.sampled_token_ids).tolist()
        assert len(tokens) == len(slots) == len(output.logprobs)
        for slot, token, row in zip(slots, tokens, output.logprobs, strict=True):
            found = np.empty(NUM_TOKENS + 8, np.float32)
            found[int32_view(row.token_ids)] = float32_view(row.logprobs)
            expected = next_logprobs(model, texts[slot], pictures[slot])
            np.testing.assert_allclose(found[:NUM_TOKENS], expected, atol=1e-4)
            assert found[NUM_TOKENS:].max() < -1e20
            texts[slot].append(token)

    def work(*rows):
        return EncoderWork(computed=int32_bytes([number for row in rows for number in row]))

    new = [steps.new(slot, PROMPTS[slot], SCORED, inputs=inputs[slot]) for slot in range(3)]
    # A chunk begins at each image, beside requests with other images and without any.
    check(steps.run(slots=[0, 1], chunks=[(0, 2), (1, 3)], new=new[:2]), [1])
    if backend == "native":
        # Without images, the two layers that read them are not computed.
        assert _skipped_attentions(steps) == 2
    check(steps.run(slots=[0, 1], chunks=[(0, 3)], encoders=work((0, 0))), [1])
    if backend == "native":
        assert not _skipped_attentions(steps)
    check(steps.run(slots=[0, 1], chunks=[(0, 1)]), [1])
    third = {"new": new[2:], "encoders": work((0, 1), (2, 0))}
    check(steps.run(slots=[0, 1, 2], chunks=[(0, 1), (2, 2)], **third), [1])
    check(steps.run(slots=[0, 1, 2], chunks=[(0, 2)], encoders=work((0, 2))), [1, 2])
    check(steps.run(slots=[0, 1, 2]), [0, 1, 2])
    for _ in range(4):
        check(steps.run(slots=[0, 1, 2]), [0, 1, 2])
    # A request that begins after a cached prefix stores the images that its next tokens read.
    again = steps.new(0, texts[0], SCORED, len(PROMPTS[0]), inputs[0])
    again = msgspec.structs.replace(again, num_computed_tokens=8)
    chunks = [(0, len(texts[0]) - 8)]
    begin = {"removed": [0], "new": [again], "encoders": work((0, 1), (0, 2))}
    check(steps.run(slots=[0, 1, 2], chunks=chunks, **begin), [0, 1, 2])


@pytest.mark.parametrize("backend", ["torch", "device"])
@pytest.mark.parametrize(
    "write",
    [
        nemotron_parse,
        trocr,
        partial(trocr, is_projected=True),
        partial(trocr, is_small=True),
        blip,
        donut,
        partial(donut, side=14),
        partial(donut, is_nougat=True),
        formula_net,
    ],
)
def test_layers_read_pages_beside_tokens(tmp_path, write, backend):
    model, size = write(tmp_path), 96
    config = read_model_config(tmp_path)
    text = read_text_config(config)
    processor = read_image_processor(tmp_path, config, text, {})
    places = PromptImages(processor, _Tokenizer({model.image_token: "</s>"}))
    steps = Steps(tmp_path, size, block_size=16, max_model_len=128, **BACKENDS[backend])
    # A page that is larger, one that is smaller, and none.
    payloads, inputs, texts = [], [], []
    for slot, sizes in enumerate([[(90, 110)], [(17, 5)], []]):
        pictures = _pictures(sizes)
        prepared = [MediaReader(places.reader_config).prepare_image(each) for each in pictures]
        texts.append([model.image_token, 5 + slot, 9, 11, 7])
        inputs.append(places.inputs(texts[-1], prepared) if prepared else [])
        parts = [part for each in pictures for part in process_image(each, processor)]
        payloads.append([[part.payload] for part in parts if isinstance(part, Tile)])

    def check(output, slots):
        tokens = int32_view(output.sampled_token_ids).tolist()
        for slot, token, row in zip(slots, tokens, output.logprobs, strict=True):
            found = np.empty(size, np.float32)
            found[int32_view(row.token_ids)] = float32_view(row.logprobs)
            expected = model.logits(texts[slot], payloads[slot])[-1].log_softmax(-1)
            np.testing.assert_allclose(found, expected, atol=1e-4)
            texts[slot].append(token)

    new = [steps.new(slot, texts[slot], SCORED, inputs=inputs[slot]) for slot in range(3)]
    work = EncoderWork(computed=int32_bytes([0, 0, 1, 0]))
    check(
        steps.run(slots=[0, 1, 2], chunks=[(0, 3), (1, 5), (2, 5)], new=new, encoders=work), [1, 2]
    )
    check(steps.run(slots=[0, 1, 2], chunks=[(0, 2)]), [0, 1, 2])
    for _ in range(4):
        check(steps.run(slots=[0, 1, 2]), [0, 1, 2])
