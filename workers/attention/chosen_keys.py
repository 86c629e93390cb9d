"""The keys that the tokens of a step attend to, if an indexer chooses them.

Shapes: N sequences, M tokens of each, L keys of each, J heads of an indexer, I elements of an index key.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChosenKeys:
    """Masks that replace the metadata's: one per bucket of decoding requests, and one per tile of each prompt."""

    decodes: list[Tensor]
    tiles: list[list[Tensor]]


def choose_keys(
    queries_NMJI: Tensor, weights_NMJ: Tensor, keys_NLI: Tensor, mask_NML: Tensor, num_chosen: int
) -> Tensor:
    """Return `mask_NML` with -inf for all but the `num_chosen` keys with the highest scores.

    Of equal scores, the first ones win.

    A score is summed head by head, so its bits do not depend on what else is computed with it.
    """
    if keys_NLI.shape[1] <= num_chosen:
        return mask_NML
    keys_NIL = keys_NLI.float().transpose(1, 2)
    num_tokens = queries_NMJI.shape[1]
    scores_NML = mask_NML.float()
    for head in range(queries_NMJI.shape[2]):
        queries_NMI = queries_NMJI[:, :, head].float()
        if num_tokens == 1:
            # A product with a single row sums in another order, so double the row.
            queries_NMI = queries_NMI.expand(-1, 2, -1)
        products_NML = torch.bmm(queries_NMI, keys_NIL)[:, :num_tokens].relu_()
        scores_NML = torch.addcmul(scores_NML, weights_NMJ[:, :, head, None].float(), products_NML)
    lowest_NM1 = scores_NML.topk(num_chosen, -1).values[..., -1:]
    is_higher_NML = scores_NML > lowest_NM1
    is_equal_NML = scores_NML == lowest_NM1
    room_NM1 = num_chosen - is_higher_NML.sum(-1, keepdim=True)
    is_chosen_NML = is_higher_NML | (is_equal_NML & (is_equal_NML.cumsum(-1) <= room_NM1))
    return mask_NML.masked_fill(~is_chosen_NML, -math.inf)
