"""Models with convolutions give the embeddings and logits of transformers with timm, or of their authors."""

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
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.checkpoint.gguf import GGUFFile
from engine.protocol.checkpoint.gguf_config.mmproj.read import read_mmproj
from engine.protocol.checkpoint.vision.read import vision_spec
from engine.protocol.encoder_inputs.payloads import ImagePayload
from engine.protocol.errors import CheckpointError, EngineError
from engine.workers.loaders.mmproj import MmprojCheckpoint
from engine.workers.towers.image_tower import TowerSource
from engine.workers.towers.make_tower import make_tower
from gguf import GGUFWriter
from PIL import Image
from support.gguf.finish import finish
from support.own_code.own_towers.mobilevlm import mobilevlm, write_mobilevlm_mmproj
from support.vision.fast_vlm import fast_vlm_directory
from support.vision.gemma3n import NUM_IMAGE_TOKENS, gemma3n_directory
from support.workers.decoders import CPU, Runner, load_decoder, load_native_decoder
from support.workers.towers import load_tower, media_logits

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
SIZES = {"gemma3n": ((150, 90), (70, 164)), "fast_vlm": ((150, 90), (270, 564))}
"""The images of the prompt, whose seeds are their widths."""

MARKS = {"gemma3n": ("boi_token_id", "image_token_id", "eoi_token_id")}
PLACES = {"gemma3n": [4, 265, -10, -1], "fast_vlm": [4, 25, -10, -1]}
LOGITS = {
    "gemma3n": [
        [-0.53393, 1.275223, -1.001727, -0.100593],
        [1.925256, -0.024772, -0.497731, 0.054459],
        [-1.330666, 0.306893, 1.237514, 0.102869],
        [0.471811, -0.498779, 0.06067, 0.088839],
    ],
    "fast_vlm": [
        [-1.242511, -0.813746, 1.485793, 0.194257],
        [-0.795539, -0.021135, 1.775455, -1.223893],
        [-1.013719, -0.176919, 0.467925, -1.324399],
        [-1.881283, -0.470093, 0.625335, -0.944388],
    ],
}
"""The first logits of these places of the prompt, by transformers 5.24 with timm 1.0.31."""

EMBEDDINGS = {
    384: [
        [-2.245033, 1.23211, -0.19896],
        [-2.442389, 0.81576, 0.277906],
        [-1.894214, 0.363783, 0.322205],
    ],
    752: [
        [-2.404399, 0.987719, -0.332502],
        [-2.490019, 0.995639, 0.026261],
        [-2.366384, 0.723647, 0.352348],
    ],
    768: [
        [-2.246788, 0.628822, -0.25025],
        [-2.398265, 0.733166, 0.009975],
        [-2.247564, 0.468497, 0.375258],
    ],
}
"""The same for the first numbers of three embeddings of an image of this side."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {
        "gemma3n": gemma3n_directory(tmp_path_factory.mktemp("gemma3n")),
        "fast_vlm": fast_vlm_directory(tmp_path_factory.mktemp("fast_vlm")),
    }


@pytest.fixture(scope="module")
def towers(paths):
    return {kind: _tower(path) for kind, path in paths.items()}


def _tower(path):
    decoder = load_decoder(path, max_model_len=64)
    return load_tower(path, decoder)


def _pixels(seed, width, height):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def _processor(path, **overrides):
    config = ConfigFields.read(path / "config.json")
    return read_image_processor(path, config, config.section("text_config"), overrides)


def test_prompts_have_the_tokens_of_images(paths):
    path = paths["gemma3n"]
    tokenizer = load_tokenizer(path)
    places = PromptImages(_processor(path), tokenizer)
    reader = MediaReader(places.reader_config)
    images = [reader.prepare_image(Image.fromarray(_pixels(w, w, h))) for w, h in SIZES["gemma3n"]]
    text = places.expand("the <image> quick\n<image>fox", images)
    image = f"\n\n<start_of_image>{'<image>' * NUM_IMAGE_TOKENS}<end_of_image>\n\n"
    assert text == f"the {image} quick\n{image}fox"
    ids = tokenizer.encode(text)
    inputs = places.inputs(ids, images)
    end = tokenizer.token_to_id("<end_of_image>")
    assert [ids[item.position + item.num_tokens - 1] for item in inputs] == [end, end]
    assert [item.num_tokens for item in inputs] == [NUM_IMAGE_TOKENS + 1] * 2
    with pytest.raises(ValueError, match="does not support embeddings of images"):
        reader.place_embeddings(np.zeros((256, 64), np.float32))


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
@pytest.mark.parametrize("kind", SIZES)
def test_logits_equal_those_of_transformers(paths, towers, kind, load):
    path, tower = paths[kind], towers[kind]
    processor, fields = _processor(path), ConfigFields.read(path / "config.json")
    marks = [fields.integer(name) for name in MARKS.get(kind, ("image_token_index",))]
    rng = random.Random(3)
    prompt, outputs = [], []
    for count, (width, height) in zip((5, 3), SIZES[kind], strict=True):
        parts = process_image(Image.fromarray(_pixels(width, width, height)), processor)
        [tile] = [part for part in parts if isinstance(part, Tile)]
        outputs.append(tower(tile.payload))
        prompt += [rng.randrange(4, 300) for _ in range(count)]
        if kind == "gemma3n":
            begin, image, end = marks
            prompt += [begin, *[image] * NUM_IMAGE_TOKENS, end]
        else:
            prompt += marks * len(outputs[-1])
    prompt += [rng.randrange(4, 300) for _ in range(9)]
    is_image = np.isin(prompt, marks[-2:])
    decoder = load(path, max_model_len=1024)
    runner = Runner(decoder, 1, max_tokens=1024)
    # The chunks end within the images.
    ends = len(prompt) // 5, 3 * len(prompt) // 4
    found = media_logits(runner, prompt, is_image, torch.cat(outputs), ends)
    torch.testing.assert_close(
        found[PLACES[kind], :4], torch.tensor(LOGITS[kind]), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("side", [384, 752, 768])
def test_embeddings_of_other_sizes_equal_those_of_transformers(towers, side):
    pixels = _pixels(side, side, side).tobytes()
    found = towers["gemma3n"](ImagePayload(side, side, pixels, 1 / 255, (0.0,) * 3, (1.0,) * 3))
    assert len(found) == NUM_IMAGE_TOKENS + 1
    torch.testing.assert_close(
        found[[0, 100, 255], :3], torch.tensor(EMBEDDINGS[side]), atol=1e-4, rtol=1e-4
    )


def test_unknown_settings_are_refused(paths, towers):
    with pytest.raises(
        EngineError, match="has 9 x 40 pixels, but the model reads sides of at least"
    ):
        towers["gemma3n"](ImagePayload(9, 40, bytes(1080), 1 / 255, (0.0,) * 3, (1.0,) * 3))
    with pytest.raises(EngineError, match="has 9 x 40 pixels, but the model reads 256 x 256"):
        towers["fast_vlm"](ImagePayload(9, 40, bytes(1080), 1 / 255, (0.0,) * 3, (1.0,) * 3))
    sizes = {"inference_mode": True, "embed_dims": (8, 16, 32, 64, 96)}
    for kind, values, message in (
        ("gemma3n", {"architecture": "resnet50"}, "architecture must be 'mobilenetv5_300m_enc'"),
        ("gemma3n", {"model_args": {"depth": 3}}, "must be nothing but channel_multiplier"),
        ("gemma3n", {"vocab_offset": 9}, "eoi_token_id must be one of the 2 tokens from"),
        ("fast_vlm", {"architecture": "resnet50"}, "architecture must be 'fastvit_mci3'"),
        ("fast_vlm", {"model_args": {"depth": 3}}, "must be nothing but inference_mode, layers"),
        ("fast_vlm", {"model_args": {}}, "inference_mode must be true, with merged branches"),
        ("fast_vlm", {"model_args": sizes}, "embed_dims must be sizes that are multiples"),
        ("fast_vlm", {"hidden_size": 96}, "hidden_size must be 256, twice the last channels"),
    ):
        config = ConfigFields.read(paths[kind] / "config.json")
        wrong = config.with_values({"vision_config": config.config["vision_config"] | values})
        with pytest.raises(CheckpointError, match=message):
            vision_spec(wrong, 64)


@pytest.mark.parametrize("version", [1, 2])
def test_outputs_of_mobilevlm_files_equal_those_of_the_authors_code(version, tmp_path):
    reference = mobilevlm(tmp_path, version=version)
    file = tmp_path / "mmproj-tiny.gguf"
    write_mobilevlm_mmproj(file, tmp_path)
    writer = GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "<unk>"])
    finish(writer)
    text = {"hidden_size": 64, "vocab_size": 2}
    found = read_mmproj(GGUFFile(file), GGUFFile(tmp_path / "tiny.gguf"), text)
    fields = ConfigFields(found.config, file)
    processor = read_image_processor(file, fields, fields.section("text_config"), {}, found)
    tower = make_tower(
        vision_spec(fields, 64), TowerSource(MmprojCheckpoint(file), CPU, torch.float32)
    )
    mean = tuple(int(255 * each) for each in processor.mean)
    for width, height in ((40, 24), (31, 90), (24, 24)):
        pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
        image = Image.fromarray(pixels)
        [tile] = [part for part in process_image(image, processor) if isinstance(part, Tile)]
        side = max(width, height)
        square = Image.new("RGB", (side, side), mean)
        square.paste(image, ((side - width) // 2, (side - height) // 2))
        resized = square.resize((24, 24), Image.Resampling.BICUBIC)
        assert (tile.payload.pixels, tile.num_outputs) == (resized.tobytes(), 9)
        with torch.inference_mode():
            [expected] = reference.encode([tile.payload])
        torch.testing.assert_close(tower(tile.payload), expected, rtol=0, atol=1e-4)
