"""Encode prompts of completions and embeddings that have images, videos or audio clips."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ....protocol.errors import ParameterError, counted
from ...chat import ChatTemplateError
from ...chat.messages import AUDIO_MARK, AUDIO_PART, MEDIA_MARK
from ...http.errors import bad_request, renaming
from ..chats.prompt import video_hashes
from ..prompts import ContextExceededError, Prompt
from ..serving import Serving
from .given_media import GivenMedia

_BETWEEN: Final = "\ufdd4"
"""A Unicode noncharacter that separates media in a message, so that the text of each is found in the prompt."""

_PART = re.compile(r"messages\[0\]\.content\[(\d+)\]")


async def encode_with_media(
    serving: Serving, prompts: Sequence[Prompt], *, has_special: bool
) -> None:
    """Encode those of the prompts that have media. The tokenizer adds special tokens to texts if `has_special`.

    Equal media of several prompts are preprocessed once.

    Raises:
        APIError: The model does not read the media, one of them cannot be read, or the text has more or fewer places
            than there are media (400), or there is no room for them (503).
    """
    done: dict[int, tuple[list[str], Sequence[Any]]] = {}
    with serving.request_memory.lease() as lease:
        for prompt in prompts:
            if (given := prompt.given_media) is None:
                continue
            if id(given) not in done:
                done[id(given)] = await _prepare(serving, given)
            await _encode(serving, prompt, given, *done[id(given)], has_special=has_special)
            lease.count_media(sum(len(item.data) for item in prompt.encoder_inputs))


async def _prepare(serving: Serving, given: GivenMedia) -> tuple[list[str], Sequence[Any]]:
    """Return the text with which the model's chat template shows each of the media, and the preprocessed media."""
    if serving.media is None:
        raise bad_request(given.param, "must be left out, because this model reads only text")
    separator = {"type": "text", "text": _BETWEEN}
    content: list[Any] = [separator]
    for part in given.parts:
        content += [part, separator]

    def sent_name(name: str) -> str:
        if (part := _PART.match(name)) is not None:
            return given.names[int(part[1]) // 2]
        return given.param if name.startswith("messages") else name

    message = {"role": "user", "content": content}
    with renaming(sent_name):
        [taken], media = await serving.media.take([message], len(content), given.options)
    unread = set(map(id, given.parts)).intersection(map(id, taken["content"]))
    for part, name in zip(given.parts, given.names, strict=True):
        if id(part) in unread:
            kind = "audio" if "audio" in part["type"] else part["type"].removesuffix("_url")
            raise bad_request(name, f"is of the kind {kind}, which this model does not read")
    return await serving.executor.run(len(content), _show, serving, taken), media


def _show(serving: Serving, message: dict[str, Any]) -> list[str]:
    """Return the text between each two separators of a message in the prompt of the chat template.

    If there is no such text, it has a mark for each image, video or audio clip.
    """
    marks: list[str] = []
    for part in message["content"]:
        if part.get("text") == _BETWEEN:
            marks.append("")
        else:
            marks[-1] += AUDIO_MARK if part is AUDIO_PART else MEDIA_MARK
    marks.pop()
    shown: list[str] = []
    if (template := serving.templates.choose(False)) is not None:
        try:
            shown = template.render([message]).split(_BETWEEN)[1:-1]
        except (ChatTemplateError, ParameterError):
            # Such a template allows no message that consists of media.
            shown = []
    if len(shown) != len(marks):
        return marks
    return [text.strip() or mark for text, mark in zip(shown, marks, strict=True)]


async def _encode(
    serving: Serving,
    prompt: Prompt,
    given: GivenMedia,
    shown: list[str],
    media: Sequence[Any],
    *,
    has_special: bool,
) -> None:
    """Set the tokens and the encoder inputs of a prompt."""
    serving.verify_tokenizer(prompt.param)
    tokenizer, reader = serving.tokenizer, serving.media
    assert reader is not None, "the model reads no media"
    adds_special = has_special and prompt.text is not None

    def encode(text: str) -> tuple[str, Sequence[int]]:
        return text, tokenizer.encode(text, adds_special)

    def encode_all() -> None:
        text = prompt.text
        if text is None:
            text = tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False)
        try:
            text = _write_places(text, given.markers, shown)
            _, token_ids, prompt.encoder_inputs = reader.encode(text, media, encode)
        except ParameterError as error:
            problem = f"does not match its media: they {error.problem}"
            raise bad_request(prompt.param, problem) from None
        prompt.token_ids = np.asarray(token_ids, np.int32)
        prompt.video_hashes = video_hashes(media)

    num_tokens, limit = len(prompt.token_ids), serving.config.model.max_model_len
    if num_tokens > limit:
        raise ContextExceededError(
            prompt.param,
            f"{prompt.param} has {num_tokens} tokens without its media, but at most {limit} are allowed",
            limit=limit,
            num_tokens=num_tokens,
        )
    size = num_tokens if prompt.text is None else len(prompt.text)
    await serving.executor.run(size, encode_all)


def _write_places(text: str, markers: Sequence[str], shown: Sequence[str]) -> str:
    """Return a text in which markers are replaced by the texts of the media, in their order.

    A place that has the text of its medium already is kept.

    Raises:
        ParameterError: There are more markers than media.
    """
    waiting: dict[str, deque[str]] = {marker: deque() for marker in markers}
    for marker, own in zip(markers, shown, strict=True):
        waiting[marker].append(own)
    numbers = Counter(markers)
    counts: Counter[str] = Counter()
    # A text may contain a marker: MiniCPM-V's is (<image>./</image>).
    texts = sorted({*markers, *shown}, key=len, reverse=True)

    def write(place: re.Match[str]) -> str:
        found = place[0]
        if (queue := waiting.get(found)) is not None:
            counts[found] += 1
            return queue.popleft() if queue else found
        for queue in waiting.values():
            if queue and queue[0] == found:
                queue.popleft()
                break
        return found

    written = re.sub("|".join(map(re.escape, texts)), write, text)
    for marker, number in numbers.items():
        if counts[marker] > number:
            raise ParameterError(
                "messages",
                f"have {counted(number, 'file')}, but the prompt has {counts[marker]} markers {marker}",
            )
    return written
