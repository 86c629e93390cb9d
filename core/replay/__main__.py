"""The `engine replay FILE` command: run a recorded scheduler again, compare its decisions, and explain a request."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime

from ...protocol.errors import EngineError, counted
from .dump import Dump, read_dump
from .events import AddRequest, Decided, Update
from .replayer import Difference, Replayer
from .timeline import RequestTimeline, find_requests


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine replay`."""
    parser = argparse.ArgumentParser(
        prog="engine replay",
        description="Run the scheduler again on its recorded events and compare every decision.",
    )
    parser.add_argument("file", metavar="FILE", help="Event log dump (*.engine-events)")
    parser.add_argument(
        "--why",
        metavar="REQUEST_ID",
        help="Request to explain: its x-request-id, a prefix of that, or CLIENT/INDEX",
    )
    parser.add_argument(
        "--scheduler-cls",
        metavar="MODULE.CLASS",
        help="Scheduler class that the server used, if not the built-in one",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Returns:
        0 if every decision equals the recorded one, 1 if one differs, 2 if the file or the request cannot be used.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        dump = read_dump(args.file, args.scheduler_cls)
        timelines = []
        if args.why is not None:
            policy = dump.setup.config.policy
            timelines = [RequestTimeline(key, policy) for key in find_requests(dump, args.why)]
            if not timelines:
                raise EngineError(f"no request {args.why} in this log; {_list_latest(dump)}")
        _describe(dump)
        return _replay(dump, timelines)
    except EngineError as error:
        print(f"engine replay: {error}", file=sys.stderr)
        return 2


def _replay(dump: Dump, timelines: list[RequestTimeline]) -> int:
    code = 0
    for number, segment in enumerate(dump.segments, 1):
        where = f"part {number} of {len(dump.segments)}"
        if not segment.is_whole:
            print(f"{where}: skipped {len(segment.events)} events, which have no initial state")
            continue
        replayer = Replayer(dump.setup, segment)
        for timeline in timelines:
            timeline.begin(replayer.scheduler)
        try:
            for moment in replayer.run():
                for timeline in timelines:
                    timeline.apply_moment(moment, replayer.scheduler)
        except Difference as difference:
            print(f"{where}: the first difference, after {replayer.num_decisions} equal decisions:")
            print(f"  {difference}")
            code = 1
            continue
        start = "a new scheduler" if segment.snapshot is None else "the state at its beginning"
        print(f"{where}: {replayer.num_decisions} decisions from {start}, all as recorded")
        if replayer.reproduced_error:
            print(
                f"the error that ended the recording was reproduced:\n{replayer.reproduced_error}"
            )
    for timeline in timelines:
        timeline.finish()
        client, index = timeline.key
        print(f"\nrequest {client}/{index}")
        print("\n".join(timeline.lines))
        print(timeline.summary())
    return code


def _describe(dump: Dump) -> None:
    decided = [e for s in dump.segments for e in s.events if isinstance(e, Decided)]
    num_steps = sum(isinstance(event, Update) for event in decided)
    arrivals = [e for s in dump.segments for e in s.events if isinstance(e, AddRequest)]
    seconds = decided[-1].now - decided[0].now if decided else 0.0
    at = datetime.fromtimestamp(dump.wall_time).isoformat(" ", "seconds")
    print(
        f"core {dump.setup.core_index} of engine {dump.engine_version}, {dump.reason} at {at}: "
        f"{counted(num_steps, 'step')} in {seconds:.3f} s, {counted(len(arrivals), 'arrival')}"
    )
    if dump.problem:
        print(f"the log has no later snapshot: {dump.problem}")


def _list_latest(dump: Dump) -> str:
    arrivals = [e for s in dump.segments for e in s.events if isinstance(e, AddRequest)]
    if not arrivals:
        return "no request arrived in it"
    names = [
        f"{event.client_index}/{event.message.request_index} {event.message.request_id}".rstrip()
        for event in arrivals[-5:]
    ]
    return f"the latest: {', '.join(names)}"


if __name__ == "__main__":
    sys.exit(main())
