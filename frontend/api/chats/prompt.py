"""Render a conversation into the prompt of the model, with the model's chat template."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import msgspec

from ....protocol.encoder_inputs.inputs import EncoderInput
from ....protocol.errors import ParameterError
from ...chat import ChatTemplate, ChatTemplateError
from ...http.errors import APIError, bad_request, expect, redact
from ...media.sources.media_options import parse_media_options, sglang_fields
from ..inputs.files import read_files
from ..logprobs import Json
from ..prompts import BYTES_PER_TOKEN_ID, max_characters, parse_token_ids, verify_num_characters
from ..schema import ChatCompletionRequest, TokenizeRequest
from ..serving import Serving

logger = logging.getLogger(__name__)

RESERVED_VARIABLES: Final = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
)
"""Variables of chat templates that requests set by fields of their own."""

_FIELD = re.compile(
    r"(?:messages|tools|documents|chat_template_kwargs|continue_final_message)[\w.\[\]]*"
)


class RenderedChat(msgspec.Struct):
    """A prompt as text and as token ids, with the images or audio that replace some of the tokens.

    `video_hashes` are the content hashes of the encoder inputs that are parts of videos.
    """

    text: str
    token_ids: Sequence[int]
    encoder_inputs: list[EncoderInput]
    video_hashes: frozenset[bytes] = frozenset()


class GivenTokenIds(NamedTuple):
    """A prompt that the client encoded, and the name of its field."""

    name: str
    token_ids: list[Any]


async def render_chat(
    serving: Serving,
    request: ChatCompletionRequest | TokenizeRequest,
    body_size: int,
    *,
    tools: Sequence[dict[str, Any]],
    add_special_tokens: bool = False,
    for_encoder: bool = False,
    template_kwargs: dict[str, Any] | None = None,
) -> RenderedChat:
    """Apply the chat template and encode the result.

    Templates write their own special tokens, so by default the tokenizer adds none. It adds those that are missing
    in a prompt `for_encoder`, and in one whose images precede all of its tokens.

    Raises:
        APIError: The request does not fit the template, or the prompt is too long (400).
    """
    own_kwargs = dict(request.chat_template_kwargs or {})
    own_template = request.chat_template
    # vLLM's clients may send the template among its variables.
    template_param = "chat_template"
    if own_template is None and "chat_template" in own_kwargs:
        template_param = "chat_template_kwargs.chat_template"
        own_template = expect(own_kwargs.pop("chat_template"), str, template_param, "a string")
    template = await _find_template(serving, own_template, template_param, bool(tools))
    if tools and not template.shows_tools:
        logger.warning(
            "the chat template ignores tools, so the model does not see the %d tools of this request; "
            "set another template with --chat-template",
            len(tools),
        )
    messages = request.messages
    if messages is None:
        raise bad_request("messages", "is required")
    # Texts of documents may be longer than the body that had them.
    with serving.request_memory.lease() as lease:
        media: Sequence[Any] = []
        try:
            messages = await read_files(serving, messages, body_size, lease)
            options = parse_media_options(
                request.mm_processor_kwargs, request.media_io_kwargs, sglang_fields(request)
            )
            if serving.media is not None:
                messages, media = await serving.media.take(messages, body_size, options)
        except ParameterError as error:
            raise bad_request(error.param, error.problem) from None
        kwargs = (template_kwargs or {}) | own_kwargs
        verify_template_kwargs(kwargs)
        continue_final = bool(request.continue_final_message)
        add_generation_prompt = request.add_generation_prompt
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final

        max_model_len = serving.config.model.max_model_len
        images = serving.config.model.images
        is_whole = for_encoder or (images is not None and images.precedes_prompt)
        documents = request.documents
        given = {
            "messages": messages,
            "tools": list(tools),
            "documents": documents,
            "chat_template_kwargs": kwargs,
        }

        def render() -> RenderedChat:
            # Rendering blocks all other threads for a time proportional to the text, whose length is at most that of
            # the body.
            if body_size > max_characters(max_model_len):
                counts = {name: _num_characters(value) for name, value in given.items()}
                longest = max(counts, key=counts.__getitem__)
                verify_num_characters(counts[longest], longest, max_model_len)
                verify_num_characters(sum(counts.values()), "messages", max_model_len)
            text = template.render(
                serving.stable_prefix.apply(messages),
                serving.special_tokens,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final,
                **kwargs,
            )
            verify_num_characters(len(text), "messages", max_model_len)

            def encode(text: str) -> tuple[str, Sequence[int]]:
                if is_whole:
                    return serving.special_tokens.encode_whole(text)
                return serving.special_tokens.encode(text, add_special_tokens)

            if serving.media is None:
                return RenderedChat(*encode(text), [])
            return RenderedChat(*serving.media.encode(text, media, encode), video_hashes(media))

        try:
            return await serving.executor.run(body_size, render)
        except ValueError as error:  # Includes ChatTemplateError and ParameterError.
            raise _template_error(str(error)) from None


def video_hashes(media: Sequence[Any]) -> frozenset[bytes]:
    """Return the content hashes of the parts of the videos among preprocessed media."""
    videos = (item.inputs for item in media if getattr(item, "is_video", False))
    return frozenset(part.content_hash for part in chain.from_iterable(videos))


async def _find_template(
    serving: Serving, given: str | None, param: str, with_tools: bool
) -> ChatTemplate:
    """Return the template that a request brings in the field `param`, or that of the model.

    Raises:
        APIError: The server does not accept templates from requests, the template is not valid, or the model has none
            (400).
    """
    if given is None:
        return serving.chat_template(with_tools)
    if not serving.config.frontend.trust_request_chat_template:
        raise bad_request(
            param, "needs a server that was started with --trust-request-chat-template"
        )
    if len(given) > MAX_TEMPLATE_CHARACTERS:
        raise bad_request(
            param, f"must have at most {MAX_TEMPLATE_CHARACTERS} characters, got {len(given)}"
        )
    try:
        return await serving.executor.run(len(given), serving.templates.of_request, given)
    except ChatTemplateError as error:
        raise APIError(400, redact(str(error)), param=param) from None


_OF_TEMPLATES = (
    "add_generation_prompt",
    "continue_final_message",
    "documents",
    "chat_template_kwargs",
    "chat_template",
    "echo",
)
"""Fields that have no effect without a chat template."""

MAX_TEMPLATE_CHARACTERS: Final = 1 << 18
"""Maximum length of a request's chat template."""

MARKED_TOKENS = 256
"""Number of tokens at the end of a prompt among which a template may open the reasoning."""


def find_token_ids(request: ChatCompletionRequest) -> GivenTokenIds | None:
    """Return the tokens that replace the conversation; None if it is rendered.

    vLLM's routers forward the tokens that another engine has computed in `kv_transfer_params`. As in vLLM, `echo` and
    media need the conversation all the same.

    Raises:
        APIError: A field needs a chat template (400).
    """
    if (given := request.prompt_token_ids) is not None:
        name = request.sent_name("prompt_token_ids")
        for other in _OF_TEMPLATES:
            if getattr(request, other):
                raise bad_request(other, f"has no effect on {name}; send one of them")
        return GivenTokenIds(name, given)
    given = (request.kv_transfer_params or {}).get("prompt_token_ids")
    if given is None or request.echo or any(map(_has_media, request.messages or ())):
        return None
    return GivenTokenIds("kv_transfer_params.prompt_token_ids", given)


def _has_media(message: Json) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return any(isinstance(part, dict) and part.get("type", "text") != "text" for part in parts)


async def read_token_ids(serving: Serving, given: GivenTokenIds) -> RenderedChat:
    """Return a conversation that the client rendered and encoded. `text` is only the end of the prompt.

    Raises:
        APIError: A token is not in the vocabulary (400).
    """
    expect(given.token_ids, list, given.name, "an array")
    vocab_size = serving.config.model.vocab_size
    token_ids = await serving.executor.run(
        len(given.token_ids) * BYTES_PER_TOKEN_ID,
        parse_token_ids,
        given.token_ids,
        given.name,
        vocab_size,
    )
    text = serving.tokenizer.decode(token_ids[-MARKED_TOKENS:].tolist())
    return RenderedChat(text, token_ids.tolist(), [])


def verify_template_kwargs(kwargs: dict[str, Any]) -> None:
    """Raise APIError 400 if a template variable has the name of a request field."""
    for name in RESERVED_VARIABLES:
        if name in kwargs:
            param = f"chat_template_kwargs.{name}"
            raise bad_request(param, f"is not allowed; {name} is a field of the request")


def _num_characters(value: Any) -> int:
    """Return the total length of all strings in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(len, value)) + _num_characters(list(value.values()))
    return sum(map(_num_characters, value)) if isinstance(value, list) else 0


def _template_error(message: str) -> APIError:
    field = _FIELD.match(message)
    return APIError(400, redact(message), param=field[0].rstrip(".") if field else "messages")
