"""Render a pair of texts into the prompt of a model that compares texts (a reranker)."""

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

    def encode(self, query: str, document: str, kwargs: dict[str, Any]) -> Sequence[int]:
        """Return the tokens of the prompt. `kwargs` are additional variables of the template.

        Raises:
            ChatTemplateError: The template failed.
            ParameterError: A text or a variable was rejected.
        """
        messages = [
            {"role": "query", "content": query},
            {"role": "document", "content": document},
        ]
        text = self._template.render(messages, self._guard, **kwargs)
        _, token_ids = self._guard.encode(text, add_special_tokens=False)
        return token_ids
