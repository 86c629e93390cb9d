"""Describes each route in one sentence, for the OpenAPI document and the reference pages."""

from __future__ import annotations

from typing import Final

CLIENTS: Final = "clients"
OPERATORS: Final = "operators"
PROBES: Final = "probes and monitoring"

ROUTE_DESCRIPTIONS: Final[dict[str, tuple[str, str]]] = {
    "/v1/models": (CLIENTS, "List the served model names."),
    "/v1/models/{name}": (CLIENTS, "Describe one served model."),
    "/v1/completions": (CLIENTS, "Complete one or more prompts."),
    "/v1/chat/completions": (CLIENTS, "Answer a conversation, or list stored answers."),
    "/v1/chat/completions/{id}": (CLIENTS, "Return, change or delete a stored answer."),
    "/v1/chat/completions/{id}/messages": (CLIENTS, "List the messages of a stored answer."),
    "/v1/completions/{id}/events": (CLIENTS, "Stream a recorded completion from any position."),
    "/v1/chat/completions/{id}/events": (CLIENTS, "Stream a recorded answer from any position."),
    "/v1/chat/completions/batch": (CLIENTS, "Answer several conversations in one request."),
    "/v1/responses": (
        CLIENTS,
        "Answer a conversation (OpenAI's Responses API); GET opens a WebSocket.",
    ),
    "/v1/responses/compact": (CLIENTS, "Replace the items of a conversation with a summary."),
    "/v1/responses/input_tokens": (CLIENTS, "Count the tokens of a response's prompt."),
    "/v1/responses/{id}": (CLIENTS, "Return or delete a stored response."),
    "/v1/responses/{id}/cancel": (CLIENTS, "Cancel a background response."),
    "/v1/responses/{id}/input_items": (CLIENTS, "List the items that a response was given."),
    "/v1/decisions": (CLIENTS, "Return probabilities of answers to questions (OpenAI)."),
    "/v1/conversations": (CLIENTS, "Create a conversation."),
    "/v1/conversations/{id}": (CLIENTS, "Return, change or delete a conversation."),
    "/v1/conversations/{id}/items": (CLIENTS, "List the items of a conversation, or add some."),
    "/v1/conversations/{id}/items/{item_id}": (
        CLIENTS,
        "Return or delete an item of a conversation.",
    ),
    "/v1/files": (CLIENTS, "List files, or store one."),
    "/v1/files/{id}": (CLIENTS, "Describe or delete a file."),
    "/v1/files/{id}/content": (CLIENTS, "Return the content of a file."),
    "/v1/batches": (CLIENTS, "List batches, or create one."),
    "/v1/batches/{id}": (CLIENTS, "Describe a batch."),
    "/v1/batches/{id}/cancel": (CLIENTS, "Cancel a batch."),
    "/v1/embeddings": (CLIENTS, "Embed one or more texts."),
    "/v2/embed": (CLIENTS, "Embed texts or images (Cohere)."),
    "/embed": (CLIENTS, "Embed texts (Text Embeddings Inference)."),
    "/v1/score": (CLIENTS, "Return a score for each pair of texts."),
    "/v1/rerank": (CLIENTS, "Sort documents by their relevance to a query."),
    "/v1/audio/transcriptions": (CLIENTS, "Transcribe an audio file."),
    "/v1/audio/translations": (CLIENTS, "Translate the speech in an audio file to English text."),
    "/inference": (CLIENTS, "Transcribe or translate an audio file (whisper.cpp)."),
    "/v1/realtime/client_secrets": (
        CLIENTS,
        "Create a key with which a web page may use /v1/realtime for some minutes.",
    ),
    "/v1/realtime": (CLIENTS, "Transcribe speech while it arrives, on a WebSocket."),
    "/pooling": (
        CLIENTS,
        "Return the embedding, or the probabilities of the classes, of each input.",
    ),
    "/classify": (CLIENTS, "Return the class of each input; needs a classification head."),
    "/v1/messages": (CLIENTS, "Answer a conversation (Anthropic's Messages API)."),
    "/v1/messages/{id}/events": (
        CLIENTS,
        "Stream a recorded message from any position (Anthropic).",
    ),
    "/v1/messages/count_tokens": (CLIENTS, "Count the tokens of a conversation (Anthropic)."),
    "/v1/messages/batches": (CLIENTS, "List batches of messages, or create one (Anthropic)."),
    "/v1/messages/batches/{id}": (CLIENTS, "Describe or delete a batch (Anthropic)."),
    "/v1/messages/batches/{id}/cancel": (CLIENTS, "Cancel a batch (Anthropic)."),
    "/v1/messages/batches/{id}/results": (CLIENTS, "Return the results of a batch (Anthropic)."),
    "/api/chat": (CLIENTS, "Answer a conversation (Ollama)."),
    "/api/generate": (CLIENTS, "Answer a prompt (Ollama)."),
    "/api/embed": (CLIENTS, "Embed one or more texts (Ollama)."),
    "/api/embeddings": (CLIENTS, "Embed one text (Ollama's older route)."),
    "/api/tags": (CLIENTS, "List the served models (Ollama)."),
    "/api/ps": (CLIENTS, "List the loaded models (Ollama)."),
    "/api/show": (CLIENTS, "Describe a served model (Ollama)."),
    "/api/pull": (CLIENTS, "Report that a served model is present (Ollama)."),
    "/api/version": (CLIENTS, "Return the version of Ollama's API."),
    "/v1/reranking": (CLIENTS, "The same as /v1/rerank."),
    "/completion": (CLIENTS, "Complete one or more prompts (llama.cpp)."),
    "/infill": (CLIENTS, "Fill in the middle of a file (llama.cpp)."),
    "/apply-template": (CLIENTS, "Return the prompt of a conversation as text (llama.cpp)."),
    "/v1/chat/completions/input_tokens": (CLIENTS, "Count the tokens of a conversation."),
    "/embedding": (CLIENTS, "Embed one or more texts (llama.cpp)."),
    "/props": (CLIENTS, "Describe the server and its model (llama.cpp)."),
    "/slots": (CLIENTS, "List the slots for running sequences (llama.cpp)."),
    "/slots/{id}": (OPERATORS, "Erase the cache, which is that of all slots (llama.cpp)."),
    "/lora-adapters": (
        OPERATORS,
        "List the adapters, or set their scales for requests for the base model (llama.cpp).",
    ),
    "/models/load": (CLIENTS, "Report that a served model is present (llama.cpp)."),
    "/models/unload": (CLIENTS, "Refused: the server has one model (llama.cpp)."),
    "/v1/chat/completions/control": (
        CLIENTS,
        "Refused: the reasoning of a running answer cannot be ended (llama.cpp).",
    ),
    "/generate": (CLIENTS, "Complete one or more texts or lists of token ids (SGLang)."),
    "/encode": (CLIENTS, "Embed one or more texts or lists of token ids (SGLang)."),
    "/parse_function_call": (CLIENTS, "Return the tool calls in a text (SGLang)."),
    "/separate_reasoning": (CLIENTS, "Return the reasoning in a text, and the rest (SGLang)."),
    "/generative_scoring": (CLIENTS, "Score items by the probability of a label (vLLM)."),
    "/model_info": (CLIENTS, "Describe the model (SGLang)."),
    "/get_model_info": (CLIENTS, "The same as /model_info."),
    "/server_info": (CLIENTS, "Describe the server and its load (SGLang)."),
    "/get_server_info": (CLIENTS, "The same as /server_info."),
    "/v2/rerank": (CLIENTS, "The same as /v1/rerank."),
    "/invocations": (CLIENTS, "Answer the body of another route of the model (SageMaker)."),
    "/tokenizer_info": (CLIENTS, "Describe the tokenizer and its chat template."),
    "/v1/tokenize": (CLIENTS, "Return the token ids of a text or a conversation."),
    "/v1/detokenize": (CLIENTS, "Return the text of token ids."),
    "/openapi.json": (CLIENTS, "Return this description in OpenAPI 3.1."),
    "/docs": (CLIENTS, "Show this description as a web page."),
    "/load": (OPERATORS, "Return the number of running and waiting sequences of all frontends."),
    "/v1/loads": (OPERATORS, "Return the load of each replica (SGLang)."),
    "/get_load": (OPERATORS, "Return the load of each replica in an older format (SGLang)."),
    "/engine/status": (OPERATORS, "List all processes of the engine."),
    "/replicas": (OPERATORS, "List the replicas with their state and load."),
    "/replicas/{index}/{action}": (
        OPERATORS,
        "Drain, undrain or restart a replica, or change its role.",
    ),
    "/reset_prefix_cache": (OPERATORS, "Empty the prefix caches of all replicas."),
    "/flush_cache": (OPERATORS, "The same as /reset_prefix_cache (SGLang)."),
    "/abort_request": (OPERATORS, "Abort the requests with an ID, or all requests (SGLang)."),
    "/v1/load_lora_adapter": (
        OPERATORS,
        "Add a LoRA adapter; needs --allow-runtime-lora-updating.",
    ),
    "/v1/unload_lora_adapter": (
        OPERATORS,
        "Remove a LoRA adapter; needs --allow-runtime-lora-updating.",
    ),
    "/debug/dump": (OPERATORS, "Write the event log of every core; needs --dump-dir."),
    "/debug/kv-cache": (OPERATORS, "Return the states of the KV-cache blocks of each replica."),
    "/debug/requests": (OPERATORS, "List the running and the recently ended requests."),
    "/debug/requests/{id}": (OPERATORS, "Explain what happened to a request; needs --dump-dir."),
    "/": (CLIENTS, "Show the web page to browsers, and a greeting to other clients."),
    "/web/app.js": (CLIENTS, "Return the program of the web page."),
    "/web/app.css": (CLIENTS, "Return the style of the web page."),
    "/web/icon.svg": (CLIENTS, "Return the icon of the web page."),
    "/livez": (PROBES, "Answer 200 while the supervisor runs."),
    "/readyz": (PROBES, "Answer 200 while the server can accept a request."),
    "/v1/health": (PROBES, "Answer 200 while the server works, even if its queues are full."),
    "/health_generate": (PROBES, "The same as /health (SGLang)."),
    "/ping": (PROBES, "The same as /health."),
    "/metrics": (PROBES, "Return Prometheus metrics."),
    "/version": (PROBES, "Return the version of Engine."),
}
"""Path -> group and description. A path without `/v1` shares the entry of the path with it."""


def describe_route(path: str) -> tuple[str, str]:
    """Return the group and the description of a route.

    Raises:
        KeyError: The route has no description.
    """
    return ROUTE_DESCRIPTIONS.get(f"/v1{path}") or ROUTE_DESCRIPTIONS[path]
