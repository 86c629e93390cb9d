"""The model that an engine serves."""

from __future__ import annotations

import enum

import msgspec

from ..file_identity import FileIdentity, LoraAdapter, verify_files
from ..pooling_params import PoolingKind, PoolingParams
from .images import AnyImageProcessor, SpanKind
from .sounds import SoundProcessorConfig
from .videos import AnyVideoProcessor


class LoadFormat(enum.StrEnum):
    """Format of the weights: `AUTO` reads the checkpoint; `DUMMY` reads only its config and uses random weights."""

    AUTO = "auto"
    DUMMY = "dummy"


class ModelImpl(enum.StrEnum):
    """The code that computes the model: Engine's own layers, transformers' module, or the first of them that can."""

    AUTO = "auto"
    ENGINE = "engine"
    TRANSFORMERS = "transformers"


class DenseActivation(enum.StrEnum):
    """The activation of a dense layer."""

    IDENTITY = "identity"
    TANH = "tanh"
    RELU = "relu"
    GELU = "gelu"


class DenseConfig(msgspec.Struct, frozen=True):
    """A product with a pooled vector, of sentence-transformers' module Dense.

    `path` is the file with its weights, and `module` their name in it.
    """

    path: str
    in_features: int
    out_features: int
    has_bias: bool = True
    activation: DenseActivation = DenseActivation.TANH
    module: str = "linear"


class PoolerConfig(msgspec.Struct, frozen=True):
    """The pooling that makes embeddings of the model's hidden states.

    Attributes:
        kind: The pooling that the model was trained with.
        normalize: Whether embeddings have length 1.
        hidden_size: The number of elements of a vector, after the dense layers.
        dense: What a pooled vector is multiplied by, in this order.
        prompts: Texts that are put before inputs, by name.
        default_prompt: The name of the prompt that inputs get by default; "" for none.
        lengths: The lengths that clients may truncate a vector to; empty for any.
    """

    kind: PoolingKind = PoolingKind.LAST
    normalize: bool = True
    hidden_size: int = 0
    dense: tuple[DenseConfig, ...] = ()
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    lengths: tuple[int, ...] = ()


class Activation(enum.StrEnum):
    """The function from the scores of a classification head to the numbers that clients get."""

    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"
    IDENTITY = "identity"


class ClassifierConfig(msgspec.Struct, frozen=True):
    """The classification head of a model: the names of its classes, and the activation of their scores."""

    labels: tuple[str, ...]
    activation: Activation


class SpeechKind(enum.StrEnum):
    """The decoder's prompt that a speech model expects: Whisper's tokens for language and task, or a start token."""

    WHISPER = "whisper"
    MOONSHINE = "moonshine"


class AudioProcessorConfig(msgspec.Struct, frozen=True):
    """The configuration of a model that reads sounds. A token id of -1 means that the model has no such token.

    Attributes:
        kind: The decoder's prompt.
        num_mel_bins: The log-mel features of a frame; 0 if the encoder reads samples.
        sampling_rate: Samples per second.
        hop_length: Samples from one frame to the next.
        fft_length: Samples that a frame reads.
        chunk_seconds: The maximum length of a sound. Whisper's are always filled up to this length.
        strides: The factors by which the encoder's convolutions shorten a sequence of frames or samples.
        kernels: The inputs that each of these convolutions reads.
        paddings: The zeros that each of them adds on both sides.
        max_source_positions: The maximum number of the encoder's outputs.
        start_token_id: The first token of the decoder's prompt.
        language_token_ids: The token of each language by its code; empty if the model has only one language.
        transcribe_token_id: The token of the task to write what is said.
        translate_token_id: The token of the task to translate it to English.
        no_timestamps_token_id: The token that asks for text without timestamps. The first timestamp follows it.
        previous_token_id: The token that begins the text before this sound.
        no_speech_token_id: The token whose probability after `start_token_id` is that of silence.
        time_precision: Seconds between a timestamp and the next one.
        max_initial_timestamp: The maximum first timestamp, as its distance to the one of 0 s; -1 without a limit.
        suppressed_token_ids: Tokens that are never sampled.
        begin_suppressed_token_ids: Tokens that are not sampled first.
        alignment_heads: The (layer, head) of cross attention that follow the time of words.
        max_tokens_per_second: The maximum length of a text in tokens per second of its sound; 0 without a limit.
    """

    kind: SpeechKind
    num_mel_bins: int
    sampling_rate: int
    hop_length: int
    fft_length: int
    chunk_seconds: float
    strides: tuple[int, ...]
    kernels: tuple[int, ...]
    paddings: tuple[int, ...]
    max_source_positions: int
    start_token_id: int
    language_token_ids: dict[str, int] = {}
    transcribe_token_id: int = -1
    translate_token_id: int = -1
    no_timestamps_token_id: int = -1
    previous_token_id: int = -1
    no_speech_token_id: int = -1
    time_precision: float = 0.02
    max_initial_timestamp: int = -1
    suppressed_token_ids: tuple[int, ...] = ()
    begin_suppressed_token_ids: tuple[int, ...] = ()
    alignment_heads: tuple[tuple[int, int], ...] = ()
    max_tokens_per_second: float = 0.0

    def num_outputs(self, num_frames: int) -> int:
        """Return the number of the encoder's outputs for so many frames or samples."""
        for stride, kernel, padding in zip(self.strides, self.kernels, self.paddings, strict=True):
            num_frames = max(0, (num_frames + 2 * padding - kernel) // stride + 1)
        return num_frames


class SourceTextConfig(msgspec.Struct, frozen=True):
    """The configuration of an encoder-decoder model of text.

    Attributes:
        start_token_ids: The decoder's prompt.
        max_tokens: The maximum length of a source in tokens.
    """

    start_token_ids: tuple[int, ...]
    max_tokens: int


class ModelConfig(msgspec.Struct, frozen=True):
    """The model that is served.

    Attributes:
        path: The resolved checkpoint, a directory or a `.gguf` file.
        tokenizer_path: A directory with a tokenizer.json: the checkpoint's own, the one of `--tokenizer`, or the
            conversion of a GGUF file's. Empty with `--skip-tokenizer-init`.
        max_model_len: The maximum of prompt plus output tokens.
        eos_token_ids: The tokenizer's end token, then those of the generation config.
        dtype: The type of weights that are not quantized.
        quantization: "int8" or "int4" quantizes the weights at load.
        model_impl: What computes the model.
        trust_remote_code: Whether Python code of the checkpoint may run, with `ModelImpl.TRANSFORMERS`.
        hf_overrides: Fields that replace those of the checkpoint's own configuration.
        weight_files: The files that were on disk when the server started.
        tokenizer_files: The same for the tokenizer and the chat templates.
        is_encoder: Whether the model's attention is bidirectional. It embeds text but cannot generate any.
        has_head: Whether the checkpoint has an output projection, without which the model only embeds.
        pooler: How the model embeds text, or what its classification head reads.
        classifier: The model's classification head, if it has one. It then classifies text and does nothing else.
        enable_lora: Whether requests may use LoRA adapters.
        loras: The LoRA adapters that are served from the start.
        download_dir: Where downloads from the hub are kept; None for the default.
        max_lora_rank: The highest rank of an adapter.
        hidden_size: The size of the model's embeddings, or 0 if its config has none.
        enable_prompt_embeds: Whether prompts may be embeddings.
        images: How the model reads images; None if it reads none.
        videos: How the model reads videos; None if it reads none.
        span_kind: Which tokens of a prompt see those behind them.
        mmproj: The file with the vision tower of a GGUF model; empty if it has none.
        audio: How a speech model reads sounds; None for other models.
        sounds: How a model for conversations reads sounds; None if it reads none.
        source_text: How the model reads its source; None unless it is an encoder-decoder model of text.
    """

    model: str
    path: str
    tokenizer_path: str
    served_names: tuple[str, ...]
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str = "auto"
    load_format: LoadFormat = LoadFormat.AUTO
    quantization: str | None = None
    seed: int = 0
    hf_overrides: dict[str, object] = {}
    model_impl: ModelImpl = ModelImpl.AUTO
    trust_remote_code: bool = False
    weight_files: tuple[FileIdentity, ...] = ()
    tokenizer_files: tuple[FileIdentity, ...] = ()
    is_encoder: bool = False
    has_head: bool = True
    pooler: PoolerConfig = PoolerConfig()
    classifier: ClassifierConfig | None = None
    enable_lora: bool = False
    loras: tuple[LoraAdapter, ...] = ()
    download_dir: str | None = None
    max_lora_rank: int = 16
    hidden_size: int = 0
    enable_prompt_embeds: bool = False
    images: AnyImageProcessor | None = None
    videos: AnyVideoProcessor | None = None
    span_kind: SpanKind | None = None
    mmproj: str = ""
    audio: AudioProcessorConfig | None = None
    sounds: SoundProcessorConfig | None = None
    source_text: SourceTextConfig | None = None

    @property
    def reads_source(self) -> bool:
        """True if the model's decoder reads a sound or a source text by cross attention."""
        return self.audio is not None or self.source_text is not None

    @property
    def generates(self) -> bool:
        """True if the model can generate text."""
        return self.has_head and not self.is_encoder and self.classifier is None

    @property
    def vector_size(self) -> int:
        """The number of elements of a pooled vector: the scores of the classes, or an embedding."""
        return self.pooler.hidden_size if self.classifier is None else len(self.classifier.labels)

    @property
    def pooling_params(self) -> PoolingParams:
        """The parameters of a request for a vector. Only the last token of a decoder needs no others."""
        kind = self.pooler.kind
        return PoolingParams(kind, self.is_encoder or kind is not PoolingKind.LAST)

    @property
    def max_pooled_tokens(self) -> int:
        """The maximum length of a text that is pooled. A decoder's slots keep room for a generated token."""
        return self.max_model_len - (not self.is_encoder)

    @property
    def has_tokenizer(self) -> bool:
        """True unless the server runs without a tokenizer."""
        return self.tokenizer_path != ""

    def verified_tokenizer_path(self) -> str:
        """Return `tokenizer_path`.

        Raises:
            CheckpointError: One of its files changed after the server started.
        """
        verify_files(self.tokenizer_files)
        return self.tokenizer_path
