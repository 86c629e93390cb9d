"""Parse the `prompt_embeds` of completion requests: embeddings that replace a prompt's tokens.

Shapes: T tokens of a prompt, D hidden size of the model.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ....protocol.config import EngineConfig
from ....protocol.encoder_inputs.inputs import EncoderInput
from ...client.encoder_inputs import Embeddings, encoder_inputs_of
from ...http.errors import bad_request
from ...media.tensor_files import NotATensorFile, read_tensor_file
from ..prompts import ContextExceededError


def parse_prompt_embeds(
    given: str | list[str], config: EngineConfig
) -> list[tuple[str, npt.NDArray[np.int32], list[EncoderInput]]]:
    """Return, for each prompt, the field that errors name, zeros as placeholder tokens, and the encoder inputs.

    Raises:
        APIError: The server does not accept embeddings, or they do not fit the model (400).
    """
    verify_enabled("prompt_embeds", config)
    single = isinstance(given, str)
    texts = [given] if isinstance(given, str) else given
    if not texts:
        raise bad_request("prompt_embeds", "must not be an empty array")
    prompts = []
    for index, text in enumerate(texts):
        param = "prompt_embeds" if single else f"prompt_embeds[{index}]"
        prompts.append(embedded_prompt(_decode(text, param), param, config))
    return prompts


def verify_enabled(param: str, config: EngineConfig) -> None:
    """Raise APIError 400 if the server does not accept the embeddings in the field `param`."""
    if not config.model.enable_prompt_embeds:
        raise bad_request(
            param, "needs a server started with --enable-prompt-embeds; send text or token ids"
        )


def embedded_prompt(
    embeddings: Embeddings, param: str, config: EngineConfig
) -> tuple[str, npt.NDArray[np.int32], list[EncoderInput]]:
    """Return the field that errors name, zeros as placeholder tokens, and the encoder inputs of embeddings [T, D].

    Raises:
        APIError: They do not fit the model (400).
    """
    _verify(embeddings, param, config)
    tokens: npt.NDArray[np.int32] = np.zeros(embeddings.shape[0], np.int32)
    return param, tokens, encoder_inputs_of(embeddings, config)


def _verify(embeddings: Embeddings, param: str, config: EngineConfig) -> None:
    model = config.model
    if len(embeddings.shape) != 2 or embeddings.shape[1] != model.hidden_size:
        raise bad_request(
            param,
            f"must have the shape [tokens, {model.hidden_size}], got {list(embeddings.shape)}",
        )
    if not embeddings.shape[0]:
        raise bad_request(param, "must have at least one token")
    if embeddings.shape[0] >= model.max_model_len:
        raise ContextExceededError(
            param,
            f"{param} has {embeddings.shape[0]} tokens, but at most {model.max_model_len - 1} fit",
            limit=model.max_model_len,
            num_tokens=embeddings.shape[0],
        )
    if not embeddings.are_finite():
        raise bad_request(param, "has numbers that are not finite")


def _decode(text: str, param: str) -> Embeddings:
    try:
        return read_tensor_file(text)
    except NotATensorFile as error:
        raise bad_request(param, str(error)) from None
