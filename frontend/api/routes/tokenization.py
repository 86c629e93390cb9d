"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from ...http.errors import APIError, bad_request, json_response, wrong
from ...http.json_pieces import EncodedJSON, encode_list
from ..bodies.intake import RouteHandlers, reads
from ..chats.prompt import render_chat
from ..dialects.tgi.tokens import simple_tokens
from ..prompts import parse_token_ids, verify_num_sequences
from ..schema import DetokenizeRequest, TokenizeRequest
from ..tools.tool_definitions import tools_for_template
from .chat_completions import reasoning_kwargs

MAX_CHARACTERS: Final = 1 << 22
"""Maximum characters of a text; tokenizing takes up to 80 bytes of memory per character."""


class Tokenization(RouteHandlers):
    """Routes that tokenize and detokenize."""

    @reads(TokenizeRequest)
    async def tokenize(self, http: Request, request: TokenizeRequest, body_size: int) -> Response:
        """Return the token ids of a text, or of the prompt for a conversation."""
        return await self._tokenize(request, body_size)

    async def _tokenize(self, request: TokenizeRequest, body_size: int) -> Response:
        serving = self._serving
        serving.verify_model(request.model)
        given = [
            name
            for name in ("prompt", "content", "messages", "inputs", "text")
            if getattr(request, name) is not None
        ]
        if len(given) != 1:
            message = "exactly one of prompt, content, messages, inputs and text is required"
            raise APIError(400, message, param="prompt")
        [name] = given
        serving.verify_tokenizer(name)
        if name == "messages":
            tools = [] if request.tool_choice == "none" else tools_for_template(request.tools)
            chat = await render_chat(
                serving,
                request,
                body_size,
                tools=tools,
                add_special_tokens=bool(request.add_special_tokens),
                template_kwargs=reasoning_kwargs(request),
            )
            encoded: list[Sequence[int]] = [chat.token_ids]
        else:
            encoded = await self._encode(request, name)
        if (text := request.inputs) is not None:
            return await serving.executor.run(
                len(encoded[0]),
                lambda: json_response(
                    encode_list(simple_tokens(serving.tokenizer, text, encoded[0]), at_once=1)
                ),
            )
        is_list = isinstance(request.prompt, list)
        counts = [len(token_ids) for token_ids in encoded]
        answer: dict[str, Any] = {
            "count": counts if is_list else counts[0],
            "max_model_len": serving.config.model.max_model_len,
        }

        def show(piece_of: Callable[[int], object]) -> EncodedJSON:
            lists = (encode_list(map(piece_of, token_ids)) for token_ids in encoded)
            return encode_list(lists, at_once=1) if is_list else next(lists)

        def encode() -> Response:
            answer["tokens"] = show(self._piece if request.with_pieces else int)
            answer["token_strs"] = None
            if request.return_token_strs:
                answer["token_strs"] = show(serving.tokenizer.id_to_token)
            if request.text is not None:
                answer["token_strings"] = show(lambda token: serving.tokenizer.decode([token]))
            return json_response(answer)

        return await serving.executor.run(sum(counts), encode)

    async def _encode(self, request: TokenizeRequest, name: str) -> list[Sequence[int]]:
        """Return the token ids of each text in a field. Raise APIError 400 if the texts are too long or too many."""
        given: str | list[str] = getattr(request, name)
        texts = [given] if isinstance(given, str) else given
        verify_num_sequences(len(texts), name)
        if (length := sum(map(len, texts))) > MAX_CHARACTERS:
            raise bad_request(
                name,
                f"must have at most {MAX_CHARACTERS} characters, got {length}; "
                "tokenize it in parts",
            )
        is_special = request.add_special_tokens is not False
        if name == "content":
            is_special = bool(request.add_special)
        return await self._serving.encode(texts, is_special)

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

        is_list = any(isinstance(each, list) for each in tokens)
        lists: list[Any] = tokens if is_list else [tokens]
        verify_num_sequences(len(lists), "tokens")

        def decode() -> list[str]:
            texts = []
            for number, token_ids in enumerate(lists):
                param = f"tokens[{number}]" if is_list else "tokens"
                if not isinstance(token_ids, list):
                    raise wrong(param, "a list of token ids like the others", token_ids)
                if token_ids:
                    parse_token_ids(token_ids, param, serving.config.model.vocab_size)
                skips_special = bool(request.skip_special_tokens)
                texts.append(serving.tokenizer.decode(token_ids, skips_special))
            return texts

        size = sum(len(each) for each in lists if isinstance(each, list))
        texts = await serving.executor.run(size, decode)
        text = texts if is_list else texts[0]
        # `content` is the name in llama.cpp, and `text` in SGLang.
        return json_response({"prompt": text, "content": text, "text": text})

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
