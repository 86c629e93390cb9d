"""Reads the `prompt_embeds` of completion requests: embeddings in place of a prompt's tokens.

Shapes: T tokens of a prompt, D hidden size of the model.
"""

from __future__ import annotations

import binascii
import json
from base64 import b64decode
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ....protocol.config import EngineConfig
from ....protocol.messages import EncoderInput
from ...client.prompt_embeds import DTYPES, Embeddings, encoder_inputs_of
from ...http.errors import bad_request, echo
from ..prompts import context_exceeded
from .torch_tensor import NotATensor, read_torch_tensor

MAX_HEADER_BYTES: Final = 1 << 16
"""Maximum size of a safetensors header."""

_SAFETENSORS: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def parse_prompt_embeds(
    given: str | list[str], config: EngineConfig
) -> list[tuple[str, npt.NDArray[np.int32], list[EncoderInput]]]:
    """Return the name, the placeholder tokens, zeros, and the inputs of each prompt.

    Raises:
        APIError: The server does not accept embeddings, or they do not fit the model (400).
    """
    if not config.model.enable_prompt_embeds:
        raise bad_request(
            "prompt_embeds",
            "prompt_embeds needs a server started with --enable-prompt-embeds; send text or token ids",
        )
    single = isinstance(given, str)
    texts = [given] if isinstance(given, str) else given
    if not texts:
        raise bad_request("prompt_embeds", "prompt_embeds must not be an empty array")
    prompts = []
    for index, text in enumerate(texts):
        param = "prompt_embeds" if single else f"prompt_embeds[{index}]"
        embeddings = _decode(text, param)
        _verify(embeddings, param, config)
        tokens: npt.NDArray[np.int32] = np.zeros(embeddings.shape[0], np.int32)
        prompts.append((param, tokens, encoder_inputs_of(embeddings, config)))
    return prompts


def _verify(embeddings: Embeddings, param: str, config: EngineConfig) -> None:
    model = config.model
    if len(embeddings.shape) != 2 or embeddings.shape[1] != model.hidden_size:
        raise bad_request(
            param,
            f"{param} must have the shape [tokens, {model.hidden_size}], got {list(embeddings.shape)}",
        )
    if not embeddings.shape[0]:
        raise bad_request(param, f"{param} must have at least one token")
    if embeddings.shape[0] >= model.max_model_len:
        raise context_exceeded(
            param,
            f"{param} has {embeddings.shape[0]} tokens, but at most {model.max_model_len - 1} fit",
        )
    if not embeddings.are_finite():
        raise bad_request(param, f"{param} has numbers that are not finite")


def _decode(text: str, param: str) -> Embeddings:
    try:
        data = b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_request(param, f"{param} is not valid base64: {error}") from None
    try:
        if data.startswith(b"PK"):
            return read_torch_tensor(data)
        return _read_safetensors(data)
    except NotATensor as problem:
        raise bad_request(
            param,
            f"{param} {problem}; send the bytes of a safetensors file, or of torch.save, with one float tensor",
        ) from None


def _read_safetensors(data: bytes) -> Embeddings:
    """Return the only tensor of a safetensors file (https://huggingface.co/docs/safetensors).

    Raises:
        NotATensor: It is something else.
    """
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(MAX_HEADER_BYTES, len(data) - 8):
        raise NotATensor("is not a safetensors file")
    try:
        header: Any = json.loads(data[8 : 8 + size])
        tensors = {name: value for name, value in header.items() if name != "__metadata__"}
        (tensor,) = tensors.values()
        dtype, shape = tensor["dtype"], tuple(map(int, tensor["shape"]))
        start, end = map(int, tensor["data_offsets"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise NotATensor("is not a safetensors file with one tensor") from None
    if dtype not in _SAFETENSORS:
        raise NotATensor(f"has the dtype {echo(str(dtype))}, not F32, F16 or BF16")
    content = data[8 + size :][start:end]
    name = _SAFETENSORS[dtype]
    if start < 0 or min(shape, default=0) < 0 or len(content) != prod(shape) * DTYPES[name]:
        raise NotATensor("has a tensor whose size does not fit its shape")
    return Embeddings(name, shape, content)
