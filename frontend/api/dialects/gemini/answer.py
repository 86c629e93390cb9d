"""Write answers in the format of Google's Gemini API."""

from __future__ import annotations

from typing import Final

from ....client.engine_client import Delta, Sequence
from ....http.errors import APIError
from ....http.json_pieces import encode_whole
from ...chats.answer import ChatAnswer, ChatChoice
from ...logprobs import Json
from ...streaming.event_stream import StreamFormat, event
from ..dialect import CallCollector, DialectChunks, decode_input

_STATUSES: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""HTTP status -> Google's name. Others are INTERNAL."""


def error_body(error: APIError, request_id: str) -> Json:
    """Return the body of an error in Google's format."""
    status = error_status(error)
    return {"error": {"code": error.status, "message": error.message, "status": status}}


def error_status(error: APIError) -> str:
    """Return Google's name for the status of an error."""
    return _STATUSES.get(error.status, "INTERNAL")


class GeminiAnswer(ChatAnswer):
    """The answer to one conversation, in Google's format."""

    shows_abort = False

    def whole(self, outputs: list[Delta]) -> Json:
        """Return the complete response body."""
        candidates = [
            self.candidate(choice, output, CallCollector())
            for choice, output in zip(self.choices, outputs, strict=True)
        ]
        return self.response(candidates)

    def chunks(self) -> GeminiChunks:
        """Return the encoder of a stream."""
        return GeminiChunks(self)

    def response(self, candidates: list[Json]) -> Json:
        """Return a response with candidates and the usage so far."""
        sequences = self._group.sequences
        counts = [choice.num_reasoning_tokens for choice in self.choices]
        num_thoughts = sum(count or 0 for count in counts)
        num_output = sum(sequence.num_read_tokens for sequence in sequences)
        num_prompt, num_cached = sequences[0].num_prompt_tokens, sequences[0].num_cached_tokens
        usage: Json = {
            "promptTokenCount": num_prompt,
            "candidatesTokenCount": num_output - num_thoughts,
            "totalTokenCount": num_prompt + num_output,
            "cachedContentTokenCount": num_cached,
            "promptTokensDetails": [{"modality": "TEXT", "tokenCount": num_prompt}],
        }
        if any(count is not None for count in counts):
            usage["thoughtsTokenCount"] = num_thoughts
        return {
            "candidates": candidates,
            "usageMetadata": usage,
            "modelVersion": self.envelope["model"],
            "responseId": self.envelope["id"],
        }

    def candidate(self, choice: ChatChoice, delta: Delta, calls: CallCollector) -> Json:
        """Return a candidate with the new output of a choice. Unfinished calls stay in `calls`."""
        message = choice.read(delta)
        parts: list[Json] = []
        if message.reasoning:
            parts.append({"text": message.reasoning, "thought": True})
        if message.content:
            parts.append({"text": message.content})
        is_end = delta.finish_reason is not None
        for call in calls.add(message.tool_calls, is_end=is_end):
            found = {"id": call.id, "name": call.name, "args": decode_input(call.arguments)}
            parts.append({"functionCall": found})
        candidate: Json = {"content": {"role": "model", "parts": parts}, "index": choice.index}
        if is_end:
            reason = "MAX_TOKENS" if delta.finish_reason == "length" else "STOP"
            candidate["finishReason"] = reason
        if self.request.logprobs and delta.logprobs is not None:
            candidate |= self._logprobs(delta)
        return candidate

    def _logprobs(self, delta: Delta) -> Json:
        positions = list(delta.logprobs or ())
        chosen = [self._token(position.token_id, position.logprob) for position in positions]
        top = [
            {"candidates": [self._token(*candidate) for candidate in position.top]}
            for position in positions
        ]
        values = [each["logProbability"] for each in chosen]
        return {
            "avgLogprobs": sum(values) / max(1, len(values)),
            "logprobsResult": {"chosenCandidates": chosen, "topCandidates": top},
        }

    def _token(self, token_id: int, logprob: float) -> Json:
        shown = self.renderer.chat_token(token_id, logprob)
        return {"token": shown["token"], "tokenId": token_id, "logProbability": shown["logprob"]}


_STREAM: Final = StreamFormat(
    content_type=b"text/event-stream; charset=utf-8",
    keep_alive=b": keep-alive\n\n",
    done=b"",
    encode_error=lambda error: b"data: %b\n\n" % encode_whole(error_body(error, "")),
)


class GeminiChunks(DialectChunks[GeminiAnswer]):
    """Writes the stream of an answer: each event is a response with the new output of one candidate."""

    format = _STREAM

    def __init__(self, answer: GeminiAnswer) -> None:
        super().__init__(answer)
        self._calls = [CallCollector() for _ in answer.choices]

    def encode(self, sequence: Sequence) -> bytes:
        """Return the events for the new output."""
        delta = self.read(sequence)
        answer, index = self.answer, sequence.position
        candidate = answer.candidate(answer.choices[index], delta, self._calls[index])
        if not (candidate["content"]["parts"] or "finishReason" in candidate):
            return b""
        return event(answer.response([candidate]))
