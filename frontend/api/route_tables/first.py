"""The routes of a server that is starting: its state, and those of most requests."""

from __future__ import annotations

from ...http.routing import Route, with_v1
from ..bodies.intake import Intake
from ..routes.completions import Completions
from ..routes.management import Management
from ..serving import Serving
from ..stored_chats.endpoint import StoredChatCompletions
from ..stored_chats.records import ChatRecords


class FirstRoutes:
    """The first routes, and the objects that they share with the others."""

    def __init__(self, serving: Serving) -> None:
        self.intake = Intake(serving)
        self.management = management = Management(serving)
        self.completions = Completions(serving, self.intake)
        self.chat_records = ChatRecords(serving.store)
        self.chat_completions = StoredChatCompletions(serving, self.intake, self.chat_records)
        self.openai_routes = [
            Route("/completions", self.completions),
            Route("/chat/completions", self.chat_completions),
        ]
        self.routes = [
            *with_v1(self.openai_routes),
            Route("/livez", management.livez),
            Route("/readyz", management.readyz),
            *(Route(path, management.health) for path in ("/health", "/v1/health")),
            Route("/ping", management.health, methods=["GET", "POST"]),
            Route("/metrics", management.metrics),
            Route("/version", management.version),
            Route("/load", management.load),
            Route("/engine/status", management.engine_status),
        ]
