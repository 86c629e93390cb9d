"""Read calls and arguments that are JSON objects."""

from .json_scanner import JsonObjectScanner, decode_string

_ARGUMENTS = ("arguments", "parameters")


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
    """Reads a call that is one JSON object with the members `name` and `arguments` or `parameters`.

    With `needs_arguments`, an object without arguments does not count as a call.
    """

    def __init__(self, markers: tuple[str, ...], *, needs_arguments: bool = False) -> None:
        super().__init__(markers)
        self.name: str | None = None
        self.call_id: str | None = None
        self._needs_arguments = needs_arguments

    def _scan(self, text: str) -> None:
        super()._scan(text)
        if self.name is None:
            self.name = self._find_name()

    def _find_name(self) -> str | None:
        scanner = self._scanner
        name = decode_string(scanner.members.get("name", ""))
        if not name:
            return None
        has_arguments = not scanner.members.keys().isdisjoint(_ARGUMENTS) or (
            scanner.open_key in _ARGUMENTS and scanner.open_start is not None
        )
        ended = scanner.end is not None and not self._needs_arguments
        return name if has_arguments or ended else None

    def _arguments(self, end: int) -> str:
        """Return the arguments in the first `end` characters of the call; "" until the name is known."""
        if self.name is None:
            return ""
        scanner = self._scanner
        value = next((v for k, v in scanner.members.items() if k in _ARGUMENTS), None)
        if value is None:
            return "{}" if scanner.open_start is None else scanner.text[scanner.open_start : end]
        # A JSON string that contains the arguments as JSON.
        if value.startswith('"'):
            decoded = decode_string(value)
            value = value if decoded is None else decoded
        return "{}" if value in ("null", "") else value
