"""The chunks of streams that vLLM's derender routes receive, and the state that clients send with the next chunk."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ....http.errors import expect
from ...logprobs import Json
from ...schema.vllm import VllmGenerated, VllmGeneratedChoice, VllmStreamState


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk of a stream, with the text before it and its own."""

    choice: VllmGeneratedChoice
    known_ids: list[int]
    known_text: str
    text: str

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the chunk."""
        return list(self.choice.token_ids or ())


def next_state(state: VllmStreamState, piece: Piece | None, calls_tools: bool) -> Json:
    """Return the state that the client sends with the next chunk."""
    ids, lengths = list(state.output_token_ids or ()), list(state.output_chunk_lens or ())
    if piece is not None and piece.token_ids:
        ids += piece.token_ids
        lengths.append(len(piece.token_ids))
    following = msgspec.structs.replace(
        state,
        output_token_ids=ids,
        output_chunk_lens=lengths,
        role_sent=bool(state.role_sent) or piece is not None,
        tools_streamed=bool(state.tools_streamed) or calls_tools,
    )
    # vLLM accepts no nulls.
    return {
        name: value for name, value in msgspec.to_builtins(following).items() if value is not None
    }


def chunk_usage(response: VllmGenerated, num_prompt: int | None) -> Json:
    """Return the fields of a chunk with the usage of its response, if it has one."""
    if (given := response.usage) is None:
        return {}
    counts = [
        expect(given.get(name) or 0, int, f"generate_chunk.usage.{name}", "an integer")
        for name in ("prompt_tokens", "completion_tokens")
    ]
    prompt = counts[0] if num_prompt is None else num_prompt
    usage = {"prompt_tokens": prompt, "completion_tokens": counts[1]}
    return {"usage": usage | {"total_tokens": prompt + counts[1]}}
