"""The base class of readers that read arguments in steps."""

from abc import ABC, abstractmethod


class StepwiseArguments(ABC):
    """Reads arguments in steps, which consume text from `_buffer` and append JSON to `_json`; see `ArgumentsReader`."""

    def __init__(self) -> None:
        self.rest: str | None = None
        self.failed = False
        self._buffer = ""
        self._json: list[str] = []

    def feed(self, text: str) -> str:
        """Return the JSON that the next piece of text adds."""
        self._buffer += text
        while self.rest is None and self._step():
            pass
        return self._take_json()

    def finish(self) -> str:
        """Return the held-back JSON of arguments that are still open."""
        self._append_held_back()
        return self._take_json()

    @abstractmethod
    def _step(self) -> bool:
        """Consume text, change the state, or end the arguments. Return False if this needs more text."""

    @abstractmethod
    def _append_held_back(self) -> None:
        """Append the JSON of text that was held back, at the end of all text."""

    def _take_json(self) -> str:
        json, self._json = "".join(self._json), []
        return json
