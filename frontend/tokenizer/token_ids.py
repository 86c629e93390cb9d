"""Convert lists of token IDs to arrays, and cut them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


def token_id_array(token_ids: Iterable[int]) -> npt.NDArray[np.int64]:
    """Return `token_ids` as an array.

    Raises:
        ValueError: An element is not a 64-bit integer. (`numpy.array` would convert all elements to strings.)
    """
    try:
        return np.frombuffer(array("q", token_ids), np.int64)
    except (TypeError, OverflowError):
        raise ValueError("token ids must be integers") from None


def truncate(
    token_ids: npt.NDArray[np.int32], bare: npt.NDArray[np.int32], keep: int, side: str | None
) -> npt.NDArray[np.int32]:
    """Return `keep` tokens: the special tokens, and the start of the text `bare` (its end if `side` is "left")."""
    num_special = len(token_ids) - len(bare)
    before = next(
        (
            start
            for start in range(num_special + 1)
            if np.array_equal(token_ids[start : start + len(bare)], bare)
        ),
        None,
    )
    if before is None or num_special >= keep:
        return token_ids[-keep:] if side == "left" else token_ids[:keep]
    kept = bare[num_special - keep :] if side == "left" else bare[: keep - num_special]
    end = token_ids[before + len(bare) :]
    return np.concatenate((token_ids[:before], kept, end))
