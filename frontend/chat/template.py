"""Render chat templates: Jinja as in transformers, in a sandbox with limits.

A template comes with a checkpoint, so it is untrusted. It can access plain values only, not the attributes of Python
objects, and its time is limited.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.meta import find_undeclared_variables
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...protocol.config.frontend import ContentFormat
from ...protocol.errors import EngineError
from .bare_tools import BARE_TOOLS, complete_tools
from .generic_tools import write_tools_as_text
from .messages import AUDIO_PART, Message, TemplateTraits, normalize_messages
from .named_templates import NAMED_TEMPLATES
from .special_tokens import SpecialTokenGuard

MAX_RENDER_SECONDS = 10.0
MAX_REPETITION = 1_000_000
"""Maximum number of elements of a repeated string or list (`value * n`)."""
_DEADLINE = "_deadline"
# The final space shows whether the template trims content. If so, the text before the mark must be trimmed as well.
_CONTINUE_HERE = "\u241fcontinue here\u241f "


class ChatTemplateError(EngineError, ValueError):
    """Raised if the template rejects a chat or cannot be used. The message may be sent to clients."""


class ChatTemplate:
    """One compiled template. `render` is thread-safe.

    `content_format` is the form in which the template reads a message's content: "string", "openai" (a list of parts),
    or "auto" to detect it.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        content_format: ContentFormat = "auto",
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """Compile a template. `special_tokens` maps names such as bos_token to the tokens.

        `defaults` are extra variables for every chat that does not set them itself.

        Raises:
            ChatTemplateError: The template is not valid.
        """
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._defaults = dict(defaults or {})
        try:
            self._template = _ENVIRONMENT.from_string(source)
            # Each render copies the globals, which takes several times as long from jinja's chain of mappings.
            self._template.globals = dict(self._template.globals)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template is not valid, line {error.lineno}: {error.message}"
            ) from error
        # Parsing takes longer than the search.
        self._reads_functions = "functions" in source and (
            "functions" in find_undeclared_variables(_ENVIRONMENT.parse(source))
        )
        self._traits = self._probe(content_format)
        self.shows_tools = self._probe_tools()
        """True if prompts depend on the tools of the request."""
        self._completes_tools = self.shows_tools and self._fails_with_bare_tools()
        self._describes_tools = False
        self._reads_system = True

    def describe_tools(self) -> None:
        """From now on, describe tools in the system message, instead of in the template's own format."""
        self._describes_tools = self.shows_tools = True
        self._reads_system = self._probe_system()

    def render(
        self,
        messages: Sequence[Message],
        guard: SpecialTokenGuard | None = None,
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **chat_template_kwargs: Any,
    ) -> str:
        """Return the prompt for `messages` in the format of the OpenAI API.

        With `continue_final_message` the prompt ends with the last message's text, which the model continues.
        `chat_template_kwargs` are extra variables for the template. Text from the request passes through the
        `guard`, which then encodes the prompt.

        Raises:
            ChatTemplateError: The template failed; the message quotes its error.
            ParameterError: A field is invalid; the message names it, such as `messages[0].content[1].type`.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError(
                "continue_final_message and add_generation_prompt cannot both be true"
            )
        normalized = normalize_messages(messages, self._traits)
        if guard is not None:
            normalized = guard.protect_messages(normalized)
            tools = guard.protect(tools, "tools")
            documents = guard.protect(documents, "documents")
            chat_template_kwargs = guard.protect(chat_template_kwargs, "chat_template_kwargs")
        if self._describes_tools:
            try:
                normalized = write_tools_as_text(
                    normalized,
                    tools,
                    reads_system=self._reads_system,
                    reads_strings=self._traits.reads_strings,
                )
            except RecursionError as error:
                raise ChatTemplateError("tools are nested too deeply; use fewer levels") from error
            tools = None
        elif tools and self._completes_tools:
            tools = complete_tools(tools)
        if continue_final_message:
            _mark_end(normalized)
        prompt = self._render(
            self._defaults | chat_template_kwargs,
            messages=normalized,
            tools=list(tools) if tools else None,
            documents=list(documents) if documents else None,
            add_generation_prompt=add_generation_prompt,
        )
        return _cut_at_mark(prompt) if continue_final_message else prompt

    def render_call(self, question: str, name: str, arguments: dict[str, Any]) -> str:
        """Return a chat in which the question is answered with one call; "" if the template does not support calls."""
        properties = {key: {"type": "string", "description": key} for key in arguments}
        schema = {"type": "object", "properties": properties}
        function = {"name": name, "description": name, "parameters": schema}
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages: list[Message] = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c12345678", **call}]},
        ]
        chat = normalize_messages(messages, self._traits)
        tools = [{"type": "function", "function": function}]
        return self._try_render(chat, tools, add_generation_prompt=False) or ""

    def _render(self, more: Mapping[str, Any], **variables: Any) -> str:
        limit = {_DEADLINE: time.monotonic() + MAX_RENDER_SECONDS}
        if self._reads_functions:
            more = {**_firefunction_variables(variables["tools"]), **more}
        try:
            return self._template.render({**self._special_tokens, **more, **variables, **limit})
        except jinja2.TemplateError as error:
            raise ChatTemplateError(_explain(error)) from error
        except RecursionError as error:
            raise ChatTemplateError("the chat template recurses too deeply") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ChatTemplateError(f"the chat template failed: {error}") from error

    def _probe(self, content_format: ContentFormat) -> TemplateTraits:
        """Detect the template's features by rendering small chats."""
        word = "4f1c"

        def shows(content: Any) -> bool:
            text = self._try_render([{"role": "user", "content": content}])
            return text is not None and word in text and "'text'" not in text

        reads_strings, reads_parts = content_format == "string", content_format == "openai"
        if content_format == "auto":
            reads_parts = shows([{"type": "text", "text": word}])
            reads_strings = shows(word) or not reads_parts
        call = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
        with_null = self._try_render(
            [
                {"role": "user", "content": word},
                {"role": "assistant", "content": None, "tool_calls": [{"id": "c12345678", **call}]},
            ]
        )
        return TemplateTraits(
            reads_strings=reads_strings,
            reads_parts=reads_parts,
            reads_audio=reads_parts and self._shows_audio(word),
            reads_null=with_null is not None and "None" not in with_null,
            knows_developer="developer" in self.source,
        )

    def _shows_audio(self, word: str) -> bool:
        """Return whether an audio clip among the parts of a message changes the prompt."""
        parts = [{"type": "text", "text": word}]
        texts = [
            self._try_render([{"role": "user", "content": content}])
            for content in (parts, [dict(AUDIO_PART), *parts])
        ]
        return texts[1] is not None and texts[0] != texts[1]

    def _probe_tools(self) -> bool:
        """Return whether the template shows tools, by comparing small chats with and without a tool."""
        schema = {"type": "object", "properties": {"a": {"type": "string", "description": "b"}}}
        function = {"name": "f", "description": "c", "parameters": schema}
        chat = [{"role": "system", "content": "d"}, {"role": "user", "content": "e"}]
        chat = normalize_messages(chat, self._traits)
        for messages in (chat[1:], chat):
            with_tools = self._try_render(messages, [{"type": "function", "function": function}])
            if with_tools is not None and with_tools != self._try_render(messages):
                return True
        return False

    def _fails_with_bare_tools(self) -> bool:
        """Return whether the template reads descriptions and parameters that a tool does not have."""
        chat = normalize_messages([{"role": "user", "content": "e"}], self._traits)
        return any(self._try_render(chat, [tool]) is None for tool in BARE_TOOLS)

    def _probe_system(self) -> bool:
        """Return whether the template has a system role."""
        word = "4f1c"
        chat = [{"role": "system", "content": word}, {"role": "user", "content": "e"}]
        return word in (self._try_render(normalize_messages(chat, self._traits)) or "")

    def _try_render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str | None:
        try:
            return self._render(
                {},
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except ChatTemplateError:
            return None


def _firefunction_variables(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, str]:
    """Return the variables that Firefunction's template reads instead of `tools`.

    The time has only its date, so that prompts of a day share their prefix.
    """
    functions = [tool.get("function", tool) for tool in tools or ()]
    shown = _tojson(functions, indent=4) if functions else ""
    return {"functions": shown, "datetime": _strftime_now("%Y-%m-%d")}


def load_chat_template(argument: str) -> str:
    """Return the template given by `--chat-template`: directly, by its name or as the path of a file.

    Raises:
        ChatTemplateError: The file cannot be read.
    """
    if "{" in argument or "\n" in argument:
        return argument
    if argument in NAMED_TEMPLATES:
        return NAMED_TEMPLATES[argument]
    try:
        return Path(argument).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChatTemplateError(
            f"--chat-template {argument!r} is neither a Jinja template nor a readable file: {error}; check the path"
        ) from error


def _mark_end(messages: list[dict[str, Any]]) -> None:
    """Add the mark after the last message's text."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + _CONTINUE_HERE
    elif isinstance(content, list) and content:
        content[-1]["text"] += _CONTINUE_HERE
    else:
        raise ChatTemplateError("continue_final_message needs a last message with text content")


def _cut_at_mark(prompt: str) -> str:
    before, mark, after = prompt.rpartition(_CONTINUE_HERE.rstrip())
    if not mark:
        raise ChatTemplateError(
            "continue_final_message must be omitted, because the chat template does not write the last message's content"
        )
    return before if after.startswith(" ") else before.rstrip()


class _GenerationTag(jinja2.ext.Extension):
    """Implements `{% generation %}`, which marks the model's text, by rendering its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Checks the time limit in each loop iteration and at each call of a template."""

    intercepted_binops = frozenset(["*", "**"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in list(template.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "_timed", [], [], None, None, lineno=loop.lineno)
        return template

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_deadline(__context)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("it must not use the operator **")
        for sequence, times in ((left, right), (right, left)):
            repeats = isinstance(sequence, (str, list, tuple)) and isinstance(times, int)
            if repeats and len(sequence) * times > MAX_REPETITION:
                raise SecurityError(f"a repeated value has more than {MAX_REPETITION} elements")
        return super().call_binop(context, operator, left, right)


def _check_deadline(context: Context) -> None:
    if time.monotonic() > context.resolve(_DEADLINE):
        raise SecurityError(f"rendering takes more than {MAX_RENDER_SECONDS} seconds")


@jinja2.pass_context
def _timed(context: Context, iterable: Iterable[Any] | None) -> Iterator[Any]:
    # Templates for chats with tools loop over them without a test, but without tools there is no list.
    for item in () if iterable is None else iterable:
        _check_deadline(context)
        yield item


def _explain(error: jinja2.TemplateError) -> str:
    """Return the message of an error, with a note that it comes from the chat template."""
    if isinstance(error, _TemplateRefusal):
        return f"the chat template rejected the messages: {error.message}"
    return f"the chat template failed: {error.message or type(error).__name__}"


class _TemplateRefusal(jinja2.TemplateError):
    """Raised when a template calls `raise_exception`."""


def _raise_exception(message: str) -> None:
    raise _TemplateRefusal(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_as_list,
    )


def _as_list(value: Any) -> list[Any]:
    """Return the elements of what filters such as `map` return."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def _environment() -> _BoundedEnvironment:
    environment = _BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.globals |= functions
    del environment.globals["lipsum"]
    environment.filters |= {"tojson": _tojson, "_timed": _timed}
    return environment


_ENVIRONMENT = _environment()
