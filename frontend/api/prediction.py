"""Parse the `prediction` of a chat completion: text that the client expects the answer to repeat."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..http.errors import wrong
from .prompts import ContextExceededError, verify_num_characters
from .serving import Serving


async def encode_prediction(
    serving: Serving, prediction: dict[str, Any] | None
) -> npt.NDArray[np.int32]:
    """Return the tokens of a prediction; an empty array if the server does not propose drafts.

    Raises:
        APIError: The prediction is not in OpenAI's format, or has more tokens than the context (400).
    """
    if prediction is None:
        return np.empty(0, np.int32)
    text = _text_of(prediction)
    limit = serving.config.model.max_model_len
    verify_num_characters(len(text), "prediction", limit)
    if serving.config.scheduler.speculative is None:
        return np.empty(0, np.int32)
    [token_ids] = await serving.encode([text], add_special_tokens=False)
    if len(token_ids) > limit:
        raise ContextExceededError(
            "prediction",
            f"prediction has {len(token_ids)} tokens, but this model's maximum context length is "
            f"{limit} tokens; send only the part of the answer that you expect",
            limit=limit,
        )
    return np.asarray(token_ids, np.int32)


def _text_of(prediction: dict[str, Any]) -> str:
    kind = prediction.get("type", "content")
    if kind != "content":
        raise wrong("prediction.type", '"content"', kind)
    content = prediction.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong("prediction.content", "a string or an array of text parts", content)
    texts: list[str] = []
    for i, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type", "text") != "text":
            raise wrong(f"prediction.content[{i}]", "a text part", part)
        texts.append(text)
    return "".join(texts)
