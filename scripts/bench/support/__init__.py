"""The tests' helpers that benchmarks also use: a server and its processes, mixed streams, faults."""

from pathlib import Path

__path__ = [str(Path(__file__).parents[3] / "tests" / "support")]
