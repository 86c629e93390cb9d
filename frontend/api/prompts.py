"""Parses the `prompt` of a completion request: text, token ids, text with media, or a list of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ...protocol.encoder_inputs.inputs import EncoderInput
from ..http.errors import APIError, bad_request, wrong
from ..tokenizer.token_ids import token_id_array
from .inputs.given_media import GivenMedia, read_parts, read_prompt_object

MAX_SEQUENCES = 4096
"""Maximum sequences of one request: prompts times n."""

BYTES_PER_TOKEN_ID = 6
"""Approximate bytes of one token id in a JSON body."""

MAX_CHARACTERS_PER_TOKEN = 256
"""Upper bound on a token's characters, so that a prompt that cannot fit is rejected before it is tokenized."""

MAX_CHARACTERS = 1 << 22
"""Maximum characters of a prompt. Processing blocks all other threads for a time proportional to them."""

CHARACTERS_PER_TOKEN = 8
"""Characters allowed per token of a very long context. In every language a token has fewer on average."""


class Prompt(msgspec.Struct):
    """One prompt. `text` is None if it was given as token ids; `param` names it in errors.

    `instruction` is put before a text that is embedded; None for the model's default. With `second` the prompt is a
    pair of texts: `second_param` names the second one, and tokens from index `second_segment` on have token type 1.
    `encoder_inputs` are embeddings that replace the tokens. `role` is the name of the model's prompt for the text, to
    which a model may add tokens. If `num_visible` is not 0, tokens attend only to that many at the start. Only those
    that `keeps_T` marks have results. Instead of a text, a prompt to be compared may have `content`: the parts of a
    message, in which marks stand for the `media`. A pair has the media of both. A text longer than the model reads
    may be embedded in `num_parts` parts. `given_media` are those whose places the text marks; `video_hashes` are the
    content hashes of the encoder inputs that are parts of videos. `start_token_ids` are the first ones of the output of
    a model whose encoder reads the prompt.
    """

    param: str
    text: str | None
    token_ids: npt.NDArray[np.int32]
    instruction: str | None = None
    second: str | None = None
    second_param: str = ""
    second_segment: int = 0
    encoder_inputs: list[EncoderInput] = msgspec.field(default_factory=list)
    role: str = ""
    num_visible: int = 0
    keeps_T: npt.NDArray[np.bool_] | None = None
    content: Any = None
    second_content: Any = None
    media: Sequence[Any] = ()
    num_parts: int = 1
    given_media: GivenMedia | None = None
    video_hashes: frozenset[bytes] = frozenset()
    start_token_ids: npt.NDArray[np.int32] | None = None


def parse_prompts(prompt: Any, vocab_size: int, name: str = "prompt") -> list[Prompt]:
    """Return the prompts of a request. Texts are not encoded yet, so their `token_ids` are empty.

    A prompt is a text, token ids, or an object in llama.cpp's format, with a text and its media. `name` is the name of
    the field in errors.

    Raises:
        APIError: A prompt has a wrong type or an invalid token id, or there are too many (400).
    """
    if prompt is None:
        raise bad_request(name, "is required")
    if isinstance(prompt, str):
        return [_text(prompt, name)]
    if isinstance(prompt, dict):
        return [parse_object(prompt, name)]
    if not len(prompt):
        raise bad_request(name, "must not be an empty array")
    if isinstance(prompt, np.ndarray) or isinstance(prompt[0], int):
        return [Prompt(name, None, parse_token_ids(prompt, name, vocab_size))]
    verify_num_sequences(len(prompt), name)
    kind = next((type(entry) for entry in prompt if not isinstance(entry, dict | int)), list)
    prompts = []
    for i, entry in enumerate(prompt):
        param = f"{name}[{i}]"
        if isinstance(entry, dict):
            prompts.append(parse_object(entry, param))
            continue
        if type(entry) is not kind:
            expected = "a string" if kind is str else "an array of token ids"
            raise wrong(param, f"{expected} like the first", entry)
        if isinstance(entry, str):
            prompts.append(_text(entry, param))
        else:
            prompts.append(Prompt(param, None, parse_token_ids(entry, param, vocab_size)))
    return prompts


def parse_inputs(
    given: Any, vocab_size: int, name: str, encode: Callable[[str, bool], list[int]]
) -> list[Prompt]:
    """Return the inputs of a request to embed or classify: prompts, or inputs in one of llama.cpp's formats.

    A list with a token id is one input, and may contain texts too. An object has a text in `prompt_string` and its
    media in `multimodal_data`, or the parts of a message in `content`.

    Args:
        given: The inputs.
        vocab_size: The size of the vocabulary.
        name: The name of the field in errors.
        encode: Function from a text, and true to add the special tokens, to token ids.

    Raises:
        APIError: An input has a wrong type or an invalid token id, or there are too many (400).
    """
    if not isinstance(given, list | dict) or not given:
        return parse_prompts(given, vocab_size, name)
    is_one = isinstance(given, dict) or any(isinstance(each, int) for each in given)
    inputs = [given] if is_one else given
    verify_num_sequences(len(inputs), name)
    found = []
    for i, entry in enumerate(inputs):
        param = name if is_one else f"{name}[{i}]"
        if isinstance(entry, dict):
            read = read_parts if "content" in entry else read_prompt_object
            text, media = read(entry, param)
            found.append(Prompt(param, text, np.empty(0, np.int32), given_media=media))
        elif isinstance(entry, str):
            found.append(_text(entry, param))
        else:
            token_ids = parse_mixed(entry, param, vocab_size, encode)
            found.append(Prompt(param, None, token_ids))
    return found


def parse_mixed(
    parts: Any, param: str, vocab_size: int, encode: Callable[[str, bool], list[int]]
) -> npt.NDArray[np.int32]:
    """Return the token ids of a prompt in llama.cpp's format: a list of token ids and texts.

    Raises:
        APIError: There are no tokens, or a part is neither a text nor a token id (400).
    """
    if isinstance(parts, list) and any(isinstance(part, str) for part in parts):
        token_ids: list[Any] = []
        for i, part in enumerate(parts):
            if isinstance(part, str):
                token_ids += encode(part, i == 0)
            elif isinstance(part, int) and 0 <= part < vocab_size:
                token_ids.append(part)
            else:
                raise wrong(f"{param}[{i}]", f"a token id in [0, {vocab_size})", part)
        parts = token_ids
    return parse_token_ids(parts, param, vocab_size)


def parse_object(given: dict[str, Any], param: str) -> Prompt:
    """Return a prompt in llama.cpp's format: an object with a text and its media.

    Raises:
        APIError: There is no text, or its markers do not match the media (400).
    """
    text, media = read_prompt_object(given, param)
    return Prompt(param, text, np.empty(0, np.int32), given_media=media)


def verify_num_sequences(count: int, param: str = "prompt") -> None:
    """Raise APIError 400 if `count` exceeds `MAX_SEQUENCES`."""
    if count > MAX_SEQUENCES:
        raise bad_request(
            param,
            f"and n request {count} sequences, but at most {MAX_SEQUENCES} are allowed",
        )


def _text(text: str, param: str) -> Prompt:
    return Prompt(param, text, np.empty(0, np.int32))


def parse_token_ids(
    token_ids: list[Any] | npt.NDArray[np.int64], param: str, vocab_size: int
) -> npt.NDArray[np.int32]:
    """Return token ids as an array. In large bodies they already are an array.

    Raises:
        APIError: There are no tokens, or an entry is not in the vocabulary; the message names the first one (400).
    """
    if not len(token_ids):
        raise bad_request(param, "must have at least one token")
    try:
        ids = token_ids if isinstance(token_ids, np.ndarray) else token_id_array(token_ids)
    except ValueError:
        raise bad_request(param, "must contain token ids only") from None
    invalid = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if invalid.size:
        at = int(invalid[0])
        raise bad_request(
            f"{param}[{at}]",
            f"is out of vocabulary: it must be a token id in [0, {vocab_size}), got {ids[at]}",
        )
    return ids.astype(np.int32)


def max_characters(max_model_len: int) -> int:
    """Return the maximum number of characters of a prompt for a context of `max_model_len` tokens."""
    return min(
        max_model_len * MAX_CHARACTERS_PER_TOKEN,
        max(max_model_len * CHARACTERS_PER_TOKEN, MAX_CHARACTERS),
    )


def verify_num_characters(count: int, param: str, max_model_len: int) -> None:
    """Raise APIError 400 for a text of `count` characters that is too long for the context."""
    if count > (limit := max_characters(max_model_len)):
        raise ContextExceededError(
            param,
            f"{param} has {count} characters, but at most {limit} are allowed "
            f"for the maximum context length of {max_model_len} tokens",
            limit=max_model_len,
        )


def fit_context(
    token_ids: npt.NDArray[np.int32],
    param: str,
    *,
    max_tokens: int | None,
    default_max_tokens: int | None = None,
    max_tokens_limit: int | None = None,
    truncate: int | None,
    truncation_side: str | None = None,
    max_model_len: int,
    max_tokens_param: str = "max_tokens",
) -> tuple[npt.NDArray[np.int32], int]:
    """Return the prompt, truncated if the request asks for that, and the number of tokens that may be generated.

    Args:
        token_ids: The prompt's token ids.
        param: The name of the prompt in errors.
        max_tokens: The requested number; None for the default.
        default_max_tokens: The default, reduced to what remains of the context; None for all that remains.
        max_tokens_limit: The server's limit for every request; None for no limit.
        truncate: Prompt tokens to keep; -1 for as many as fit, None to keep all.
        truncation_side: The side to cut, `left` or `right`; None for `left`.
        max_model_len: The context length in tokens.
        max_tokens_param: The name of `max_tokens` in errors.

    Raises:
        APIError: A parameter is invalid, or the context is exceeded (400, `context_length_exceeded`).
    """
    if max_tokens is not None and max_tokens_limit is not None:
        max_tokens = min(max_tokens, max_tokens_limit)
    if truncation_side not in (None, "left", "right"):
        raise wrong("truncation_side", '"left" or "right"', truncation_side)
    if truncate is not None:
        if truncate < -1 or truncate == 0 or truncate > max_model_len:
            raise wrong("truncate_prompt_tokens", f"-1 or between 1 and {max_model_len}", truncate)
        keep = max(max_model_len - (max_tokens or 1) if truncate == -1 else truncate, 1)
        # Copy the tokens, because a view would keep all tokens of the text in memory.
        token_ids = (token_ids[:keep] if truncation_side == "right" else token_ids[-keep:]).copy()
    num_tokens = len(token_ids)
    if num_tokens == 0:
        raise bad_request(param, "must have at least one token")
    remaining = max_model_len - num_tokens
    wanted = 1 if max_tokens is None else max_tokens
    if wanted > remaining:
        raise ContextExceededError(
            param if remaining < 1 else max_tokens_param,
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_tokens + wanted} tokens ({num_tokens} in {param}, {wanted} for the completion). "
            f"Please reduce {param} or {max_tokens_param}.",
            limit=max_model_len,
            num_tokens=num_tokens,
            max_tokens=max(max_model_len - wanted, 0),
        )
    limits = (
        max_tokens if max_tokens is not None else default_max_tokens,
        max_tokens_limit,
        remaining,
    )
    return token_ids, min(limit for limit in limits if limit is not None)


class ContextExceededError(APIError):
    """An error for a prompt that does not fit into the context.

    It has OpenAI's code, and the type and the numbers from which llama.cpp's clients read how much to cut.

    Args:
        limit: The tokens of the context, or the most that the model reads.
        num_tokens: The tokens of the prompt; 0 if they are unknown.
        max_tokens: The tokens of the longest prompt that fits; 0 if they are unknown.
    """

    def __init__(
        self, param: str, message: str, *, limit: int, num_tokens: int = 0, max_tokens: int = 0
    ) -> None:
        super().__init__(400, message, param=param, code="context_length_exceeded")
        # If the prompt alone would fit, a shorter answer is the remedy.
        if not 0 < num_tokens < limit:
            self.type = "exceed_context_size_error"
            known = {"n_prompt_tokens": num_tokens} if num_tokens else {}
            self.details = known | {"n_ctx": limit}
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens
