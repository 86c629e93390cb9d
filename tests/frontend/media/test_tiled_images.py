"""Images of models that split them are resized, split and put into prompts as by transformers."""

import ast
import functools
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import transformers
from engine.frontend.media.frame_sampling import Sampling, sample_frames
from engine.frontend.media.layouts.covers import cover
from engine.frontend.media.layouts.frames import fit_frames
from engine.frontend.media.layouts.grids import canvas, views
from engine.frontend.media.layouts.pixels import Tile
from engine.frontend.media.layouts.single_frames import single_frames
from engine.frontend.media.layouts.slices import slices
from engine.frontend.media.layouts.thumbnails import thumbnail
from engine.frontend.media.layouts.tiles import mosaic
from engine.frontend.media.media_reader import MediaReader, ReaderConfig
from engine.frontend.media.processor import process_image
from engine.frontend.media.video_files import open_video
from engine.frontend.model_source.images.read import read_image_processor
from engine.frontend.model_source.images.videos import read_video_processor
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.config.images.details import (
    CutsProcessor,
    SlicesProcessor,
    ThumbnailProcessor,
    ViewsProcessor,
)
from engine.protocol.config.images.tiles import CoverProcessor, MosaicProcessor
from PIL import Image, ImageOps
from support.media.image_marks import COHERE_MARKS
from support.own_code.own_towers.perception_lm import perception_lm
from support.vision.checkpoints import vision_directory
from transformers.models.cohere2_vision.processing_cohere2_vision import Cohere2VisionProcessor
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
    DeepseekOcr2ImageProcessorPil,
)
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil
from transformers.models.ovis2.processing_ovis2 import Ovis2Processor
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

pytestmark = pytest.mark.slow

LIMITS = {
    "downsample_factor": 2,
    "min_image_tokens": 4,
    "max_image_tokens": 20,
    "encoder_patch_size": 4,
}
CONFIG = ThumbnailProcessor(
    token_id=1,
    output_size=8,
    num_outputs=20,
    resample=2,
    unit=8,
    patch_size=4,
    min_outputs=4,
    max_outputs=20,
    side=32,
    min_tiles=2,
    max_tiles=6,
    tolerance=2.0,
    start="<|image_start|>",
    end="<|image_end|>",
    before_whole="<|img_thumbnail|>",
)


def _functions(kind):
    """Return functions and methods of the module of a processor, whose class needs torchvision."""
    directory = Path(transformers.__file__).parent / "models" / kind
    tree = ast.parse((directory / f"image_processing_{kind}.py").read_text())
    known = {"math": math, "np": np}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list, node.returns = [], None
            for argument in (*node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
            if node.args.kwarg is not None:
                node.args.kwarg.annotation = None
            exec(ast.unparse(node), known)
    return known


def _expected(image, known):
    """Return the size, the grid and the text that the processor of transformers gives an image."""
    width, height = image.size
    state = SimpleNamespace(_target_ratios=lambda *limits: known["_target_ratios"](None, *limits))
    size = known["smart_resize"](None, height, width, **LIMITS)
    limits = {name: LIMITS[name] for name in LIMITS if name != "min_image_tokens"}
    rows = columns = 1
    if known["_is_image_too_large"](None, height, width, max_pixels_tolerance=2.0, **limits):
        columns, rows, *_ = known["_get_grid_layout"](state, height, width, 2, 6, 32)
    names = {"image": "<image>", "image_start": CONFIG.start, "image_end": CONFIG.end}
    names["image_thumbnail"] = CONFIG.before_whole
    marks = SimpleNamespace(**{f"{name}_token": mark for name, mark in names.items()})
    num_outputs = size[0] * size[1] // 64
    text = vars(Lfm2VlProcessor)["_build_image_tokens"](
        marks, rows, columns, 16, num_outputs, True, True
    )
    return size, (columns, rows), text


def test_images_of_lfm2_equal_those_of_transformers():
    known, rng = _functions("lfm2_vl"), random.Random(1)
    sizes = [(1, 1), (3, 2000), (4000, 2), (64, 64)]
    sizes += [(rng.randrange(1, 300), rng.randrange(1, 300)) for _ in range(100)]
    for width, height in sizes:
        pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
        image = Image.fromarray(pixels)
        whole, (columns, rows), text = _expected(image, known)
        parts = thumbnail(image, CONFIG)
        found = "".join(
            "<image>" * part.num_outputs if isinstance(part, Tile) else part for part in parts
        )
        assert found == text, (width, height)
        tiles = [part.payload for part in parts if isinstance(part, Tile)]
        assert (tiles[-1].width, tiles[-1].height) == whole
        expected = [np.asarray(image.resize(whole, Image.Resampling.BILINEAR))]
        if columns * rows > 1:
            canvas = np.asarray(image.resize((32 * columns, 32 * rows), Image.Resampling.BILINEAR))
            grid = canvas.reshape(rows, 32, columns, 32, 3).swapaxes(1, 2).reshape(-1, 32, 32, 3)
            expected = [*grid, *expected]
        assert [tile.pixels for tile in tiles] == [each.tobytes() for each in expected]


def test_images_of_cohere_equal_those_of_transformers(tmp_path):
    path, _ = vision_directory(tmp_path, "cohere2_vision")
    config = ConfigFields.read(path / "config.json")
    processor = read_image_processor(path, config, config.section("text_config"), {})
    choose = _functions("cohere2_vision")["get_optimal_tiled_canvas"]
    marks = SimpleNamespace(**{f"{name}_token": mark for name, mark in COHERE_MARKS.items()})
    # The square root of the embeddings of a tile.
    marks.patch_size = 4
    rng = random.Random(1)
    sizes = [(1, 1), (64, 64), (128, 64), (65, 63), (1000, 3), (5, 800)]
    sizes += [(rng.randrange(1, 600), rng.randrange(1, 600)) for _ in range(100)]
    for width, height in sizes:
        image = Image.new("RGB", (width, height), (200, 100, 50))
        columns, rows = choose((height, width), (64, 64), 1, 6)
        num_tiles = columns * rows + (columns * rows > 1)
        parts = canvas(image, processor)
        text = "".join(
            COHERE_MARKS["image"] * part.num_outputs if isinstance(part, Tile) else part
            for part in parts
        )
        inputs = {"num_patches": [num_tiles]}
        assert text == Cohere2VisionProcessor.replace_image_token(marks, inputs, 0)
        tiles = [part for part in parts if isinstance(part, Tile)]
        assert {(tile.payload.width, tile.payload.height) for tile in tiles} == {(64, 64)}


@pytest.mark.parametrize("splits", [True, False])
def test_images_of_deepseek_equal_those_of_transformers(splits):
    config = ViewsProcessor(
        token_id=1,
        output_size=8,
        num_outputs=65,
        resample=3,
        side=48,
        whole_side=64 if splits else 48,
        unit=8,
        splits=splits,
        min_tiles=2,
        max_tiles=6,
        margin=(127, 100, 90),
    )
    reference = DeepseekOcr2ImageProcessorPil(
        size={"height": 64, "width": 64},
        tile_size=48,
        crop_to_patches=splits,
        background_color=[127, 100, 90],
    )
    rng = random.Random(1)
    sizes = [(1, 1), (48, 48), (49, 20), (64, 64), (96, 48), (48, 97), (300, 2)]
    sizes += [(rng.randrange(1, 300), rng.randrange(1, 300)) for _ in range(40)]
    for width, height in sizes:
        # Transformers cannot resize to a side without pixels.
        if round(min(width, height) * config.whole_side / max(width, height)) == 0:
            continue
        pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
        image = Image.fromarray(pixels)
        expected = reference(image, return_tensors="np")
        *tiles, whole = views(image, config)
        assert [len(tiles)] == expected["num_local_patches"].tolist()
        assert [tile.num_outputs for tile in tiles] == [36] * len(tiles)
        assert whole.num_outputs == (config.whole_side // 8) ** 2 + 1
        assert [tile.payload.is_last for tile in (*tiles, whole)] == [False] * len(tiles) + [True]
        values = [*expected.get("pixel_values_local", ()), *expected["pixel_values"]]
        for tile, value in zip((*tiles, whole), values, strict=True):
            payload = tile.payload
            found = np.frombuffer(payload.pixels, np.uint8)
            found = found.reshape(payload.height, payload.width, 3).transpose(2, 0, 1)
            np.testing.assert_allclose((found / 255 - 0.5) / 0.5, value, atol=1e-6)


def test_images_of_minicpm_equal_those_of_transformers():
    names = {"image_start": "<image>", "image_end": "</image>"}
    names |= {"slice_start": "<slice>", "slice_end": "</slice>"}
    config = SlicesProcessor(
        token_id=1, output_size=8, num_outputs=64, resample=3, side=64, unit=16, max_slices=5
    )
    config = msgspec.structs.replace(
        config,
        start=names["image_start"],
        end=names["image_end"],
        slice_start=names["slice_start"],
        slice_end=names["slice_end"],
    )
    marks = SimpleNamespace(
        slice_mode=True, image_token="<pad>", **{f"{name}_token": names[name] for name in names}
    )
    reference = MiniCPMV4_6ImageProcessorPil(patch_size=4, scale_resolution=64, max_slice_nums=5)
    rng = random.Random(1)
    sizes = [(1, 1), (64, 64), (128, 64), (65, 63), (1000, 5), (5, 800), (640, 640)]
    sizes += [(rng.randrange(1, 300), rng.randrange(1, 300)) for _ in range(60)]
    for width, height in sizes:
        pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
        image = Image.fromarray(pixels)
        expected = reference(image, return_tensors="np")
        text = vars(MiniCPMV4_6Processor)["replace_image_token"](
            marks, expected, 0, image_token_divisor=16
        )
        parts = slices(image, config)
        found = "".join(
            "<pad>" * part.num_outputs if isinstance(part, Tile) else part for part in parts
        )
        assert found == text, (width, height)
        tiles = [part.payload for part in parts if isinstance(part, Tile)]
        sides = [[tile.height // 4, tile.width // 4] for tile in tiles]
        assert sides == expected["target_sizes"].tolist()
        patches = []
        for tile in tiles:
            cells = np.frombuffer(tile.pixels, np.uint8).reshape(tile.height, tile.width, 3)
            cells = cells.transpose(2, 0, 1).reshape(3, tile.height // 4, 4, -1, 4)
            patches.append(cells.transpose(0, 2, 1, 3, 4).reshape(3, 4, -1))
        values = (np.concatenate(patches, -1) / 255 - 0.5) / 0.5
        np.testing.assert_allclose(values, expected["pixel_values"][0], atol=1e-6)


@pytest.mark.parametrize("covers", [True, False])
def test_images_of_ovis_equal_those_of_transformers(covers):
    config = CoverProcessor(
        token_id=1,
        output_size=8,
        num_outputs=9,
        resample=3,
        side=48,
        covers=covers,
        max_tiles=6,
        mark_ids=(2, 3, 4, 5, 6),
        mark_texts=("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
    )
    reference = Ovis2ImageProcessorPil(
        size={"height": 48, "width": 48},
        crop_to_patches=True,
        max_patches=6,
        use_covering_area_grid=covers,
        do_rescale=False,
        do_normalize=False,
    )
    reader = MediaReader(ReaderConfig(config, None, "<IMG_ATOM>", "", ("", ""), 100))
    rng = random.Random(1)
    sizes = [(1, 1), (48, 48), (49, 20), (96, 48), (48, 97), (300, 2), (3, 500), (640, 640)]
    sizes += [(rng.randrange(1, 300), rng.randrange(1, 300)) for _ in range(60)]
    for width, height in sizes:
        pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
        image = Image.fromarray(pixels)
        expected = reference(image, return_tensors="np")
        marks = SimpleNamespace(image_seq_length=9)
        text = Ovis2Processor.replace_image_token(marks, expected, 0)
        prepared = reader.prepare_image(image)
        assert prepared.text == text, (width, height)
        assert sum(item.num_tokens for item in prepared.inputs) == text.count("<")
        tiles = [part.payload for part in cover(image, config)]
        for tile, value in zip(tiles, expected["pixel_values"], strict=True):
            found = np.frombuffer(tile.pixels, np.uint8).reshape(48, 48, 3)
            np.testing.assert_array_equal(found.transpose(2, 0, 1), value)


def test_images_of_llama_3_2_equal_those_of_transformers():
    config = MosaicProcessor(
        token_id=1, output_size=8, num_outputs=40, resample=2, side=48, max_tiles=4
    )
    reference = MllamaImageProcessorPil(
        size={"height": 48, "width": 48}, do_rescale=False, do_normalize=False
    )
    grids = [(rows, columns) for rows in range(1, 5) for columns in range(1, 4 // rows + 1)]
    rng = random.Random(1)
    sizes = [(1, 1), (48, 48), (49, 20), (96, 48), (48, 97), (300, 2), (3, 500), (640, 640)]
    sizes += [(rng.randrange(1, 300), rng.randrange(1, 300)) for _ in range(60)]
    for width, height in sizes:
        pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
        image = Image.fromarray(pixels)
        expected = reference(image, return_tensors="np")
        [[num_tiles]] = expected["num_tiles"]
        [tile] = mosaic(image, config)
        payload = tile.payload
        assert (tile.num_outputs, payload.height) == (10 * num_tiles, 48 * num_tiles)
        grid = num_tiles // payload.grid_columns, payload.grid_columns
        assert grids.index(grid) + 1 == expected["aspect_ratio_ids"][0, 0]
        found = np.frombuffer(payload.pixels, np.uint8).reshape(num_tiles, 48, 48, 3)
        values = expected["pixel_values"][0, 0, :num_tiles]
        np.testing.assert_array_equal(found.transpose(0, 3, 1, 2), values)


def test_squares_of_step_equal_those_of_transformers():
    source = Path(transformers.__file__).parent / "models/step3p7/image_processing_step3p7.py"
    known = {}
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in (
            "_plan_patches",
            "_is_extreme_aspect",
        ):
            node.decorator_list = []
            exec(ast.unparse(node), known)
    owner = SimpleNamespace(_is_extreme_aspect=known["_is_extreme_aspect"], max_image_size=302)
    config = CutsProcessor(
        token_id=1,
        output_size=8,
        num_outputs=9,
        resample=2,
        side=72,
        cut_side=50,
        cut_outputs=4,
        longest=302,
        start="<",
        end=">",
        cut_start="(",
        cut_end=")",
        row_end=";",
    )
    sizes = [(64, 64), (30, 20), (200, 150), (151, 333), (400, 40), (40, 330), (7, 90), (1, 1)]
    for size in sizes:
        pixels = np.random.default_rng(size[0]).integers(0, 256, (*size[::-1], 3), np.uint8)
        image = Image.fromarray(pixels)
        shape, cut_shape, cut, columns, rows, is_narrow = known["_plan_patches"](
            owner, *size, 72, 50
        )
        if is_narrow:
            image = ImageOps.expand(image, (0, 0, max(size) - size[0], max(size) - size[1]))
        expected = []
        if cut:
            canvas = image.resize(cut_shape, Image.Resampling.BILINEAR)
            boxes = [
                (x, y, min(x + cut, canvas.width), min(y + cut, canvas.height))
                for y in range(0, canvas.height, cut)
                for x in range(0, canvas.width, cut)
            ]
            expected = [canvas.crop(b).resize((50, 50), Image.Resampling.BILINEAR) for b in boxes]
        whole = image.resize(shape, Image.Resampling.BILINEAR)
        expected.append(whole.resize((72, 72), Image.Resampling.BILINEAR))
        parts = process_image(Image.fromarray(pixels), config)
        tiles = [part.payload.pixels for part in parts if isinstance(part, Tile)]
        assert tiles == [each.tobytes() for each in expected], size
        row = "(.)" * columns
        text = "".join(part if isinstance(part, str) else "." for part in parts)
        assert text == ";".join([row] * rows if cut else []) + "<.>"


@pytest.mark.parametrize("kind", ["thumb+tile", "vanilla"])
def test_images_of_perception_lm_equal_those_of_transformers(tmp_path, kind):
    perception_lm(tmp_path)
    config = ConfigFields.read(tmp_path / "config.json")
    settings = {"vision_input_type": kind, "max_num_tiles": 6}
    processor = read_image_processor(tmp_path, config, config.section("text_config"), settings)
    # The module itself needs torchvision.
    models = Path(transformers.__file__).parent / "models"
    source = models / "perception_lm/image_processing_perception_lm.py"
    tree = ast.parse(source.read_text())
    [own] = [node for node in tree.body if isinstance(node, ast.ClassDef) and len(node.body) > 9]
    own.body = [
        node
        for node in own.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith(("_f", "_get_image"))
    ]
    own.bases, own.decorator_list = [], []
    known = {"math": math, "reduce": functools.reduce}
    exec(compile(ast.Module([own], []), source, "exec"), known)
    reference = known["PerceptionLMImageProcessor"]()
    reference.max_num_tiles = 6
    rng = random.Random(1)
    sizes = [(1, 1), (20, 20), (21, 8), (40, 20), (20, 41), (300, 2), (3, 500), (640, 640)]
    sizes += [(rng.randrange(1, 150), rng.randrange(1, 150)) for _ in range(60)]
    for width, height in sizes:
        pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
        image = Image.fromarray(pixels)
        grid = reference._fit_image_to_canvas(width, height, 20)  # noqa: SLF001
        grid = grid or reference._find_closest_aspect_ratio(width, height, 20)  # noqa: SLF001
        expected = [image.resize((20, 20), Image.Resampling.BICUBIC)]
        if kind == "thumb+tile":
            columns, rows = grid
            whole = image.resize((columns * 20, rows * 20), Image.Resampling.BICUBIC)
            corners = [(20 * x, 20 * y) for y in range(rows) for x in range(columns)]
            expected += [whole.crop((x, y, x + 20, y + 20)) for x, y in corners]
        parts = process_image(image, processor)
        assert [part.payload.pixels for part in parts] == [tile.tobytes() for tile in expected]
        assert {(part.num_outputs, part.payload.mean[0]) for part in parts} == {(4, 0.5)}


def test_each_frame_of_perception_lm_is_one_tile(tmp_path):
    perception_lm(tmp_path)
    sizes = {"size": {"height": 20, "width": 20}}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(sizes))
    config = ConfigFields.read(tmp_path / "config.json")
    processor = read_video_processor(tmp_path, config, config.section("text_config"), {})
    pixels = np.random.default_rng(1).integers(0, 256, (40, 30, 50, 3), np.uint8)
    frames = [Image.fromarray(frame) for frame in pixels]
    fit = functools.partial(fit_frames, config=processor, max_outputs=1000)
    video = open_video(frames, Sampling(2.0), "v", processor, fit)
    tiles = [part for part in single_frames(video, processor) if isinstance(part, Tile)]
    resized = [frame.resize((20, 20), Image.Resampling.BICUBIC) for frame in frames]
    assert [tile.payload.pixels for tile in tiles] == [each.tobytes() for each in resized]
    assert {(tile.num_outputs, tile.payload.mean[0]) for tile in tiles} == {(4, 0.5)}
    assert processor.token_id == config.integer("video_token_id")
    metadata = VideoMetadata(total_num_frames=90, fps=30.0, duration=3.0)
    expected = default_sample_indices_fn(metadata, num_frames=32)
    assert sample_frames(90, 30.0, processor) == expected.tolist()
