"""Measure the time from an image to the first token, compared with transformers in the same run.

    scripts/bench/run images [--rounds 3] [--width 1024] [--height 768]

The model has the shape of SmolVLM-256M and random weights. "tiles" is an image as the model reads it by default, and
"whole" one that is not split (--mm-processor-kwargs '{"do_image_splitting": false}').
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine import LLM, SamplingParams
from PIL import Image
from support.media.image_processors import image_processor
from support.vision.checkpoints import vision_directory

TOWER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
}
DECODER = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "vocab_size": 49280,
    "model_type": "llama",
}
PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def random_image(seed: int, width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def seconds_of_engine(llm: LLM, image: Image.Image) -> tuple[float, list[int]]:
    """Return the seconds from sending an image to the first token, and the prompt's token ids."""
    content = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "the fox"}]
    start = time.perf_counter()
    [output] = llm.chat([{"role": "user", "content": content}], PARAMS)
    return time.perf_counter() - start, output.prompt_token_ids


@torch.inference_mode()
def seconds_of_transformers(
    model: Any, processor: Any, image: Image.Image, prompt: list[int]
) -> float:
    """Return the seconds that transformers takes to process the image and compute the prompt's logits."""
    start = time.perf_counter()
    pixels = processor([[image]], return_tensors="pt")["pixel_values"]
    model(input_ids=torch.tensor([prompt]), pixel_values=pixels, logits_to_keep=1)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--height", type=int, default=768)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path, model = vision_directory(
            Path(directory), "smolvlm", tower=TOWER, decoder=DECODER, factor=4
        )
        for kind, fields in (("tiles", {}), ("whole", {"do_image_splitting": False})):
            processor = image_processor(path, "smolvlm", **fields)
            seconds: dict[str, list[float]] = {"new": [], "again": [], "transformers": []}
            with LLM(str(path), dtype="float32", mm_processor_kwargs=fields) as llm:
                for round_ in range(args.rounds + 1):
                    image = random_image(round_, args.width, args.height)
                    new, prompt = seconds_of_engine(llm, image)
                    again, _ = seconds_of_engine(llm, image)
                    theirs = seconds_of_transformers(model, processor, image, prompt)
                    if round_:
                        for name, value in (
                            ("new", new),
                            ("again", again),
                            ("transformers", theirs),
                        ):
                            seconds[name].append(value)
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            print(
                f"{kind:6} {len(prompt):5} tokens  new {medians['new']:6.2f} s  again {medians['again']:6.3f} s  "
                f"transformers {medians['transformers']:6.2f} s  "
                f"ratio {medians['transformers'] / medians['new']:.2f}"
            )


if __name__ == "__main__":
    main()
