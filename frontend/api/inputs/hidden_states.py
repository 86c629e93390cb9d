"""Parse the fields with which requests ask for hidden states, and write these into answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from ....protocol.config import EngineConfig
from ....protocol.config.hidden_states import MAX_ANSWER_BYTES
from ....protocol.sampling_params import ReturnedStates, SamplingParams, StatesOf
from ...client.engine_client import Sequence
from ...client.groups.hidden_states import StatesInMemory, states_in_file
from ...http.errors import bad_request, wrong
from ...http.json_pieces import EncodedJSON, encode_list
from ..logprobs import Json
from ..schema import GenerationRequest

RETURN: Final = "return_hidden_states"


def returned_states(request: GenerationRequest) -> ReturnedStates | None:
    """Return the hidden states that a request asks for; None if it leaves that to the server.

    Raises:
        APIError: A field is invalid (400).
    """
    wanted = request.return_hidden_states
    if wanted not in (None, True, False, "last"):
        raise wrong(RETURN, 'true, false or "last"', wanted)
    if wanted:
        return ReturnedStates(StatesOf.LAST if wanted == "last" else StatesOf.ALL)
    return states_in_file(request.kv_transfer_params or {})


def num_answer_bytes(wanted: Iterable[tuple[SamplingParams, int]], config: EngineConfig) -> int:
    """Return the bytes of the hidden states of an answer.

    `wanted` has the parameters of each prompt, and its number of tokens.

    Raises:
        APIError: They are more than `MAX_ANSWER_BYTES` (400).
    """
    if (states := config.scheduler.hidden_states) is None:
        return 0
    limit, num_rows = config.model.max_model_len, 0
    for params, num_prompt_tokens in wanted:
        returned = params.returned_states
        if returned is None or returned.in_file:
            continue
        is_last = returned.tokens is StatesOf.LAST
        num_tokens = min(num_prompt_tokens + (params.max_tokens or limit), limit)
        num_rows += params.n * (1 if is_last else num_tokens)
    size = 4 * num_rows * states.row_size(config.model.hidden_size)
    if size > MAX_ANSWER_BYTES:
        raise bad_request(
            RETURN,
            f"needs {size} bytes for {num_rows} tokens, and at most {MAX_ANSWER_BYTES} are allowed; lower "
            'max_tokens, or send "last"',
        )
    return size


def all_states(sequence: Sequence) -> Json:
    """Return SGLang's field of a sequence: a list of the prompt's states, and then the states of each output token.

    With "last", it is the list of the last token's states. It is {} if the request asks for none.
    """
    states = sequence.states
    if not isinstance(states, StatesInMemory):
        return {}
    rows, num_prompt = states.rows(), states.num_prompt_rows
    if states.is_last:
        return {"hidden_states": rows[0].tolist() if len(rows) else None}
    prompt = _encoded(rows[:num_prompt])
    return {"hidden_states": encode_list([prompt, *(_encoded(row) for row in rows[num_prompt:])])}


def last_states(sequence: Sequence) -> Json:
    """Return SGLang's field of a choice: the last token's states.

    As in SGLang, they are empty if the output has one token, unless the request sent "last".
    """
    states = sequence.states
    if not isinstance(states, StatesInMemory):
        return {}
    rows = states.rows()
    if not states.is_last and len(rows) <= states.num_prompt_rows:
        return {"hidden_states": []}
    return {"hidden_states": rows[-1].tolist() if len(rows) else None}


def _encoded(rows: Any) -> EncodedJSON:
    return (
        encode_list((row.tolist() for row in rows), at_once=1)
        if rows.ndim > 1
        else encode_list(rows.tolist())
    )
