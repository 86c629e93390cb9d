"""The request bodies of Text Generation Inference."""

from __future__ import annotations

from typing import Any

import msgspec

from .. import Int


class TgiParameters(msgspec.Struct, kw_only=True):
    """The parameters of a request."""

    # The number of candidates, of which the most probable one is the answer.
    best_of: Int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    # False takes the most probable tokens, unless a parameter for sampling is set.
    do_sample: bool | None = None
    # By default, as many as fit into the context.
    max_new_tokens: Int | None = None
    # True puts the prompt before the answer.
    return_full_text: bool | None = None
    # The answer ends with the text that ended it.
    stop: list[str] | None = None
    # The number of tokens of the prompt to keep, from its end.
    truncate: Int | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: Int | None = None
    top_n_tokens: Int | None = None
    # A constraint: {"type": "json", "json_schema" or "regex", "value": ...}.
    grammar: dict[str, Any] | None = None
    # The name of an adapter.
    adapter_id: str | None = None


class TgiRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /` and `POST /generate_stream`, and of `POST /generate` if it has `inputs`."""

    inputs: str | None = None
    parameters: TgiParameters | None = None
    # Only read at `/`.
    stream: bool | None = None
