"""Compare Engine with the installed peers: the same load, in alternation, with ratios.

    scripts/bench/run peers --json FILE [--peers DIRECTORY] [--contenders engine,llama-bf16] [--points c1,c64]

In each round, each contender is started alone, one after another, and measured at every point. Results are added to the
JSON file after every point, so that a long comparison can be run in pieces. The table shows medians of all results in
the file. `side_by_side/contenders.py` describes the directory of peers.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from side_by_side.contenders import MAX_STREAMS, Contender, find_contenders
from side_by_side.model_cost import ModelCost
from side_by_side.points import DEFAULT_POINTS, POINTS
from side_by_side.roofline import measure_machine
from side_by_side.running import run
from side_by_side.table import make_table
from support.servers.server import default_model

MEMORY = "memory"

Record = dict[str, Any]


def measure_contender(contender: Contender, points: list[str], log: Path) -> Iterator[Record]:
    """Yield the contender's record, again after each addition."""
    record: Record = {
        "time": round(time.time()),
        "name": contender.name,
        "engine": contender.engine,
        "model": contender.model,
        "weights": contender.weights,
        "points": {},
    }
    with run(contender, log) as running:
        record["start_s"] = running.start_s
        yield record
        for index, key in enumerate(points):
            if key == MEMORY:
                record["pss_mib"] = running.pss_without_kv_cache()
            else:
                figures = running.measure(POINTS[key], seed=round(time.time()) + index)
                record["points"][key] = figures
                print(f"  {key:7s} {json.dumps(figures)}", file=sys.stderr, flush=True)
            yield record


def main() -> None:
    # If this program is ended by a time limit or by hand, the servers that it started must end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--json", type=Path, required=True, help="file to which results are appended"
    )
    parser.add_argument(
        "--table", action="store_true", help="only print the table, without measuring"
    )
    parser.add_argument(
        "--peers", type=Path, default=Path("peers"), help="directory with the installed peers"
    )
    parser.add_argument(
        "--contenders", help="comma-separated contenders to run (default: all that are found)"
    )
    parser.add_argument(
        "--points",
        default=",".join([*DEFAULT_POINTS, MEMORY]),
        help="comma-separated points to measure",
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--model-file",
        type=Path,
        action="append",
        default=[],
        help="GGUF file for Engine and llama.cpp, instead of the default model",
    )
    parser.add_argument(
        "--streams",
        type=int,
        default=MAX_STREAMS,
        help="maximum concurrent streams of llama.cpp with --model-file",
    )
    parser.add_argument("--engine-flags", default="", help="additional flags for engine serve")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"machines": [], "costs": {}, "records": []}
    if arguments.json.exists():
        results = json.loads(arguments.json.read_text())
    if not arguments.table:
        measure_rounds(arguments, results)
    print(make_table(results))


def measure_rounds(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    points = arguments.points.split(",")
    if unknown := set(points) - {*POINTS, MEMORY}:
        raise SystemExit(
            f"--points: there is no {', '.join(unknown)}; there are {', '.join(POINTS)}"
        )
    paths = arguments.model_file or [Path(default_model())]
    kv_token_bytes = ModelCost.of(paths[0]).kv_token_bytes
    found = find_contenders(
        arguments.peers,
        arguments.model_file,
        kv_token_bytes,
        arguments.engine_flags.split(),
        arguments.streams,
    )
    keys = arguments.contenders.split(",") if arguments.contenders else [c.key for c in found]
    if unknown := set(keys) - {c.key for c in found}:
        raise SystemExit(
            f"--contenders: {', '.join(unknown)} not found; found are {', '.join(c.key for c in found)}"
        )
    for _ in range(arguments.rounds):
        results["machines"].append(measure_machine())
        for contender in found:
            if contender.key not in keys:
                continue
            print(contender.name, file=sys.stderr, flush=True)
            if not contender.is_peer:
                cost = ModelCost.of(contender.path).to_dict()
                results["costs"][f"{contender.model} {contender.weights}"] = cost
            log = arguments.json.with_suffix(".log")
            earlier = results["records"]
            for record in measure_contender(contender, points, log):
                results["records"] = [*earlier, record]
                arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
