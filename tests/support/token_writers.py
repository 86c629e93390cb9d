"""Tiny random Parakeets as files on disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from support.source_checkpoints import MODELS, write_letters


def parakeet_directory(directory: Path, kind: str) -> tuple[Path, Any]:
    """Write a Parakeet ("CTC", "RNNT" or "TDT") with a tokenizer. Return its directory and transformers' model."""
    ids = write_letters(directory, ("<pad>", "<blank>"), "<pad>")
    # Parakeet CTC has no token for padding beside the blank.
    blank = "pad_token_id" if kind == "CTC" else "blank_token_id"
    special = {"pad_token_id": ids["<pad>"], blank: ids["<blank>"]}
    decoder = {"decoder_hidden_size": 24} if kind != "CTC" else {}
    encoder = MODELS["canary"][1]["encoder_config"] | {"scale_input": True}
    config = getattr(transformers, f"Parakeet{kind}Config")(
        vocab_size=1 + max(ids.values()), encoder_config=encoder, **special, **decoder
    )
    torch.manual_seed(0)
    model = (
        getattr(transformers, f"ParakeetFor{kind}")
        ._from_config(config, attn_implementation="eager")
        .eval()
    )
    for name, parameter in model.named_parameters():
        if not re.search(r"norm\w*\.weight|bias$", name):
            torch.nn.init.normal_(parameter, 0, 0.5)
    for name, buffer in model.named_buffers():
        if "running_" in name:
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    with torch.no_grad():
        # Most rows have no token, as those of speech.
        head = model.ctc_head if kind == "CTC" else model.joint.head
        head.bias[ids["<blank>"]] += 3
    if kind != "CTC":
        model.generation_config.decoder_start_token_id = ids["<blank>"]
    model.save_pretrained(directory)
    transformers.ParakeetFeatureExtractor(feature_size=16).save_pretrained(directory)
    return directory, model
