"""Read calls and arguments that are JSON objects."""

from typing import Final

import msgspec

from .json_scanner import JsonObjectScanner, decode_string


class CallKeys(msgspec.Struct, frozen=True):
    """The keys of the members of a call.

    Attributes:
        name: The key of the function's name; "" if the name itself is the key of the arguments.
        arguments: The keys that the arguments may have.
        id: The key of the call's ID; "" if calls have none.
    """

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")
    id: str = ""

    def are_arguments(self, key: str | None) -> bool:
        """Return whether this is a key of arguments."""
        return key is not None and (not self.name or key in self.arguments)


NAME_AND_ARGUMENTS: Final = CallKeys()


class JsonArguments:
    """Reads arguments that are one JSON object. A marker outside a string ends an object that is still open."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        self.rest: str | None = None
        self.failed = False
        self._scanner = JsonObjectScanner(markers)
        self._num_emitted = 0

    def feed(self, text: str) -> str:
        """Return the part of the arguments that the next piece of text adds."""
        self._scan(text)
        return self._emit(self._scanner.position)

    def finish(self) -> str:
        """Return the held-back end of the arguments."""
        return self._emit(len(self._scanner.text))

    def _scan(self, text: str) -> None:
        scanner = self._scanner
        scanner.feed(text)
        self.failed = scanner.failed
        if scanner.end is not None or scanner.failed:
            self.rest = scanner.text[scanner.position :]

    def _emit(self, end: int) -> str:
        piece = self._arguments(end)[self._num_emitted :]
        self._num_emitted += len(piece)
        return piece

    def _arguments(self, end: int) -> str:
        """Return the arguments in the first `end` characters."""
        return self._scanner.text[:end]


class JsonCall(JsonArguments):
    """Reads a call that is one JSON object with a name and arguments.

    With `needs_arguments`, an object without arguments does not count as a call.
    """

    def __init__(
        self, markers: tuple[str, ...], keys: CallKeys, *, needs_arguments: bool = False
    ) -> None:
        super().__init__(markers)
        self.name: str | None = None
        self.call_id: str | None = None
        self._keys = keys
        self._needs_arguments = needs_arguments

    def _scan(self, text: str) -> None:
        super()._scan(text)
        if self.name is None:
            self.name = self._find_name()
            self.call_id = decode_string(self._scanner.members.get(self._keys.id, "")) or None

    def _find_name(self) -> str | None:
        scanner, keys = self._scanner, self._keys
        is_open = keys.are_arguments(scanner.open_key) and scanner.open_start is not None
        if not keys.name:
            return next(iter(scanner.members), scanner.open_key if is_open else None) or None
        name = decode_string(scanner.members.get(keys.name, ""))
        if not name:
            return None
        has_arguments = is_open or any(map(keys.are_arguments, scanner.members))
        ended = scanner.end is not None and not self._needs_arguments
        return name if has_arguments or ended else None

    def _arguments(self, end: int) -> str:
        """Return the arguments in the first `end` characters of the call; "" until the name is known."""
        if self.name is None:
            return ""
        scanner = self._scanner
        value = next((v for k, v in scanner.members.items() if self._keys.are_arguments(k)), None)
        if value is None:
            return "{}" if scanner.open_start is None else scanner.text[scanner.open_start : end]
        # A JSON string that contains the arguments as JSON.
        if value.startswith('"'):
            decoded = decode_string(value)
            value = value if decoded is None else decoded
        return "{}" if value in ("null", "") else value
