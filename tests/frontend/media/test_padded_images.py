"""Images of Kimi, Inkling 2, DeepSeek-VL and Janus are resized and get margins as by transformers or their authors."""

import ast
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import transformers
from engine.frontend.media.decode import to_rgb
from engine.frontend.media.layouts.grids import views
from engine.frontend.media.layouts.pixels import Tile
from engine.frontend.media.layouts.resized import padded, resized
from engine.frontend.media.layouts.single import in_square
from engine.frontend.media.processor import process_image
from engine.frontend.model_source.images.qwen import (
    pad_whole,
    resize,
    resize_rounded,
    resize_whole_patches,
)
from engine.frontend.model_source.images.source import ProcessorSource
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.config.images.details import ViewsProcessor
from engine.protocol.config.images.single import MarginProcessor
from engine.protocol.config.images.sized import PadProcessor, ResizeProcessor
from engine.protocol.config.images.tiles import BandsProcessor, RowsProcessor
from msgspec.structs import replace
from PIL import Image, ImageOps
from support.media.pictures import random_picture
from transformers.models.deepseek_vl_hybrid.image_processing_pil_deepseek_vl_hybrid import (
    DeepseekVLHybridImageProcessorPil,
)
from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil

CONFIG = PadProcessor(
    token_id=1,
    output_size=8,
    num_outputs=400,
    resample=3,
    unit=8,
    patch_size=4,
    max_patches=300,
    max_side=40,
)


MARGINS = MarginProcessor(
    token_id=1,
    output_size=8,
    num_outputs=16,
    resample=3,
    side=48,
    min_side=6,
    margin=(122, 116, 104),
)
SIZES = [(1, 1), (3, 700), (500, 2), (48, 48), (49, 20), (7, 48)]
_rng = random.Random(1)
SIZES += [(_rng.randrange(1, 300), _rng.randrange(1, 300)) for _ in range(60)]


def test_images_of_deepseek_vl_and_janus_equal_those_of_transformers():
    reference = JanusImageProcessorPil(
        size={"height": 48, "width": 48}, min_size=6, do_rescale=False, do_normalize=False
    )
    for size in SIZES:
        [expected] = reference(random_picture(*size), return_tensors="np")["pixel_values"]
        _check(in_square(random_picture(*size), MARGINS), expected)
    # The small square of DeepSeek-VL 7B is made of the large one.
    reference = DeepseekVLHybridImageProcessorPil(
        size={"height": 48, "width": 48},
        high_res_size={"height": 80, "width": 80},
        high_res_resample=1,
        high_res_image_mean=[0.5] * 3,
        min_size=6,
        do_rescale=False,
        do_normalize=False,
    )
    fine = replace(MARGINS, side=80, resample=1, margin=(127, 127, 127))
    for size in SIZES:
        expected = reference(random_picture(*size), return_tensors="np")
        arrays = expected["pixel_values"][0], expected["high_res_pixel_values"][0]
        _check(in_square(random_picture(*size), replace(MARGINS, fine=fine)), *arrays)


def _check(parts, expected, expected_fine=None):
    [tile] = [part for part in parts if isinstance(part, Tile)]
    for payload, array in ((tile.payload, expected), (tile.payload.fine, expected_fine)):
        if array is not None:
            pixels = np.frombuffer(payload.pixels, np.uint8)
            found = pixels.reshape(payload.height, payload.width, 3)
            np.testing.assert_array_equal(found.transpose(2, 0, 1), array)


def _function(model, name):
    """Return a function of the module of a processor, whose class needs torchvision."""
    directory = Path(transformers.__file__).parent / "models" / model
    tree = ast.parse((directory / f"image_processing_{model}.py").read_text())
    [function] = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    names = {"math": math}
    exec(ast.unparse(function), names)
    return names[name]


def test_images_of_kimi_equal_those_of_transformers():
    size_of = _function("kimi_k25", "navit_resize")
    for width, height in SIZES:
        image = random_picture(width, height)
        (rows, columns), (num_rows, num_columns) = size_of(height, width, 4, 2, 300, 40)
        _check_padded(image, CONFIG, (columns, rows), (num_columns, num_rows))


def test_images_of_kimi_vl_equal_those_of_its_authors():
    config = replace(CONFIG, max_side=510)
    for size in SIZES:
        num_patches = math.prod(side // 4 for side in size)
        scale = (300 / num_patches) ** 0.5 if num_patches > 300 else 1
        shown = tuple(int(side * scale) for side in size)
        _check_padded(
            random_picture(*size), config, shown, tuple(side + -side % 8 for side in shown)
        )


def _check_padded(image, config, shown, whole):
    """Compare the tile of an image with its copy in the size `shown` on a black canvas with the size `whole`."""
    columns, rows = whole
    expected = np.zeros((rows, columns, 3), np.uint8)
    expected[: shown[1], : shown[0]] = image.resize(shown, Image.Resampling.BICUBIC)
    [tile] = [part for part in padded(image, config) if isinstance(part, Tile)]
    payload = tile.payload
    found = np.frombuffer(payload.pixels, np.uint8).reshape(payload.height, payload.width, 3)
    np.testing.assert_array_equal(found, expected)
    assert tile.num_outputs == rows * columns // 64 <= config.num_outputs


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, (1024, 13_312)),
        ({"min_num_patches": 16, "max_num_patches": 180}, (16, 180)),
        ({"max_model_len": 1000}, (1024, 3984)),
        ({"max_num_patches": 0}, (1024, 65_520)),
    ],
)
def test_sizes_of_images_of_nemotron_equal_those_of_transformers(limits, expected):
    size_of = _function("nemotron_h_omni", "get_patch_grid_size")
    fields = ConfigFields(limits, "preprocessor_config.json")
    vision = SimpleNamespace(unit=8, patch_size=4, merge_size=2, output_size=8)
    config = resize_whole_patches(ProcessorSource(Path(), fields, fields, {}, 1), vision)
    for width, height in [size for size in SIZES if max(size) < 100 * min(size)]:
        [tile] = _tiles(random_picture(width, height), config)
        found = tile.payload.height // 4, tile.payload.width // 4
        assert found == size_of(height, width, 4, 2, *expected)
        assert tile.num_outputs == math.prod(found) // 4 <= config.num_outputs


def test_nemotron_nano_vl_2_reads_tiles_and_then_the_whole_image():
    values = {"model_type": "NemotronH_Nano_VL_V2", "image_size": 16, "max_num_tiles": 4}
    fields = ConfigFields(values | {"norm_mean": [0.1, 0.2, 0.3]}, "preprocessor_config.json")
    vision = SimpleNamespace(unit=8, patch_size=4, merge_size=2, output_size=8)
    config = resize_whole_patches(ProcessorSource(Path(), fields, fields, {}, 1), vision)
    image = random_picture(50, 22)
    start, *parts, end = [part for part in process_image(image, config) if part]
    assert (start, end) == ("<img>", "</img>")
    canvas = image.resize((32, 16), Image.Resampling.BICUBIC)
    expected = [canvas.crop((0, 0, 16, 16)), canvas.crop((16, 0, 32, 16))]
    expected.append(image.resize((16, 16), Image.Resampling.BICUBIC))
    assert [tile.payload.pixels for tile in parts] == [each.tobytes() for each in expected]
    assert {(tile.num_outputs, tile.payload.mean) for tile in parts} == {(4, (0.1, 0.2, 0.3))}


def _tiles(image, config):
    return [part for part in process_image(image, config) if isinstance(part, Tile)]


@pytest.mark.parametrize("read", [resize, resize_rounded])
def test_oblong_images_have_no_more_embeddings_than_declared(read):
    fields = ConfigFields({"min_pixels": 64, "max_pixels": 6400}, "preprocessor_config.json")
    vision = SimpleNamespace(unit=8, patch_size=4, merge_size=2, frames_per_patch=1)
    vision.output_size, vision.deepstack_layers = 8, ()
    config = read(ProcessorSource(Path(), fields, fields, {}, 1), vision)
    for size in [(3, 400), (400, 3), (190, 1), (1600, 8), (80, 80)]:
        [tile] = [part for part in resized(random_picture(*size), config) if isinstance(part, Tile)]
        assert tile.num_outputs <= config.num_outputs


def test_images_of_inkling_2_keep_their_size_and_have_checkers_behind_them():
    fields = ConfigFields({"size": {"height": 8, "width": 8}}, "preprocessor_config.json")
    vision = SimpleNamespace(unit=8, patch_size=4, merge_size=2, output_size=8)
    config = pad_whole(ProcessorSource(Path(), fields, fields, {}, 1), vision)
    for size in SIZES:
        _check_padded(random_picture(*size), config, size, tuple(side + -side % 8 for side in size))
    image = Image.new("RGBA", (17, 9), (10, 20, 30, 128))
    image.putpixel((0, 0), (10, 20, 30, 0))
    image.putpixel((8, 0), (10, 20, 30, 0))
    found = to_rgb(image, config.background)
    assert [found.getpixel(at) for at in ((0, 0), (8, 0))] == [(204,) * 3, (153,) * 3]
    for at, gray in (((1, 0), 204), ((8, 1), 153), ((16, 7), 204), ((0, 8), 153), ((8, 8), 204)):
        expected = tuple((color * 128 + gray * 127 + 127) // 255 for color in (10, 20, 30))
        assert found.getpixel(at) == expected


def test_images_of_deepseek_ocr_equal_those_of_its_authors():
    config = ViewsProcessor(
        token_id=1,
        output_size=8,
        num_outputs=300,
        resample=3,
        side=40,
        whole_side=64,
        unit=8,
        min_tiles=2,
        max_tiles=6,
        margin=(127, 127, 127),
        has_rows=True,
    )
    for size in [*SIZES, (40, 40), (41, 3), (90, 37), (150, 300), (64, 61), (1, 500)]:
        image = random_picture(*size)
        *grids, whole = views(image, config)
        assert bool(grids) == (max(size) > 40)
        if 64 * min(size) / max(size) > 0.5:
            expected = ImageOps.pad(image, (64, 64), Image.Resampling.BICUBIC, (127, 127, 127))
            assert whole.payload.pixels == expected.tobytes()
        assert (whole.num_outputs, whole.payload.is_last) == (8 * 9 + 1, True)
        for grid in grids:
            payload = grid.payload
            num_tiles, columns = payload.height // 40, payload.grid_columns
            rows = num_tiles // columns
            assert grid.num_outputs == rows * 5 * (columns * 5 + 1) <= config.num_outputs
            canvas = image.resize((columns * 40, rows * 40), Image.Resampling.BICUBIC)
            boxes = [(x, y) for y in range(0, rows * 40, 40) for x in range(0, columns * 40, 40)]
            tiles = [canvas.crop((x, y, x + 40, y + 40)).tobytes() for x, y in boxes]
            assert payload.pixels == b"".join(tiles)


def test_images_of_deepseek_vl2_equal_those_of_its_authors():
    config = RowsProcessor(
        token_id=1,
        output_size=8,
        num_outputs=100,
        resample=3,
        side=40,
        grids=((1, 1), (2, 1), (1, 2), (2, 2), (3, 1)),
        row_length=3,
        margin=(127, 127, 127),
        max_split=2,
    )
    found_grids = set()
    for size in [*SIZES, (40, 40), (41, 3), (90, 37), (150, 300), (64, 61), (1, 500), (130, 40)]:
        image = random_picture(*size)
        # The grid that keeps most of the image's pixels, and of several the one with the least area.
        kept = []
        for columns, rows in config.grids:
            scale = min(columns * 40 / image.width, rows * 40 / image.height)
            area = int(image.width * scale) * int(image.height * scale)
            kept.append((min(area, image.width * image.height), -columns * rows))
        best = config.grids[kept.index(max(kept))]
        for num_images, (columns, rows) in ((2, best), (3, (1, 1))):
            found_grids.add((columns, rows))
            tile = process_image(image, config, num_images)[1]
            assert tile.payload.grid_columns == columns
            assert tile.num_outputs == 3 * 4 + 1 + rows * 3 * (columns * 3 + 1)
            if 40 * min(size) / max(size) > 0.5:
                whole, canvas = (
                    ImageOps.pad(image, shape, Image.Resampling.BICUBIC, (127, 127, 127))
                    for shape in ((40, 40), (columns * 40, rows * 40))
                )
                boxes = [
                    (x, y) for y in range(0, rows * 40, 40) for x in range(0, columns * 40, 40)
                ]
                tiles = [canvas.crop((x, y, x + 40, y + 40)).tobytes() for x, y in boxes]
                assert tile.payload.pixels == whole.tobytes() + b"".join(tiles)
    assert len(found_grids) > 3


def test_images_of_phi3_equal_those_of_its_authors():
    config = BandsProcessor(
        token_id=1,
        output_size=8,
        num_outputs=1 + 17 * 3 * 4,
        resample=2,
        side=40,
        row_length=3,
        max_tiles=16,
    )
    for size in [*SIZES, (40, 40), (41, 3), (90, 37), (150, 300), (64, 61), (1, 500)]:
        image = random_picture(*size)
        [tile] = process_image(image, config)
        # The widest canvas of an image on its side that has enough tiles.
        width, height = max(size), min(size)
        counts = [n for n in range(1, 17) if n * math.ceil(n / (width / height)) <= 16]
        columns = next(n for n in counts if n + 1 not in counts)
        lying = image if size[0] >= size[1] else image.transpose(Image.Transpose.TRANSPOSE)
        shape = columns * 40, int(columns * 40 / (width / height))
        rows = math.ceil(shape[1] / 40)
        top = int((rows * 40 - shape[1]) / 2)
        canvas = ImageOps.expand(
            lying.resize(shape, Image.Resampling.BILINEAR),
            (0, top, 0, rows * 40 - shape[1] - top),
            (255, 255, 255),
        )
        if lying is not image:
            canvas, columns, rows = canvas.transpose(Image.Transpose.TRANSPOSE), rows, columns
        assert tile.payload.pixels == canvas.tobytes()
        assert (tile.payload.width, tile.payload.height) == canvas.size
        assert tile.num_outputs == rows * 3 * (columns * 3 + 1) + 1 + 3 * 4 <= config.num_outputs
    with pytest.raises(ValueError, match="the longer side may be at most 640 times"):
        process_image(random_picture(1, 700), config)


def test_an_error_names_the_size_of_an_image_before_it_grows():
    limits = {"unit": 8, "min_pixels": 64, "max_pixels": 4096, "num_outputs": 64}
    config = ResizeProcessor(token_id=1, output_size=8, resample=3, grows="round", **limits)
    with pytest.raises(ValueError, match="it has 3000 x 5 pixels, and one side"):
        process_image(Image.new("RGB", (3000, 5)), config)
