"""Run a recorded segment again, and find the first decision that differs."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from ...protocol.arrays import Int32Array, int32_view
from ...protocol.block_hash import PlacedInput
from ...protocol.errors import EngineError
from ...protocol.messages import EngineCoreOutputs
from ...protocol.worker_messages import SchedulerOutput
from ..scheduler.scheduler import Scheduler
from ..state.external_dependency import ExternalDependency
from .decision_hash import DecisionHash
from .dump import DumpSegment
from .events import HASH_BLOCKS, AddRequest, Answer, Call, Event, Schedule, TakeOutputs, Update
from .external import (
    AskedEncoderCacheConnector,
    AskedGrammars,
    NoConnector,
    ask_connector,
    repeat_answers,
)
from .recorder import Setup
from .redaction import expand_drafts, expand_growth, expand_request, expand_result, redact_step
from .snapshot import expand_digests, restore


class Difference(EngineError):
    """Raised if a decision differs from the recorded one; the message says where and how."""


class Moment(NamedTuple):
    """The state after an event was handled again.

    `step` is the step that the event scheduled, and `outputs` are its outputs for clients; None if it has none.
    """

    event: Event
    step: SchedulerOutput | None = None
    outputs: dict[int, EngineCoreOutputs] | None = None


class Replayer(ExternalDependency):
    """Runs the events of a segment on a new scheduler.

    `scheduler` is in the state after the last `Moment`. The recorded answers replace grammars, connectors and the hash
    function.

    Raises:
        EngineError: The segment has no initial state.
    """

    def __init__(
        self,
        setup: Setup,
        segment: DumpSegment,
        scheduler_class: Callable[..., Scheduler] | None = None,
    ) -> None:
        if not segment.is_whole:
            raise EngineError(
                "this part of the log has no starting state: there were too many requests, or the state "
                "could not be captured"
            )
        self._segment = segment
        self._answers: deque[Answer] = deque()
        self._steps: dict[int, SchedulerOutput] = {}
        self._decision_hash = DecisionHash(segment.initial_hash)
        self.num_decisions = 0
        self.reproduced_error = ""
        """The traceback of the error that ended the recording, if the replay raised the same error; else ""."""
        self._ask = ask = repeat_answers(self._answers)
        connector = NoConnector(polls_workers=setup.polls_workers)
        self.scheduler = setup.make_scheduler(
            AskedGrammars(None, ask) if setup.has_grammars else None,
            self._hash_blocks,
            scheduler_class=scheduler_class,
            kv_connector=ask_connector(connector, ask, finds_blocks=setup.finds_blocks)
            if setup.kv_transfer is not None
            else None,
            encoder_cache_connector=AskedEncoderCacheConnector(None, ask)
            if setup.has_encoder_cache_connector
            else None,
        )
        if segment.snapshot is not None:
            restore(segment.snapshot, self.scheduler)
        self._neutral_token = self._find_neutral_token(setup.vocab_size)

    def run(self) -> Iterator[Moment]:
        """Run all events, and yield a `Moment` after each.

        Raises:
            Difference: At the first decision that differs from the recorded one.
        """
        events = self._segment.events
        last = max((i for i, e in enumerate(events) if not isinstance(e, Answer)), default=0)
        for index, event in enumerate(events):
            if isinstance(event, Answer):
                continue
            self._answers.extend(_answers_after(events, index))
            is_cut_short = (
                index == last and isinstance(event, Schedule | Update) and not event.decision_hash
            )
            try:
                moment = self._handle(event)
            except Difference as error:
                raise Difference(f"{_place(index, event)}: {error}") from None
            except Exception as error:
                if is_cut_short:
                    self.reproduced_error = traceback.format_exc()
                    return
                raise Difference(
                    f"{_place(index, event)}: the scheduler raised {type(error).__name__}: {error}"
                ) from error
            if is_cut_short:
                raise Difference(
                    f"{_place(index, event)}: the recorded scheduler raised an error, but this one did not"
                )
            self._compare(index, moment)
            yield moment

    def _find_neutral_token(self, vocab_size: int) -> int:
        """Return a token at which no request stops."""
        stops: set[int] = set()
        for request in self.scheduler.requests.values():
            stops.update(request.stop_token_ids)
        for event in self._segment.events:
            if isinstance(event, AddRequest):
                stops.update(event.message.eos_token_ids)
                stops.update(event.message.sampling_params.stop_token_ids)
        return next((token for token in range(vocab_size) if token not in stops), 0)

    def _handle(self, event: Event) -> Moment:
        scheduler = self.scheduler
        match event:
            case AddRequest(client_index, _, _, now):
                scheduler.add_request(client_index, expand_request(event), now)
            case Call(method):
                args = event.decode_args()
                if method == "append_inputs":
                    args = args[0], expand_growth(args[1])
                elif method == "update_draft_token_ids":
                    args = (expand_drafts(*args),)
                result = getattr(scheduler, method)(*args)
                if method == "reset_prefix_cache":
                    self._decision_hash.add_result(result)
            case Schedule(now):
                step = scheduler.schedule(now)
                if step is not None:
                    self._steps[step.step] = step
                return Moment(event, step=step)
            case Update(now):
                output = expand_result(event, self._neutral_token)
                step = self._steps.pop(output.step, None) or SchedulerOutput(output.step)
                return Moment(event, outputs=scheduler.update_from_output(step, output, now))
            case TakeOutputs(now):
                return Moment(event, outputs=scheduler.take_outputs(now))
        return Moment(event)

    def _compare(self, index: int, moment: Moment) -> None:
        event = moment.event
        if self._answers:
            raise Difference(
                f"{_place(index, event)}: {len(self._answers)} more answers from external dependencies were "
                f"recorded here, starting with {_readable(self._answers[0])}"
            )
        match event:
            case Schedule(_, recorded, decision_hash):
                self._decision_hash.add_step(moment.step)
                explain = partial(_compare_steps, recorded, moment.step)
            case Update(reports=recorded_reports, decision_hash=decision_hash) | TakeOutputs(
                _, recorded_reports, decision_hash
            ):
                reports = self._decision_hash.add_outputs(moment.outputs or {})
                explain = partial(_compare_values, "reports", recorded_reports, reports)
            case _:
                return
        self.num_decisions += 1
        if self._decision_hash.value != decision_hash:
            differences = explain() or [
                "the statistics, or the result of a call since the last decision"
            ]
            raise Difference("\n  ".join((f"{_place(index, event)}:", *differences)))

    def _hash_blocks(
        self,
        token_ids: Int32Array,
        block_size: int,
        parent: bytes,
        inputs: Sequence[PlacedInput] = (),
    ) -> bytes:
        num_blocks = len(token_ids) // block_size
        digests = self._ask(HASH_BLOCKS, num_blocks, None, lambda: None)
        if digests is None:
            raise Difference(
                f"a request with {num_blocks} cached blocks of output ended or was preempted"
            )
        return expand_digests(digests)


def _answers_after(events: list[Event], index: int) -> Iterator[Answer]:
    for event in events[index + 1 :]:
        if not isinstance(event, Answer):
            return
        yield event


def _place(index: int, event: Event) -> str:
    what = type(event).__name__
    match event:
        case Schedule(step=SchedulerOutput() as step):
            what = f"scheduling of step {step.step}"
        case Update(result=result):
            what = f"output of step {result.step}"
    now = getattr(event, "now", None)
    return f"event {index}, {what}" + (f", at {now:.6f} s" if now is not None else "")


def _compare_steps(recorded: SchedulerOutput | None, now: SchedulerOutput | None) -> list[str]:
    if recorded is None or now is None:
        describe = {True: "nothing to do", False: "a step"}
        return [f"recorded: {describe[recorded is None]}; now: {describe[now is None]}"]
    now = redact_step(now)
    lines = []
    for name in recorded.__struct_fields__:
        lines += _compare_values(name, getattr(recorded, name), getattr(now, name))
    return lines


def _compare_values(name: str, recorded: object, now: object) -> list[str]:
    if recorded == now:
        return []
    return [f"{name}, recorded: {_readable(recorded)}", f"{name}, now:      {_readable(now)}"]


def _readable(value: object) -> str:
    """Return the value as text of at most about 400 characters, with bytes shown as int32 numbers."""

    def numbers(data: object) -> object:
        if isinstance(data, bytes) and len(data) % 4 == 0:
            return int32_view(data).tolist()
        return data

    def show(item: object) -> str:
        match item:
            case msgspec.Struct():
                fields = ((n, getattr(item, n)) for n in item.__struct_fields__)
                return ", ".join(
                    f"{n}={show(v)}" for n, v in fields if v not in (b"", [], None, ())
                )
            case list() | tuple():
                return "[" + "; ".join(map(show, item)) + "]"
            case _:
                return str(numbers(item))

    text = show(value)
    return text if len(text) <= 400 else text[:400] + " …"
