"""Read the layout of the head in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.config import ProposerMethod, SpeculativeConfig
from ....layers.spec import ModelSpec
from ....loaders import Checkpoint, open_checkpoint
from .block import read_block
from .block_inputs import read_block_inputs
from .eagle import read_eagle
from .eagle3 import read_eagle3, read_eagle3_inputs
from .head_layout import HeadLayout
from .mtp import read_mtp


def read_layout(
    speculative: SpeculativeConfig, target: ModelSpec, checkpoint: Checkpoint
) -> HeadLayout:
    """Return the layout of the head in a checkpoint.

    Raises:
        CheckpointError: The checkpoint has no head, or its layout is not supported.
    """
    match speculative.method:
        case ProposerMethod.MTP:
            return read_mtp(target, checkpoint, speculative.num_speculative_tokens)
        case ProposerMethod.DFLASH:
            return read_block(target, checkpoint)
        case ProposerMethod.EAGLE3:
            return read_eagle3(target, checkpoint)
    return read_eagle(checkpoint)


def find_kept_layers(speculative: SpeculativeConfig, target: ModelSpec) -> Sequence[int]:
    """Return the model's layers whose inputs the head reads; the number of layers means the final norm.

    In a model with several residual streams, a head reads only the normed hidden states.

    Raises:
        CheckpointError: The head's config names layers that the model does not have.
    """
    count = len(target.layers)
    if not speculative.method.reads_inner_states or speculative.model is None:
        return () if target.hyper_connections or target.attention_residuals else (count,)
    checkpoint = open_checkpoint(speculative.model)
    fields = ConfigFields(checkpoint.config, checkpoint.config_path)
    if speculative.method is ProposerMethod.DFLASH:
        return read_block_inputs(fields, count)
    return read_eagle3_inputs(fields, count)
