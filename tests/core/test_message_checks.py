from typing import Any

import pytest
from engine.core.message_checks import are_below, is_valid_output
from engine.protocol.arrays import int32_bytes
from engine.protocol.worker_messages import DraftTokenIds, ModelRunnerOutput, RowLogprobs
from hypothesis import given
from hypothesis import strategies as st

VOCAB_SIZE = 1000
ONE = int32_bytes([1])


def row(**fields: Any) -> RowLogprobs:
    sound = {"slot": 0, "num_positions": 1, "token_ids": ONE, "logprobs": ONE, "ranks": ONE}
    return RowLogprobs(**{**sound, **fields})


def is_valid(**fields: Any) -> bool:
    return is_valid_output(ModelRunnerOutput(1, **fields), VOCAB_SIZE, max_num_seqs=8)


def test_an_output_with_valid_tokens_and_slots_is_accepted() -> None:
    drafts = DraftTokenIds(1, slots=int32_bytes([7]), token_ids=ONE, num_tokens=ONE)
    assert is_valid()
    assert is_valid(
        sampled_token_ids=int32_bytes([0, VOCAB_SIZE - 1]),
        num_sampled=int32_bytes([2]),
        nan_slots=int32_bytes([7]),
        prediction_counts=int32_bytes([7, 0, 2]),
        logprobs=[row()],
        prompt_logprobs=[row()],
        drafts=drafts,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"sampled_token_ids": b"123"},
        {"sampled_token_ids": int32_bytes([VOCAB_SIZE])},
        {"sampled_token_ids": int32_bytes([-1])},
        {"nan_slots": b"1"},
        {"nan_slots": int32_bytes([8])},
        {"nan_slots": int32_bytes([-1])},
        {"num_sampled": b"12345"},
        {"num_verified": b"12345"},
        {"prediction_counts": int32_bytes([1, 2])},
        {"prediction_counts": int32_bytes([1, -2, 3])},
        {"logprobs": [row(num_positions=0)]},
        {"logprobs": [row(num_positions=2**40)]},
        {"logprobs": [row(ranks=b"")]},
        {"prompt_logprobs": [row(logprobs=b"12")]},
        {"prompt_logprobs": [row(token_ids=int32_bytes([VOCAB_SIZE]))]},
        {"seconds": float("nan")},
        {"draft_seconds": -1.0},
        {"draft_passes": 2**40},
        {"drafts": DraftTokenIds(1, slots=b"1")},
        {"drafts": DraftTokenIds(1, slots=ONE, token_ids=ONE, num_tokens=int32_bytes([2]))},
    ],
)
def test_an_output_with_out_of_range_numbers_is_rejected(fields: dict[str, Any]) -> None:
    assert not is_valid(**fields)


@given(
    limit=st.integers(1, 2**31 - 1),
    numbers=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8),
    repeats=st.sampled_from([1, 2000]),
)
def test_every_number_is_compared_with_the_limit(
    limit: int, numbers: list[int], repeats: int
) -> None:
    numbers += [limit - 1, limit]
    for count in range(1, len(numbers) + 1):
        some = numbers[:count] * repeats
        array = b"".join(number.to_bytes(4, "little") for number in some)
        assert are_below(limit, array) == all(number < limit for number in some)
