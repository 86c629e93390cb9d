"""Render a query and a document into the prompt of a model that compares them (a reranker)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ...protocol.config.model import ClassifierConfig
from ...protocol.errors import ParameterError
from .special_tokens import SpecialTokenGuard
from .template import ChatTemplate, ChatTemplateError

_T = TypeVar("_T")


class PairTemplate:
    """A chat template that reads a message with the role `query` and one with the role `document`.

    Prompts end with the tokens `end`, whatever the template.
    """

    def __init__(
        self, template: ChatTemplate, guard: SpecialTokenGuard, end: Sequence[int] = ()
    ) -> None:
        self._template = template
        self._guard = guard
        self._end = end
        self._reverses = self._begins_with_document()

    @classmethod
    def find(
        cls,
        classifier: ClassifierConfig | None,
        given: ChatTemplate | None,
        guard: SpecialTokenGuard,
    ) -> PairTemplate | None:
        """Return the template `given` or that of a classifier; None if its tokenizer joins pairs of texts."""
        if classifier is None:
            return None
        if given is None and classifier.pair_template:
            given = ChatTemplate(classifier.pair_template)
        return None if given is None else cls(given, guard, classifier.pair_end)

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

    def ordered(self, query: _T, document: _T) -> tuple[_T, _T]:
        """Return what belongs to the query and to the document in the order of the prompt."""
        return (document, query) if self._reverses else (query, document)

    def _begins_with_document(self) -> bool:
        query, document = "\ue000", "\ue001"
        try:
            text = self.render(query, document, {})
        except (ChatTemplateError, ParameterError):
            return False
        return -1 < text.find(document) < text.find(query)

    def encode(self, text: str) -> tuple[str, Sequence[int]]:
        """Return a prompt without the marks of its special tokens, and its tokens."""
        text, token_ids = self._guard.encode_whole(text)
        return text, [*token_ids, *self._end]
