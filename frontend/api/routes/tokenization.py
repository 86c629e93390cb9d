"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

import contextlib
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from ...http.errors import APIError, bad_request, json_response
from ...http.json_pieces import encode_list
from ..bodies.intake import Intake, reads
from ..chat_prompt import render_chat
from ..prompts import parse_token_ids
from ..schema import DetokenizeRequest, TokenizeRequest
from ..serving import Serving
from ..tools.tool_definitions import tools_for_template
from .chat_completions import reasoning_kwargs

MAX_CHARACTERS: Final = 1 << 22
"""Maximum characters of a text; tokenizing takes up to 80 bytes of memory per character."""


class Tokenization:
    """Routes that tokenize and detokenize."""

    def __init__(self, serving: Serving, intake: Intake) -> None:
        self._serving = serving
        self._intake = intake

    @reads(TokenizeRequest)
    async def tokenize(self, http: Request, request: TokenizeRequest, body_size: int) -> Response:
        """Return the token ids of a text, or of the prompt for a conversation."""
        return await self._tokenize(request, body_size)

    async def _tokenize(self, request: TokenizeRequest, body_size: int) -> Response:
        serving = self._serving
        serving.verify_model(request.model)
        given = [
            name for name in ("prompt", "content", "messages") if getattr(request, name) is not None
        ]
        if len(given) != 1:
            raise APIError(
                400, "exactly one of prompt, content and messages is required", param="prompt"
            )
        [name] = given
        serving.verify_tokenizer(name)
        if name != "messages":
            text: str = getattr(request, name)
            if len(text) > MAX_CHARACTERS:
                raise bad_request(
                    name,
                    f"must have at most {MAX_CHARACTERS} characters, got {len(text)}; "
                    "tokenize it in parts",
                )
            is_special = request.add_special_tokens is not False
            if name == "content":
                is_special = bool(request.add_special)
            [token_ids] = await serving.encode([text], is_special)
        else:
            chat = await render_chat(
                serving,
                request,
                body_size,
                tools=tools_for_template(request.tools),
                add_special_tokens=bool(request.add_special_tokens),
                template_kwargs=reasoning_kwargs(request),
            )
            token_ids = chat.token_ids
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": serving.config.model.max_model_len,
        }

        def encode() -> Response:
            shown = map(self._piece, token_ids) if request.with_pieces else token_ids
            answer["tokens"] = encode_list(shown)
            answer["token_strs"] = None
            if request.return_token_strs:
                answer["token_strs"] = encode_list(map(serving.tokenizer.id_to_token, token_ids))
            return json_response(answer)

        return await serving.executor.run(len(token_ids), encode)

    def _piece(self, token_id: int) -> dict[str, Any]:
        """Return a token with its text, or with its bytes if they are no text."""
        data = self._serving.tokenizer.token_bytes(token_id)
        try:
            return {"id": token_id, "piece": data.decode()}
        except UnicodeDecodeError:
            return {"id": token_id, "piece": list(data)}

    @reads(DetokenizeRequest)
    async def detokenize(self, http: Request, request: DetokenizeRequest, size: int) -> Response:
        """Return the text of token ids."""
        return await self._detokenize(request)

    async def _detokenize(self, request: DetokenizeRequest) -> Response:
        serving = self._serving
        serving.verify_model(request.model)
        tokens = request.tokens
        if tokens is None:
            raise bad_request("tokens", "is required")
        serving.verify_tokenizer("tokens")

        def decode() -> str:
            if tokens:
                parse_token_ids(tokens, "tokens", serving.config.model.vocab_size)
            return serving.tokenizer.decode(tokens, bool(request.skip_special_tokens))

        text = await serving.executor.run(len(tokens), decode)
        # `content` is the name in llama.cpp.
        return json_response({"prompt": text, "content": text})

    async def tokenizer_info(self, http: Request) -> Response:
        """Return the tokenizer's configuration, with the chat template in use."""
        serving = self._serving
        if not serving.config.frontend.enable_tokenizer_info:
            raise APIError(
                404,
                "This server was started without --enable-tokenizer-info-endpoint; restart it with that flag",
            )
        info = await serving.executor.in_thread(serving.tokenizer.read_config)
        with contextlib.suppress(APIError):
            info["chat_template"] = serving.chat_template(with_tools=False).source
        return json_response({"tokenizer_class": "PreTrainedTokenizerFast"} | info)
