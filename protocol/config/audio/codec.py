"""The encoder of a codec, whose codes are added to tokens."""

import math

from .bases import AddedSpec


class CodecSpec(AddedSpec, frozen=True, tag=True):
    """The encoder of Mimi (arXiv 2410.00037), whose codes have vectors that are added to all tokens (Kyutai's models).

    A frame is a sample. Causal convolutions make rows of samples: the first has `kernel_size` taps, and each of
    `ratios` has one that doubles the channels, which are `num_filters` at first, after `num_residuals` blocks whose
    dilations grow by `dilation_growth`. After transformer layers, a convolution halves the number of rows, of which
    `num_semantic` quantizers and the others each choose a code for a residual.

    The vectors of codebook i begin at row `first_vector` + i * `num_vectors` of the embedding. An output has those of
    the frame before it, and the first output those of the code `first_code`, and of the token `first_token` in place of
    the prompt's `prompt_token`, if they differ.
    """

    num_filters: int
    kernel_size: int
    last_kernel_size: int
    residual_kernel_size: int
    ratios: tuple[int, ...]
    num_residuals: int
    dilation_growth: int
    compress: int
    has_shortcut: bool
    codebook_size: int
    codebook_dim: int
    num_codebooks: int
    num_semantic: int
    first_vector: int
    num_vectors: int
    first_code: int
    first_token: int
    prompt_token: int

    @property
    def num_mel_bins(self) -> int:
        """The number of features per frame, which is 0 because the encoder reads samples."""
        return 0

    @property
    def frames_per_output(self) -> int:
        """The number of samples of an output."""
        return 2 * math.prod(self.ratios)
