"""The output of a running request of `LLM`, as vLLM's engines return it while tokens arrive."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

import msgspec

from ....protocol.sampling_params import SamplingParams as Params
from ...client.engine_client import Delta, PositionLogprobs, RequestGroup
from ...client.groups.hidden_states import complete_states
from ...tokenizer.tokenizer import Tokenizer
from ..outputs import RequestOutput, request_output
from ..params import RequestOutputKind, SamplingParams
from ..prompts import EncodedPrompt


async def stream_outputs(
    group: RequestGroup,
    prompt: EncodedPrompt,
    params: Params | None,
    request_id: str,
    tokenizer: Tokenizer,
) -> AsyncIterator[RequestOutput]:
    """Yield the output of a request whenever there is more, in the form that `params.output_kind` chooses.

    The request is aborted if the iteration ends early.
    """
    kind = params.output_kind if isinstance(params, SamplingParams) else None
    writer = tokenizer if group.sequences[0].params.detokenize else None

    def write(deltas: list[Delta]) -> RequestOutput:
        output = request_output(group, prompt.text, prompt.token_ids, deltas, writer)
        return dataclasses.replace(output, request_id=request_id)

    deltas = [Delta("", [], _no_logprobs(group)) for _ in group.sequences]
    try:
        if kind is RequestOutputKind.FINAL_ONLY:
            yield write(await group.result())
            return
        while updated := await group.wait_for_updates():
            for sequence in updated:
                await complete_states([sequence])
                deltas[sequence.position] = _join(deltas[sequence.position], sequence.read())
            yield write(deltas)
            if kind is RequestOutputKind.DELTA:
                deltas = [
                    msgspec.structs.replace(
                        each, text="", token_ids=[], logprobs=_no_logprobs(group)
                    )
                    for each in deltas
                ]
    finally:
        group.abort()


def _no_logprobs(group: RequestGroup) -> list[PositionLogprobs] | None:
    return None if group.sequences[0].params.logprobs is None else []


def _join(first: Delta, more: Delta) -> Delta:
    """Return two outputs of a sequence as one."""
    logprobs = None
    if first.logprobs is not None and more.logprobs is not None:
        logprobs = [*first.logprobs, *more.logprobs]
    return msgspec.structs.replace(
        more,
        text=first.text + more.text,
        token_ids=[*first.token_ids, *more.token_ids],
        logprobs=logprobs,
    )
