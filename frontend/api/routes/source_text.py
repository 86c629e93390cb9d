"""Prompts of text-to-text encoder-decoder models: the prompt is the encoder's input."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from ....protocol.config.model import SourceTextConfig
from ....protocol.encoder_inputs.inputs import EncoderInput
from ....protocol.sampling_params import SamplingParams
from ...client.encoder_inputs import answer_start, text_source, without_bad_words
from ...http.errors import bad_request, wrong
from ..chats.prompt import RenderedChat
from ..prompts import (
    BYTES_PER_TOKEN_ID,
    ContextExceededError,
    Prompt,
    parse_token_ids,
    verify_num_characters,
)
from ..schema import ChatCompletionRequest
from ..serving import Serving


def source_input(
    prompt: Prompt, config: SourceTextConfig, truncate: int | None, truncation_side: str | None
) -> EncoderInput:
    """Return the encoder input for a prompt, truncated if requested.

    Args:
        prompt: The prompt, with its token ids.
        config: The settings of the encoder-decoder model.
        truncate: Tokens to keep; -1 for as many as fit, None to keep all.
        truncation_side: The side to cut, `left` or `right`; None for `left`.

    Raises:
        APIError: The prompt is empty, or longer than the model reads (400).
    """
    token_ids = prompt.token_ids
    if prompt.encoder_inputs and truncate is not None:
        raise bad_request(
            "truncate_prompt_tokens",
            "cannot cut a prompt with images or audio; send fewer messages",
        )
    if truncate is not None:
        token_ids = _truncated(token_ids, truncate, config.max_tokens, truncation_side)
    if not len(token_ids):
        raise bad_request(prompt.param, "must have at least one token")
    if len(token_ids) > config.max_tokens:
        raise ContextExceededError(
            prompt.param,
            f"This model reads a source of at most {config.max_tokens} tokens. However, "
            f"{prompt.param} has {len(token_ids)} tokens. Please reduce it.",
            limit=config.max_tokens,
            num_tokens=len(token_ids),
        )
    return text_source(token_ids, prompt.encoder_inputs)


def read_as_source(
    chat: RenderedChat,
    params: SamplingParams,
    request: ChatCompletionRequest,
    config: SourceTextConfig | None,
) -> tuple[RenderedChat, SamplingParams, int | None]:
    """Return a chat, its sampling parameters, and the number of tokens to which its prompt is truncated.

    If the model has an encoder for texts (`config`), the conversation with its images is the source, and the prompt is
    the decoder's own.

    Raises:
        APIError: The source is empty, or longer than the model reads (400).
    """
    truncate = request.truncate_prompt_tokens
    if config is None:
        return chat, params, truncate
    token_ids = np.asarray(chat.token_ids, np.int32)
    prompt = Prompt("messages", None, token_ids, encoder_inputs=chat.encoder_inputs)
    item = source_input(prompt, config, truncate, request.truncation_side)
    chat = RenderedChat("", answer_start(config, None).tolist(), [item])
    return chat, without_bad_words(params, config), None


async def encode_start(
    given: str | list[int] | None, serving: Serving, config: SourceTextConfig
) -> npt.NDArray[np.int32]:
    """Return the decoder's prompt (see `answer_start`).

    Args:
        given: The request's `decoder_prompt`.
        serving: The objects that all requests share.
        config: The settings of the encoder-decoder model.

    Raises:
        APIError: `given` is empty, too long or not in the vocabulary, or the server has no tokenizer (400).
    """
    if given is None:
        return answer_start(config, None)
    name, model = "decoder_prompt", serving.config.model
    if isinstance(given, str):
        serving.verify_tokenizer(name)
        verify_num_characters(len(given), name, model.max_model_len)
        text = given
        encode = partial(serving.tokenizer.encode_output, text)
        given = list(await serving.executor.run(len(text), encode))
    size = len(given) * BYTES_PER_TOKEN_ID
    token_ids = await serving.executor.run(size, parse_token_ids, given, name, model.vocab_size)
    return answer_start(config, token_ids)


def _truncated(
    token_ids: npt.NDArray[np.int32], truncate: int, limit: int, side: str | None
) -> npt.NDArray[np.int32]:
    if not (truncate == -1 or 1 <= truncate <= limit):
        raise wrong("truncate_prompt_tokens", f"-1 or between 1 and {limit}", truncate)
    keep = limit if truncate == -1 else truncate
    return token_ids[:keep] if side == "right" else token_ids[-keep:]
