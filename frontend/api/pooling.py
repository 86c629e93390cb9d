"""Prepare texts and token ids for pooling (embedding or classification), and run them as one request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from ...protocol.encoder_inputs.inputs import EncoderInput
from ...protocol.pooling_params import PoolingKind
from ..chat import ChatTemplateError, PairTemplate
from ..client.embeddings import BY_TOKEN, embedding_params, find_prompt
from ..client.encoder_inputs import pooled_source
from ..client.engine_client import RequestGroup
from ..client.text_changes import TextChanges
from ..http.errors import APIError, bad_request, redact, renamer, renaming, verify_choice, wrong
from ..http.request_headers import read_deadline
from ..tokenizer.token_ids import truncate
from .chats.prompt import render_chat, verify_template_kwargs
from .generation import (
    PreparedPrompt,
    find_origin,
    find_request_id,
    read_outputs,
    submit,
    wait_for_end,
)
from .inputs.prompt_media import encode_with_media
from .prompts import ContextExceededError, Prompt, verify_num_characters, verify_num_sequences
from .schema import ChatCompletionRequest, InputFields, PoolingFields
from .serving import Serving

PADDINGS: Final = ("longest", "max_length", "do_not_pad")
SIDES: Final = ("left", "right")

INPUTS_AT_ONCE: Final = 128
"""Number of inputs that are prepared before other tasks run; takes about 2 ms."""

MAX_TOKEN_ELEMENTS: Final = 1 << 22
"""Maximum number of elements in the results of all tokens, or of all sparse vectors, of a request.

They take 16 MiB, and about 80 MiB as JSON.
"""


class Pooling:
    """Pools prompts: embeds them, or classifies them with the model's classification head."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def run(
        self,
        http: Request,
        request: PoolingFields,
        prompts: list[Prompt],
        kind: PoolingKind,
        answer: Callable[[RequestGroup], Response],
        *,
        splits: bool = False,
    ) -> Response:
        """Tokenize the prompts in place, pool them, and return the result of `answer` for their vectors.

        With `splits`, longer prompts than the model reads are pooled in parts, if `--pooler-config` says so.

        Raises:
            APIError: The request is invalid (400), or the engine cannot accept it now.
        """
        serving = self._serving
        serving.verify_model(request.model)
        serving.verify_serving()
        model = serving.config.model
        limit = model.max_pooled_tokens
        if splits and model.pooler.max_embed_len:
            limit = model.pooler.max_embed_len
        _verify_lengths(request, limit)
        with serving.request_memory.lease() as lease:
            inputs = await self._encode(request, prompts, kind, limit)
            lease.count_media(sum(each.num_image_bytes for each in inputs))
            size = self._verify_size(prompts, kind)
            deadline = read_deadline(http.scope, serving.config.frontend.default_deadline_s)
            origin = find_origin(http.scope, request, deadline, serving.num_replicas)
            request_id = find_request_id(request, http.scope["state"])
            group = await submit(serving, request, inputs, request_id, origin)
            try:
                await wait_for_end(group, http.receive)
                read_outputs(group)
                return await serving.executor.run(size, answer, group)
            finally:
                group.abort()

    def _verify_size(self, prompts: list[Prompt], kind: PoolingKind) -> int:
        """Return the number of elements of all results."""
        size = self._serving.config.model.vector_size_of(kind)
        count, unit = len(prompts), "texts"
        if kind in BY_TOKEN:
            count, unit = sum(len(each.token_ids) for each in prompts), "tokens"
        if kind in (*BY_TOKEN, PoolingKind.HEAD) and count * size > MAX_TOKEN_ELEMENTS:
            name = prompts[-1].param.partition("[")[0]
            raise bad_request(
                name,
                f"has {count} {unit} with {size} results each, more than {MAX_TOKEN_ELEMENTS} together; "
                "send fewer or shorter texts at once",
            )
        return count * size

    async def _encode(
        self, request: PoolingFields, inputs: list[Prompt], kind: PoolingKind, limit: int
    ) -> list[PreparedPrompt]:
        serving, model = self._serving, self._serving.config.model
        part_size = model.max_pooled_tokens
        default = find_prompt(None, model.pooler)
        has_special = request.add_special_tokens is not False
        changes = serving.text_changes
        texts = [each for each in inputs if each.text is not None and each.second is None]
        for each in texts:
            instruction = default if each.instruction is None else each.instruction
            each.text = instruction + (each.text or "")
            if changes is not None:
                each.text = changes.prefix_of(each.role) + each.text + changes.suffix_of(each.role)
            self._verify_text(each.text, each.param, request, limit)
        texts = [each for each in texts if each.given_media is None]
        encoded = await serving.encode([each.text or "" for each in texts], has_special)
        for each, token_ids in zip(texts, encoded, strict=True):
            each.token_ids = np.asarray(token_ids, np.int32)
        await encode_with_media(serving, inputs, has_special=has_special)
        if changes is not None and has_special:
            await self._add_tokens(changes, texts)
        await self._join_pairs(request, inputs, has_special=has_special)
        params = embedding_params()
        prepared: list[PreparedPrompt] = []
        for each in inputs:
            longest = part_size if each.encoder_inputs else limit
            each.token_ids = await self._fit(each, request, longest, has_special=has_special)
            if changes is not None and each.role:
                each.keeps_T = changes.keeps(each.role, each.token_ids)
            pooling = msgspec.structs.replace(
                model.pooling_params_of(kind),
                second_segment=each.second_segment,
                num_visible=each.num_visible,
            )
            parts = [
                each.token_ids[begin : begin + part_size]
                for begin in range(0, len(each.token_ids), part_size)
            ]
            each.num_parts = len(parts)
            verify_num_sequences(len(prepared) + len(parts), each.param)
            for part in parts:
                prompt, source = pooled_source(model.source_text, part)
                media = source or each.encoder_inputs
                prepared.append(
                    PreparedPrompt(prompt, params, each.text, pooling=pooling, encoder_inputs=media)
                )
            if len(prepared) % INPUTS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return prepared

    async def _add_tokens(self, changes: TextChanges, prompts: list[Prompt]) -> None:
        def add_all() -> list[tuple[npt.NDArray[np.int32], int]]:
            return [
                changes.add_tokens(each.role, each.text or "", each.token_ids) for each in prompts
            ]

        size = sum(len(each.text or "") for each in prompts)
        added = await self._serving.executor.run(size, add_all)
        for each, (token_ids, num_visible) in zip(prompts, added, strict=True):
            each.token_ids, each.num_visible = token_ids, num_visible

    async def apply_template(
        self,
        request: PoolingFields,
        template: PairTemplate,
        pairs: list[Prompt],
        kwargs: dict[str, Any],
    ) -> None:
        """Replace each pair of texts by the template's prompt for it.

        Raises:
            APIError: The template refuses a text or a variable (400).
        """
        verify_template_kwargs(kwargs)
        serving, size = self._serving, 0
        for each in pairs:
            for text, param in (
                (each.text or "", each.param),
                (each.second or "", each.second_param),
            ):
                verify_num_characters(len(text), param, self._serving.config.model.max_model_len)
                size += len(text)

        place = None if serving.media is None else serving.media.encode

        def encode(pair: Prompt) -> tuple[Sequence[int], list[EncoderInput]]:
            query = pair.text or "" if pair.content is None else pair.content
            document = pair.second or "" if pair.second_content is None else pair.second_content
            text = template.render(query, document, kwargs)
            if place is None or not pair.media:
                return template.encode(text)[1], []
            _, token_ids, inputs = place(text, pair.media, template.encode)
            return token_ids, inputs

        def encode_all() -> list[tuple[Sequence[int], list[EncoderInput]]]:
            return [encode(each) for each in pairs]

        def sent_name(name: str) -> str:
            return "chat_template_kwargs" if name.startswith("chat") else pairs[0].param

        try:
            with renaming(sent_name):
                encoded = await self._serving.executor.run(size, encode_all)
        except ChatTemplateError as error:
            raise APIError(400, redact(str(error)), param="chat_template_kwargs") from None
        for each, (token_ids, inputs) in zip(pairs, encoded, strict=True):
            each.token_ids, each.encoder_inputs = np.array(token_ids, np.int32), inputs
            each.text = each.second = None

    async def _join_pairs(
        self, request: PoolingFields, inputs: list[Prompt], *, has_special: bool
    ) -> None:
        """Encode the pairs of texts into one sequence of tokens each."""
        pairs = [each for each in inputs if each.second is not None]
        if not pairs:
            return
        # The same text often occurs in every pair, so it is encoded once.
        limit = self._serving.config.model.max_pooled_tokens
        numbers: dict[str, int] = {}
        for each in pairs:
            for text, param in ((each.text, each.param), (each.second, each.second_param)):
                assert text is not None
                if text not in numbers:
                    self._verify_text(text, param, request, limit)
                    numbers[text] = len(numbers)
        encoded = await self._serving.encode(list(numbers), False)
        keep = request.truncate_prompt_tokens
        joiner = self._serving.tokenizer.pair_joiner
        for number, each in enumerate(pairs):
            first, second = encoded[numbers[each.text or ""]], encoded[numbers[each.second or ""]]
            pair = joiner.join(
                first, second, limit if keep == -1 else keep, has_special=has_special
            )
            each.token_ids = np.array(pair.token_ids, np.int32)
            each.second_segment = pair.second_segment
            if number % INPUTS_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _verify_text(self, text: str, param: str, request: PoolingFields, limit: int) -> None:
        """Raise APIError 400 for a text that cannot be encoded or is too long."""
        self._serving.verify_tokenizer(param, "send token ids")
        if request.truncate_prompt_tokens is None:
            limit = max(limit, self._serving.config.model.max_model_len)
            verify_num_characters(len(text), param, limit)

    async def _fit(
        self, each: Prompt, request: PoolingFields, limit: int, *, has_special: bool
    ) -> npt.NDArray[np.int32]:
        """Return the tokens of an input, truncated if the request asks for it."""
        token_ids = each.token_ids
        if not len(token_ids):
            raise bad_request(each.param, "must have at least one token")
        keep = None if each.num_visible else request.truncate_prompt_tokens
        if keep is None:
            if len(token_ids) > limit:
                raise ContextExceededError(
                    each.param,
                    f"{each.param} has {len(token_ids)} tokens, and this model reads at most {limit}; "
                    "shorten it, or set truncate_prompt_tokens to -1",
                    limit=limit,
                    num_tokens=len(token_ids),
                )
            return token_ids
        keep = limit if keep == -1 else keep
        if len(token_ids) <= keep:
            return token_ids
        if each.encoder_inputs:
            raise APIError(
                400,
                f"{each.param} has {len(token_ids)} tokens and images or audio, so it cannot be cut to {keep}",
                param="truncate_prompt_tokens",
            )
        bare: Sequence[int] | npt.NDArray[np.int32] = token_ids
        if each.text is not None and has_special:
            [bare] = await self._serving.encode([each.text], False)
        return truncate(token_ids, np.array(bare, np.int32), keep, request.truncation_side)


async def take_media(serving: Serving, each: Prompt, role: str, body_size: int) -> None:
    """Replace the images and audio in the content of a prompt by marks, and preprocess them.

    Raises:
        APIError: The model reads none, or one of them cannot be read (400).
    """
    if serving.media is None:
        raise bad_request(each.param, "must be a text, because this model reads only text")
    message = {"role": role, "content": each.content}
    with renaming(renamer({"messages[0]": each.param})):
        [taken], each.media = await serving.media.take([message], body_size)
    each.content = taken["content"]


async def render_input(
    serving: Serving,
    request: InputFields,
    conversation: list[dict[str, Any]],
    param: str,
    body_size: int,
) -> Prompt:
    """Return the prompt of a conversation, which the model's chat template writes, with its images and audio.

    Raises:
        APIError: The conversation does not fit the template (400).
    """
    serving.verify_tokenizer(param)
    is_encoder = serving.config.model.is_encoder
    chat = await render_chat(
        serving,
        ChatCompletionRequest(
            messages=conversation,
            # An embedding is usually that of the conversation, not of the start of an answer.
            add_generation_prompt=request.add_generation_prompt is True,
            continue_final_message=request.continue_final_message,
            chat_template=request.chat_template,
            chat_template_kwargs=request.chat_template_kwargs,
            mm_processor_kwargs=request.mm_processor_kwargs,
            media_io_kwargs=request.media_io_kwargs,
        ),
        body_size,
        tools=(),
        add_special_tokens=bool(request.add_special_tokens),
        # The tokenizer of an encoder, not its template, adds the special tokens.
        for_encoder=is_encoder and request.add_special_tokens is None,
    )
    token_ids = np.array(chat.token_ids, np.int32)
    if is_encoder and not chat.encoder_inputs:
        return Prompt(param, chat.text, np.empty(0, np.int32))
    return Prompt(param, None, token_ids, encoder_inputs=chat.encoder_inputs)


def _verify_lengths(request: PoolingFields, limit: int) -> None:
    """Raise APIError 400 for a field whose value is not allowed."""
    verify_choice("truncation_side", request.truncation_side, SIDES)
    if not isinstance(request.padding, bool):
        verify_choice("padding", request.padding, PADDINGS)
    keep = request.truncate_prompt_tokens
    if keep is not None and keep != -1 and not 1 <= keep <= limit:
        raise wrong("truncate_prompt_tokens", f"-1 or between 1 and {limit}", keep)
