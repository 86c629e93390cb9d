"""Choices where transformers has none, has several, or has another one; see docs/numerics.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import assert_same, expected_logits, make_reference, prompt, save_reference
from support.workers.decoders import Runner, load_decoder, load_native_decoder
from torch import Tensor

pytestmark = pytest.mark.slow

LOADERS = pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4}
SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [1.5, 2.5, 3.5, 4.5]


class _FirstOfEqual(torch.overrides.TorchFunctionMode):
    """Lets `topk` choose the first of equal numbers, where torch chooses any of them."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (Tensor.topk, torch.topk):
            numbers, count = args[0], args[1] if len(args) > 1 else kwargs["k"]
            ordered, indices = torch.sort(numbers, dim=-1, descending=True, stable=True)
            kind = torch.return_types.topk
            return kind((ordered[..., :count], indices[..., :count]))
        return function(*args, **kwargs or {})


@LOADERS
def test_first_of_keys_with_equal_scores_is_chosen(tmp_path: Path, load: Any) -> None:
    """With a single head, the scores of half of all keys are zero."""
    reference = make_reference("glm5", index_n_heads=1)
    save_reference(reference, tmp_path)
    tokens = prompt(60)
    with _FirstOfEqual():
        expected = expected_logits(reference, tokens)
    # Otherwise, this test shows nothing.
    assert (expected_logits(reference, tokens) - expected).abs().max() > 0.01
    runner = Runner(load(tmp_path))
    parts = [runner.step({0: tokens[start : start + 13]})[0] for start in range(0, 60, 13)]
    assert_same(torch.cat(parts), expected)


@LOADERS
def test_limit_and_not_length_chooses_long_factors(tmp_path: Path, load: Any) -> None:
    def reference(short: list[float], long: list[float]) -> Any:
        rope = LONGROPE | {"short_factor": short, "long_factor": long}
        return make_reference("phi3", rope_parameters=rope, original_max_position_embeddings=100)

    save_reference(reference(SHORT, LONG), tmp_path)
    tokens = prompt(40)
    for limit, factors in ((100, SHORT), (101, LONG)):
        logits = Runner(load(tmp_path, max_model_len=limit)).step({0: tokens})[0]
        assert_same(logits, expected_logits(reference(factors, factors), tokens))


@LOADERS
def test_tokens_of_bidirectional_gemma_attend_to_later_ones(tmp_path: Path, load: Any) -> None:
    """In transformers, the field has no effect on eager attention."""
    reference = make_reference("gemma", use_bidirectional_attention=True)
    save_reference(reference, tmp_path)
    reference.set_attn_implementation("sdpa")
    tokens = prompt(40)
    logits = Runner(load(tmp_path)).step({0: tokens})[0]
    assert_same(logits, expected_logits(reference, tokens))


@LOADERS
def test_rotated_part_of_heads_is_that_of_training(tmp_path: Path, load: Any) -> None:
    """In transformers, a window's YaRN that names no part rotates whole heads."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    plain = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334}
    yarn["rope_theta"] = 1e4

    def reference(**fields: float) -> Any:
        rope = {"full_attention": plain, "sliding_attention": yarn | fields}
        return make_reference("mimo-v2", rope_parameters=rope)

    save_reference(reference(), tmp_path)
    tokens = prompt(40)
    logits = Runner(load(tmp_path)).step({0: tokens})[0]
    assert_same(logits, expected_logits(reference(partial_rotary_factor=0.334), tokens))
