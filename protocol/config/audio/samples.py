"""Encoders that read samples instead of features."""

import math
from typing import ClassVar, Literal

import msgspec

from ..token_decoders import CtcSpec
from .bases import LayeredSpec, UnpaddedSpec
from .conformer_layers import ConformerLayers, Convolutions


class FrameSpec(UnpaddedSpec, frozen=True, tag=True):
    """A norm without weights and a matrix, which make an output of each frame of samples (Gemma 4's unified models).

    The features of a frame are its `num_mel_bins` samples. A clip is read in parts of `num_frames` frames.
    """

    num_mel_bins: int
    num_frames: int
    norm_eps: float
    output_size: int

    def num_outputs(self, num_frames: int) -> int:
        """Return the number of outputs for the frames of a part."""
        return num_frames


class DistanceScores(msgspec.Struct, frozen=True):
    """Numbers for distances between rows that are added to the scores of attention.

    Distances fall into 2 * `span` buckets. Only distances below half of the span have a bucket each if `max_distance`
    is not 0; the others cover growing ranges up to it. Queries have products with the vectors of a table (SpeechT5). If
    it is `projected`, projections of its normed vectors give keys, with which queries have products if
    `compares_queries`, and queries, with which keys have products if `compares_keys` (DeBERTa, arXiv 2006.03654).
    """

    span: int
    max_distance: int = 0
    projected: bool = False
    norms_table: bool = False
    compares_queries: bool = True
    compares_keys: bool = False


class SamplesSpec(LayeredSpec, frozen=True, tag=True):
    """The encoder of wav2vec 2.0 (arXiv 2006.11477), which HuBERT, UniSpeech and OmniASR have as well.

    `convolutions` (channels, kernel size, stride) read samples. Their norm is over the channels of each output
    ("layer"), or only the first has one, over the outputs of each channel ("group"). Positions are a convolution over
    `position_rows` rows in `position_groups` groups, or `num_position_layers` of them, each with a norm without weights
    after it (data2vec, arXiv 2202.03555). If `norms_sums`, the norms of layers follow their sums. If
    `adapter_size` is not 0, another MLP of this size follows each layer (MMS, arXiv 2305.13516).

    Without `has_norm`, no norm precedes or follows the layers. With `first_sinusoid`, sinusoids from this position on
    are added, too. If `num_buckets` is not 0, scores have biases of so many ranges of distances up to `max_distance`,
    which depend on the query (WavLM, arXiv 2110.13900); with `distances`, they have others. Layers read the means of
    `squeezed_rows` rows, and a matrix makes as many of each output (SEW, arXiv 2109.06870). A `conformer` replaces
    positions and layers (wav2vec2-conformer). The `decoder` turns rows into tokens. Without one, gated
    `last_convolutions` may make fewer rows, after a matrix and a norm if these have another size, `last_size`, and with
    `has_projection` a matrix makes outputs of them.
    """

    convolutions: tuple[tuple[int, int, int], ...]
    intermediate_size: int
    position_rows: int
    position_groups: int
    activation: str
    norm_eps: float
    decoder: CtcSpec | None
    conv_norm: Literal["layer", "group"] = "layer"
    has_conv_bias: bool = True
    has_input_norm: bool = True
    norms_sums: bool = False
    num_position_layers: int = 0
    adapter_size: int = 0
    num_buckets: int = 0
    max_distance: int = 0
    squeezed_rows: int = 1
    conformer: ConformerLayers | None = None
    attention_scale: float = 0.0
    distances: DistanceScores | None = None
    first_sinusoid: int | None = None
    has_norm: bool = True
    has_input_matrix: bool = True
    input_norm_eps: float = 1e-5
    last_convolutions: Convolutions | None = None
    last_size: int = 0
    has_projection: bool = True
    num_mel_bins: int = 0

    def num_outputs(self, num_frames: int) -> int:
        """Return the maximum number of tokens or outputs for the samples of a clip."""
        for _, kernel_size, stride in self.convolutions:
            num_frames = max(0, (num_frames - kernel_size) // stride + 1)
        last = self.last_convolutions
        return num_frames if last is None else last.num_rows(num_frames)


class WaveEncoder(msgspec.Struct, frozen=True):
    """A causal convolutional encoder of samples, as in VibeVoice's tokenizers (arXiv 2508.19205).

    Each stage has `depths` blocks: a depthwise convolution with `kernel_size` taps and an MLP, `expansion` times as
    wide. Between two stages, a convolution doubles the channels and reads every `ratios`th row. The first stage has
    `num_filters` channels.
    """

    num_filters: int
    kernel_size: int
    ratios: tuple[int, ...]
    depths: tuple[int, ...]
    expansion: int
    hidden_size: int
    activation: str
    norm_eps: float

    @property
    def hop(self) -> int:
        """The number of samples of an output."""
        return math.prod(self.ratios)

    @property
    def outputs_before(self) -> int:
        """The number of earlier outputs whose samples an output depends on."""
        taps = self.kernel_size - 1
        rows = 1 + taps + self.depths[-1] * taps
        for ratio, depth in zip(self.ratios[::-1], self.depths[-2::-1], strict=True):
            rows = (rows + 1) * ratio + depth * taps
        return -(-(rows + taps) // self.hop) - 1


class WaveSpec(UnpaddedSpec, frozen=True, tag=True):
    """Two encoders of samples, whose projected outputs are added (VibeVoice ASR).

    A clip is read in parts of `part_outputs` outputs, each after the samples of `outputs_before` earlier ones.
    """

    knows_window: ClassVar[bool] = True
    acoustic: WaveEncoder
    semantic: WaveEncoder
    part_outputs: int
    output_size: int

    @property
    def num_mel_bins(self) -> int:
        """The number of features per frame, which is 0 because the encoders read samples."""
        return 0

    @property
    def outputs_before(self) -> int:
        """The number of outputs before a part whose samples it contains."""
        return max(self.acoustic.outputs_before, self.semantic.outputs_before)

    @property
    def num_frames(self) -> int:
        """The maximum number of samples of a part."""
        return (self.outputs_before + self.part_outputs) * self.acoustic.hop

    @property
    def warm_frames(self) -> int:
        """The number of samples to warm up with."""
        return 2 * self.acoustic.hop

    def num_outputs(self, num_frames: int) -> int:
        """Return the number of outputs for the samples of a part."""
        return -(-num_frames // self.acoustic.hop)


class StreamingSpec(UnpaddedSpec, frozen=True, tag=True):
    """An encoder that reads frames of `frame_size` samples (Moonshine Streaming).

    Two convolutions halve the number of frames. Each layer has a window: the rows up to a row, and those from it on,
    that it attends to, both with the row itself.
    """

    frame_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[tuple[int, int], ...]
    num_frames: int
    max_positions: int
    activation: str
    has_bias: bool
    output_size: int

    @property
    def num_mel_bins(self) -> int:
        """The number of features per frame, which is 0 because the encoder reads samples."""
        return 0

    def num_outputs(self, num_frames: int) -> int:
        """Return the number of outputs for the samples of a clip."""
        return -(-num_frames // (4 * self.frame_size))
