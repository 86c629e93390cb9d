"""Drop the oldest messages of a conversation that is too long for the context (`truncation: auto`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from ...http.errors import APIError
from ..chats.prompt import RenderedChat
from ..schema import ChatCompletionRequest

_TOO_LONG = "context_length_exceeded"

Render = Callable[[ChatCompletionRequest], Awaitable[RenderedChat]]


async def drop_oldest(
    request: ChatCompletionRequest, render: Render, max_model_len: int, max_output: int | None
) -> RenderedChat:
    """Return the prompt with the instructions at the beginning and as many of the last messages as fit.

    Room is kept for the output: the requested number of tokens or a quarter of the context, but at most half of it.

    Raises:
        APIError: The last message alone is too long, or a message is invalid (400).
    """
    room = min(max_output or max_model_len // 4, max_model_len // 2)
    messages = request.messages or []
    head = 0
    while head < len(messages) and messages[head]["role"] in ("system", "developer"):
        head += 1
    # A tool result is never the first message, because it belongs to the call before it.
    starts = [i for i in range(head, len(messages)) if messages[i]["role"] != "tool"]

    async def keep_from(number: int) -> RenderedChat | None:
        """Return the prompt with the messages from `number` on; None if it does not fit."""
        kept = messages[:head] + messages[starts[number] :]
        try:
            chat = await render(msgspec.structs.replace(request, messages=kept))
        except APIError as error:
            if error.code != _TOO_LONG or number == len(starts) - 1:
                raise
            return None
        fits = len(chat.token_ids) + room <= max_model_len
        return chat if fits or number == len(starts) - 1 else None

    if not starts:
        return await render(request)
    if (whole := await keep_from(0)) is not None:
        return whole
    low, high, found = 1, len(starts) - 1, None
    while low < high:
        middle = (low + high) // 2
        chat = await keep_from(middle)
        if chat is None:
            low = middle + 1
        else:
            high, found = middle, chat
    if found is None:
        found = await keep_from(low)
    assert found is not None
    return found
