"""The routes of the Responses API."""

from __future__ import annotations

from ...http.routing import Route
from ..bodies.intake import Intake
from ..dialects.vllm.render import ResponsesRender
from ..serving import Serving
from .compaction import Compaction
from .conversations import Conversations
from .endpoint import InputTokens, Responses
from .states import ResponseStates
from .stored import StoredResponses


def response_routes(
    serving: Serving, intake: Intake, states: ResponseStates, responses: Responses
) -> list[Route]:
    """Return the routes of responses and conversations."""
    stored = StoredResponses(states, responses.runs)
    conversations = Conversations(serving, intake, states)
    one, items = "/conversations/{id}", "/conversations/{id}/items"
    return [
        Route("/responses", responses),
        Route("/responses/input_tokens", InputTokens(serving, intake, states).count),
        Route("/responses/render", ResponsesRender(serving, intake, states)),
        Route("/responses/compact", Compaction(serving, intake, states)),
        Route("/responses/{id}", stored, methods=["GET", "DELETE"]),
        Route("/responses/{id}/cancel", stored.cancel, methods=["POST"]),
        Route("/responses/{id}/input_items", stored.input_items),
        Route("/conversations", conversations.create),
        Route(one, conversations.retrieve),
        Route(one, conversations.update),
        Route(one, conversations.delete, methods=["DELETE"]),
        Route(items, conversations.list_items),
        Route(items, conversations.add_items),
        Route(f"{items}/{{item_id}}", conversations.retrieve_item),
        Route(f"{items}/{{item_id}}", conversations.delete_item, methods=["DELETE"]),
    ]
