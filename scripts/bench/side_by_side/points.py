"""The points at which servers are measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """Requests with `shared` common prompt tokens and `prompt` different ones, `concurrency` at a time."""

    prompt: int
    output: int
    concurrency: int
    requests: int
    shared: int = 0

    @property
    def name(self) -> str:
        shared = f"{self.shared} shared + " if self.shared else ""
        return f"{shared}{self.prompt}/{self.output} c{self.concurrency}"

    @property
    def figure(self) -> str:
        """The name of the figure to compare. Points with few outputs measure long prompts."""
        return "output_tok_s" if self.output >= self.prompt else "total_tok_s"


POINTS = {
    "c1": Point(128, 128, 1, 6),
    "c8": Point(128, 128, 8, 32),
    "c32": Point(128, 128, 32, 96),
    "c64": Point(128, 128, 64, 128),
    "long": Point(1024, 32, 8, 24),
    "prompt512": Point(512, 1, 1, 8),
    "prompt8k": Point(8192, 1, 1, 2),
    "shared": Point(32, 32, 8, 48, shared=1024),
}
DEFAULT_POINTS = ("c1", "c8", "c32", "c64", "long", "shared")
WARM_UP = Point(64, 16, 4, 8)
