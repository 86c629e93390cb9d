"""Render a query and a document into the prompt of a model that compares them (a reranker)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .special_tokens import SpecialTokenGuard
from .template import ChatTemplate


class PairTemplate:
    """A chat template that reads a message with the role `query` and one with the role `document`."""

    def __init__(self, template: ChatTemplate, guard: SpecialTokenGuard) -> None:
        self._template = template
        self._guard = guard

    def render(self, query: Any, document: Any, kwargs: dict[str, Any]) -> str:
        """Return the prompt. `kwargs` are additional variables of the template.

        Both are texts or the parts of a message, with marks for images.

        Raises:
            ChatTemplateError: The template failed.
            ParameterError: A text or a variable was rejected.
        """
        messages = [
            {"role": "query", "content": query},
            {"role": "document", "content": document},
        ]
        return self._template.render(messages, self._guard, **kwargs)

    def encode(self, text: str) -> tuple[str, Sequence[int]]:
        """Return a prompt without the marks of its special tokens, and its tokens."""
        return self._guard.encode(text, add_special_tokens=False)
