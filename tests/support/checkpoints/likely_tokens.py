"""Which tokens a model of transformers would generate, from one pass over tokens that are to be compared with them."""

from __future__ import annotations

import torch
import transformers


def likely_tokens(
    model: transformers.PreTrainedModel, prompt: list[int], tokens: list[int]
) -> list[int]:
    """Return the most likely token after the prompt, and after each of `tokens` but the last.

    They equal `tokens` if, and only if, greedy generation would give `tokens`. That would take one pass for each.
    """
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    return logits.argmax(-1).tolist()
