"""Convert lists of token IDs to arrays."""

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
