"""The chat templates of one model."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from ...protocol.config.frontend import ContentFormat
from ..tokenizer.tokenizer import Tokenizer
from .built_in_templates import built_in_template
from .named_templates import NAMED_TEMPLATES
from .special_tokens import adds_bos
from .template import ChatTemplate, load_chat_template

_USED = ("default", "tool_use")
_NUM_KEPT: Final = 8
"""Maximum number of templates of requests that stay compiled."""
_WITHOUT_START = {"molmo2"}
"""Model types whose prompts start with a token that their published templates lack."""


class ModelTemplates:
    """The model's chat templates, or the one template `instead`, given as its text or its path.

    Some models of an `architecture` are published without a template, and get one from Engine. If prompts should start
    with BOS, or EOS without one, and the template does not name BOS, it is added as by transformers' processor.
    `defaults` are extra variables for every chat that does not set them itself.

    Raises:
        ChatTemplateError: The template cannot be used.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        instead: str | None = None,
        content_format: ContentFormat = "auto",
        architecture: str = "",
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        sources = tokenizer.chat_templates
        if not sources and (built_in := built_in_template(architecture)) is not None:
            sources = {"default": built_in}
        if instead is not None:
            sources = {"default": load_chat_template(instead)}
        tokens: dict[str, str | None] = {
            **tokenizer.named_tokens,
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.pad_token,
        }
        if instead in NAMED_TEMPLATES and not adds_bos(tokenizer):
            tokens["bos_token"] = None
        start = tokenizer.bos_token or tokenizer.eos_token
        if instead is None and start is not None and architecture in _WITHOUT_START:
            sources = {
                name: source if "bos_token" in source else f"{{{{ {json.dumps(start)} }}}}{source}"
                for name, source in sources.items()
            }
        special_tokens = {name: token for name, token in tokens.items() if token is not None}
        self._compile = partial(
            ChatTemplate,
            special_tokens=special_tokens,
            content_format=content_format,
            defaults=defaults,
        )
        self._by_name = {name: self._compile(sources[name]) for name in _USED if name in sources}
        self._describes_tools = False
        self._of_requests: OrderedDict[str, ChatTemplate] = OrderedDict()
        self._lock = threading.Lock()

    def describe_tools(self) -> None:
        """From now on, describe tools in the system message, because the model's template does not support tools."""
        self._describes_tools = True
        for template in self._by_name.values():
            template.describe_tools()

    def of_request(self, source: str) -> ChatTemplate:
        """Return the template that a request brings. This method is thread-safe.

        Raises:
            ChatTemplateError: The template is not valid.
        """
        with self._lock:
            if (known := self._of_requests.get(source)) is not None:
                self._of_requests.move_to_end(source)
                return known
        template = self._compile(source)
        if self._describes_tools and not template.shows_tools:
            template.describe_tools()
        with self._lock:
            self._of_requests[source] = template
            if len(self._of_requests) > _NUM_KEPT:
                self._of_requests.popitem(last=False)
        return template

    def choose(self, with_tools: bool) -> ChatTemplate | None:
        """Return the tool-use template if `with_tools` and there is one, else the default one, which may be None."""
        default = self._by_name.get("default")
        return self._by_name.get("tool_use", default) if with_tools else default
