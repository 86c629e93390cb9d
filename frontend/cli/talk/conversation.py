"""A conversation of `engine chat`: its messages in OpenAI's format, and the images for the next message."""

from __future__ import annotations

import base64
import json
import mimetypes
import os
from pathlib import Path
from typing import Any, TypeAlias

from ....protocol.errors import EngineError

Message: TypeAlias = dict[str, Any]


class Conversation:
    """The messages of a chat so far.

    Attributes:
        system: The system prompt, or None.
        messages: Messages of the user and of the assistant, in OpenAI's format.
        images: URLs of the images that will be sent with the next message of the user.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.messages: list[Message] = []
        self.images: list[str] = []

    def for_request(self) -> list[Message]:
        """Return all messages, the system prompt first."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]

    def ask(self, text: str) -> None:
        """Add a message of the user, with the images that were added for it."""
        content: str | list[Message] = text
        if self.images:
            content = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
            content.append({"type": "text", "text": text})
            self.images = []
        self.messages.append({"role": "user", "content": content})

    def answer(self, text: str) -> None:
        """Add a message of the assistant."""
        self.messages.append({"role": "assistant", "content": text})

    def retract_question(self) -> None:
        """Remove the last message of the user, which was not answered, and its images."""
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()

    def retract_answer(self) -> bool:
        """Remove the last answer, so that its question can be asked again. Return False if there is no answer."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return False
        self.messages.pop()
        return True

    def clear(self) -> None:
        """Remove everything but the system prompt."""
        self.messages = []
        self.images = []

    def save(self, path: Path) -> None:
        """Write the messages as JSON, in the format of a chat completion request.

        Raises:
            EngineError: The file cannot be written.
        """
        text = json.dumps(self.for_request(), indent=2, ensure_ascii=False) + "\n"
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise EngineError(f"cannot write {path}: {error.strerror}") from None

    def load(self, path: Path) -> None:
        """Replace the conversation by one that `save` wrote.

        Raises:
            EngineError: The file cannot be read, or has no list of messages.
        """
        try:
            messages = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise EngineError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise EngineError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(messages, list) or not all(
            isinstance(message, dict) and "role" in message for message in messages
        ):
            raise EngineError(f"{path} must contain a list of messages, as /save writes it")
        if messages and messages[0]["role"] == "system":
            self.system = messages.pop(0)["content"]
        self.messages = messages


def image_url(source: str) -> str:
    """Return the URL of an image: the given one, or a `data:` URL with the content of a file.

    Raises:
        EngineError: The file cannot be read or is not an image.
    """
    if source.startswith(("http://", "https://", "data:")):
        return source
    path = Path(os.path.expanduser(source))
    kind, _ = mimetypes.guess_type(path)
    if kind is None or not kind.startswith("image/"):
        raise EngineError(
            f"{path} does not have an image extension; use a .png, .jpg, .gif or .webp file"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise EngineError(f"cannot read {path}: {error.strerror}") from None
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
