"""Read calls in Python notation: `weather(city="Rome")`."""

import ast
import json
import re
from typing import Final

_BEGINNING: Final = re.compile(r"[A-Za-z_][\w.]*\s*(?P<rest>\(?)")
_STRUCTURE: Final = re.compile(r"""[()\[\]{}"']""")
_PIECES: Final = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?<![\w.])0+(?=[1-9]\d*(?![\w.]))""",
    re.DOTALL,
)
"""A string, or the zeros before an integer, which Python permits only without them."""
_ESCAPES: Final = {"\n": "\\n", "\r": "\\r", "\0": "\\0"}
"""Characters that models write into strings -> the notation that Python demands."""
_JSON_CONSTANTS: Final = {"true": True, "false": False, "null": None}


class PythonCall:
    """Reads one call with keyword arguments.

    The call is known once it is complete, because its arguments must be converted to JSON as a whole.
    """

    def __init__(self) -> None:
        self.rest: str | None = None
        self.failed = False
        self.name: str | None = None
        self.call_id: str | None = None
        self._text = ""
        self._position = 0  # how far the text has been scanned
        self._brackets = 0
        self._quote = ""

    def feed(self, text: str) -> str:
        """Return the arguments if the next piece of text completes the call."""
        self._text += text
        if not self._brackets:
            beginning = _BEGINNING.match(self._text)
            if beginning is None or not (beginning["rest"] or beginning.end() == len(self._text)):
                self._fail()
            if self.failed or not (beginning and beginning["rest"]):
                return ""
            self._position, self._brackets = beginning.end(), 1
        while self._brackets:
            if self._quote:
                if not self._skip_string():
                    return ""
                continue
            found = _STRUCTURE.search(self._text, self._position)
            if found is None:
                self._position = len(self._text)
                return ""
            self._position = found.end()
            char = found[0]
            if char in "\"'":
                self._quote = char
            else:
                self._brackets += 1 if char in "([{" else -1
        call = _parse_call(self._text[: self._position])
        if call is None:
            self._fail()
            return ""
        self.name, arguments = call
        self.rest = self._text[self._position :]
        return arguments

    def finish(self) -> str:
        """Return "", because an incomplete call has no arguments."""
        return ""

    def _fail(self) -> None:
        self.rest, self.failed = self._text, True

    def _skip_string(self) -> bool:
        """Advance past the end of a string. Return False if more text is needed."""
        for at in range(self._position, len(self._text)):
            if self._text[at] == "\\":
                if at + 1 == len(self._text):
                    self._position = at
                    return False
                self._position = at + 2
                return True
            if self._text[at] == self._quote:
                self._quote = ""
                self._position = at + 1
                return True
        self._position = len(self._text)
        return False


class _JsonValues(ast.NodeTransformer):
    """Replaces JSON constants, which models sometimes write, with Python's constants, and sets with lists."""

    def visit_Set(self, node: ast.Set) -> ast.expr:
        return ast.List([self.visit(item) for item in node.elts], ast.Load())

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_CONSTANTS[node.id]) if node.id in _JSON_CONSTANTS else node


def _as_python(piece: re.Match[str]) -> str:
    text = piece["string"] or ""
    for character, escaped in _ESCAPES.items():
        text = text.replace(character, escaped)
    return text


def _parse_call(source: str) -> tuple[str, str] | None:
    """Return the name and the JSON arguments if `source` is a call with keyword arguments; None otherwise."""
    try:
        call = ast.parse(_PIECES.sub(_as_python, source), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                return None
            arguments[keyword.arg] = ast.literal_eval(_JsonValues().visit(keyword.value))
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return ast.unparse(call.func), text.encode(errors="replace").decode()
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None
