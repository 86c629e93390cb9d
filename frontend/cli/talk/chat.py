"""The command `engine chat`: chat with a model on the terminal, with or without a running server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....protocol.errors import EngineError
from ...supervisor.console import reports_errors
from ..parsers import add_option, add_switch, command_parser
from ..remote.server import ServerError
from ..remote.target import Target, add_target_arguments, open_target
from .answer import Answer
from .conversation import Conversation, image_url
from .line_input import EndOfInput, LineInput
from .sampling import add_sampling_arguments, sampling_fields
from .slash import SLASH_COMMANDS, Quit, Retry, run_command
from .views import PlainView

if TYPE_CHECKING:
    from .markdown_view import MarkdownView


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine chat`, without the flags of `engine serve`."""
    parser = command_parser(
        "chat",
        "Chat with a model. --url can be any server with an OpenAI-compatible API. With MODEL and "
        "without --url, a server is started for the chat, and all flags of engine serve are accepted.",
        "[MODEL] [--url URL] [flags]",
        epilog="In the chat, /help lists the commands. Ctrl-C stops an answer, Ctrl-D ends the chat.",
        takes_serve_flags=True,
    )
    add_target_arguments(parser)
    add_option(parser, "--system", "System prompt", "TEXT")
    about = "Image for the first message; may be repeated"
    add_option(parser, "--image", about, "FILE_OR_URL", default=[], action="append")
    add_option(parser, "--load", "Continue a conversation that /save wrote", "FILE", Path)
    add_option(parser, "-q --quick", "Send this message, print the answer and exit", "TEXT")
    add_switch(parser, "--plain", "Print answers as plain text, without rendering Markdown")
    add_sampling_arguments(parser)
    return parser


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Chat until the input ends. Return 0, or 1 if the server cannot be used; invalid arguments exit with code 2."""
    parser = make_parser()
    parsed, flags = parser.parse_known_args(argv)
    conversation = Conversation(parsed.system)
    if parsed.load is not None:
        conversation.load(parsed.load)
    conversation.images += map(image_url, parsed.image)
    with open_target(parser, parsed, flags) as target:
        chat = _Chat(target, conversation, sampling_fields(parsed), parsed.plain)
        if parsed.quick is not None:
            return 0 if chat.answer(parsed.quick) else 1
        chat.run()
    return 0


class _Chat:
    """A chat: reads messages and commands, and shows the answers."""

    def __init__(
        self, target: Target, conversation: Conversation, sampling: dict[str, Any], plain: bool
    ) -> None:
        self._target = target
        self._conversation = conversation
        self._sampling = sampling
        self._input = LineInput()
        self._make_view = _choose_view(plain)

    def run(self) -> None:
        """Answer messages until the input ends.

        Raises:
            EngineError: A message was not answered, and the input is not a terminal.
        """
        with self._input.editing(SLASH_COMMANDS):
            self._note(f"{self._target.model} at {self._target.server.url}; /help lists commands")
            while True:
                try:
                    message = self._input.read_message()
                    if not message.strip():
                        continue
                    if message.startswith("/"):
                        self._note(run_command(self._conversation, message))
                    else:
                        self.answer(message)
                except Retry:
                    self._answer_last()
                except (Quit, EndOfInput):
                    return
                except KeyboardInterrupt:
                    self._note("\nCtrl-D or /quit ends the chat")
                except EngineError as error:
                    if not self._input.on_terminal:
                        raise
                    self._note(f"error: {error}")

    def answer(self, message: str) -> bool:
        """Ask the model and show its answer. Return False if the user stopped it.

        Raises:
            ServerError: The server cannot be reached, or answers with an error.
        """
        self._conversation.ask(message)
        return self._answer_last()

    def _answer_last(self) -> bool:
        answer = Answer()
        body = {
            "model": self._target.model,
            "messages": self._conversation.for_request(),
            "stream_options": {"include_usage": True},
            **self._sampling,
        }
        is_whole = True
        try:
            events = self._target.server.stream("/v1/chat/completions", body)
            with closing(events), self._make_view() as view:
                try:
                    for piece in answer.read(events):
                        view.show(piece)
                except KeyboardInterrupt:
                    is_whole = False
        except ServerError:
            self._conversation.retract_question()
            raise
        # The text before the interruption stays in the conversation.
        if answer.text or is_whole:
            self._conversation.answer(answer.text)
        else:
            self._conversation.retract_question()
        figures = answer.figures()
        self._note(figures if is_whole else f"stopped; {figures}".rstrip("; "))
        return is_whole

    def _note(self, text: str) -> None:
        """Print a line that is not part of an answer; only on a terminal."""
        if self._input.on_terminal and text:
            print(f"\x1b[2m{text}\x1b[0m")


def _choose_view(plain: bool) -> Callable[[], PlainView | MarkdownView]:
    if plain or not sys.stdout.isatty():
        return PlainView
    # Late imports keep other commands fast.
    from rich.console import Console as Terminal

    from .markdown_view import MarkdownView

    terminal = Terminal()
    return lambda: MarkdownView(terminal)
