"""The audio tower of a chat model, which turns audio clips into embeddings for the decoder."""

from typing import Final, Literal, TypeAlias

import msgspec

from ..query_former import QueryFormerSpec
from ..token_decoders import CtcSpec, TransducerSpec
from .bases import AddedSpec, LayeredSpec, UnpaddedSpec
from .codec import CodecSpec
from .conformer_layers import ConformerLayers, CtcConformerSpec
from .samples import FrameSpec, SamplesSpec, StreamingSpec, WaveSpec

FRAMES_AFTER: Final = 2
"""Frames after the last computed row of an audio clip that the convolutions still read."""


class AudioChunks(msgspec.Struct, frozen=True):
    """Three convolutions over frames and features, each of which halves both (Qwen3-ASR, arXiv 2601.21337).

    They read chunks of `num_frames` frames separately, and each chunk's rows have their own positions from 0. The last
    chunk is filled with zeros, unless it is the only one of a clip and `fills_first` is false (MOSS-Audio).
    """

    num_frames: int
    num_channels: int
    has_bias: bool = False
    fills_first: bool = True


class AudioRotary(msgspec.Struct, frozen=True):
    """The rotation of the first `num_rotated` elements of each head by the row (GLM-ASR)."""

    theta: float
    num_rotated: int


class OutputTimes(msgspec.Struct, frozen=True):
    """The rotation of a tower's outputs by their times (Music Flamingo, arXiv 2511.10289).

    The first `num_rotated` elements rotate with the number of the window in the clip, and as many others with the
    number of the output in the window, both in units of 1 / `theta` and multiplied by the time in the clip, of which an
    output takes `seconds`. Frequencies fall from 1 to 1 / `theta`.
    """

    theta: float
    num_rotated: int
    seconds: float


class OutputGroups(msgspec.Struct, frozen=True):
    """The change of `size` neighboring outputs to one: a matrix multiplies their mean (Fun-Audio-Chat).

    Zeros complete the last group. A row of a table with `num_codes` rows, multiplied by another matrix, is added to
    each output unless `added_row` is None.
    """

    size: int
    num_codes: int = 0
    added_row: int | None = None


class AudioTowerSpec(msgspec.Struct, frozen=True, tag=True):
    """Whisper's encoder (arXiv 2212.04356), followed by a projection to the decoder's hidden size.

    It reads windows of log-mel features. Two convolutions turn every two frames into one row, unless there are
    `chunks`. Positions are learned, unless there are `chunks`, a `rotary` or sinusoids.

    Attributes:
        num_frames: The number of frames of a window.
        output_size: The size of an output.
        join: The change of `rows_per_output` neighboring rows into one output after the layers. "mean" (Qwen2-Audio,
            arXiv 2407.10759): their mean is normed. "stack" (Voxtral, arXiv 2507.13264): they are normed and
            concatenated. "fill" (Ultravox): as "stack", but zeros complete the last output.
        rows_per_output: The number of rows that become one output.
        silence: The treatment of rows of the silence after a clip. "skipped": they are not computed; the window ends
            with the clip and `frames_after` more frames, which only the convolutions read. "dropped": they are
            computed, and other rows attend to them, but they become no outputs. "filling": as "dropped", but some of
            them fill the last output. "kept": they become outputs.
            "absent": the window ends with the clip, and the convolutions read zeros after it. "cut": as "absent", but
            the frame in which a clip ends is not read. A row that then has no frames has zeros (dots3-note).
        norm_kind: The kind of the norms of the layers and after them.
        has_gate: True if MLPs are gated. The gates are the first half of the outputs of their first matrix.
        has_projection_norm: True if outputs are normed before the first of two projections.
        projection_size: The size of the first of two projections; 0 for a single one.
        projection_activation: The activation between them.
        projection_norm_eps: The term of the layer norm after them; 0 for no norm.
        gated_norm: The place of a norm in Ultravox's projections, which begin with a norm: in the "middle" (version 0.5
            and later) or "last". The second half of the first projection's outputs is the gate of the first half if the
            activation is "swiglu". "" for other projections.
        projects_gated: True if rows are normed once more before they are joined, and multiplied by a matrix with
            `projection_size` outputs and SiLU. A gate and another matrix, whose product the last one reads, follow
            (MERaLiON-2).
        tensor_names: Replacements that translate a checkpoint's names to Whisper's.
        times: The rotation of outputs by their times in the clip, before they are projected; None for none.
        groups: The change of several outputs to one after the projection; None for none.
        gated_size: The intermediate size of a gated MLP that projects outputs instead of matrices (MOSS-Audio); 0 for
            matrices.
        read_layers: The tower's layers, from 1, whose outputs are projected as well. The decoder adds them after its
            first layers, one after each.
    """

    num_mel_bins: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_frames: int
    activation: str
    output_size: int
    join: Literal["mean", "stack", "fill"]
    rows_per_output: int
    silence: Literal["skipped", "dropped", "filling", "kept", "absent", "cut"]
    chunks: AudioChunks | None = None
    rotary: AudioRotary | None = None
    has_sinusoids: bool = False
    has_key_bias: bool = False
    norm_kind: Literal["layer", "rms"] = "layer"
    has_gate: bool = False
    has_projection_norm: bool = False
    projection_size: int = 0
    projection_activation: str = "gelu"
    projection_norm_eps: float = 0.0
    gated_norm: Literal["", "middle", "last"] = ""
    has_projection_bias: bool = True
    projects_gated: bool = False
    tensor_names: tuple[tuple[str, str], ...] = ()
    times: OutputTimes | None = None
    groups: OutputGroups | None = None
    gated_size: int = 0
    read_layers: tuple[int, ...] = ()

    @property
    def added_after(self) -> tuple[int, ...]:
        """The decoder's layers, from 0, after which the parts of an output but the first are added."""
        return tuple(range(len(self.read_layers)))

    @property
    def knows_window(self) -> bool:
        """True if outputs depend on the number of the window in its clip."""
        return self.times is not None or (self.chunks is not None and not self.chunks.fills_first)

    @property
    def warm_frames(self) -> int:
        """The number of frames to warm up with; 0 for the maximum."""
        return 0

    @property
    def frames_after(self) -> int:
        """The number of frames at the end of a window for which no row is computed."""
        return FRAMES_AFTER if self.silence == "skipped" and self.chunks is None else 0

    def num_rows(self, num_frames: int) -> int:
        """Return the number of rows for the frames of one window."""
        if self.chunks is None:
            return (num_frames + 1) // 2
        num_chunks, rest = divmod(num_frames, self.chunks.num_frames)
        # Each of the three convolutions halves the number of frames, rounded up.
        return num_chunks * -(-self.chunks.num_frames // 8) + -(-rest // 8)

    def num_outputs(self, num_frames: int) -> int:
        """Return the number of outputs for a window in which the clip has `num_frames` frames."""
        num_frames = self.num_frames if self.silence == "kept" else num_frames
        num_rows = self.num_rows(num_frames)
        if self.silence == "filling" or self.join == "fill":
            num_rows += -num_rows % self.rows_per_output
        size = 1 if self.groups is None else self.groups.size
        return -(-(num_rows // self.rows_per_output) // size)


class ConformerSpec(LayeredSpec, frozen=True, tag=True):
    """A conformer (arXiv 2005.08100) with a projector of queries, or with a `decoder` that writes tokens.

    Granite Speech (arXiv 2505.08699) has the first, and Granite Speech 5 the second.

    A row is made of `num_mel_bins` features. Rows attend within blocks of `block_rows`, with embeddings of their
    distances (arXiv 1803.02155). The projector reads the outputs of `read_layers` (0: the inputs of the first layer)
    and of the last layer. In it, each `rows_per_query_block` rows become `outputs_per_block` outputs, which are
    multiplied by `output_scale`. `halving_layers`, counted from 0, make one row of two.
    """

    num_mel_bins: int
    intermediate_size: int
    head_dim: int
    num_classes: int
    block_rows: int
    max_distance: int
    kernel_size: int
    conv_channels: int
    rows_per_query_block: int = 0
    outputs_per_block: int = 0
    queries: QueryFormerSpec | None = None
    output_scale: float = 1.0
    read_layers: tuple[int, ...] = ()
    halving_layers: tuple[int, ...] = ()
    decoder: CtcSpec | None = None
    tensor_names: tuple[tuple[str, str], ...] = ()

    @property
    def warm_frames(self) -> int:
        """The number of rows to warm up with, which is a block."""
        return self.block_rows

    def num_outputs(self, num_frames: int) -> int:
        """Return the number of outputs for the rows of a clip, and the maximum number with a `decoder`."""
        if self.queries is None:
            return num_frames >> len(self.halving_layers)
        return -(-num_frames // self.rows_per_query_block) * self.outputs_per_block


class FixedOutputs(msgspec.Struct, frozen=True):
    """The constant number of outputs of a clip (Gemma 3n): its own, copies of a filler, and one for the token after it.

    The last two are embeddings of a table with `vocab_size` rows: the last row, and the row `end_row`.
    """

    num_outputs: int
    vocab_size: int
    end_row: int


class UniversalSpeechSpec(LayeredSpec, frozen=True, tag=True):
    """The conformer of the Universal Speech Model (arXiv 2303.01037), which Gemma 3n and Gemma 4 have.

    Two convolutions over frames and features halve both. A row attends to the `rows_before` rows before it and the
    `rows_after` rows after it, with embeddings of their distances. Every `rows_per_output`th row becomes an output.

    In Gemma 3n, outputs are `fixed`, and the convolutions' outputs are normed with the mean and the variance of all
    frames so far. In Gemma 4, they have a layer norm, outputs have a projection to `projection_size`, products may have
    bounds (`clips`), and `tensor_names` translates names to those of Gemma 3n.
    """

    num_mel_bins: int
    conv_channels: tuple[int, int]
    conv_norm_eps: float
    kernel_size: int
    rows_before: int
    rows_after: int
    score_cap: float
    residual_weight: float
    max_value: float
    norm_eps: float
    rows_per_output: int = 1
    fixed: FixedOutputs | None = None
    projection_size: int = 0
    key_scale: float = 1.0
    clips: bool = False
    tensor_names: tuple[tuple[str, str], ...] = ()

    def num_outputs(self, num_frames: int) -> int:
        """Return the number of outputs for the frames of a clip."""
        if not num_frames:
            return 0
        if self.fixed is not None:
            return self.fixed.num_outputs + 1
        return -(-num_frames // (4 * self.rows_per_output))


class FastConformerSpec(UnpaddedSpec, frozen=True, tag=True):
    """A Fast Conformer (arXiv 2305.05084), and a projection of its outputs unless `has_projection` is false (Canary).

    `num_halvings` convolutions halve the frames and features. Rows attend to all rows, with embeddings of their
    distances. With a `decoder`, its outputs are tokens (Parakeet). If `projection_size` is not 0, the projection is a
    norm and two matrices with this many elements in between (Nemotron Omni). The norm is a layer norm if the activation
    between them is "gelu" (LFM2-Audio). With `has_last_row`, a clip whose frames
    fill all rows has one row more, of silence, that others do not read.
    """

    layers: ConformerLayers
    num_mel_bins: int
    num_frames: int
    output_size: int
    conv_channels: int
    num_halvings: int
    input_scale: float
    has_projection: bool = True
    projection_size: int = 0
    projection_activation: Literal["relu2", "gelu"] = "relu2"
    has_projection_bias: bool = False
    has_last_row: bool = False
    tensor_names: tuple[tuple[str, str], ...] = ()
    decoder: CtcSpec | TransducerSpec | None = None

    def num_outputs(self, num_frames: int) -> int:
        """Return the number of outputs for the frames of a clip, and the maximum number with a `decoder`."""
        return -(-(num_frames + self.has_last_row) >> self.num_halvings)


class MemoryAdaptor(msgspec.Struct, frozen=True):
    """The layers after the projections of a `MemorySpec`. Their size is that of an output."""

    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str
    norm_eps: float


class MemorySpec(LayeredSpec, frozen=True, tag=True):
    """Layers of attention with a memory (SAN-M, arXiv 2006.01713), which Fun-ASR-Nano has.

    The memory is a depthwise convolution of the values. A row is made of `num_mel_bins` features. The first layer
    changes the size of rows, and the layers `normed_layers` norm their outputs. Two matrices and the layers of an
    adaptor follow. The number of rows, halved `num_halvings` times, is that of the outputs that are read, the first
    ones. `tensor_names` translates the checkpoint's names, as in `ModelSpec`.
    """

    num_mel_bins: int
    intermediate_size: int
    normed_layers: tuple[int, ...]
    kernel_size: int
    activation: str
    norm_eps: float
    projection_size: int
    projection_activation: str
    adaptor: MemoryAdaptor
    num_halvings: int = 0
    tensor_names: tuple[tuple[str, str], ...] = ()

    @property
    def warm_frames(self) -> int:
        """The number of rows to warm up with, which last 12 s."""
        return min(self.num_frames, 200)

    def num_outputs(self, num_frames: int) -> int:
        """Return the number of outputs for the rows of a clip."""
        return -(-num_frames // (1 << self.num_halvings))


class CausalSpec(AddedSpec, frozen=True, tag=True):
    """The encoder of Voxtral Realtime.

    Two convolutions turn every two frames into one row. `rows_per_output` neighboring rows are concatenated, and two
    matrices make an output of them.

    The text is `delay` outputs behind the speech. The norms of the decoder's MLPs depend on this number.
    """

    num_mel_bins: int
    projection_activation: str
    rows_per_output: int
    delay: int

    @property
    def frames_per_output(self) -> int:
        """The number of frames of an output."""
        return 2 * self.rows_per_output


class PatchesSpec(LayeredSpec, frozen=True, tag=True):
    """Transformer layers over patches of `frames_per_patch` frames, which MiDashengLM has (arXiv 2508.03983).

    Patches attend within windows of `window` patches, each with positions from 0. Two matrices make an output of
    `patches_per_output` neighboring patches.
    """

    num_mel_bins: int
    intermediate_size: int
    frames_per_patch: int
    window: int
    patches_per_output: int
    has_qkv_bias: bool
    has_layer_scale: bool

    @property
    def warm_frames(self) -> int:
        """The number of frames to warm up with, which is a window."""
        return min(self.num_frames, self.window * self.frames_per_patch)

    def num_outputs(self, num_frames: int) -> int:
        """Return the number of outputs for the frames of a clip."""
        return num_frames // self.frames_per_patch // self.patches_per_output


class RelativeConformerSpec(UnpaddedSpec, frozen=True, tag=True):
    """A conformer and two matrices (FireRedASR2).

    Two convolutions over frames and features make a row of four frames. `rows_per_output` neighboring rows become an
    output.
    """

    layers: ConformerLayers
    num_mel_bins: int
    num_frames: int
    output_size: int
    conv_channels: int
    rows_per_output: int
    tensor_names: tuple[tuple[str, str], ...]

    def num_outputs(self, num_frames: int) -> int:
        """Return the number of outputs for the frames of a clip."""
        return -(-num_frames // 4) // self.rows_per_output


AnyAudioSpec: TypeAlias = (
    AudioTowerSpec
    | ConformerSpec
    | CtcConformerSpec
    | UniversalSpeechSpec
    | FrameSpec
    | FastConformerSpec
    | MemorySpec
    | PatchesSpec
    | RelativeConformerSpec
    | SamplesSpec
    | WaveSpec
    | StreamingSpec
    | CausalSpec
    | CodecSpec
)
