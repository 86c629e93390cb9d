"""Read the layout of the head in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.config import ProposerMethod, SpeculativeConfig
from .....protocol.errors import ConfigError
from ....layers.spec import ModelSpec
from ....loaders import Checkpoint, open_checkpoint
from .block import read_block
from .block_inputs import block_fields, is_deepseek, read_block_inputs
from .deepseek_block import read_deepseek_block
from .eagle import read_eagle
from .eagle3 import read_eagle3, read_eagle3_inputs
from .head_layout import HeadLayout
from .mtp import read_mtp

NEEDS_ONE_STREAM = (
    "--speculative-config with method {!r} needs a model with Engine's own layers and one hidden state per token; use "
    "another method"
)


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
            read = read_deepseek_block if is_deepseek(block_fields(checkpoint)) else read_block
            return read(target, checkpoint)
        case ProposerMethod.EAGLE3:
            return read_eagle3(target, checkpoint)
    return read_eagle(checkpoint)


def find_kept_layers(speculative: SpeculativeConfig, target: ModelSpec) -> Sequence[int]:
    """Return the model's layers whose inputs the head reads; the number of layers means the final norm.

    In a model with several residual streams, a head reads only the normed hidden states, or sums of outputs
    or means of streams. A layer for multi-token prediction whose model has hyper-connections of low rank (Qwen4) reads
    all streams.

    Raises:
        CheckpointError: The head's config names layers that the model does not have.
        ConfigError: The head reads inputs of layers that have several hidden states for a token.
    """
    count, hyper, name = len(target.layers), target.hyper_connections, speculative.model
    if not speculative.method.reads_inner_states or name is None:
        if hyper is not None and hyper.rank and speculative.method is ProposerMethod.MTP:
            return (count,)
        if hyper is not None or target.attention_residuals is not None:
            return ()
        name = None
    # With attention residuals, it reads the sum to which the last block was added, as in Kimi K3. With
    # hyper-connections it reads means of streams, as in DeepSeek-V4.
    residuals, hyper = target.attention_residuals, target.hyper_connections
    has_sums = residuals is not None and not residuals.norms_values
    has_means = hyper is not None and not hyper.rank
    if target.num_streams and not has_sums and not has_means:
        raise ConfigError(NEEDS_ONE_STREAM.format(speculative.method.value))
    if name is None:
        return (count,)
    checkpoint = open_checkpoint(name)
    if speculative.method is ProposerMethod.DFLASH:
        return read_block_inputs(block_fields(checkpoint), count)
    return read_eagle3_inputs(ConfigFields(checkpoint.config, checkpoint.config_path), count)
