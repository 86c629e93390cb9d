"""The commands within `engine chat`, which begin with a slash."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from ....protocol.errors import EngineError, counted
from .conversation import Conversation, image_url
from .line_input import QUOTES


class Quit(Exception):
    """Raised by the command that ends the chat."""


class Retry(Exception):
    """Raised by the command that asks for another answer to the last message."""


class SlashCommand(NamedTuple):
    """A command of a chat: its arguments, its help, and the function that runs it and returns a line for the user."""

    usage: str
    summary: str
    run: Callable[[Conversation, str], str]


def run_command(conversation: Conversation, line: str) -> str:
    """Run a line that begins with a slash, and return the text to show.

    Raises:
        EngineError: The command does not exist, or it failed.
        Quit: The user ended the chat.
        Retry: The user wants another answer to the last message.
    """
    name, _, argument = line.strip().partition(" ")
    if name not in SLASH_COMMANDS:
        raise EngineError(f"unknown command {name}; /help lists all commands")
    return SLASH_COMMANDS[name].run(conversation, argument.strip())


def _help(conversation: Conversation, argument: str) -> str:
    rows = [
        (f"{name} {command.usage}".strip(), command.summary)
        for name, command in SLASH_COMMANDS.items()
    ]
    rows += [
        (QUOTES, "begins and ends a message of several lines"),
        ("Ctrl-C", "stops an answer"),
        ("Ctrl-D", "ends the chat"),
    ]
    width = max(len(usage) for usage, _ in rows)
    return "\n".join(f"{usage:{width}}  {summary}" for usage, summary in rows)


def _system(conversation: Conversation, argument: str) -> str:
    if argument:
        conversation.system = argument
        return "the system prompt applies from the next message on"
    return conversation.system or "there is no system prompt; set one with /system TEXT"


def _image(conversation: Conversation, argument: str) -> str:
    try:
        sources = shlex.split(argument)
    except ValueError as error:
        raise EngineError(f"/image {argument}: {error}") from None
    if not sources:
        raise EngineError("/image needs the path or URL of an image")
    conversation.images += [image_url(source) for source in sources]
    return f"{len(conversation.images)} image(s) will be sent with the next message"


def _save(conversation: Conversation, argument: str) -> str:
    if not argument:
        raise EngineError("/save needs a file name")
    path = Path(os.path.expanduser(argument))
    conversation.save(path)
    return f"saved {counted(len(conversation.messages), 'message')} to {path}"


def _clear(conversation: Conversation, argument: str) -> str:
    conversation.clear()
    return "the conversation is empty"


def _retry(conversation: Conversation, argument: str) -> str:
    if not conversation.retract_answer():
        raise EngineError("there is no answer to replace yet")
    raise Retry


def _quit(conversation: Conversation, argument: str) -> str:
    raise Quit


SLASH_COMMANDS: Final = {
    "/help": SlashCommand("", "lists the commands", _help),
    "/system": SlashCommand("[TEXT]", "sets the system prompt, or shows it", _system),
    "/image": SlashCommand("FILE_OR_URL...", "adds images to the next message", _image),
    "/save": SlashCommand("FILE", "writes the messages as JSON, for --load", _save),
    "/clear": SlashCommand("", "starts a new conversation", _clear),
    "/retry": SlashCommand("", "asks the last message again", _retry),
    "/quit": SlashCommand("", "ends the chat", _quit),
}
