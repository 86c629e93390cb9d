"""The routes of SGLang's own API."""

from __future__ import annotations

from typing import Final

from ....http.routing import Route
from ...bodies.intake import Intake
from ...control.pause import Pauses
from ...control.sleep import Sleep
from ...control.weights import Weights
from ...routes.embeddings import Embeddings
from ...routes.loras import Loras
from ...routes.management import Management
from ...serving import Serving
from .encode import SglangEncode
from .operations import SglangAborts, SglangDescription
from .parsers import SglangParsers
from .sessions import Sessions

WEIGHT_VERSION_PATHS: Final = ("/weight_version", "/get_weight_version", "/weight_info")
"""SGLang's paths of the route that names the weights, and vLLM's."""


def routes(
    serving: Serving,
    intake: Intake,
    management: Management,
    embeddings: Embeddings,
    weights: Weights,
    sessions: Sessions,
    loras: Loras,
) -> list[Route]:
    """Return all routes except `/generate`, which is also one of Text Generation Inference."""
    description, parsers = SglangDescription(serving), SglangParsers(serving, intake)
    pauses, sleep = Pauses(serving, intake), Sleep(serving, intake)
    return [
        Route("/encode", SglangEncode(serving, intake, embeddings).encode, methods=["POST", "PUT"]),
        Route("/open_session", sessions.open),
        Route("/close_session", sessions.close),
        Route("/parse_function_call", parsers.parse_calls),
        Route("/separate_reasoning", parsers.separate_reasoning),
        *(Route(path, description.model) for path in ("/model_info", "/get_model_info")),
        *(Route(path, description.server) for path in ("/server_info", "/get_server_info")),
        *(Route(path, description.weights) for path in WEIGHT_VERSION_PATHS),
        Route("/v1/loads", description.loads),
        Route("/get_load", description.older_loads),
        Route("/health_generate", management.health),
        Route("/ready", management.readyz),
        Route("/flush_cache", management.reset_prefix_cache, methods=["GET", "POST"]),
        Route("/pause_generation", pauses.pause_like_sglang),
        Route("/continue_generation", pauses.resume_like_sglang),
        Route("/release_memory_occupation", sleep.release),
        Route("/resume_memory_occupation", sleep.take_back),
        Route("/update_weights_from_disk", weights.update_like_sglang),
        Route("/update_weight_version", weights.rename_like_sglang),
        Route("/load_lora_adapter", loras.load_like_sglang),
        Route("/unload_lora_adapter", loras.unload_like_sglang),
        Route("/abort_request", SglangAborts(serving, intake).abort),
    ]
