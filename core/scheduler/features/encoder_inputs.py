"""Schedule encoder inputs (images, audio) when the decoder reaches them, within the encoder budget and cache."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from ....protocol.arrays import Int64Array, int32_bytes
from ....protocol.config import SchedulerConfig
from ....protocol.encoder_inputs.inputs import EncoderInput
from ....protocol.worker_messages import EncoderWork, SchedulerOutput
from ...state.request import Request
from .encoder_cache import EncoderCacheManager
from .encoder_cache_connector import EncoderCacheConnector


class _Need(NamedTuple):
    """An encoder input that a request will reference, with the cache space and compute budget that this takes."""

    request: Request
    input_index: int
    room: int
    budget: int
    is_external: bool


class EncoderPlan:
    """The encoder inputs planned for a step, and the remaining budget and cache space.

    Planning changes no state.
    """

    def __init__(self, budget: int, room: int) -> None:
        self.budget = budget
        self.room = room
        self.needs: list[_Need] = []
        self.hashes: set[bytes] = set()
        self.failed: dict[Request, str] = {}

    def add_input(self, need: _Need) -> None:
        """Add an input to the plan."""
        self.needs.append(need)
        self.hashes.add(need.request.encoder_inputs[need.input_index].content_hash)
        self.room -= need.room
        self.budget -= need.budget

    def undo(self, num_needs: int) -> None:
        """Remove all inputs from the plan except the first `num_needs`."""
        for need in self.needs[num_needs:]:
            self.room += need.room
            self.budget += need.budget
        del self.needs[num_needs:]
        self.hashes = {
            need.request.encoder_inputs[need.input_index].content_hash for need in self.needs
        }


class EncoderInputs:
    """Tracks the encoder inputs that running requests reference until their computed tokens have passed them."""

    def __init__(
        self, config: SchedulerConfig, connector: EncoderCacheConnector | None = None
    ) -> None:
        self.cache = EncoderCacheManager(config.encoder_cache_capacity)
        self.connector = connector
        self.are_in_use = False
        """True once any request had an encoder input."""
        self.decoding: dict[int, Request] = {}
        """The requests with inputs after their prompts, by slot."""
        self._budget = config.encoder_budget
        self._may_split = not config.disable_chunked_mm_input
        self._held: dict[Request, set[int]] = {}
        self._appended: dict[int, list[EncoderInput]] = {}
        self._to_compute: list[tuple[int, int]] = []
        self._to_load: list[tuple[Request, int]] = []

    def held_by_request(self) -> dict[Request, list[bytes]]:
        """The content hashes of the inputs that each request references."""
        return {
            request: [request.encoder_inputs[index].content_hash for index in held]
            for request, held in self._held.items()
        }

    def begin_plan(self) -> EncoderPlan:
        """Return an empty plan for the next step."""
        return EncoderPlan(self._budget, self.cache.num_available)

    def fit_inputs(
        self, plan: EncoderPlan, request: Request, start: int, end: int, most: int
    ) -> int:
        """Return the end of the range from `start` that the request can compute; `start` if it can compute nothing.

        The range normally ends at or before `end`. It may extend up to `most` if an input must not be split. The inputs
        that it needs are added to the plan.
        """
        num_needs = len(plan.needs)
        if request.is_open:
            end = max(start, min(end, request.num_ready_tokens))
        # Output tokens that read an input are not known before its first token is computed.
        may_split = self._may_split or request.reads_inputs_in_output
        inputs, is_running = request.encoder_inputs, request.slot >= 0
        num_passed = bisect_left(
            inputs, True, key=lambda item: not _is_passed(item, start, is_running=is_running)
        )
        for index, item in enumerate(inputs[num_passed:], num_passed):
            first, last = item.position, item.position + item.num_tokens
            if first >= end:
                break
            if item.read_until and first > start:
                # All tokens of a chunk read the same images.
                end = first
                break
            if last > end and not may_split:
                if last > most:
                    end = max(start, first)
                    break
                end = last
            if not self._take(plan, request, index):
                end = max(start, first)
                break
        if end == start:
            plan.undo(num_needs)
        return end

    def apply_plan(self, plan: EncoderPlan) -> None:
        """Reference the planned inputs. Their requests must have slots."""
        for need in plan.needs:
            self.cache.keep_output(need.request.encoder_inputs[need.input_index].content_hash)
        for request, index, _, _, is_external in plan.needs:
            item = request.encoder_inputs[index]
            if self.cache.add_reference(item.content_hash, item.size):
                if is_external:
                    self._to_load.append((request, index))
                else:
                    self._to_compute.append((request.slot, index))
            self._held.setdefault(request, set()).add(index)
            if request.reads_inputs_in_output:
                self.decoding[request.slot] = request
        plan.needs.clear()
        plan.hashes.clear()

    def append_inputs(self, slot: int, inputs: Sequence[EncoderInput]) -> None:
        """Send inputs to the workers that hold the request of a slot, together with the next step."""
        self._appended.setdefault(slot, []).extend(inputs)

    def release_computed(self, num_computed_tokens: Int64Array) -> None:
        """Release the inputs that lie before the computed tokens. `num_computed_tokens` is indexed by slot."""
        for request, held in list(self._held.items()):
            num_computed = int(num_computed_tokens[request.slot])
            for index in sorted(held):
                item = request.encoder_inputs[index]
                if _is_passed(item, num_computed, is_running=True):
                    held.remove(index)
                    self.cache.remove_reference(item.content_hash)
            if not held:
                del self._held[request]

    def release_request(self, request: Request) -> None:
        """Release all inputs of a request that loses its slot."""
        self.decoding.pop(request.slot, None)
        self._appended.pop(request.slot, None)
        for index in sorted(self._held.pop(request, ())):
            self.cache.remove_reference(request.encoder_inputs[index].content_hash)

    def invalidate_inputs(self, request: Request, num_found_tokens: int) -> None:
        """Mark the inputs after the first `num_found_tokens` tokens for recomputation, because they may be wrong."""
        for item in request.encoder_inputs:
            if not _is_passed(item, num_found_tokens, is_running=num_found_tokens > 0):
                self.cache.invalidate_output(item.content_hash)

    def add_work(self, step: SchedulerOutput) -> None:
        """Add the outputs to evict, and those to compute or load, to a step message."""
        work = EncoderWork(self.cache.take_freed(), int32_bytes(self._to_compute))
        self._to_compute = []
        if self._appended:
            work.appended, self._appended = list(self._appended.items()), {}
        if self.connector is not None:
            loads, self._to_load = self._to_load, []
            work.loaded = int32_bytes([(request.slot, index) for request, index in loads])
            work.connector_metadata = self.connector.build_connector_meta(step, loads)
        step.encoders = work

    def _take(self, plan: EncoderPlan, request: Request, index: int) -> bool:
        """Plan to reference an input. Return False if the budget or the cache is exhausted."""
        if index in self._held.get(request, ()):
            return True
        item = request.encoder_inputs[index]
        content_hash = item.content_hash
        if content_hash in plan.hashes:
            plan.add_input(_Need(request, index, 0, 0, False))
            return True
        room = 0
        if not self.cache.is_referenced(content_hash):
            room = self.cache.get_size(content_hash, item.size)
        if room > plan.room:
            return False
        if self.cache.has_output(content_hash):
            plan.add_input(_Need(request, index, room, 0, False))
            return True
        is_external = False
        if self.connector is not None:
            try:
                is_external = self.connector.has_cache_item(request, index)
            except Exception as error:
                plan.failed[request] = f"encoder-cache connector: {error}"
                return False
        budget = 0 if is_external else item.size
        # Images that are read together are needed together. So in a step of their own they may exceed the budget.
        is_needed = item.follows and all(need.request is request for need in plan.needs)
        if budget > plan.budget and not is_needed:
            return False
        plan.add_input(_Need(request, index, room, budget, is_external))
        return True


def _is_passed(item: EncoderInput, num_computed_tokens: int, *, is_running: bool) -> bool:
    """Return whether no remaining token of the request needs the input.

    In an encoder-decoder model the input fills the cross-attention blocks, which a request allocates together with its
    slot. A request therefore needs it at every start, even after a cached prefix. The same is true for images that are
    read by cross attention, as long as tokens read them.
    """
    if item.num_tokens == 0:
        return is_running
    if item.read_until and not is_running:
        return item.read_until <= num_computed_tokens
    return item.position + item.num_tokens <= num_computed_tokens
