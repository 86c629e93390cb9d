"""Images of InternVL in its authors' format, and of models like it or LLaVA, have their tiles and texts."""

import json
from functools import partial

import numpy as np
import pytest
import tokenizers
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
from engine.protocol.checkpoint.files import read_model_config
from engine.protocol.config.images.sized import ResizeProcessor
from engine.protocol.errors import CheckpointError
from PIL import Image
from support.checkpoints.tiny import sentencepiece_tokenizer
from support.media.pictures import random_picture
from support.own_code.known_towers import eagle2_5
from support.own_code.known_towers.ling3_vl import ling3_vl
from support.own_code.known_towers.vision_decoders import donut, formula_net, trocr
from support.own_code.model import normalized
from support.own_code.own_towers.blip import blip
from support.own_code.own_towers.minicpm import minicpmv
from support.own_code.own_towers.nvila import nvila_lite
from support.own_code.own_towers.youtu import youtu_vl
from support.vision.checkpoints import vision_directory
from support.vision.grid_models import write_grid_model

pytestmark = pytest.mark.slow


def _read(path, **overrides):
    config = ConfigFields.read(path / "config.json")
    return read_image_processor(path, config, text_section(config), overrides)


def _tiles(image, config):
    parts = process_image(image, config)
    return [part.payload for part in parts if isinstance(part, Tile)]


def test_models_that_read_images_unlike_internvl_are_refused(tmp_path):
    path, _ = vision_directory(tmp_path, "internvl_chat")
    (path / "preprocessor_config.json").unlink()
    processor = _read(path, max_dynamic_patch=2)
    assert (processor.max_tiles, processor.mean) == (2, (0.485, 0.456, 0.406))
    reader = MediaReader(PromptImages(processor, load_tokenizer(path)).reader_config)
    tile = "<IMG_CONTEXT>" * 16
    assert reader.prepare_image(random_picture(64, 64)).text == f"<img>{tile}</img>"
    assert reader.prepare_image(random_picture(90, 40)).text == f"<img>{3 * tile}</img>"
    fields = json.loads((path / "config.json").read_text())
    for name, value in (
        ("ps_version", "v3"),
        ("force_image_size", 32),
        ("use_thumbnail", False),
        ("pad2square", True),
        ("flash_relative_threshold", 0.1),
        ("llm_config", fields["llm_config"] | {"architectures": ["InternLM2VEForCausalLM"]}),
    ):
        (path / "config.json").write_text(json.dumps(fields | {name: value}))
        with pytest.raises(CheckpointError, match=name):
            _read(path)


def test_an_error_names_the_size_of_an_image_before_it_grows():
    limits = {"unit": 8, "min_pixels": 64, "max_pixels": 4096, "num_outputs": 64}
    config = ResizeProcessor(token_id=1, output_size=8, resample=3, grows="round", **limits)
    with pytest.raises(ValueError, match="it has 3000 x 5 pixels, and one side"):
        process_image(Image.new("RGB", (3000, 5)), config)


def test_the_image_token_of_ling_may_have_no_texts_around_it(tmp_path):
    tokenizer = sentencepiece_tokenizer()
    start, token, end = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
    tokenizer.add_special_tokens({"additional_special_tokens": [start, token, end]})
    tokenizer.save_pretrained(tmp_path)
    ling3_vl(
        tmp_path, image_token=tokenizer.convert_tokens_to_ids(token), vocab_size=len(tokenizer)
    )
    config = read_model_config(tmp_path)
    processor = read_image_processor(tmp_path, config, text_section(config), {})
    places = PromptImages(processor, load_tokenizer(tmp_path))
    images = [MediaReader(places.reader_config).prepare_image(random_picture(16, 16))] * 2
    prompt = f"a{start}{token}{end}b{token}c"
    assert places.in_order(prompt, images) == images
    expanded = f"{start}{4 * token}{end}\n"
    assert places.expand(prompt, images) == f"a{expanded}b{expanded}c"


@pytest.mark.parametrize(
    ("write", "kind", "size"),
    [
        (trocr, "ViT", (24, 24)),
        (trocr, "ViT", (130, 70)),
        (partial(trocr, is_small=True), "DeiT", (5, 90)),
        (blip, "Blip", (70, 40)),
        *(
            (write, "Nougat", size)
            for write in (partial(donut, is_nougat=True), formula_net)
            for size in ((70, 41), (40, 90), (5, 7), (7, 120), (120, 7))
        ),
        *((donut, "Donut", size) for size in ((70, 41), (40, 90), (5, 7), (31, 30), (3, 2))),
    ],
)
def test_squares_that_are_read_equal_those_of_transformers(tmp_path, write, kind, size):
    write(tmp_path)
    config = read_model_config(tmp_path)
    processor = read_image_processor(tmp_path, config, text_section(config), {})
    [tile] = _tiles(random_picture(*size), processor)
    reference = getattr(transformers, f"{kind}ImageProcessorPil").from_pretrained(tmp_path)
    expected = reference(random_picture(*size), return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(normalized(tile), expected, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="one image a prompt, not 2"):
        process_image(random_picture(*size), processor, 2)


@pytest.mark.parametrize("paper", [255, 230, 0])
def test_margins_of_pages_of_nougat_are_removed_as_by_transformers(tmp_path, paper):
    donut(tmp_path, is_nougat=True)
    config = read_model_config(tmp_path)
    processor = read_image_processor(tmp_path, config, text_section(config), {})
    reference = transformers.NougatImageProcessorPil.from_pretrained(tmp_path)
    page = Image.new("RGB", (90, 70), (paper,) * 3)
    for mark in (None, random_picture(31, 12)):
        if mark is not None:
            page.paste(mark, (40, 9))
        [tile] = _tiles(page, processor)
        expected = reference(page, return_tensors="pt")["pixel_values"][0]
        torch.testing.assert_close(normalized(tile), expected, atol=1e-6, rtol=0)


def test_tiles_of_nvlm_have_names_and_those_of_h2ovl_two_grids(tmp_path):
    paths = {kind: tmp_path / kind for kind in ("h2ovl", "nvlm")}
    processors = {}
    for kind, path in paths.items():
        vision_directory(path, f"internvl_chat-{kind}")
        (path / "preprocessor_config.json").unlink()
        processors[kind] = _read(path, max_dynamic_patch=6)
    places = PromptImages(processors["nvlm"], load_tokenizer(paths["nvlm"]))
    reader, tile = MediaReader(places.reader_config), "<|vision_pad|>" * 16
    whole = f"<tile_global_thumbnail>{tile}</Image>"
    assert reader.prepare_image(random_picture(64, 64)).text == f"<Image>{whole}"
    names = f"<tile_1>{tile}<tile_2>{tile}"
    assert reader.prepare_image(random_picture(90, 40)).text == f"<Image>{names}{whole}"
    # An image alone has the tiles of the second grid, if there is one, those of the first, and the whole.
    config = processors["h2ovl"]
    for size, grids in (
        ((64, 64), [(2, 2)]),
        ((130, 130), [(2, 2)]),
        ((60, 200), [(2, 2), (1, 3)]),
        ((300, 50), [(6, 1)]),
    ):
        image, expected = random_picture(*size), []
        for columns, rows in grids:
            resized = np.asarray(image.resize((64 * columns, 64 * rows), Image.Resampling.BICUBIC))
            cells = resized.reshape(rows, 64, columns, 64, 3).swapaxes(1, 2)
            expected += [*cells.reshape(-1, 64, 64, 3)]
        expected.append(np.asarray(image.resize((64, 64), Image.Resampling.BICUBIC)))
        tiles = _tiles(image, config)
        found = [np.frombuffer(tile.pixels, np.uint8).reshape(64, 64, 3) for tile in tiles]
        np.testing.assert_array_equal(found, expected)
    several = process_image(random_picture(64, 64), config, 2)
    assert sum(isinstance(part, Tile) for part in several) == 1


def test_images_of_eagle_have_numbers_and_enough_tiles(tmp_path):
    tokenizer = sentencepiece_tokenizer()
    marks = ["<IMG_CONTEXT>", "<img>", "</img>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.save_pretrained(tmp_path)
    image_token = tokenizer.convert_tokens_to_ids(marks[0])
    eagle2_5(tmp_path, vocab_size=len(tokenizer), image_token=image_token)
    config = _read(tmp_path)
    places = PromptImages(config, load_tokenizer(tmp_path))
    reader = MediaReader(places.reader_config)
    images = [reader.prepare_image(random_picture(*size), 2) for size in ((16, 16), (70, 70))]
    tile = 4 * marks[0]
    found = places.expand("the <image-1> quick\n<image-2>fox", images)
    first, second = f"<image 1><img>{tile}</img>", f"<image 2><img>{5 * tile}</img>"
    assert found == f"the {first} quick\n{second}fox"
    # InternVL, which compares aspect ratios only, would read a square of this size as a whole.
    for size, count in (((20, 20), 1), ((24, 24), 5), ((100, 20), 5), ((60, 30), 3)):
        assert len(_tiles(random_picture(*size), config)) == count


def test_tiles_of_nvila_lite_end_with_line_feeds_that_are_not_joined(tmp_path):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate([*alphabet, "ĊĊ"])}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("Ċ", "Ċ")]))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(tmp_path)
    token, line, pair = (tokenizer.convert_tokens_to_ids(text) for text in ("<image>", "Ċ", "ĊĊ"))
    nvila_lite(tmp_path, vocab_size=len(tokenizer), image_token=token)
    places = PromptImages(_read(tmp_path), load_tokenizer(tmp_path))
    reader, encode = MediaReader(places.reader_config), load_tokenizer(tmp_path).encode
    a = encode("a")[0]
    # An image alone has tiles, here a grid of two, and the whole. A text line feed follows each of them, too.
    alone = [reader.prepare_image(random_picture(40, 20))]
    found = places.complete(encode(places.expand("a<image>\n", alone)), alone)
    tile = [token] * 4
    assert found == [a, *tile, line, line, *tile, line, line, *tile, line, pair]
    assert [item.position for item in places.inputs(found, alone)] == [1, 7, 13]
    both = [reader.prepare_image(random_picture(*size), 2) for size in ((40, 20), (20, 20))]
    found = places.complete(encode(places.expand("<image><image>\n\n", both)), both)
    assert found == [*tile, line, *tile, line, pair]
    assert [item.position for item in places.inputs(found, both)] == [0, 5]


def test_llava_in_its_authors_format_needs_no_file_of_a_processor(tmp_path):
    path, _ = vision_directory(tmp_path, "llava_next-published")
    (path / "preprocessor_config.json").unlink()
    (path / "processor_config.json").unlink()
    fields = json.loads((path / "config.json").read_text())

    def read(**values):
        (path / "config.json").write_text(json.dumps(fields | values))
        config = read_model_config(path)
        return read_image_processor(path, config, text_section(config), {})

    # Grids are given as the width and the height.
    found = read(image_grid_pinpoints=[[64, 128], [192, 64]])
    assert (found.side, found.grids, found.mark) == (64, ((1, 2), (3, 1)), "<image>")
    assert found.mean == (0.48145466, 0.4578275, 0.40821073)
    square = read(image_aspect_ratio="pad")
    assert (square.side, square.pads, square.num_outputs) == (64, True, 64)
    crop = read(image_aspect_ratio=None)
    assert (crop.side, crop.shortest_edge) == (64, 64)
    texts = {
        "mm_vision_tower must be one of clip-vit": {
            "vision_config": None,
            "mm_vision_tower": "google/vit-base-patch16-224",
        },
        "mm_projector_type must be 'mlp2x_gelu'": {"mm_projector_type": "linear"},
        "mm_patch_merge_type must be 'spatial_unpad'": {"mm_patch_merge_type": "flat"},
        "image_grid_pinpoints must be a list": {"image_grid_pinpoints": "anything"},
    }
    for message, values in texts.items():
        with pytest.raises(CheckpointError, match=message):
            read(**values)
    config = fields | {"vision_config": None}
    (path / "config.json").write_text(json.dumps(config))
    vision = read_model_config(path).required_section("vision_config")
    assert (vision.get("image_size"), vision.get("hidden_size")) == (336, 1024)


def test_deepseek_vl_in_its_own_format_normalizes_in_its_towers(tmp_path):
    write_grid_model(tmp_path, "deepseek_vl_hybrid-published")
    # The file describes the larger square only.
    file = {"image_size": 64, "min_size": 5, "do_normalize": False, "image_mean": [0.4, 0.5, 0.6]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(file))
    config = read_model_config(tmp_path)
    found = read_image_processor(tmp_path, config, text_section(config), {})
    assert (found.side, found.mean, found.resample) == (24, (0.5, 0.5, 0.5), 2)
    assert (found.fine.side, found.fine.margin, found.fine.resample) == (64, (122, 116, 104), 3)
    assert found.fine.mean == (0.48145466, 0.4578275, 0.40821073)


def test_images_of_mantis_have_numbers(tmp_path):
    path, _ = vision_directory(tmp_path, "llava-siglip")
    fields = json.loads((path / "config.json").read_text())
    fields["architectures"] = ["MantisForConditionalGeneration"]
    (path / "config.json").write_text(json.dumps(fields))
    config = _read(path)
    places = PromptImages(config, load_tokenizer(path))
    reader = MediaReader(places.reader_config)
    images = [reader.prepare_image(random_picture(*size), 2) for size in ((64, 64), (30, 20))]
    first, second = (
        f"(image {number}: <Image>{'<image>' * config.num_outputs}</Image>)" for number in (1, 2)
    )
    found = places.expand("the <image> quick\n<image>fox", images)
    assert found == f"the {first} quick\n{second}fox"


def test_slices_of_minicpm_2_5_are_images_between_marks(tmp_path):
    minicpmv(tmp_path, "2.5")
    tokenizer = {"added_tokens_decoder": {"95": {"content": "<unk>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    config = ConfigFields.read(tmp_path / "config.json")
    parts = process_image(
        random_picture(70, 70), read_image_processor(tmp_path, config, config, {})
    )
    found = "".join("I" if isinstance(part, Tile) else part for part in parts)
    row = 2 * "<image>I</image>"
    assert found == f"<image>I</image><slice>{row}\n{row}</slice>"


@pytest.mark.parametrize(
    ("size", "expected"), [((100, 44), (80, 40)), ((5, 3), (8, 8)), ((60, 33), (64, 40))]
)
def test_images_of_youtu_vl_are_shrunk_in_steps(size, expected, tmp_path):
    youtu_vl(tmp_path)
    config = ConfigFields.read(tmp_path / "config.json")
    processor = read_image_processor(tmp_path, config, config, {"max_image_patches": 200})
    [tile] = _tiles(random_picture(*size), processor)
    assert (tile.width, tile.height) == expected
    # The first of the sizes is the first one below the limit, at a scale of 0.8.
    assert processor.num_outputs == 50
