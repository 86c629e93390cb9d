"""The parts of the GPU benchmark, in five calls.

A checks the results of one model, B measures the speed, C explains it, D checks every family of models, and E measures
a mixture of experts and checks every kind of request.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

DIRECTORY = Path(__file__).parents[1]
CALL_SECONDS = {"A": 570, "B": 570, "C": 480, "D": 570, "E": 570}
"""Time of each call, of which `first.sh` also needs `SETUP_SECONDS` for itself."""

SETUP_SECONDS = 25
MODELS = ("Llama-3.1-8B", "Qwen3-0.6B")
IMPORTS, LIMITS = "imports", "limits"
_HEADS = {"Llama-3.1-8B": "32 8 128", "tiny": "4 2 16"}
EXPERTS = {"Llama-3.1-8B": "Qwen3-30B-A3B", "tiny": "tiny with experts"}
_SMALL_PRODUCT = {"Llama-3.1-8B": "4096 1024", "tiny": "16 128"}
_TUNED = {
    "Llama-3.1-8B": ("prefill 8k", "decode 64 x 2k"),
    "tiny": ("prefill", "decode"),
}


class Part(NamedTuple):
    """The arguments of Python, and the limit in seconds. With `is_measure`, `measure.py`'s options are added."""

    command: list[str]
    seconds: int
    is_measure: bool = False


def plan(models: tuple[str, ...] = MODELS) -> dict[str, dict[str, Part]]:
    """Return the parts of each call, the most important first."""
    first, *others = models
    on_gpu = DIRECTORY / "on_gpu"

    def measure(seconds: int, *arguments: str) -> Part:
        return Part([str(on_gpu / "measure.py"), *arguments], seconds, is_measure=True)

    def program(name: str, seconds: int, *arguments: str) -> Part:
        return Part([str(DIRECTORY / name), *arguments], seconds)

    heads = ("--heads", *_HEADS[first].split())
    rows, columns = _SMALL_PRODUCT[first].split()
    prefill, decode = _TUNED[first]
    return {
        "A": {
            IMPORTS: Part([str(on_gpu / "imports.py")], 45),
            "agreement": measure(220, "agreement"),
            "repeats": measure(60, "repeats"),
            "tests": measure(130, "tests"),
            "sanitizer": measure(85, "sanitizer"),
        },
        "B": {
            LIMITS: measure(40, "limits"),
            first: measure(220, "model", first),
            "attention": program("gpu_attention.py", 85, *heads),
            **{name: measure(115, "model", name) for name in others},
            "again": measure(75, "again", first),
        },
        "C": {
            "profiles": measure(90, "profiles"),
            f"{first}, served": measure(120, "served", first),
            f"{first} in 4 bits": measure(65, "model", f"{first} in 4 bits"),
            "kernels": program("gpu_kernels.py", 60),
            "prefill tiles": program("gpu_attention.py", 50, *heads, "--tune", "--case", prefill),
            "decode tiles": program("gpu_attention.py", 40, *heads, "--tune", "--case", decode),
            "small products": program(
                "gpu_kernels.py", 25, "--only", "linear", "--rows", rows, "--columns", columns
            ),
        },
        "D": {"families": measure(540, "families")},
        "E": {
            EXPERTS[first]: measure(160, "model", EXPERTS[first]),
            "requests": measure(380, "requests"),
        },
    }
