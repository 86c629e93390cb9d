"""The routes that a server loads once it is ready, because its first tokens need none of their modules."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from ...http.errors import json_response
from ...http.routing import Route, with_v1
from ...media.transcription.options import Task
from ..batches.executor import BatchExecutor
from ..batches.routes import batch_routes
from ..control.replicas import Replicas
from ..control.weight_transfer import WeightTransfer
from ..control.weights import Weights
from ..decisions.endpoint import Decisions
from ..decisions.system_one import SystemOne
from ..dialects import llama_cpp, mistral, ollama, whisper_cpp
from ..dialects.anthropic import messages as anthropic
from ..dialects.anthropic.batches import message_batch_routes
from ..dialects.anthropic.mcp import McpMessages, McpTokenCounter
from ..dialects.azure import deployment_routes
from ..dialects.cohere import chat as cohere_chat
from ..dialects.cohere.embed import CohereEmbeddings
from ..dialects.gemini import answer as gemini_answer
from ..dialects.gemini import interaction_answer, interactions
from ..dialects.gemini import models as gemini_models
from ..dialects.gemini import routes as gemini
from ..dialects.ollama_answer import error_body as ollama_error
from ..dialects.sglang.routes import routes as sglang_routes
from ..dialects.sglang.scores import ScoreRoute
from ..dialects.sglang.sessions import Sessions
from ..dialects.text_embeddings import TextEmbeddings
from ..dialects.tgi.routes import TgiRoot
from ..dialects.tgi.routes import routes as tgi_routes
from ..dialects.vertex import vertex_routes
from ..dialects.vllm.derender import Derender
from ..dialects.vllm.render import ChatRender, CompletionRender, MessagesRender
from ..dialects.vllm.routes import routes as vllm_routes
from ..docs_page import HEADERS, render_docs
from ..files.routes import file_routes
from ..files.storage import FileStorage
from ..files.uploads import UploadStorage, upload_routes
from ..openapi import describe_routes
from ..pooling import Pooling
from ..realtime.client_secrets import ClientSecrets
from ..realtime.session import Realtime
from ..responses.endpoint import Responses
from ..responses.routes import response_routes
from ..responses.states import ResponseStates
from ..routes.chat_batch import ChatBatch
from ..routes.embeddings import Embeddings
from ..routes.events import ConversationStream, ConversationStreams, Events
from ..routes.invocations import Invocations, PoolingInvocations
from ..routes.loras import Loras
from ..routes.scores import Scores
from ..routes.timelines import Timelines
from ..routes.tokenization import Tokenization
from ..routes.transcriptions import Transcriptions
from ..routes.web_page import web_page_routes
from ..serving import Serving
from ..sockets.responses import ResponsesSocket
from ..stored_chats.routes import chat_routes
from .first import FirstRoutes

ERROR_BODIES: Final = {
    anthropic.PATH: anthropic.error_body,
    f"{anthropic.PATH}/": anthropic.error_body,
    **dict.fromkeys(cohere_chat.PATHS, cohere_chat.error_body),
    **dict.fromkeys(
        (place for path in interactions.PATHS for place in (path, f"{path}/")),
        interaction_answer.error_body,
    ),
    **dict.fromkeys((gemini.PATH, *gemini.METHODS), gemini_answer.error_body),
    ollama.PATH: ollama_error,
    whisper_cpp.PATH: ollama_error,
}
"""Path of a dialect -> the function that writes its error bodies.

A path that ends with a slash is the beginning of paths, and one that begins with a colon is their end.
"""


def make_routes(serving: Serving, first: FirstRoutes) -> list[Route]:
    """Return the routes besides the first ones, including `/openapi.json` and `/docs`, which describe all."""
    intake, management = first.intake, first.management
    completions, chat_completions = first.completions, first.chat_completions
    google = gemini_models.GeminiModels(serving)
    mistral_models = mistral.MistralModels(serving, management)
    list_models = mistral.for_mistral(mistral_models.models, management.models)
    describe_model = mistral.for_mistral(mistral_models.model, management.model)
    replicas = Replicas(serving)
    timelines = Timelines(serving)
    loras = Loras(serving, intake)
    files = FileStorage(serving.store)
    states = ResponseStates(serving.store, files, serving.config.frontend.max_body_bytes)
    responses = Responses(serving, intake, states)
    tokenization = Tokenization(serving, intake)
    pooling = Pooling(serving)
    embeddings = Embeddings(serving, intake, pooling)
    scores = Scores(serving, intake, pooling)
    sessions = Sessions(serving, intake)
    messages = McpMessages(serving, intake)
    batch_executor = BatchExecutor(serving, files)
    serving.when_ready.append(batch_executor.start)
    transcriptions, translations = (
        Transcriptions(serving, intake, task, serving.transcriber)
        for task in (Task.TRANSCRIBE, Task.TRANSLATE)
    )
    secrets = ClientSecrets(serving, intake, transcriptions)
    derender = Derender(serving, intake)
    openai_routes = [
        Route("/models", gemini.for_google(google.list, list_models)),
        Route("/models/{name:path}", gemini.for_google(google.describe, describe_model)),
        Route("/fim/completions", mistral.MistralFim(serving, intake)),
        Route("/completions/{id}/events", Events(serving, completions), methods=["GET"]),
        Route("/chat/completions/{id}/events", Events(serving, chat_completions), methods=["GET"]),
        *response_routes(serving, intake, states, responses),
        Route("/responses", ResponsesSocket(serving, intake), methods=["GET"]),
        Route("/decisions", Decisions(serving, intake)),
        Route("/systemone", SystemOne(serving, intake)),
        *file_routes(serving, intake, files),
        *upload_routes(serving, intake, files, UploadStorage(serving.store)),
        *batch_routes(serving, intake, batch_executor),
        Route("/embeddings", embeddings.embed),
        Route("/classify", embeddings.classify),
        Route("/tokenize", tokenization.tokenize),
        Route("/detokenize", tokenization.detokenize),
        Route("/score", ScoreRoute(serving, intake, scores)),
        Route("/rerank", scores.rerank),
        Route("/reranking", scores.rerank),
        Route("/chat/completions/batch", ChatBatch(serving, intake)),
        Route("/completions/render", CompletionRender(serving, intake)),
        Route("/chat/completions/render", ChatRender(serving, intake)),
        Route("/completions/derender", derender.completion),
        Route("/chat/completions/derender", derender.chat),
        *chat_routes(serving, intake, first.chat_records),
        Route("/audio/transcriptions", transcriptions),
        Route("/audio/translations", translations),
        Route("/realtime", Realtime(serving, intake, transcriptions), methods=["GET"]),
        Route("/realtime/client_secrets", secrets.create),
    ]
    text_embeddings = TextEmbeddings(serving, intake, embeddings)
    root: TgiRoot | PoolingInvocations
    invocations: Invocations | PoolingInvocations
    if serving.config.model.generates:
        root = TgiRoot(serving, intake)
        invocations = Invocations(serving, intake, completions, chat_completions)
    else:
        root = invocations = PoolingInvocations(
            serving, intake, embeddings, scores, text_embeddings
        )
    # Both routes that load weights share one lock.
    weights = Weights(serving, intake)
    streams = ConversationStreams(serving, intake)
    routes = [
        *llama_cpp.routes(serving, intake, management, embeddings),
        *with_v1(openai_routes),
        *deployment_routes([*first.openai_routes, *openai_routes]),
        Route("/", root),
        Route("/invocations", invocations),
        Route("/v1/messages", messages),
        Route("/v1/messages/render", MessagesRender(serving, intake)),
        Route(
            "/v1/messages/{id}/events",
            Events(serving, messages, anthropic.recorded_id),
            methods=["GET"],
        ),
        Route("/v1/messages/count_tokens", McpTokenCounter(serving, intake).count),
        Route(
            "/v1/stream",
            ConversationStream(
                serving,
                {"/chat/completions": chat_completions, "/completions": completions},
            ),
            methods=["GET"],
        ),
        Route("/v1/stream", streams.stop, methods=["DELETE"]),
        Route("/v1/streams/lookup", streams.look_up),
        *message_batch_routes(serving, intake, batch_executor),
        *gemini.routes(serving, intake, embeddings),
        *interactions.routes(serving, intake, states, responses.runs),
        *ollama.routes(serving, intake, loras, embeddings),
        *sglang_routes(serving, intake, management, embeddings, weights, sessions, loras),
        *tgi_routes(serving, intake, sessions),
        Route(
            whisper_cpp.PATH, whisper_cpp.Inference(serving, intake, transcriptions, translations)
        ),
        *vllm_routes(serving, intake, weights),
        *WeightTransfer(serving, intake, weights).routes(),
        *vertex_routes(serving, intake, management),
        Route("/v2/rerank", scores.rerank),
        *(Route(path, cohere_chat.CohereChats(serving, intake)) for path in cohere_chat.PATHS),
        Route("/v2/embed", CohereEmbeddings(serving, intake, embeddings).embed),
        Route("/embed", text_embeddings.embed),
        Route("/pooling", embeddings.pool),
        Route("/tokenizer_info", tokenization.tokenizer_info),
        *web_page_routes(serving.config.frontend.root_path),
        Route("/replicas", replicas.list),
        Route("/replicas/{index}/{action}", replicas.command, methods=["POST"]),
        Route("/reset_prefix_cache", management.reset_prefix_cache, methods=["POST"]),
        Route("/reset_mm_cache", management.reset_media_cache, methods=["POST"]),
        Route("/reset_encoder_cache", management.reset_encoder_cache, methods=["POST"]),
        Route("/v1/load_lora_adapter", loras.load),
        Route("/v1/unload_lora_adapter", loras.unload),
        Route("/adapters", loras.load_for_sagemaker),
        Route("/adapters/{name}", loras.unload_for_sagemaker, methods=["DELETE"]),
        Route("/debug/dump", management.dump_event_logs, methods=["POST"]),
        Route("/debug/kv-cache", replicas.kv_caches),
        Route("/debug/requests", timelines.list),
        Route("/debug/requests/{id:path}", timelines.explain),
    ]

    # Describing all schemas takes too long for the start of a server and for its event loop.
    @cache
    def document() -> dict[str, Any]:
        return describe_routes([*first.routes, *routes])

    @cache
    def page() -> str:
        return render_docs(document())

    async def openapi(request: Request) -> Response:
        return json_response(await asyncio.to_thread(document))

    async def docs(request: Request) -> Response:
        return Response(await asyncio.to_thread(page), headers=HEADERS, media_type="text/html")

    if not serving.config.frontend.disable_docs:
        routes += [Route("/openapi.json", openapi), Route("/docs", docs)]
    return routes
