"""Measure vision towers on a CPU, native and in torch, in alternation with transformers.

    scripts/bench/run towers [smolvlm llava-clip …] [--rounds 5] [--layers 4] [--threads 2]

Towers have the shapes of well-known models, but only some of the layers, and random weights in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from engine.frontend.media.layouts.pixels import Tile
from engine.frontend.media.processor import process_image
from engine.frontend.model_source.images.read import read_image_processor
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.checkpoint.vision.read import vision_spec
from engine.protocol.encoder_inputs.payloads import ImagePayload
from engine.workers.cpu.tower_layers import NativeLayers
from engine.workers.loaders.open_checkpoint import open_checkpoint
from engine.workers.towers.image_tower import TowerSource
from engine.workers.towers.layers import TorchLayers
from engine.workers.towers.make_tower import make_tower
from PIL import Image
from side_by_side.rounds import alternate
from support.vision.checkpoints import vision_directory
from support.vision.qwen import QWEN_MODELS, qwen_directory, qwen_image_processor

CPU = torch.device("cpu")


class Shape(NamedTuple):
    """The sizes of a tower, and the width and height of the image."""

    hidden: int
    intermediate: int
    heads: int
    patch: int
    image: tuple[int, int]


SHAPES = {
    "smolvlm": Shape(768, 3072, 12, 16, (512, 512)),
    "llava-clip": Shape(1024, 4096, 16, 14, (336, 336)),
    "internvl": Shape(1024, 4096, 16, 14, (448, 448)),
    "pixtral": Shape(1024, 4096, 16, 16, (512, 384)),
    "gemma4": Shape(768, 3072, 12, 16, (512, 384)),
    "qwen2_5_vl": Shape(1280, 3420, 16, 14, (560, 420)),
    "qwen3_vl": Shape(1024, 4096, 16, 16, (512, 384)),
}
"""SmolVLM-256M, LLaVA 1.5, InternVL 3, Pixtral, Gemma 4 E2B, Qwen2.5-VL and Qwen3-VL-2B."""


def random_image(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def write_model(directory: Path, kind: str, num_layers: int) -> tuple[Path, Any]:
    shape = SHAPES[kind]
    if kind in QWEN_MODELS:
        size = "embed_dim" if kind == "qwen2_vl" else "hidden_size"
        tower = {
            size: shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_heads": shape.heads,
            "depth": num_layers,
            "patch_size": shape.patch,
            "window_size": 112,
            "fullatt_block_indexes": [num_layers - 1],
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [0],
        }
        path, model = qwen_directory(directory, kind, tower)
        file = path / "preprocessor_config.json"
        fields = json.loads(file.read_text()) | {"max_pixels": 1 << 22}
        file.write_text(json.dumps(fields))
        return path, model
    sizes = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        # LLaVA's features come from the last layer but one.
        "num_hidden_layers": num_layers + kind.startswith("llava"),
        "num_attention_heads": shape.heads,
        "image_size": shape.image[0],
        "patch_size": shape.patch,
    }
    return vision_directory(directory, kind, tower=sizes)


def reference(
    kind: str, path: Path, model: Any, image: Image.Image, tile: ImagePayload
) -> Callable[[], Any]:
    """Return a function that computes the features of an image with transformers."""
    if kind in QWEN_MODELS:
        inputs = qwen_image_processor(path)([image], return_tensors="pt")
        return lambda: model.model.get_image_features(
            inputs["pixel_values"], inputs["image_grid_thw"]
        )
    frame = np.frombuffer(tile.pixels, np.uint8).reshape(tile.height, tile.width, 3)
    pixels = torch.from_numpy(frame.transpose(2, 0, 1).astype(np.float32) / 127.5 - 1)
    if kind == "smolvlm":
        return lambda: model.model.get_image_features(pixels[None, None])
    if kind == "pixtral":
        sizes = torch.tensor([[tile.height, tile.width]])
        return lambda: model.model.get_image_features(pixels[None], image_sizes=sizes)
    if kind == "gemma4":
        size = SHAPES[kind].patch
        patches = pixels.div(2).add(0.5).unflatten(1, (-1, size)).unflatten(3, (-1, size))
        patches = patches.permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)
        rows, columns = tile.height // size, tile.width // size
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
        return lambda: model.model.get_image_features(patches[None], places[None])
    return lambda: model.model.get_image_features(pixels[None])


def time_run(run: Callable[[], Any], threads: int) -> float:
    """Return the seconds of a call."""
    torch.set_num_threads(threads)
    start = time.perf_counter()
    with torch.inference_mode():
        run()
    return time.perf_counter() - start


def measure(kind: str, directory: Path, num_layers: int, rounds: int, threads: int) -> None:
    path, model = write_model(directory, kind, num_layers)
    image = random_image(*SHAPES[kind].image)
    config = ConfigFields.read(path / "config.json")
    text = config.section("text_config")
    assert text is not None
    processor = read_image_processor(path, config, text, {"do_image_splitting": False})
    assert processor is not None
    parts = process_image(image, processor)
    [tile, *_] = [part.payload for part in parts if isinstance(part, Tile)]
    assert isinstance(tile, ImagePayload)
    spec = vision_spec(config, text.integer("hidden_size"))
    checkpoint = open_checkpoint(path)
    runs: dict[str, Callable[[], Any]] = {}
    for name, make in (
        ("native", partial(NativeLayers, num_threads=threads)),
        ("torch", TorchLayers),
    ):
        tower = make_tower(spec, TowerSource(checkpoint, CPU, torch.float32, threads, make))
        runs[name] = partial(tower, tile)
    runs["transformers"] = reference(kind, path, model, image, tile)
    seconds = alternate(
        {name: partial(time_run, run, threads) for name, run in runs.items()}, rounds
    )
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    shown = "  ".join(f"{name} {1000 * value:7.1f} ms" for name, value in medians.items())
    ratio = medians["transformers"] / medians["native"]
    print(f"{kind:12} {shown}  ratio {ratio:.2f}  load {os.getloadavg()[0]:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "kinds", nargs="*", default=list(SHAPES), help="towers to measure (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as directory:
            measure(kind, Path(directory), args.layers, args.rounds, args.threads)


if __name__ == "__main__":
    main()
