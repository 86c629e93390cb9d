"""The routes, and what surrounds them."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from .chat_completions import ChatCompletions
from .completions import Completions
from .edge import Edge
from .management import Management
from .replicas import Replicas
from .serving import Serving
from .tokenization import Tokenization


def create_app(serving: Serving) -> ASGIApp:
    management = Management(serving)
    replicas = Replicas(serving)
    tokenization = Tokenization(serving)
    routes = [
        Route("/v1/models", management.models),
        Route("/v1/models/{name:path}", management.model),
        Route("/v1/completions", Completions(serving), methods=["POST"]),
        Route("/v1/chat/completions", ChatCompletions(serving), methods=["POST"]),
        Route("/tokenize", tokenization.tokenize, methods=["POST"]),
        Route("/detokenize", tokenization.detokenize, methods=["POST"]),
        Route("/livez", management.livez),
        Route("/readyz", management.readyz),
        Route("/health", management.health),
        Route("/ping", management.health, methods=["GET", "POST"]),
        Route("/metrics", management.metrics),
        Route("/version", management.version),
        Route("/load", management.load),
        Route("/engine/status", management.engine_status),
        Route("/replicas", replicas.list),
        Route("/replicas/{index}/{action}", replicas.command, methods=["POST"]),
        Route("/reset_prefix_cache", management.reset_prefix_cache, methods=["POST"]),
        Route("/debug/dump", management.dump_event_logs, methods=["POST"]),
    ]
    frontend = serving.config.frontend
    router = Router(routes, redirect_slashes=False)
    edge = Edge(router, frontend.api_keys, frontend.root_path)
    return CORSMiddleware(
        edge,
        allow_origins=frontend.allowed_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id"],
    )
