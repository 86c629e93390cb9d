"""Move lines that change with every request to the end of the prompt, so that the prefix cache works.

Agents write the time, or a header for billing, at the start of their system prompt. When such a line changes,
everything after it must be computed again. At the end of the last message, the line has nothing after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ...protocol.errors import ConfigError

RULES: Final = {
    "billing": r"x-anthropic-billing-header:.*",
    "date": r".*\b(today'?s|current)[ _]date\b(?! and).*\d.*|.*\btoday is\b.*\d.*",
    "clock": r".*\b(current|local|system)[ _](date[ _]?(and[ _])?)?time\b.*\d.*|(time|now|timestamp)\s*[:=].*\d.*",
}
"""Rule -> regular expression for the lines that it moves, without surrounding spaces, ignoring case."""

MAX_LINE_CHARACTERS: Final = 512
"""Lines with more characters are not moved, so that matching takes little time."""

_SYSTEM: Final = ("system", "developer")
_INPUTS: Final = ("user", "tool", "function")


class StablePrefix:
    """Rules for the lines of system prompts that are moved to the end of the conversation.

    Args:
        rules: Names of `RULES`, or regular expressions between slashes that match whole lines.

    Raises:
        ConfigError: A rule is neither.
    """

    def __init__(self, rules: Iterable[str]) -> None:
        patterns = [_pattern_of(rule) for rule in rules]
        self._is_volatile = re.compile("|".join(f"(?:{p})" for p in patterns), re.IGNORECASE)
        self._has_rules = bool(patterns)

    def apply(self, messages: Sequence[Any]) -> Sequence[Any]:
        """Return the messages of a request with the matching lines moved. Invalid messages are left unchanged."""
        if not self._has_rules:
            return messages
        moved: list[str] = []
        changed = list(messages)
        num_leading = 0
        for message in messages:
            if not isinstance(message, Mapping) or message.get("role") not in _SYSTEM:
                break
            kept = self._keep(message.get("content"), moved)
            changed[num_leading] = {**message, "content": kept}
            num_leading += 1
        if not moved:
            return messages
        for i in reversed(range(num_leading, len(messages))):
            message = messages[i]
            if isinstance(message, Mapping) and message.get("role") in (*_INPUTS, *_SYSTEM):
                changed[i] = {**message, "content": _extended(message.get("content"), moved)}
                return changed
        return messages

    def _keep(self, content: Any, moved: list[str]) -> Any:
        """Return the content without the matching lines, which are appended to `moved`."""
        if isinstance(content, str):
            lines = content.split("\n")
            kept = [line for line in lines if not self._matches(line)]
            if len(kept) == len(lines):
                return content
            moved += (line.strip() for line in lines if self._matches(line))
            return "\n".join(kept)
        if not isinstance(content, list):
            return content
        parts = []
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else None
            kept_text = self._keep(text, moved)
            # A part that has only such lines is dropped completely, because an empty part would leave a separator.
            if not isinstance(text, str) or kept_text or not text:
                parts.append(part if kept_text is text else {**part, "text": kept_text})
        return parts

    def _matches(self, line: str) -> bool:
        line = line.strip()
        return len(line) <= MAX_LINE_CHARACTERS and self._is_volatile.fullmatch(line) is not None


def _pattern_of(rule: str) -> str:
    if rule in RULES:
        return RULES[rule]
    if len(rule) > 2 and rule.startswith("/") and rule.endswith("/"):
        try:
            re.compile(rule[1:-1])
        except re.error as error:
            raise ConfigError(
                f"--stable-prefix {rule}: invalid regular expression: {error}"
            ) from None
        return rule[1:-1]
    raise ConfigError(
        f"--stable-prefix {rule}: must be {', '.join(RULES)}, or a regular expression enclosed in slashes"
    )


def _extended(content: Any, lines: list[str]) -> Any:
    text = "\n".join(lines)
    if isinstance(content, list):
        return [*content, {"type": "text", "text": text}]
    return f"{content}\n\n{text}" if isinstance(content, str) and content else text
