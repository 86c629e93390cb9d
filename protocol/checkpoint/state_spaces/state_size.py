"""The state of a recurrent layer: its size, and how ranks divide it."""

from __future__ import annotations

from typing import Final

import msgspec

SEGMENT: Final = 16
"""Number of tokens in a segment of most layers."""


class StateSize(msgspec.Struct, frozen=True):
    """The state of one layer in one worker.

    It has `num_recurrent` float32 numbers, and `num_inputs` stored inputs of `channels` elements each. `beside` is the
    state of another part of the layer, stored directly after it.
    """

    num_recurrent: int
    num_inputs: int
    channels: int
    beside: StateSize | None = None

    def num_own_bytes(self, input_bytes: int) -> int:
        """Return the size in bytes without `beside`, if one element of an input takes `input_bytes`."""
        return 4 * self.num_recurrent + self.num_inputs * self.channels * input_bytes

    def num_bytes(self, input_bytes: int) -> int:
        """Return the size of the state in bytes, if one element of an input takes `input_bytes`."""
        beside = 0 if self.beside is None else self.beside.num_bytes(input_bytes)
        return self.num_own_bytes(input_bytes) + beside


class StatePart(msgspec.Struct, frozen=True):
    """Consecutive numbers of a state: `runs` times `units` times `width`.

    The ranks divide the units of each run. If there are fewer units than ranks, several ranks have the same one, so
    all ranks have the whole of a part with one unit.
    """

    units: int
    width: int
    runs: int = 1

    def num_elements(self, ranks: int) -> int:
        """Return the number of elements in one of `ranks` workers."""
        return self.runs * max(1, self.units // ranks) * self.width


class StateParts(msgspec.Struct, frozen=True):
    """The parts of a layer's state: of the recurrent numbers, and of each of the `num_inputs` stored inputs.

    An input has all `inputs` side by side. A native program divides them into `native_tables`, runs of that many parts,
    and stores the `num_inputs` rows of one table after those of another; () is one table.
    """

    recurrent: tuple[StatePart, ...]
    num_inputs: int
    inputs: tuple[StatePart, ...]
    beside: StateParts | None = None
    native_tables: tuple[int, ...] = ()

    def size(self, ranks: int) -> StateSize:
        """Return the size of the state in one of `ranks` workers."""
        return StateSize(
            sum(part.num_elements(ranks) for part in self.recurrent),
            self.num_inputs,
            sum(part.num_elements(ranks) for part in self.inputs),
            None if self.beside is None else self.beside.size(ranks),
        )
