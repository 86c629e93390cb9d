"""Engine: a fast, small, crash-proof server for large language models.

The public Python API. Names are resolved when first used, so that `import engine` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .frontend.client.beam_search import BeamSearchParams
    from .frontend.client.embeddings import LateChunkingParams
    from .frontend.offline.drop_in.constraints import StructuredOutputsParams, structured_output
    from .frontend.offline.drop_in.engine_args import EngineArgs, FlexibleArgumentParser
    from .frontend.offline.drop_in.engines import AsyncLLM, LLMEngine
    from .frontend.offline.drop_in.metrics import Counter, Gauge, Histogram, Metric, Vector
    from .frontend.offline.llm import LLM
    from .frontend.offline.loras import LoRARequest
    from .frontend.offline.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from .frontend.offline.params import PoolingParams, RequestOutputKind, SamplingParams
    from .frontend.offline.prompts import PromptType, TextPrompt, TokensPrompt
    from .protocol.sampling_params import RepetitionDetectionParams

    AsyncEngineArgs, AsyncLLMEngine = EngineArgs, AsyncLLM

__version__ = "0.1.0"

_OUTPUTS = (
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
)
_METRICS = ("Counter", "Gauge", "Histogram", "Metric", "Vector")
_SYNONYMS = {"AsyncEngineArgs": "EngineArgs", "AsyncLLMEngine": "AsyncLLM"}
_MODULES = {
    "AsyncLLM": ".frontend.offline.drop_in.engines",
    "BeamSearchParams": ".frontend.client.beam_search",
    "EngineArgs": ".frontend.offline.drop_in.engine_args",
    "FlexibleArgumentParser": ".frontend.offline.drop_in.engine_args",
    "LLM": ".frontend.offline.llm",
    "LLMEngine": ".frontend.offline.drop_in.engines",
    "LateChunkingParams": ".frontend.client.embeddings",
    "LoRARequest": ".frontend.offline.loras",
    "PoolingParams": ".frontend.offline.params",
    "PromptType": ".frontend.offline.prompts",
    "RepetitionDetectionParams": ".protocol.sampling_params",
    "RequestOutputKind": ".frontend.offline.params",
    "SamplingParams": ".frontend.offline.params",
    "StructuredOutputsParams": ".frontend.offline.drop_in.constraints",
    "TextPrompt": ".frontend.offline.prompts",
    "TokensPrompt": ".frontend.offline.prompts",
    "structured_output": ".frontend.offline.drop_in.constraints",
    **dict.fromkeys(_OUTPUTS, ".frontend.offline.outputs"),
    **dict.fromkeys(_METRICS, ".frontend.offline.drop_in.metrics"),
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "Counter",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "FlexibleArgumentParser",
    "Gauge",
    "Histogram",
    "LLMEngine",
    "LateChunkingParams",
    "LoRARequest",
    "Metric",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Vector",
    "__version__",
    "structured_output",
]


def __getattr__(name: str) -> Any:
    owned = _SYNONYMS.get(name, name)
    if owned not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_MODULES[owned], __name__)
    value = globals()[name] = getattr(module, owned)
    return value
