"""The configuration of the model that an engine serves: its files, its lengths, and how it reads and produces data."""

import enum
from typing import Final

import msgspec

from ..file_identity import FileIdentity, LoraAdapter, verify_files
from ..pooling_params import PoolingKind, PoolingParams
from .audio.processor import AudioProcessorConfig
from .chat_audio import ChatAudioConfig
from .diffusion import BlockDiffusion
from .images.processors import AnyImageProcessor
from .images.settings import SpanKind
from .videos import AnyVideoProcessor

TOKEN_FIELDS: Final = 4
"""Numbers of a token that an encoder writes: its id, its log-probability, its first row, and the row after its last."""


class LoadFormat(enum.StrEnum):
    """The source of the weights.

    `AUTO` reads the checkpoint. `DUMMY` reads only the checkpoint's config, and uses random weights.
    """

    AUTO = "auto"
    DUMMY = "dummy"


class ModelImpl(enum.StrEnum):
    """The code that computes the model.

    `ENGINE`: Engine's own layers. `TRANSFORMERS`: the module of transformers. `AUTO`: the first of them that supports
    the model.
    """

    AUTO = "auto"
    ENGINE = "engine"
    TRANSFORMERS = "transformers"


class DenseActivation(enum.StrEnum):
    """The activation function of a dense layer."""

    IDENTITY = "identity"
    TANH = "tanh"
    RELU = "relu"
    GELU = "gelu"


class DenseConfig(msgspec.Struct, frozen=True):
    """A dense layer that is applied to a pooled vector (sentence-transformers' module `Dense`).

    `path` is the file with its weights, and `module` their name in the file; "" if it contains only them.
    """

    path: str
    in_features: int
    out_features: int
    has_bias: bool = True
    activation: DenseActivation = DenseActivation.TANH
    module: str = "linear"


class TextChangesConfig(msgspec.Struct, frozen=True):
    """The tokens that a model adds to texts that it embeds, and those whose results it leaves out.

    A model for late interaction (ColBERT, arXiv 2004.12832) changes texts with the prompts called "query" and
    "document"; others stay as they are.

    Attributes:
        prefixes: Name of a prompt -> the token that is inserted after the first one. A prefix that is not
            one token of the tokenizer is put before the text.
        suffixes: Name of a prompt -> the text that is put after a text.
        lengths: Name of a prompt -> the maximum number of tokens, with the prefix. Longer texts are cut.
        expanded_length: The number of tokens to which shorter queries are filled; 0 if they are not.
        expansion_token: The token that fills them.
        expands_all: True if it fills all texts, not only queries (SigLIP).
        attends_to_expansion: True if tokens attend to those that fill a query.
        skipped_tokens: Name of a prompt -> tokens whose results are left out.
    """

    prefixes: dict[str, str] = {}
    suffixes: dict[str, str] = {}
    lengths: dict[str, int] = {}
    expanded_length: int = 0
    expansion_token: str = ""
    expands_all: bool = False
    attends_to_expansion: bool = False
    skipped_tokens: dict[str, tuple[str, ...]] = {}

    @property
    def hides_expansion(self) -> bool:
        """True if no token attends to the tokens that fill a query."""
        return self.expanded_length > 0 and not self.attends_to_expansion


class RankingConfig(msgspec.Struct, frozen=True):
    """The settings of a model that scores all documents of a query, which it reads in one prompt.

    A score is the cosine of the vectors of two tokens: `document_token`, which follows a document, and `query_token`,
    which follows the query.
    """

    document_token: str
    query_token: str


class PoolerConfig(msgspec.Struct, frozen=True):
    """The way in which a text's hidden states become one embedding.

    Attributes:
        kind: The pooling operation that the model was trained with.
        normalize: True if embeddings are scaled to L2 norm 1.
        hidden_size: The number of elements of an embedding, after the dense layers.
        dense: The dense layers that are applied to the pooled vector, in this order.
        prompts: Name -> text that is put before an input.
        default_prompt: The name of the prompt for requests that name none; "" for no prompt.
        lengths: The lengths to which clients may truncate an embedding (`dimensions`); empty if any is permitted.
        dimensions: The length to which embeddings are truncated for clients that give none; 0 for their whole length.
        step_token_id: The token that ends each step of an answer. If all tokens are pooled, only the results of these
            tokens are returned. -1 for the results of all tokens.
        text_changes: The tokens that are added to texts to embed (late interaction); None if there are none.
        chat_template: The template for conversations, instead of that of the tokenizer; "" for that one.
        other_dense: A kind of result -> the dense layers that are applied to it instead (BGE-M3, arXiv 2402.03216).
        skipped_token_ids: A kind of result -> the tokens whose results are left out.
        max_embed_len: The maximum number of tokens of a text that is embedded in parts, if it is longer than the model
            reads; 0 if such texts are refused.
        ranking: How it scores all documents of a query at once; None if it does not.
    """

    kind: PoolingKind = PoolingKind.LAST
    normalize: bool = True
    hidden_size: int = 0
    dense: tuple[DenseConfig, ...] = ()
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    lengths: tuple[int, ...] = ()
    step_token_id: int = -1
    text_changes: TextChangesConfig | None = None
    chat_template: str = ""
    other_dense: dict[PoolingKind, tuple[DenseConfig, ...]] = {}
    skipped_token_ids: dict[PoolingKind, tuple[int, ...]] = {}
    max_embed_len: int = 0
    dimensions: int = 0
    ranking: RankingConfig | None = None


class Activation(enum.StrEnum):
    """The function that is applied to the scores of a classification head before clients receive them."""

    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"
    IDENTITY = "identity"


class ClassifierConfig(msgspec.Struct, frozen=True):
    """The classification head of a model.

    Attributes:
        labels: The names of its classes.
        activation: The activation of their scores.
        pair_template: The template for pairs of texts, unless `--chat-template` gives another; "" if they are joined
            by the tokenizer.
        pair_end: The tokens after the prompt of a template.
        logit_mean: The number that is subtracted from scores before the activation.
        logit_sigma: The number by which they are divided then.
    """

    labels: tuple[str, ...]
    activation: Activation
    pair_template: str = ""
    pair_end: tuple[int, ...] = ()
    logit_mean: float = 0.0
    logit_sigma: float = 1.0


class SourceTextConfig(msgspec.Struct, frozen=True):
    """The settings of a text-to-text encoder-decoder model, such as T5.

    Attributes:
        start_token_ids: The decoder's prompt.
        max_tokens: The maximum length of the encoder's input in tokens.
        vocab_size: The number of tokens that the encoder reads.
        bad_words_token_ids: Token sequences that the model must never generate, such as Marian's padding.
        end_token_id: The token at the end of a source, whose last place classification heads read; -1 for the last one.
        begins_with_last: True if these heads need a prompt that begins with the last token, the language of mBART.
    """

    start_token_ids: tuple[int, ...]
    max_tokens: int
    vocab_size: int
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    end_token_id: int = -1
    begins_with_last: bool = False


class ModelConfig(msgspec.Struct, frozen=True):
    """The model that an engine serves.

    Attributes:
        path: The resolved checkpoint, a directory or a `.gguf` file.
        tokenizer_path: A directory with a tokenizer.json: the checkpoint's own, the one of `--tokenizer`, or the
            conversion of a GGUF file's. Empty with `--skip-tokenizer-init`.
        max_model_len: The maximum number of prompt and output tokens of a request.
        eos_token_ids: The tokens that end an answer: the tokenizer's EOS token, then those of the generation config.
        dtype: The element type of activations and of weights that are not quantized.
        quantization: "int8" or "int4" quantizes the weights at load.
        model_impl: The code that computes the model.
        trust_remote_code: True if Python code of the checkpoint may run, with `ModelImpl.TRANSFORMERS`.
        hf_overrides: Fields that replace those of the checkpoint's own configuration.
        weight_files: The identities of the weight files at startup, to detect files that change later.
        tokenizer_files: The same for the files of the tokenizer and the chat templates.
        weights_id: A hash of weights that replaced those of the start; "" for those of the start.
        weight_version: The name of the weights, which a client gave to them.
        is_encoder: True if the model's attention is bidirectional. Such a model embeds text but cannot generate it, or
            transcribes audio without a decoder.
        has_head: True if the checkpoint has an output projection. A model without one can only embed.
        pooler: The pooling of hidden states into an embedding or into the input of the classification head.
        classifier: The model's classification head, if it has one. Such a model only classifies.
        enable_lora: True if requests may use LoRA adapters.
        loras: The LoRA adapters that are served from startup on.
        default_lora: The LoRA adapter of requests that choose no other.
        media_lora: The LoRA adapter of requests with images or audio that choose no other.
        download_dir: The directory of downloads from the hub; None for the default.
        max_lora_rank: The highest rank of an adapter.
        hidden_size: The size of the model's embeddings, or 0 if its config has none.
        enable_prompt_embeds: True if clients may send prompts as embeddings.
        images: The image processor; None if the model reads no images.
        videos: The video processor; None if the model reads no videos.
        span_kind: The spans of a prompt in which tokens attend to later tokens; None for causal attention only.
        has_output_window: True if output tokens attend to the prompt and to the last output tokens only.
        mmproj: The file with the towers of a GGUF model, or the directory of a model whose decoder is another
            checkpoint; empty if the checkpoint has all tensors.
        audio: The audio features of a speech model (transcription); None for other models.
        chat_audio: The audio processor of a chat model; None if it reads no audio clips.
        source_text: The settings of a text-to-text encoder-decoder model; None for other models.
        diffusion: The blocks of a block-diffusion model; None for other models.
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
    weights_id: str = ""
    weight_version: str = ""
    tokenizer_files: tuple[FileIdentity, ...] = ()
    is_encoder: bool = False
    has_head: bool = True
    pooler: PoolerConfig = PoolerConfig()
    classifier: ClassifierConfig | None = None
    enable_lora: bool = False
    loras: tuple[LoraAdapter, ...] = ()
    default_lora: LoraAdapter | None = None
    media_lora: LoraAdapter | None = None
    download_dir: str | None = None
    max_lora_rank: int = 16
    hidden_size: int = 0
    enable_prompt_embeds: bool = False
    images: AnyImageProcessor | None = None
    videos: AnyVideoProcessor | None = None
    span_kind: SpanKind | None = None
    has_output_window: bool = False
    mmproj: str = ""
    audio: AudioProcessorConfig | None = None
    chat_audio: ChatAudioConfig | None = None
    source_text: SourceTextConfig | None = None
    diffusion: BlockDiffusion | None = None

    @property
    def reads_source(self) -> bool:
        """True if the model's decoder reads an audio clip or a source text by cross-attention."""
        audio = self.audio
        reads_audio = audio is not None and audio.added is None and not audio.writes_tokens
        return reads_audio or self.source_text is not None

    @property
    def prompt_vocab_size(self) -> int:
        """The number of tokens that a prompt may have. An encoder-decoder model reads its prompt with the encoder."""
        return self.vocab_size if self.source_text is None else self.source_text.vocab_size

    @property
    def generates(self) -> bool:
        """True if the model can generate text."""
        return self.has_head and not self.is_encoder and self.classifier is None

    def vector_size_of(self, kind: PoolingKind) -> int:
        """Return the number of elements of a pooled result of this kind, or of that of each token.

        It is the number of classes of a classifier, else the size of an embedding.
        """
        if self.classifier is not None:
            return len(self.classifier.labels)
        layers = self.pooler.other_dense.get(kind)
        return layers[-1].out_features if layers else self.pooler.hidden_size

    @property
    def pooling_params(self) -> PoolingParams:
        """The pooling parameters of a request for embeddings or classes, as the model was trained."""
        return self.pooling_params_of(self.pooler.kind)

    def pooling_params_of(self, kind: PoolingKind) -> PoolingParams:
        """Return the pooling parameters of a request for vectors of this kind.

        The whole prompt is computed, without cached prefix, unless only a decoder's last token is pooled.
        """
        return PoolingParams(kind, self.is_encoder or kind is not PoolingKind.LAST)

    @property
    def max_pooled_tokens(self) -> int:
        """The maximum length of a pooled text in tokens.

        For a decoder it is one less than `max_model_len`, because a slot reserves space for a generated token. An
        encoder that precedes the decoder has its own limit.
        """
        limit = self.max_model_len - (not self.is_encoder)
        return limit if self.source_text is None else min(limit, self.source_text.max_tokens)

    @property
    def has_tokenizer(self) -> bool:
        """True unless the server runs with `--skip-tokenizer-init`."""
        return self.tokenizer_path != ""

    def verified_tokenizer_path(self) -> str:
        """Return `tokenizer_path`. Raise CheckpointError if one of its files changed after the server started."""
        verify_files(self.tokenizer_files)
        return self.tokenizer_path
