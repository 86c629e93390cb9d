"""Scan one JSON object while it is being generated."""

import json
import re

from ..held_text import may_begin

_STRING_END = re.compile(r'["\\]')


def decode_string(source: str) -> str | None:
    """Return the value of the JSON string `source`, or None if it is invalid. Unpaired surrogates become "?"."""
    try:
        value: object = json.loads(source)
    except ValueError:
        return None
    return value.encode(errors="replace").decode() if isinstance(value, str) else None


class JsonObjectScanner:
    """Finds the members of one JSON object that arrives in pieces. The first piece must start with "{".

    A marker outside a string ends an object that is still open.

    Attributes:
        text: The text so far.
        members: The complete values, as JSON text.
        open_key: The key of the object value that is being written.
        open_start: The position in `text` where that value starts.
    """

    def __init__(self, markers: tuple[str, ...]) -> None:
        self._markers = markers
        self._longest_marker = max(map(len, markers))
        first_chars = re.escape("".join(marker[0] for marker in markers))
        self._structure = re.compile(rf'["{{}}\[\]:,{first_chars}]')
        self.text = ""
        self.end: int | None = None
        """The position in `text` where the object ends (exclusive); None while it is open."""
        self.failed = False
        """True if the text is not a JSON object, or a marker was found."""
        self.position = 0
        """The number of scanned characters, or the position at which scanning failed.

                It stays before a possible beginning of a marker. After a backslash it includes the escaped character to
                come.
        """
        self.members: dict[str, str] = {}
        self.open_key: str | None = None
        self.open_start: int | None = None
        self._depth = 0
        self._in_string = False
        self._string_start = 0
        self._value_start: int | None = None

    def feed(self, text: str) -> None:
        """Scan the next piece of text."""
        self.text += text
        while self.end is None and not self.failed and self.position < len(self.text):
            found = (_STRING_END if self._in_string else self._structure).search(
                self.text, self.position
            )
            if found is None:
                self.position = len(self.text)
                return
            char, at = found[0], found.start()
            if self._in_string:
                self._read_in_string(char, at)
            elif self.text.startswith(self._markers, at):
                self.position, self.failed = at, True
            elif may_begin(self.text[at : at + self._longest_marker], self._markers):
                self.position = at
                return
            else:
                self.position = at + 1
                self._read_structure(char, at)

    def _read_in_string(self, char: str, at: int) -> None:
        if char == "\\":
            self.position = at + 2
            return
        self.position, self._in_string = at + 1, False
        if self._depth == 1:
            if self.open_key is None:
                self._read_key()
            elif self.text[self._value_start : at].lstrip()[:1] == '"':
                self._close_value(at + 1)

    def _read_key(self) -> None:
        self.open_key = decode_string(self.text[self._string_start : self.position])
        self.failed = self.open_key is None

    def _read_structure(self, char: str, at: int) -> None:
        if char == '"':
            self._in_string, self._string_start = True, at
        elif char in "{[":
            if self._depth == 1:
                if self._value_start is None:
                    self.failed = True
                elif char == "{" and not self.text[self._value_start : at].strip():
                    self.open_start = at
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 1:
                self._close_value(at + 1)
            elif self._depth == 0:
                self._close_member(at, last=True)
                self.end = at + 1
        elif self._depth == 1 and char == ":":
            if self.open_key is None or self._value_start is not None:
                self.failed = True
            self._value_start = at + 1
        elif self._depth == 1 and char == ",":
            self._close_member(at, last=False)

    def _close_member(self, end: int, last: bool) -> None:
        if self.open_key is None or self._value_start is None:
            self.failed = not last or self.open_key is not None
            return
        self._close_value(end)
        self.open_key = self._value_start = self.open_start = None

    def _close_value(self, end: int) -> None:
        if self.open_key is not None:
            self.members.setdefault(self.open_key, self.text[self._value_start : end].strip())
