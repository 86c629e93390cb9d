"""Pix2Struct of transformers, whose decoder reads an image of any size by cross attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image, ImageFont
from support.checkpoints.tiny import sentencepiece_tokenizer
from support.own_code.model import fill

_SIDE = 4
_MAX_PATCHES = 30
_SIZES = {"hidden_size": 48, "d_kv": 12, "d_ff": 80}


class Pix2Struct:
    """A checkpoint, and transformers' processor and model of it."""

    def __init__(self, directory: Path, *, is_tied: bool = False, is_vqa: bool = False) -> None:
        self.tokenizer = sentencepiece_tokenizer()
        config = transformers.Pix2StructConfig(
            vision_config=_SIZES
            | {"num_hidden_layers": 2, "num_attention_heads": 4, "seq_len": 40}
            | {"patch_embed_hidden_size": 3 * _SIDE**2},
            text_config=_SIZES
            | {"num_layers": 2, "num_heads": 4, "vocab_size": len(self.tokenizer)}
            | {"tie_word_embeddings": is_tied},
            tie_word_embeddings=is_tied,
        )
        self.model = transformers.Pix2StructForConditionalGeneration(config)
        fill(self.model)
        self.model.save_pretrained(directory)
        self.processor = transformers.Pix2StructImageProcessorPil(
            patch_size={"height": _SIDE, "width": _SIDE}, max_patches=_MAX_PATCHES, is_vqa=is_vqa
        )
        self._font = directory / "Arial.TTF"
        if is_vqa:
            # The font that comes with Pillow.
            font: Any = ImageFont.load_default(36)
            self._font.write_bytes(font.font_bytes)
        self.processor.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)

    @torch.inference_mode()
    def logprobs(
        self, image: Image.Image, text: str, written: list[int]
    ) -> tuple[list[int], torch.Tensor]:
        """Return the tokens of the decoder's prompt, and the log-probabilities at the places of `written`."""
        prompt = [0, *self.tokenizer.encode(text, add_special_tokens=False)]
        if self.processor.is_vqa:
            # Its caller cannot name a font.
            pixels = np.asarray(image).transpose(2, 0, 1)
            drawn = self.processor.render_header(pixels, text, font_path=str(self._font))
            image, prompt = Image.fromarray(drawn.transpose(1, 2, 0)), [0]
        inputs = self.processor(image, return_tensors="pt", is_vqa=False)
        tokens = torch.tensor([[*prompt, *written[:-1]]])
        logits = self.model(**inputs, decoder_input_ids=tokens).logits[0, len(prompt) - 1 :]
        return prompt, logits.log_softmax(-1)
