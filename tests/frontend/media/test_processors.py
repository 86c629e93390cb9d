"""Images and prompts are processed exactly as by transformers."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import transformers
from engine.frontend.media.decode import to_rgb
from engine.frontend.media.layouts.pixels import Tile
from engine.frontend.media.media_reader import MediaReader
from engine.frontend.media.processor import process_image
from engine.frontend.media.prompt_images import PromptImages
from engine.frontend.media.sources.processor_fields import (
    take_fields,
    verify_fields,
    with_image_fields,
)
from engine.frontend.model_source.images.read import read_image_processor
from engine.frontend.tokenizer.load import load_tokenizer
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.checkpoint.field_names import text_section
from engine.protocol.errors import CheckpointError, ParameterError
from msgspec.structs import replace
from PIL import Image
from support.checkpoints.tiny import sentencepiece_tokenizer
from support.media.image_marks import (
    ANYRES_MODELS,
    GEMMA_MARKS,
    GEMMA_MODELS,
    INTERNVL_MARKS,
    MODELS,
    SIZED_MODELS,
    image_mark,
)
from support.media.image_processors import image_processor, image_processor_class
from support.media.pictures import random_picture
from support.vision.checkpoints import vision_directory
from support.vision.grid_configs import image_config
from support.vision.grid_models import write_grid_model
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

pytestmark = pytest.mark.slow

OTHERS = ("internvl_chat", "gemma3", "paligemma", "granite_docling")
SIZES = [(64, 64), (30, 20), (200, 150), (151, 333), (1000, 40), (7, 900), (1, 1)]


@pytest.fixture(scope="module", params=(*MODELS, *OTHERS))
def model(request, tmp_path_factory):
    path, _ = vision_directory(tmp_path_factory.mktemp("model"), request.param)
    return request.param, path


def _read(path, **overrides):
    config = ConfigFields.read(path / "config.json")
    return read_image_processor(path, config, text_section(config) or config, overrides)


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
    image = random_picture(*size)
    expected = image_processor(path, kind)(image, return_tensors="np")["pixel_values"]
    expected = expected.reshape(-1, *expected.shape[-3:])
    tiles = _tiles(image, _read(path))
    assert len(tiles) == len(expected)
    for tile, pixels in zip(tiles, expected, strict=True):
        np.testing.assert_array_equal(_normalized(tile), pixels)


@pytest.mark.parametrize("side", [490, 980])
def test_images_with_margins_equal_those_of_transformers(side, tmp_path):
    path, _ = vision_directory(tmp_path, "aria")
    processor = image_processor(path, "aria", max_image_size=side)
    config = _read(path, max_image_size=side)
    for size in SIZES:
        expected = processor(random_picture(*size), return_tensors="np")
        [tile] = _tiles(random_picture(*size), config)
        np.testing.assert_array_equal(_normalized(tile), expected["pixel_values"][0])
        within = np.zeros((side, side), bool)
        within[: tile.original_height, : tile.original_width] = True
        np.testing.assert_array_equal(within, expected["pixel_mask"][0])
    with pytest.raises(CheckpointError, match="split_image must be false"):
        _read(path, split_image=True)


@pytest.mark.parametrize("kind", [*SIZED_MODELS, "gemma4", "gemma4_unified"])
def test_images_of_any_size_equal_those_of_transformers(kind, tmp_path):
    path, _ = vision_directory(tmp_path, kind)
    # LightOnOCR's own patches are smaller than what makes an embedding, for which some images are too small.
    options = {"patch_size": 16} if kind == "lighton_ocr" else {}
    processor, config = image_processor(path, kind), _read(path, **options)
    sizes = [size for size in SIZES if min(size) > 7 or kind not in SIZED_MODELS]
    for size in (*sizes, (128, 128), (129, 64)):
        image = random_picture(*size)
        if kind in SIZED_MODELS:
            options = {"patch_size": {"height": config.side_factor, "width": config.side_factor}}
            [expected] = processor(image, return_tensors="np", **options)["pixel_values"]
        else:
            expected = processor(image, return_tensors="np")
            [patches], [positions] = expected["pixel_values"], expected["image_position_ids"]
            columns, rows = np.array(positions).max(0) + 1
            side = 8 if kind == "gemma4" else 16
            patches = np.array(patches)[: rows * columns].reshape(rows, columns, side, side, 3)
            expected = (patches - 0.5) * 2 if kind == "gemma4" else patches
            expected = expected.transpose(4, 0, 2, 1, 3).reshape(3, rows * side, columns * side)
        [tile] = _tiles(image, config)
        np.testing.assert_allclose(_normalized(tile), expected, rtol=0, atol=1e-6)
    if kind == "lighton_ocr":
        with pytest.raises(ValueError, match="128 x 8 pixels, but both sides need at least 16"):
            _tiles(random_picture(1000, 40), _read(path))


@pytest.mark.parametrize("kind", ANYRES_MODELS)
def test_grids_with_margins_equal_those_of_transformers(kind, tmp_path):
    path, _ = vision_directory(tmp_path, kind)
    processor, config = image_processor(path, kind), _read(path)
    sizes = [size for size in SIZES if min(size) > 1]
    for image in (random_picture(*size) for size in sizes):
        [expected] = processor(image, return_tensors="np")["pixel_values"]
        [tile] = _tiles(image, config)
        np.testing.assert_array_equal(_normalized(tile), np.concatenate(expected, 1))
    if kind == "llava_onevision":
        images = [random_picture(200, 150), random_picture(64, 90)]
        expected = processor([images], return_tensors="np")["pixel_values"]
        for image, [pixels] in zip(images, expected, strict=True):
            parts = process_image(image, config, 2)
            [tile] = [part.payload for part in parts if isinstance(part, Tile)]
            np.testing.assert_array_equal(_normalized(tile), pixels)
        with pytest.raises(ValueError, match="may have at most 8192 pixels, got 9000"):
            process_image(random_picture(1, 9000), config, 2)


@pytest.mark.parametrize("size", [(600, 260), (300, 800), (900, 200), (64, 64)])
def test_parts_of_long_images_equal_those_of_transformers(size, tmp_path):
    path, _ = vision_directory(tmp_path, "gemma3")
    options = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 128}
    processor = image_processor(
        path,
        "gemma3",
        pan_and_scan_max_num_crops=4,
        pan_and_scan_min_ratio_to_activate=1.2,
        **options,
    )
    expected = processor(random_picture(*size), return_tensors="np")["pixel_values"]
    tiles = _tiles(random_picture(*size), _read(path, **options))
    np.testing.assert_array_equal([_normalized(tile) for tile in tiles], expected)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGBA", "CMYK"])
def test_colors_and_transparency_equal_those_of_transformers(mode, tmp_path):
    path, _ = vision_directory(tmp_path, "llava-siglip")
    image = random_picture(64, 64)
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
    image = random_picture(300, 200)
    processor = image_processor(path, kind, do_image_splitting=False)
    [[expected]] = processor(image, return_tensors="np")["pixel_values"]
    [tile] = _tiles(image, _read(path, do_image_splitting=False))
    np.testing.assert_array_equal(_normalized(tile), expected)


def _texts_of_images(kind, path, name, others, images):
    """Return what replaces images, without an object of the processor's class, which needs torchvision or videos."""
    if kind == "lighton_ocr":
        sizes = image_processor(path, kind)(images)["image_sizes"]
        return ["[IMG]" * (height // 16 * (width // 16)) for height, width in sizes]
    if kind in SIZED_MODELS:
        side = 8 * others.get("spatial_merge_size", 1)
        sizes = image_processor(path, kind)(images, patch_size=side)["image_sizes"]
        rows = [["[IMG]" * (width // side)] * (height // side) for height, width in sizes]
        return ["[IMG_BREAK]".join(each) + "[IMG_END]" for each in rows]
    if kind == "llava_onevision":
        processor = image_processor(path, kind)
        processed = processor([images])
        own = SimpleNamespace(**others, image_token="<image>", image_processor=processor)
        replaces = getattr(transformers, name).replace_image_token
        return [replaces(own, processed, i) for i in range(len(images))]
    names = INTERNVL_MARKS | others | {"image_token": image_mark(kind)}
    names |= {f"{each}_token": GEMMA_MARKS[each] for each in ("boi", "eoi")}
    tiles = image_processor(path, kind)(images)
    processor_class = getattr(transformers, name)
    return [
        processor_class.replace_image_token(SimpleNamespace(**names), tiles, i)
        for i in range(len(images))
    ]


# The processor of SmolVLM needs a package that spells out numbers. Its prompts are the same as those of Idefics3.
@pytest.mark.parametrize(
    "kind",
    [
        "idefics3",
        "aria",
        "llava-clip",
        "llava-siglip",
        "internvl",
        "aya_vision",
        "granite_docling",
        *GEMMA_MODELS,
        *SIZED_MODELS,
        *ANYRES_MODELS,
    ],
)
def test_prompts_equal_those_of_transformers(kind, tmp_path):
    path, _ = vision_directory(tmp_path, kind)
    others = json.loads((path / "processor_config.json").read_text())
    name = others.pop("processor_class")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    mark = image_mark(kind)
    if not kind.startswith(("gemma3", "gemma4")):
        tokenizer.image_token = mark
        tokenizer.image_token_id = tokenizer.convert_tokens_to_ids(mark)
    images = [random_picture(200, 150), random_picture(64, 64)]
    text = f"the {mark} quick\n{mark}fox"
    if kind in ("internvl", "gemma4", "gemma4_unified", "llava_onevision", *SIZED_MODELS):
        texts = _texts_of_images(kind, path, name, others, images)
        before, between, after = text.split(mark)
        expected = tokenizer(f"{before}{texts[0]}{between}{texts[1]}{after}")["input_ids"]
    else:
        processor = getattr(transformers, name)(image_processor(path, kind), tokenizer, **others)
        expected = processor(images=[images], text=[text])["input_ids"][0]

    config = _read(path)
    places = PromptImages(config, load_tokenizer(path))
    reader = MediaReader(places.reader_config)
    prepared = [reader.prepare_image(image, len(images)) for image in images]
    found = places.complete(load_tokenizer(path).encode(places.expand(text, prepared)))
    assert list(found) == list(expected)
    inputs = places.inputs(found, prepared)
    covered = {item.position + i for item in inputs for i in range(item.num_tokens)}
    if kind not in SIZED_MODELS:
        assert covered == {i for i, token in enumerate(found) if token == config.token_id}
    assert len({item.content_hash for item in inputs}) == len(inputs)
    with pytest.raises(ParameterError, match="have 2 images, but the prompt has 3 image tokens"):
        places.in_order(text + mark, prepared)


def test_invalid_processor_fields_are_named(model):
    kind, path = model
    wrong = {"idefics3": {"max_image_size": {"longest_edge": 32}}}
    wrong["smolvlm"] = wrong["idefics3"]
    wrong["internvl"] = {"size": {"height": 32, "width": 32}}
    wrong["aya_vision"] = wrong["granite_docling"] = wrong["internvl"]
    wrong["llava-clip"] = {"crop_size": 32}
    wrong["gemma3"] = wrong["paligemma"] = wrong["internvl"]
    wrong["llava-siglip"] = {"size": {"height": 32, "width": 32}}
    wrong["internvl_chat"] = {"max_dynamic_patch": 0}
    with pytest.raises(
        CheckpointError,
        match=r"must be (64, as in the vision tower|a positive integer, at most 64)",
    ):
        _read(path, **wrong[kind])
    with pytest.raises(CheckpointError, match="do_resize must be true"):
        _read(path, do_resize=False)
    with pytest.raises(CheckpointError, match="image_std must be three numbers"):
        _read(path, image_std=[0.5, 0.0, 0.5])


@pytest.mark.parametrize(
    ("kind", "fields", "above"),
    [
        ("internvl", {"max_patches": 3, "min_patches": 2}, {"max_dynamic_patch": 13}),
        ("internvl", {"crop_to_patches": False}, {"crop_to_patches": 3}),
        ("smolvlm", {"size": {"longest_edge": 128}}, {"size": {"longest_edge": 3000}}),
        ("smolvlm", {"do_image_splitting": False}, {"do_image_splitting": 1}),
        ("gemma3", {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 2}, {}),
    ],
)
def test_requests_choose_fields_of_processors(kind, fields, above, tmp_path):
    path, _ = vision_directory(tmp_path, kind)
    config = _read(path)
    own = take_fields(dict(fields), "mm_processor_kwargs")
    verify_fields(own, config, None)
    chosen = with_image_fields(config, own)
    for size in ((200, 150), (151, 333)):
        tiles = _tiles(random_picture(*size), chosen)
        assert tiles == _tiles(random_picture(*size), _read(path, **fields))
        if kind != "gemma3":
            assert tiles != _tiles(random_picture(*size), config)
    if above:
        with pytest.raises(ParameterError, match=r"must be (at most|true or false|an integer)"):
            with_image_fields(config, take_fields(above, "mm_processor_kwargs"))
    with pytest.raises(ParameterError, match="max_pixels is no setting of this model's processor"):
        verify_fields(take_fields({"max_pixels": 9}, "mm_processor_kwargs"), config, None)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("llava-clip", {"do_center_crop": False}, "do_center_crop must be true if size has"),
        ("llava-siglip", {"do_center_crop": True, "crop_size": 32}, "crop_size.height must be 64"),
        ("llava-siglip", {"size": {"height": 64, "width": 32}}, "size.width must be 64, as height"),
        ("idefics3", {"size": {"height": 128, "width": 128}}, "size.height must be None, got 128"),
        ("gemma4", {"pooling_kernel_size": 4}, "pooling_kernel_size must be 2, as in vision_conf"),
    ],
)
def test_other_sizes_are_refused(kind, fields, message, tmp_path):
    path, _ = vision_directory(tmp_path, kind)
    with pytest.raises(CheckpointError, match=message):
        _read(path, **fields)


def test_gemma4_must_have_positions_for_the_longest_image(tmp_path):
    path, _ = vision_directory(tmp_path, "gemma4")
    with pytest.raises(CheckpointError, match="max_soft_tokens must be at most 128 for position"):
        _read(path, max_soft_tokens=140)


def test_prompts_of_apertus_have_sizes_and_separators_of_rows(tmp_path):
    names = ("boi", "eoi", "image_wrapper", "eol", "image")
    marks = {f"{name}_token": f"<{name}>" for name in names}
    tokenizer = sentencepiece_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*marks.values()]})
    tokenizer.init_kwargs |= marks
    tokenizer.save_pretrained(tmp_path)
    config = image_config("apertus1p5").to_dict()
    config["text_config"]["vocab_size"] = len(tokenizer)
    config["image_token_id"] = tokenizer.convert_tokens_to_ids("<image>")
    (tmp_path / "config.json").write_text(json.dumps(config))
    fields = {"size": {"min_pixels": 128, "max_pixels": 600}, "spatial_factor": 4}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    own = SimpleNamespace(**marks, image_processor=SimpleNamespace(spatial_factor=4))
    places = PromptImages(_read(tmp_path), load_tokenizer(tmp_path))
    reader = MediaReader(places.reader_config)
    for size in ((30, 21), (7, 70), (90, 40)):
        prepared = reader.prepare_image(random_picture(*size))
        height, width = smart_resize(*size[::-1], 4, 128, 600)
        expected = transformers.Apertus1p5Processor.replace_image_token(
            own, {"image_sizes": [(height, width)]}, 0
        )
        assert prepared.text == expected
        found = load_tokenizer(tmp_path).encode(places.expand("a<image>b", [prepared]))
        [item] = places.inputs(found, [prepared])
        assert (item.size, item.row_length) == (height * width // 16, width // 4)
    with pytest.raises(CheckpointError, match="spatial_factor must be 4, the pixels of a code"):
        _read(tmp_path, spatial_factor=8)


@pytest.mark.parametrize("splits", [False, True])
def test_images_of_idefics2_equal_those_of_transformers(splits, tmp_path):
    write_grid_model(tmp_path, "idefics2")
    config = _read(tmp_path, do_image_splitting=splits)
    size = {"shortest_edge": config.shortest, "longest_edge": config.longest}
    processor = image_processor_class("Idefics2")(size=size, do_image_splitting=splits)
    for size in SIZES[:-1]:
        tiles = _tiles(random_picture(*size), config)
        expected = processor(random_picture(*size), return_tensors="np")
        expected = zip(
            expected["pixel_values"][0], expected["pixel_attention_mask"][0], strict=True
        )
        for tile, (pixels, mask) in zip(tiles, expected, strict=True):
            # Pixels that make no whole patch are ignored.
            rows, columns = (count // 4 * 4 for count in (mask.any(1).sum(), mask.any(0).sum()))
            np.testing.assert_array_equal(_normalized(tile), pixels[:, :rows, :columns])
    if splits:
        with pytest.raises(ValueError, match="both sides need at least 2"):
            process_image(random_picture(1, 1), config)
    tokenizer = sentencepiece_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", config.joint]})
    tokenizer.save_pretrained(tmp_path)
    config = replace(config, token_id=tokenizer.convert_tokens_to_ids("<image>"))
    places = PromptImages(config, load_tokenizer(tmp_path))
    images = [
        MediaReader(places.reader_config).prepare_image(random_picture(*size)) for size in SIZES[:3]
    ]
    reference = transformers.Idefics2Processor(processor, tokenizer, image_seq_len=5)
    for text in ("<image>word<image><image> word", "<image> <image>\n<image>"):
        expected = reference(text=[text], images=[[random_picture(*size) for size in SIZES[:3]]])
        found = places.expand(text, images)
        assert tokenizer(found).input_ids == expected["input_ids"][0]


def test_images_of_video_llama_3_equal_those_of_transformers(tmp_path):
    write_grid_model(tmp_path, "video_llama_3")
    config = _read(tmp_path)
    processor = image_processor_class("VideoLlama3")(patch_size=4, min_pixels=64, max_pixels=900)
    for size in [each for each in SIZES if max(each) < 100 * min(each)]:
        [tile] = _tiles(random_picture(*size), config)
        expected = processor(random_picture(*size), return_tensors="np")
        [[_, rows, columns]] = expected["image_grid_thw"]
        pixels = expected["pixel_values"].reshape(rows, columns, 3, 4, 4)
        pixels = pixels.transpose(2, 0, 3, 1, 4).reshape(3, rows * 4, columns * 4)
        np.testing.assert_allclose(_normalized(tile), pixels, atol=1e-6)


def test_a_prompt_may_have_a_token_for_each_embedding(tmp_path):
    write_grid_model(tmp_path, "pp_chart2table")
    tokenizer = sentencepiece_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<imgpad>"]})
    tokenizer.save_pretrained(tmp_path)
    config = replace(_read(tmp_path), token_id=tokenizer.convert_tokens_to_ids("<imgpad>"))
    places = PromptImages(config, load_tokenizer(tmp_path))
    image = MediaReader(places.reader_config).prepare_image(random_picture(30, 20))
    prompt = f"fox {'<imgpad>' * config.num_outputs} and {'<imgpad>' * config.num_outputs}"
    images = places.in_order(prompt, [image, image])
    assert places.expand(prompt, images) == prompt
    assert len(places.inputs(tokenizer(prompt).input_ids, images)) == 2


def test_images_of_chameleon_equal_those_of_transformers(tmp_path):
    tokenizer = sentencepiece_tokenizer()
    others = ["<racm3:break>", "<eoss>", "<image>"]
    tokenizer.add_special_tokens({"sep_token": "<sep>", "additional_special_tokens": others})
    tokenizer.save_pretrained(tmp_path)
    ids = {"image_token": tokenizer.convert_tokens_to_ids("<image>"), "vocab_size": len(tokenizer)}
    write_grid_model(tmp_path, "chameleon", **ids)
    config = _read(tmp_path)
    fields = json.loads((tmp_path / "preprocessor_config.json").read_text())
    processor = image_processor_class("Chameleon")(**fields)
    places = PromptImages(config, load_tokenizer(tmp_path))
    reader = MediaReader(places.reader_config)
    for size in SIZES[:-2]:
        [tile] = _tiles(random_picture(*size), config)
        expected = processor(random_picture(*size), return_tensors="np")["pixel_values"]
        np.testing.assert_array_equal(_normalized(tile), expected[0])
        prompt = places.expand("a<image>b", [reader.prepare_image(random_picture(*size))])
        assert prompt == f"a<racm3:break>{36 * '<image>'}<eoss>b"
    with pytest.raises(
        CheckpointError, match=r"crop_size\.height must be a multiple of 4, the pixels of"
    ):
        _read(tmp_path, crop_size=26)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("IMGIMGJZ", "IMGIMGDAZ"))
    with pytest.raises(CheckpointError, match=r"a token below .* for each of the 30 codes"):
        _read(tmp_path)
