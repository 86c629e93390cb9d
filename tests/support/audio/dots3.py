"""A tiny random dots3-note, which reads images and audio clips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from support.vision.grid_configs import image_config

IMAGE = "<|imgpad|>"


def dots3_model(tokenizer: Any, audio_token_id: int, window_s: int) -> Any:
    """Return a model with windows of this length, and add its token of images to the tokenizer."""
    tokenizer.add_tokens([IMAGE], special_tokens=True)
    tokenizer.chat_template = tokenizer.chat_template.replace("<image>", IMAGE)
    config = image_config("dots3_note")
    config.text_config.vocab_size = len(tokenizer)
    config.text_config.max_position_embeddings = 512
    config.audio_token_id = audio_token_id
    config.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE)
    config.audio_config.chunk_seconds = window_s
    return transformers.Dots3NoteForConditionalGeneration(config)


def add_image_processor(directory: Path) -> None:
    """Add the fields of images to the file of the processor in a directory."""
    file = directory / "preprocessor_config.json"
    images = {"min_pixels": 256, "max_pixels": 8192, "patch_size": 4, "merge_size": 2}
    images |= {"temporal_patch_size": 1, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    file.write_text(json.dumps(json.loads(file.read_text()) | images))
