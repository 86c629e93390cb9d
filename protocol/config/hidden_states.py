"""The hidden states that a server returns."""

import enum
from typing import Annotated, Final

import msgspec

MAX_STEP_BYTES: Final = 128 * 1024 * 1024
"""Maximum bytes of the hidden states of a step, which are sent in one message."""

MAX_ANSWER_BYTES: Final = 128 * 1024 * 1024
"""Maximum bytes of the hidden states, as float32, that an answer in JSON contains."""

STATES_CONNECTOR: Final = "ExampleHiddenStatesConnector"
"""vLLM's name of the connector that writes hidden states to files."""


class StatesMode(enum.StrEnum):
    """The states that a request may ask for: those of its last token, or of all tokens."""

    LAST = "last"
    FULL = "full"


class HiddenStatesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The hidden states that requests return, as float32.

    Attributes:
        mode: The states that answers may contain.
        layers: The layers whose inputs are returned, in ascending order; the number of layers means the final norm's
            input. If there are none, the normed hidden states are returned.
        directory: Where the states of each request are written to a file; None for no files.
        allow_custom_save_path: True if requests may choose their files.
        use_synchronization_lock: True if each file has a file with `.lock` at the end, which is locked until it is
            complete.
    """

    mode: StatesMode = StatesMode.FULL
    layers: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    directory: str | None = None
    allow_custom_save_path: bool = False
    use_synchronization_lock: bool = True

    def row_size(self, hidden_size: int) -> int:
        """Return the number of elements of a token's states in a model with this hidden size."""
        return hidden_size * max(1, len(self.layers))
