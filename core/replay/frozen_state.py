"""Capture the state of a scheduler at one moment cheaply, to be read and encoded later.

Mutable objects are copied; immutable ones are only referenced. The graph of objects is walked class by class instead of
object by object, so a few calls do most of the work, and no garbage-collected object is allocated per object. This
relies on two rules:

* All items of a list, all keys or values of a dictionary, and all values of one field of a class have the same type, or
  are None. So have the items at each position of their tuples.
* Fields are assigned in `__init__`.

A `GradualList` has an item per block, so it is copied in parts, over several steps.
"""

from __future__ import annotations

import dis
import enum
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import cache
from itertools import chain, pairwise
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from ...protocol.encoder_inputs.inputs import EncoderInput
from ...protocol.messages import EngineCoreRequest, FinishedRequest, RequestEvents, TokenLogprobs
from ...protocol.sampling_params import SamplingParams
from ..kv_cache.block_pool import BlockPool
from ..kv_cache.cpu_offload import CPUOffload
from ..kv_cache.gradual_list import GradualCopy, GradualList
from ..scheduler.features.speculative import Drafts
from ..state.batch import ScheduledRow
from ..state.external_dependency import ExternalDependency
from ..state.request import Request, RequestConstants
from ..state.slots import Slots
from ..state.steps_in_flight import PreemptedRow

ROOT: Final = __name__.rpartition(".core.")[0]
ATOMS: Final = frozenset({type(None), bool, int, float, bytes})

CONTENT: Final[dict[type, frozenset[str]]] = {
    Request: frozenset(
        {
            "prompt_token_ids",
            "output_token_ids",
            "predicted_token_ids",
            "kv_transfer_params",
            "trace_headers",
        }
    ),
    EncoderInput: frozenset({"data"}),
    Drafts: frozenset({"_token_ids", "_forced_token_ids"}),
    ScheduledRow: frozenset({"draft_token_ids"}),
    PreemptedRow: frozenset({"drafts"}),
    Slots: frozenset({"_output_token_ids"}),
    TokenLogprobs: frozenset({"token_ids", "logprobs", "ranks"}),
}
"""The fields of each class with user content, such as prompts and outputs. Decisions depend only on their sizes."""

CONSTANT: Final[dict[type, frozenset[str]]] = {Request: frozenset(RequestConstants.__slots__)}
"""The fields of each class that are assigned only once, with an immutable value."""

APPEND_ONLY: Final[dict[type, frozenset[str]]] = {Request: frozenset({"_block_hashes"})}
"""The lists of each class to which immutable items are only appended, so that capturing the length suffices."""

DERIVED: Final[dict[type, frozenset[str]]] = {
    BlockPool: frozenset({"_block_of", "_freed", "_first_serial"}),
    CPUOffload: frozenset({"_block_of"}),
    GradualList: frozenset({"copy"}),
}
"""The fields of each class that are not captured, because its method `rebuild` computes them from the others."""

_IMMUTABLE: Final = ATOMS | {
    str,
    SamplingParams,
    EncoderInput,
    FinishedRequest,
    RequestEvents,
    TokenLogprobs,
}
_NUMBERS: Final = frozenset({bool, int, float})
_NO_ITEMS: Final[dict[Any, Any]] = {}
"""The object that represents every empty container."""
_CONTAINERS: Final = frozenset({list, deque, set, dict, OrderedDict})

Freezer: TypeAlias = Callable[["FrozenState", Sequence[Any]], None]
"""A function that copies the mutable parts of objects of one class."""


class Blank(msgspec.Struct, tag=2, array_like=True, gc=False, frozen=True):
    """Zeros of a shape and dtype, in place of user content; an empty `dtype` means bytes."""

    shape: tuple[int, ...]
    dtype: str = ""


class FrozenState:
    """The values of all objects reachable from `root`, captured at construction.

    The objects themselves may change later, so read their values through this class. Nothing is captured of requests
    that wait as they arrived, because their fields follow from the constant ones.
    """

    def __init__(self, root: object) -> None:
        self.root = root
        self._seen: dict[int, Any] = {}
        self._copies: dict[int, Any] = {}
        self._lengths: dict[int, int] = {}
        self._rows: dict[int, tuple[Any, ...]] = {}
        self._gradual: list[GradualList[Any]] = []
        self._pending: defaultdict[type, list[Any]] = defaultdict(list)
        self._visit([root])
        while self._pending:
            kind, items = self._pending.popitem()
            _find_freezer(kind)(self, items)  # type: ignore[misc]

    def get_copy(self, container: Any) -> Any:
        """Return a container or an array as it was when captured; the object itself if it is immutable.

        A list represents a `deque` or a set.
        """
        length = self._lengths.get(id(container))
        if length is not None:
            return container[:length]
        found = self._copies.get(id(container), container)
        return found.read() if type(found) is GradualCopy else found

    def get_fields(self, instance: Any) -> dict[str, Any]:
        """Return the captured values of an instance's fields, with `Blank` for the fields in `CONTENT`."""
        kind: type = type(instance)
        row = self._rows.get(id(instance))
        if row is None:
            held = untouched_fields(instance)
        else:
            held = dict(zip(changing_names(kind), row, strict=True))
        content = CONTENT.get(kind, frozenset())
        found = {}
        for name in captured_names(kind):
            value = held[name] if name in held else getattr(instance, name)
            found[name] = blank(value) if name in content else value
        return found

    def continue_copies(self) -> None:
        """Copy more of the lists that are copied over several steps."""
        for held in self._gradual:
            held.continue_copy()

    def take_containers(self, size: int) -> list[dict[Any, Any] | list[Any]]:
        """Return all containers of more than `size` captured objects, whose last references may be here.

        Remove their items from the last to the first container. Freeing all at once would delay a step.
        """
        copies = (
            held.copied if type(held) is GradualCopy else held for held in self._copies.values()
        )
        large = [held for held in copies if type(held) in (list, dict) and len(held) > size]
        return [self._seen, self._rows, self._copies, *large]

    def _visit(self, items: Sequence[Any]) -> None:
        """Let objects be frozen, unless they are immutable."""
        kinds = set(map(type, items))
        for kind in kinds:
            if _find_freezer(kind) is not None:
                self._pending[kind] += (
                    items if len(kinds) == 1 else [item for item in items if type(item) is kind]
                )

    def freeze_containers(self, items: Sequence[Any]) -> None:
        """Copy lists, sets and dictionaries, and visit their items if these may refer to mutable objects."""
        for item in items:
            key = id(item)
            if key in self._seen:
                continue
            self._seen[key] = item
            if not item:
                self._copies[key] = _NO_ITEMS
            elif isinstance(item, dict):
                entries = self._copies[key] = dict(item)
                for held in (entries, entries.values()):
                    if _may_refer(held):
                        self._visit(list(held))
            else:
                copied = self._copies[key] = list(item)
                if _may_refer(copied):
                    self._visit(copied)

    def freeze_arrays(self, items: Sequence[Any]) -> None:
        """Copy arrays."""
        self._copies.update((key, copy(item)) for key, item in self._add_new(items).items())

    def freeze_values(self, items: Sequence[Any]) -> None:
        """Copy nothing, and visit the items of tuples and frozen sets."""
        self._visit(list(chain.from_iterable(items)))

    def freeze_constants(self, items: Sequence[Any]) -> None:
        """Copy nothing, and visit each field of immutable structs."""
        kind: type = type(items[0])
        for name in field_names(kind):
            self._visit(list(map(attrgetter(name), items)))

    def freeze_requests(self, items: Sequence[Request]) -> None:
        """Copy the fields of requests, except of those that are untouched."""
        touched = [request for request in items if not request.is_untouched]
        if touched:
            self.freeze_rows(touched)

    def freeze_gradual_lists(self, items: Sequence[GradualList[Any]]) -> None:
        """Begin to copy lists."""
        for held in items:
            if id(held) not in self._seen:
                self._seen[id(held.items)] = held.items
                self._copies[id(held.items)] = held.begin_copy()
                self._gradual.append(held)
                self.freeze_rows([held])

    def freeze_rows(self, items: Sequence[Any]) -> None:
        """Copy the fields of objects that may change, and visit those that may refer to mutable objects."""
        new = self._add_new(items)
        if not new:
            return
        kind: type = type(items[0])
        rows = list(map(_get_changing(kind), new.values()))
        self._rows.update(zip(new, rows, strict=True))
        for index, is_append_only in _visited_fields(kind):
            if len(rows) == 1 and not is_append_only:
                value = rows[0][index]
                value_type: type = type(value)
                if _find_freezer(value_type) is not None:
                    self._pending[value_type].append(value)
            elif type(rows[0][index]) not in _NUMBERS:
                column = [row[index] for row in rows]
                if is_append_only:
                    self._lengths.update(
                        (id(held), len(held)) for held in column if held is not None
                    )
                elif _may_refer(column):
                    self._visit(column)

    def _add_new(self, items: Sequence[Any]) -> dict[int, Any]:
        seen = self._seen
        new = {id(item): item for item in items if id(item) not in seen}
        seen.update(new)
        return new


def is_given(kind: type) -> bool:
    """Return whether objects of this class are constructor arguments of a scheduler.

    These are the configuration, functions and external dependencies. They are not captured.
    """
    return issubclass(
        kind, ExternalDependency | FunctionType | BuiltinFunctionType | MethodType
    ) or kind.__module__.startswith(f"{ROOT}.protocol.config")


def is_engine_class(kind: type) -> bool:
    """Return whether this class, or one of its bases, belongs to `core` or `protocol`."""
    return find_engine_class(kind) is not None


@cache
def find_engine_class(kind: type) -> type | None:
    """Return the first among a class and its bases that belongs to `core` or `protocol`, or None."""
    prefixes = (f"{ROOT}.core.", f"{ROOT}.protocol.")
    return next((base for base in kind.__mro__ if base.__module__.startswith(prefixes)), None)


def is_record(kind: type) -> bool:
    """Return whether instances are values: structs or named tuples, which can be constructed from their fields."""
    return issubclass(kind, msgspec.Struct) or (
        issubclass(kind, tuple) and hasattr(kind, "_fields")
    )


def is_mutable_record(kind: type) -> bool:
    """Return whether this is a struct with assignable fields."""
    return issubclass(kind, msgspec.Struct) and not kind.__struct_config__.frozen


def blank(value: object) -> Blank | None:
    """Return a `Blank` with the size of an array or bytes, or None for anything else."""
    match value:
        case np.ndarray():
            return Blank(value.shape, value.dtype.str)
        case bytes():
            return Blank((len(value),))
        case _:
            return None


def _may_refer(items: Iterable[Any]) -> bool:
    """Return whether these items, of one type or None, are mutable or may refer to mutable objects."""
    first: Any = next(iter(items))
    if first is None:
        first = next((item for item in items if item is not None), None)
    kind: type = type(first)
    if kind is tuple and None not in first:
        return any(_find_freezer(each) is not None for each in map(type, first))
    return _find_freezer(kind) is not None


@cache
def _find_freezer(kind: type) -> Freezer | None:
    """Return the freezer of a class, or None if its instances and everything they refer to are immutable."""
    if kind in _IMMUTABLE or is_given(kind) or issubclass(kind, enum.Enum | np.generic):
        return None
    if kind is Request:
        return FrozenState.freeze_requests
    if kind is GradualList:
        return FrozenState.freeze_gradual_lists
    if kind in _CONTAINERS:
        return FrozenState.freeze_containers
    if kind is np.ndarray or kind is array:
        return FrozenState.freeze_arrays
    if issubclass(kind, tuple | frozenset):
        return FrozenState.freeze_values
    if is_mutable_record(kind):
        return FrozenState.freeze_rows
    if issubclass(kind, msgspec.Struct):
        return FrozenState.freeze_constants
    if not is_engine_class(kind):
        return None
    return FrozenState.freeze_rows


@cache
def field_names(kind: type) -> tuple[str, ...]:
    """Return the fields that every instance of a class has: its slots and the attributes that `__init__` assigns.

    The names are read from the bytecode of `__init__`, because reading an instance's `__dict__` would make later
    attribute access slower.
    """
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    names: dict[str, None] = {}
    for base in reversed(kind.__mro__):
        slots = vars(base).get("__slots__", ())
        names.update(dict.fromkeys((slots,) if isinstance(slots, str) else slots))
        names.update(dict.fromkeys(_assigned_names(vars(base).get("__init__"))))
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _assigned_names(init: object) -> Iterator[str]:
    if isinstance(init, FunctionType):
        for load, store in pairwise(dis.get_instructions(init)):
            # Since Python 3.13, one instruction may load two variables.
            loaded = load.argval[-1:] if type(load.argval) is tuple else (load.argval,)
            if store.opname == "STORE_ATTR" and loaded == ("self",):
                yield store.argval


@cache
def _get_changing(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that returns the values of an instance's changing fields."""
    names = changing_names(kind)
    # With a single name, `attrgetter` returns no tuple.
    get = attrgetter(*names)
    if len(names) > 1:
        return get
    return lambda instance: (get(instance),)


@cache
def captured_names(kind: type) -> tuple[str, ...]:
    """Return the fields of a class that are captured."""
    derived = DERIVED.get(kind, frozenset())
    return tuple(name for name in field_names(kind) if name not in derived)


@cache
def changing_names(kind: type) -> tuple[str, ...]:
    """Return the captured fields of a class whose values may change."""
    constant = CONSTANT.get(kind, frozenset())
    return tuple(name for name in captured_names(kind) if name not in constant)


@cache
def _visited_fields(kind: type) -> list[tuple[int, bool]]:
    """Return the indices in `changing_names` of all fields but user content, and whether each is in `APPEND_ONLY`."""
    skipped, append_only = CONTENT.get(kind, frozenset()), APPEND_ONLY.get(kind, frozenset())
    names = enumerate(changing_names(kind))
    return [(index, name in append_only) for index, name in names if name not in skipped]


def untouched_fields(request: Request) -> dict[str, Any]:
    """Return the values that the changing fields of a request had when it arrived, if it had no output then."""
    fields = {name: getattr(_ARRIVED, name) for name in changing_names(Request)}
    return fields | {
        "num_tokens": request.num_prompt_tokens,
        "encoder_inputs": request.first_inputs,
        "max_tokens": request.params.max_tokens,
    }


_ARRIVED: Final = Request(0, EngineCoreRequest(0, b"", SamplingParams(), 0.0), 0, 0.0)
