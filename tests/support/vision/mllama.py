"""A tiny random Llama 3.2 Vision, and the log-probabilities of transformers for its prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from support.checkpoints.tiny import sentencepiece_tokenizer
from support.families import SMALL
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

IMAGE = "<|image|>"
NUM_TOKENS = len(sentencepiece_tokenizer())
IMAGE_ID = NUM_TOKENS
TILE = 24
VISION = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "attention_heads": 4,
    "num_hidden_layers": 3,
    "num_global_layers": 2,
    "intermediate_layers_indices": [0, 1],
    "vision_output_dim": 144,
    "image_size": TILE,
    "patch_size": 4,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}"
    + IMAGE
    + "{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def mllama_directory(path: Path) -> tuple[Path, Any]:
    """Write the model and its tokenizer, whose last token represents images. Return the directory and the model."""
    tokenizer = sentencepiece_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    tokenizer.save_pretrained(path)
    text = SMALL | {"vocab_size": NUM_TOKENS, "num_hidden_layers": 4}
    text |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
    config = transformers.MllamaConfig(
        vision_config=VISION,
        text_config=text | {"cross_attention_layers": [1, 3], "pad_token_id": 0},
        image_token_index=IMAGE_ID,
    )
    torch.manual_seed(0)
    model = transformers.MllamaForConditionalGeneration(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.2)
    model.eval().save_pretrained(path)
    processor = {"size": {"height": TILE, "width": TILE}, "max_image_tiles": 4}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    _mask_rows_without_images(model)
    return path, model


def _mask_rows_without_images(model: Any) -> None:
    """Make tokens without an image before them read nothing, as in the published code.

    In transformers 5.24 they read all images, also later ones, although only in the attention.
    """
    for layer in model.model.language_model.layers:
        if hasattr(layer, "cross_attn"):
            masks: list[torch.Tensor] = []
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, masks=masks: masks.append(
                    kwargs["full_text_row_masked_out_mask"]
                ),
                with_kwargs=True,
            )
            layer.cross_attn.register_forward_hook(
                lambda _, args, output, masks=masks: (output[0] * masks[-1][:, 0], *output[1:])
            )


def next_logprobs(model: Any, tokens: Sequence[int], pictures: Sequence[Image.Image]) -> Any:
    """Return transformers' log-probabilities of the token after a prompt with images, float32 [tokens]."""
    arguments: dict[str, Any] = {}
    if pictures:
        processor = MllamaImageProcessorPil(size={"height": TILE, "width": TILE})
        arguments = dict(processor([list(pictures)], return_tensors="pt"))
        masks = [get_cross_attention_token_mask(list(tokens), IMAGE_ID)]
        tiles = arguments.pop("num_tiles")
        dense = convert_sparse_cross_attention_mask_to_dense(masks, tiles, 4, len(tokens))
        arguments["cross_attention_mask"] = torch.from_numpy(np.asarray(dense))
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(tokens)]), **arguments).logits[0, -1]
    return logits.log_softmax(-1).numpy()
