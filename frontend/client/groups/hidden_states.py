"""Collect the hidden states that a sequence returns, in memory or in a file.

Shapes: N tokens whose states are returned, E elements of a token's states.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import threading
import uuid
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Protocol

import numpy as np

from ....protocol.arrays import Float32Array, Int32Array, int32_view
from ....protocol.config import EngineConfig
from ....protocol.errors import ParameterError
from ....protocol.messages import EngineCoreRequest, FinishReason
from ....protocol.sampling_params import ReturnedStates, SamplingParams, StatesOf
from ...http.shown_values import echo

PATH: Final = "hidden_states_path"
PARAM: Final = "kv_transfer_params"
_INCLUDE: Final = "include_output_tokens"
_MAX_PATH: Final = 4096

_HEADER_BYTES: Final = 512
"""Bytes that are reserved for the header of a file, whose contents are known only at the end."""

_MAX_PENDING_BYTES: Final = 1 << 30
"""Maximum bytes of states that wait to be written. More of them mean that the disk is too slow."""

_COMPLETE: Final = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)


def states_in_file(params: Mapping[str, object]) -> ReturnedStates | None:
    """Return the hidden states that vLLM's `kv_transfer_params` ask for; None if they do not mention any.

    Raises:
        ParameterError: A field is invalid.
    """
    path, with_output = params.get(PATH), params.get(_INCLUDE)
    if path is None and with_output is None:
        return None
    if path is None:
        path = ""
    elif not (isinstance(path, str) and 0 < len(path) <= _MAX_PATH):
        problem = f"must be a path of 1 to {_MAX_PATH} characters, got {echo(path)}"
        raise ParameterError(f"{PARAM}.{PATH}", problem)
    if not (with_output is None or isinstance(with_output, bool)):
        raise ParameterError(
            f"{PARAM}.{_INCLUDE}", f"must be true or false, got {echo(with_output)}"
        )
    return ReturnedStates(StatesOf.ALL if with_output else StatesOf.PROMPT, path, in_file=True)


class CollectedStates(ABC):
    """The hidden states of one sequence, float32 [N, E]. Those of a recomputed token replace the earlier ones."""

    def __init__(self, tokens: StatesOf, num_prompt_tokens: int, row_size: int) -> None:
        self._tokens = tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._row_size = row_size
        self._end = 0
        self._num_rows = 0
        self._error: str | None = None

    def add(self, first: int, data: bytes) -> None:
        """Add the states of consecutive tokens, float32, of which `first` is the position of the first one."""
        rows_NE = np.frombuffer(data, np.float32).reshape(-1, self._row_size)
        if first > self._end and self._tokens is not StatesOf.LAST:
            self._error = f"the hidden states of tokens {self._end} to {first} are missing"
            return
        self._end = max(self._end, first + len(rows_NE))
        self._store(first, rows_NE)

    def finish(self, reason: FinishReason, prompt: Int32Array, output: Int32Array) -> None:
        """Complete the states of a sequence that has ended with these tokens, or discard them if it has failed."""
        if reason not in _COMPLETE:
            self._discard()
            return
        # The last token was not computed.
        num_output = 0 if self._tokens is StatesOf.PROMPT else len(output) - 1
        self._num_rows = len(prompt) + max(num_output, 0)
        if self._error is None and self._end < self._num_rows:
            self._error = f"the hidden states end at token {self._end} of {self._num_rows}"
        if self._error is not None:
            self._discard()
            return
        self._complete(np.concatenate((prompt, output))[: self._num_rows])

    async def wait(self) -> str | None:
        """Wait until the states are complete. Return the reason why they are not, or None."""
        return self._error

    def transfer_params(self) -> dict[str, object]:
        """Return the fields that vLLM adds to `kv_transfer_params`."""
        return {}

    @property
    def num_values(self) -> int:
        """The number of values that an answer contains."""
        return 0

    @abstractmethod
    def _store(self, first: int, rows_NE: Float32Array) -> None: ...

    @abstractmethod
    def _complete(self, token_ids: Int32Array) -> None: ...

    @abstractmethod
    def _discard(self) -> None: ...


class StatesInMemory(CollectedStates):
    """States that become part of an answer: those of all tokens, or of the last one."""

    def __init__(
        self, tokens: StatesOf, num_prompt_tokens: int, row_size: int, most_tokens: int
    ) -> None:
        super().__init__(tokens, num_prompt_tokens, row_size)
        self.is_last = tokens is StatesOf.LAST
        """True if only the states of the last token are kept."""
        self._first = 0
        # Memory of tokens that are never computed is never used.
        shape = (0 if self.is_last else most_tokens, row_size)
        self._rows_NE: Float32Array = np.empty(shape, np.float32)

    @property
    def num_values(self) -> int:
        """The number of values that an answer contains."""
        return self._num_rows * self._row_size

    def rows(self) -> Float32Array:
        """Return the states of the prompt and of the output but its last token; with LAST, those of one token."""
        last = self._num_rows - self._first
        return self._rows_NE[last - 1 : last] if self.is_last else self._rows_NE[:last]

    @property
    def num_prompt_rows(self) -> int:
        """The number of rows of the prompt."""
        return self._num_prompt_tokens

    def _store(self, first: int, rows_NE: Float32Array) -> None:
        if self.is_last:
            self._first, self._rows_NE = first, rows_NE
        else:
            # Tokens in flight at the end may be more than the sequence has room for.
            room = max(len(self._rows_NE) - first, 0)
            self._rows_NE[first : first + len(rows_NE)] = rows_NE[:room]

    def _complete(self, token_ids: Int32Array) -> None:
        if self.is_last and not self._first < self._num_rows <= self._first + len(self._rows_NE):
            self._error = f"the hidden states of token {self._num_rows - 1} are missing"

    def _discard(self) -> None:
        self._rows_NE = self._rows_NE[:0]


class StatesWriter:
    """The thread that writes the hidden states of a frontend's sequences."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "hidden-states")
        self._lock = threading.Lock()
        self._num_pending = 0

    @property
    def is_full(self) -> bool:
        """True if too much waits to be written."""
        return self._num_pending > _MAX_PENDING_BYTES

    def submit(self, size: int, job: Callable[..., None], *args: object) -> Future[None]:
        """Call `job`, which writes `size` bytes, after all earlier ones."""
        with self._lock:
            self._num_pending += size
        return self._thread.submit(self._run, size, job, args)

    def _run(self, size: int, job: Callable[..., None], args: Iterable[object]) -> None:
        try:
            job(*args)
        finally:
            with self._lock:
                self._num_pending -= size


class StatesInFile(CollectedStates):
    """States that are written to a safetensors file, in the format of vLLM's connector.

    The file gets its name when it is complete. Until then, the file with `.lock` at the end is locked, if there is one.
    """

    def __init__(
        self,
        tokens: StatesOf,
        path: str,
        num_prompt_tokens: int,
        row_shape: tuple[int, int],
        writer: StatesWriter,
        *,
        has_lock: bool,
    ) -> None:
        super().__init__(tokens, num_prompt_tokens, row_shape[0] * row_shape[1])
        self._path, self._shape, self._writer = path, row_shape, writer
        self._part = f"{self._path}.{os.urandom(4).hex()}.part"
        self._file = self._lock = -1
        self._done: Future[None] = writer.submit(0, self._guard, self._open, has_lock)

    def transfer_params(self) -> dict[str, object]:
        """Return the path of the file."""
        return {PATH: self._path}

    async def wait(self) -> str | None:
        """Wait until the file is complete. Return the reason why it is not, or None."""
        await asyncio.wrap_future(self._done)
        return self._error

    def _open(self, has_lock: bool) -> None:
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        flags = os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC
        if has_lock:
            lock = os.open(f"{self._path}.lock", flags, 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                raise
            self._lock = lock
        self._file = os.open(self._part, flags | os.O_EXCL, 0o644)

    def _store(self, first: int, rows_NE: Float32Array) -> None:
        if self._writer.is_full and self._error is None:
            self._error = "the disk is too slow for the hidden states; send fewer requests at once"
        self._submit(rows_NE.nbytes, self._write, first, rows_NE)

    def _write(self, first: int, rows_NE: Float32Array) -> None:
        _write_all(self._file, rows_NE, 8 + _HEADER_BYTES + 4 * first * self._row_size)

    def _complete(self, token_ids: Int32Array) -> None:
        self._done = self._submit(0, self._publish, token_ids)

    def _publish(self, token_ids: Int32Array) -> None:
        size = 4 * len(token_ids) * self._row_size
        offsets = (0, size, size + 8 * len(token_ids))
        header = {
            "hidden_states": _tensor("F32", (len(token_ids), *self._shape), offsets[:2]),
            "token_ids": _tensor("I64", (len(token_ids),), offsets[1:]),
        }
        text = json.dumps(header).encode().ljust(_HEADER_BYTES)
        begin = 8 + _HEADER_BYTES
        _write_all(self._file, _HEADER_BYTES.to_bytes(8, "little") + text, 0)
        # Tokens in flight at the end may have written more.
        os.ftruncate(self._file, begin + offsets[1])
        _write_all(self._file, token_ids.astype(np.int64), begin + offsets[1])
        os.rename(self._part, self._path)
        self._close()

    def _discard(self) -> None:
        self._done = self._writer.submit(0, self._remove)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._part)
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                os.unlink(f"{self._path}.lock")
        self._close()

    def _close(self) -> None:
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._lock = -1

    def _submit(self, size: int, job: Callable[..., None], *args: object) -> Future[None]:
        return self._writer.submit(size, self._guard, job, *args)

    def _guard(self, job: Callable[..., None], *args: object) -> None:
        """Call `job` unless an earlier one has failed. A failure removes the file."""
        if self._error is not None:
            return
        try:
            job(*args)
        except OSError as error:
            self._error = f"the hidden states cannot be written to {self._path}: {error.strerror}"
            self._remove()


def _tensor(dtype: str, shape: tuple[int, ...], offsets: tuple[int, ...]) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def _write_all(file: int, data: Any, offset: int) -> None:
    view = memoryview(data).cast("B")
    while len(view):
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


class HasStates(Protocol):
    """A sequence with hidden states."""

    request: EngineCoreRequest
    states: CollectedStates | None
    token_ids: array[int]
    finish_reason: FinishReason | None
    error: str | None
    kv_transfer_params: dict[str, object] | None


class StatesFactory:
    """Creates the object that collects the states of a sequence."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._writer: StatesWriter | None = None

    def collect(self, params: SamplingParams, num_prompt_tokens: int) -> CollectedStates | None:
        """Return the collector for a sequence; None if it returns no states."""
        returned, states = params.returned_states, self._config.scheduler.hidden_states
        if returned is None or states is None:
            return None
        size = self._config.model.hidden_size
        if not returned.in_file:
            most = num_prompt_tokens + (params.max_tokens or 0)
            return StatesInMemory(returned.tokens, num_prompt_tokens, states.row_size(size), most)
        self._writer = self._writer or StatesWriter()
        path = returned.path or f"{states.directory}/{uuid.uuid4().hex}.safetensors"
        return StatesInFile(
            returned.tokens,
            path,
            num_prompt_tokens,
            (max(1, len(states.layers)), size),
            self._writer,
            has_lock=states.use_synchronization_lock,
        )


def end_states(sequence: HasStates, reason: FinishReason) -> None:
    """Complete the hidden states of a sequence that has ended, or discard them if it has failed."""
    assert sequence.states is not None
    prompt = int32_view(sequence.request.prompt_token_ids)
    sequence.states.finish(reason, prompt, np.array(sequence.token_ids, np.int32))
    if params := sequence.states.transfer_params():
        sequence.kv_transfer_params = (sequence.kv_transfer_params or {}) | params


async def complete_states(sequences: Iterable[HasStates]) -> None:
    """Wait for the hidden states of sequences that have ended. If they are not complete, the sequence has failed."""
    for sequence in sequences:
        if (states := sequence.states) is None:
            continue
        if sequence.finish_reason in _COMPLETE and (error := await states.wait()) is not None:
            sequence.finish_reason, sequence.error = FinishReason.ERROR, error
