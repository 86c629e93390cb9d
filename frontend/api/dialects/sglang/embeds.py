"""Parse the `input_embeds` of SGLang's requests: embeddings that replace a prompt's tokens.

Shapes: T tokens of a prompt, D hidden size of the model.
"""

from __future__ import annotations

import base64
import binascii
import math
from typing import Any

import numpy as np

from .....protocol.config import EngineConfig
from ....client.encoder_inputs import Embeddings
from ....http.errors import bad_request
from ...inputs.prompt_embeds import embedded_prompt, verify_enabled
from ...prompts import Prompt
from .request import SglangPrompt


def embedded_prompts(request: SglangPrompt, config: EngineConfig) -> list[Prompt]:
    """Return the prompts of a request with embeddings.

    Raises:
        APIError: The server does not accept embeddings, or they do not fit the model (400).
    """
    param, given = request.prompts_param, request.embeds
    verify_enabled(param, config)
    if isinstance(given, str):
        found = [(param, _from_bytes(given, request.embeds_shape, param))]
    elif request.is_list and not request.place:
        found = [
            (f"{param}[{i}]", _from_lists(each, f"{param}[{i}]")) for i, each in enumerate(given)
        ]
    else:
        found = [(param, _from_lists(given, param))]
    prompts = []
    for name, embeddings in found:
        place, tokens, inputs = embedded_prompt(embeddings, name, config)
        prompts.append(Prompt(place, None, tokens, encoder_inputs=inputs))
    return prompts


def _from_lists(rows: Any, param: str) -> Embeddings:
    """Return the embeddings [T, D] of T lists of D numbers."""
    try:
        embeddings_TD = np.array(rows, "<f4")
    except (TypeError, ValueError):
        raise bad_request(param, "must be a list of equally long lists of numbers") from None
    return Embeddings("float32", embeddings_TD.shape, embeddings_TD.tobytes())


def _from_bytes(text: str, shape: list[int] | None, param: str) -> Embeddings:
    """Return the embeddings of float32 numbers in base64."""
    if shape is None or len(shape) != 2 or min(shape) < 0:
        raise bad_request(
            "input_embeds_shape", f"must be the tokens and the hidden size, got {shape}"
        )
    try:
        data = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise bad_request(param, f"is not valid base64: {error}") from None
    if len(data) != math.prod(shape) * 4:
        raise bad_request(param, f"has {len(data)} bytes, which do not match the shape {shape}")
    return Embeddings("float32", tuple(shape), data)
