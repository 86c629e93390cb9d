from __future__ import annotations

import numpy as np
import pytest
from engine.protocol.block_hash import HASH_BYTES, ROOT_HASH, hash_blocks, root_hash
from engine.protocol.config import PrefixHash
from hypothesis import given
from hypothesis import strategies as st

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=70)


every_algorithm = pytest.mark.parametrize("algorithm", PrefixHash)


@every_algorithm
@given(tokens=TOKENS, block_size=st.sampled_from([1, 4, 16]))
def test_every_full_block_has_one_hash(
    algorithm: PrefixHash, tokens: list[int], block_size: int
) -> None:
    hashes = hash_blocks(np.array(tokens, np.int32), block_size, algorithm=algorithm)
    assert len(hashes) == len(tokens) // block_size * HASH_BYTES


@every_algorithm
@given(tokens=TOKENS, cut=st.integers(0, 4))
def test_hashing_can_continue_after_any_block(
    algorithm: PrefixHash, tokens: list[int], cut: int
) -> None:
    ids = np.array(tokens, np.int32)
    whole = hash_blocks(ids, 4, algorithm=algorithm)
    head = hash_blocks(ids[: cut * 4], 4, algorithm=algorithm)
    parent = head[-HASH_BYTES:] if head else ROOT_HASH
    tail = hash_blocks(ids[len(head) // HASH_BYTES * 4 :], 4, parent, algorithm=algorithm)
    assert head + tail == whole


@every_algorithm
@given(tokens=st.lists(st.integers(0, 1000), min_size=8, max_size=8), position=st.integers(0, 7))
def test_a_token_changes_the_hash_of_its_block_and_all_later_ones(
    algorithm: PrefixHash, tokens: list[int], position: int
) -> None:
    changed = list(tokens)
    changed[position] += 1
    a, b = (hash_blocks(np.array(t, np.int32), 4, algorithm=algorithm) for t in (tokens, changed))
    first = position // 4 * HASH_BYTES
    assert a[:first] == b[:first]
    assert a[first : first + HASH_BYTES] != b[first : first + HASH_BYTES]
    assert a[-HASH_BYTES:] != b[-HASH_BYTES:]


def test_prompts_with_other_salts_or_adapters_share_no_hash() -> None:
    roots = {
        root_hash(),
        root_hash(cache_salt="a"),
        root_hash(cache_salt="b"),
        root_hash(lora_version=b"a"),
        root_hash(cache_salt="a", lora_version=b"a"),
        root_hash(cache_salt=""),
    }
    assert len(roots) == 6


def test_the_length_of_an_encoder_input_is_part_of_the_hash() -> None:
    tokens = np.zeros(8, np.int32)
    # Both begin at position 1 with the same content, and one of them reaches further.
    hashes = {hash_blocks(tokens, 8, ROOT_HASH, [(1, length, b"cat")]) for length in (2, 4)}
    assert len(hashes) == 2
