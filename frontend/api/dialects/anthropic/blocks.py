"""The messages of Anthropic's Messages API and their content blocks. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]


class Block(msgspec.Struct, kw_only=True, tag_field="type"):
    """The base of everything that a field `type` tells apart."""


class Text(Block, tag="text"):
    """A text."""

    text: str


class Thinking(Block, tag="thinking"):
    """The model's reasoning."""

    thinking: str


class Base64(Block, tag="base64"):
    """An image in base64."""

    media_type: str
    data: str

    @property
    def url(self) -> str:
        """The image as a data URL."""
        return f"data:{self.media_type};base64,{self.data}"


class Url(Block, tag="url"):
    """An image at a URL."""

    url: str


class Pdf(Base64, tag="base64"):
    """A PDF document in base64."""

    media_type: Literal["application/pdf"]


class PlainText(Block, tag="text"):
    """A document that is a text."""

    data: str

    @property
    def text(self) -> str:
        """The text."""
        return self.data


class Texts(Block, tag="content"):
    """A document of several texts."""

    content: str | list[Text]

    @property
    def text(self) -> str:
        """The texts, a line each."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(block.text for block in self.content)


class Image(Block, tag="image"):
    """An image."""

    source: Base64 | Url


class Document(Block, tag="document"):
    """A document."""

    source: Pdf | PlainText | Texts
    title: str | None = None


class SearchResult(Block, tag="search_result"):
    """A result of a search."""

    content: list[Text]
    title: str | None = None


class ToolReference(Block, tag="tool_reference"):
    """A tool that a search for tools found."""

    tool_name: Name


InputBlock: TypeAlias = Text | Image | Document | SearchResult | ToolReference


class ToolResult(Block, tag="tool_result"):
    """The result of a call."""

    tool_use_id: Name
    content: str | list[InputBlock] | None = None


class ToolUse(Block, tag="tool_use"):
    """A call of a tool."""

    id: Name
    name: Name
    input: dict[str, Any]


class Compaction(Block, tag="compaction"):
    """The summary of everything before it; null if the client keeps that."""

    content: str | None = None


class KnownTool(Block, tag="tool_reference"):
    """The name of an earlier tool."""

    name: Name


class NewTool(Block, tag="tool_definition"):
    """The definition of a tool."""

    definition: dict[str, Any]


class ToolAddition(Block, tag="tool_addition"):
    """Lets the model call a tool from then on."""

    tool: KnownTool | NewTool


class ToolRemoval(Block, tag="tool_removal"):
    """Forbids the model to call a tool from then on."""

    tool: KnownTool


class ServerBlock(Block, tag="redacted_thinking"):
    """A block that only Anthropic's servers can use. The texts in it are part of the answer."""

    content: Any = None


class InputMessage(msgspec.Struct, kw_only=True, tag_field="role", tag="user"):
    """A message of the user."""

    content: str | list[InputBlock | ToolResult | Compaction | ToolAddition | ToolRemoval]


class SystemMessage(InputMessage, tag="system"):
    """Instructions within the conversation."""


class AssistantMessage(msgspec.Struct, kw_only=True, tag_field="role", tag="assistant"):
    """A message of the model."""

    content: str | list[Text | Thinking | ToolUse | Compaction | ServerBlock]


Message: TypeAlias = InputMessage | SystemMessage | AssistantMessage


class Conversation(msgspec.Struct):
    """The messages of a body."""

    messages: list[Message]
