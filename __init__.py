"""Engine: a fast, small, crash-proof server for large language models.

The public Python API. Names are resolved when first used, so that `import engine` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .frontend.client.beam_search import BeamSearchParams
    from .frontend.client.embeddings import LateChunkingParams
    from .frontend.offline.llm import LLM
    from .frontend.offline.loras import LoRARequest
    from .frontend.offline.params import PoolingParams, SamplingParams
    from .frontend.offline.structured import StructuredOutputsParams, structured_output
    from .protocol.sampling_params import RepetitionDetectionParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BeamSearchParams",
    "LateChunkingParams",
    "LoRARequest",
    "PoolingParams",
    "RepetitionDetectionParams",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
    "structured_output",
]

_MODULES = {
    "BeamSearchParams": ".frontend.client.beam_search",
    "LLM": ".frontend.offline.llm",
    "LoRARequest": ".frontend.offline.loras",
    "LateChunkingParams": ".frontend.client.embeddings",
    "PoolingParams": ".frontend.offline.params",
    "RepetitionDetectionParams": ".protocol.sampling_params",
    "SamplingParams": ".frontend.offline.params",
    "StructuredOutputsParams": ".frontend.offline.structured",
    "structured_output": ".frontend.offline.structured",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name], __name__), name)
    return value
