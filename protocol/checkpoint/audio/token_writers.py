"""Read the configs of encoders that write the tokens of a text: Parakeet, Granite Speech 5 and wav2vec 2.0."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from ...config.audio.conformer_layers import Convolutions, CtcConformerSpec
from ...config.audio.processor import SpeechKind
from ...config.audio.samples import DistanceScores, SamplesSpec
from ...config.audio.tower import ConformerSpec, FastConformerSpec
from ...config.token_decoders import CtcSpec, TransducerSpec
from ..config_fields import ConfigFields
from .ctc_conformers import bert_spec, conformer_layers, joined_bert_spec, lasr_spec
from .fields import MAX_POSITIONS, Channels
from .speech_encoders import fast_conformer_spec

_Duration = Annotated[int, msgspec.Meta(ge=0, le=MAX_POSITIONS)]
_Durations = Annotated[tuple[_Duration, ...], msgspec.Meta(min_length=1)]
_Numbers = Annotated[tuple[Channels, ...], msgspec.Meta(min_length=1, max_length=16)]

WAV2VEC2: Final = frozenset(
    {
        SpeechKind.DATA2VEC,
        SpeechKind.HUBERT,
        SpeechKind.SEW,
        SpeechKind.SEW_D,
        SpeechKind.UNISPEECH,
        SpeechKind.UNISPEECH_SAT,
        SpeechKind.WAV2VEC2,
        SpeechKind.WAV2VEC2_CONFORMER,
        SpeechKind.WAVLM,
    }
)
"""Kinds of models with the layout of transformers' Wav2Vec2ForCTC."""

SAMPLES: Final = WAV2VEC2 | {SpeechKind.OMNIASR_CTC}
"""Kinds of models that read samples."""

WRITING: Final = frozenset(
    {
        *WAV2VEC2,
        SpeechKind.GRANITE_CTC,
        SpeechKind.LASR_CTC,
        SpeechKind.OMNIASR_CTC,
        SpeechKind.PARAKEET_CTC,
        SpeechKind.PARAKEET_RNNT,
        SpeechKind.PARAKEET_TDT,
        SpeechKind.WAV2VEC2_BERT,
    }
)
"""Kinds of models that write tokens without a decoder."""

_PROMPT_TOKENS: Final = 1024
"""The maximum length of a prompt. Audio has a prompt of one token, and prompts of texts are refused."""

_VOCABULARIES: Final = {
    SpeechKind.GRANITE_CTC: 16_384,
    SpeechKind.LASR_CTC: 512,
    SpeechKind.OMNIASR_CTC: 10_288,
    SpeechKind.PARAKEET_CTC: 1025,
    SpeechKind.PARAKEET_RNNT: 8193,
    SpeechKind.PARAKEET_TDT: 8193,
    **dict.fromkeys((*WAV2VEC2, SpeechKind.WAV2VEC2_BERT), 32),
}
GRANITE_STACKED: Final = 4
"""The features of a row of Granite Speech 5 for each mel bin: those of two frames, and their changes."""

_GRANITE_NAMES: Final = (
    # The head is also the matrix that scores classes in the middle layer.
    (r"^ctc_head\.", "encoder.out."),
    (r"\.norm_feed_forward([12])\.", r".ff\1.pre_norm."),
    (r"\.feed_forward([12])\.linear1\.", r".ff\1.up_proj."),
    (r"\.feed_forward([12])\.linear2\.", r".ff\1.down_proj."),
    (r"\.norm_self_att\.", ".attn.pre_norm."),
    (r"\.self_attn\.([qkv])_proj\.", r".attn.to_\1."),
    (r"\.self_attn\.o_proj\.", ".attn.to_out."),
    (r"\.self_attn\.rel_pos_emb\.", ".attn.rel_pos_emb."),
    (r"\.conv\.norm\.", ".conv.batch_norm."),
    (r"\.norm_conv\.", ".conv.norm."),
    (r"\.conv\.pointwise_lin1\.", ".conv.up_conv."),
    (r"\.conv\.depthwise_conv\.", ".conv.depth_conv.conv."),
    (r"\.conv\.pointwise_lin2\.", ".conv.down_conv."),
    (r"\.norm_out\.", ".post_norm."),
)
_SIZES: Final[dict[str, Any]] = {
    "num_mel_bins": 80,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "scale_input": True,
}
_SEW_SIZES: Final[dict[str, Any]] = {
    "conv_dim": [64, *[128] * 4, *[256] * 4, *[512] * 4],
    "conv_stride": [5, *[2, 1] * 6],
    "conv_kernel": [10, *[3, 1] * 4, *[2, 1] * 2],
}
_OMNIASR_SIZES: Final[dict[str, Any]] = {
    "conv_bias": True,
    "do_stable_layer_norm": True,
    "feat_extract_norm": "layer",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
}


def writes_tokens(fields: ConfigFields) -> bool:
    """Return whether a model with this config transcribes by its encoder alone."""
    return fields.text("model_type", "") in WRITING


def with_encoder_fields(fields: ConfigFields) -> ConfigFields:
    """Return the config of such a model with the length of its vocabulary and of prompts."""
    kind = SpeechKind(fields.text("model_type"))
    vocab_size = _VOCABULARIES[kind]
    return fields.with_defaults(vocab_size=vocab_size, max_position_embeddings=_PROMPT_TOKENS)


WriterSpec: TypeAlias = ConformerSpec | CtcConformerSpec | FastConformerSpec | SamplesSpec


def writer_spec(fields: ConfigFields) -> WriterSpec:
    """Return the encoder of a model that writes tokens. Raise CheckpointError if a field is missing or invalid."""
    if fields.text("model_type") == SpeechKind.GRANITE_CTC:
        return granite_spec(fields)
    if fields.text("model_type") == SpeechKind.WAV2VEC2_BERT:
        return bert_spec(with_encoder_fields(fields))
    if fields.text("model_type") == SpeechKind.LASR_CTC:
        return lasr_spec(with_encoder_fields(fields))
    if fields.text("model_type") in SAMPLES:
        return samples_spec(fields)
    return parakeet_spec(fields)


def samples_spec(fields: ConfigFields) -> SamplesSpec:
    """Return the encoder of OmniASR or wav2vec 2.0. Raise CheckpointError if a field is missing or invalid."""
    fields = with_encoder_fields(fields)
    kind = fields.text("model_type")
    audio, blank_name = fields, "pad_token_id"
    if kind == SpeechKind.OMNIASR_CTC:
        audio = fields.section_or_empty("audio_config")
        blank_name = "blank_token_id"
    else:
        audio.require_all(conv_pos_batch_norm=False, add_adapter=False)
    vocab_size = fields.integer("vocab_size")
    blank = fields.integer(blank_name, 0, minimum=0, maximum=vocab_size - 1)
    return _samples_encoder(audio, kind, CtcSpec(vocab_size, blank))


def omniasr_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> SamplesSpec:
    """Return the encoder of OmniASR beside a decoder of texts, as that of `samples_spec` is read.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    found = _samples_encoder(audio, fields.text("model_type"), None)
    return msgspec.structs.replace(found, output_size=output_size)


def joined_spec(fields: ConfigFields) -> SamplesSpec | CtcConformerSpec:
    """Return the encoder of a speech encoder that is joined to a decoder of texts.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    audio = fields.required_section("encoder")
    kinds = tuple(sorted({*WAV2VEC2, SpeechKind.WAV2VEC2_BERT}))
    kind = audio.choice("model_type", kinds, SpeechKind.WAV2VEC2)
    names = ("hidden_size", "d_model", "n_embd")
    decoder = fields.required_section("decoder")
    name = next((name for name in names if decoder.get(name) is not None), names[0])
    output_size = decoder.integer(name, maximum=MAX_POSITIONS)
    if kind == SpeechKind.WAV2VEC2_BERT:
        return joined_bert_spec(audio, output_size)
    encoder = _samples_encoder(audio, kind, None)
    size = audio.integer("output_hidden_size", encoder.hidden_size, maximum=MAX_POSITIONS)
    convolutions = None
    if audio.boolean("add_adapter", False):
        convolutions = Convolutions(
            count=audio.integer("num_adapter_layers", 3, maximum=64),
            kernel_size=audio.integer("adapter_kernel_size", 3, maximum=1023),
            stride=audio.integer("adapter_stride", 2, maximum=64),
            padding=1,
        )
    if size not in (encoder.hidden_size, output_size if convolutions else encoder.hidden_size):
        raise audio.wrong("output_hidden_size", str(encoder.hidden_size), size)
    return msgspec.structs.replace(
        encoder,
        output_size=output_size,
        last_convolutions=convolutions,
        last_size=size,
        has_projection=size != output_size,
    )


def _samples_encoder(audio: ConfigFields, kind: str, decoder: CtcSpec | None) -> SamplesSpec:
    is_omniasr = kind.startswith("omniasr")
    if is_omniasr:
        audio = audio.with_defaults(**_OMNIASR_SIZES)
    hidden_size = audio.integer("hidden_size", 768, maximum=MAX_POSITIONS)
    num_position_layers, rows_name, num_rows = 0, "num_conv_pos_embeddings", 128
    if kind == SpeechKind.DATA2VEC:
        num_position_layers = audio.integer(rows_name, 5, maximum=128)
        rows_name, num_rows = "conv_pos_kernel_size", 19
        audio = audio.with_values(
            {
                "feat_extract_norm": "layer",
                "feat_proj_layer_norm": True,
                "do_stable_layer_norm": False,
            }
        )
    is_squeezed = kind in (SpeechKind.SEW, SpeechKind.SEW_D)
    if is_squeezed:
        audio = audio.with_defaults(**_SEW_SIZES).with_values(
            {"feat_proj_layer_norm": True, "do_stable_layer_norm": False}
        )
    conformer = num_buckets = distances = None
    scale, input_norm_eps = 0.0, audio.positive("layer_norm_eps", 1e-5)
    if kind == SpeechKind.SEW_D:
        distances = _disentangled(audio)
        num_parts = 1 + distances.compares_queries + distances.compares_keys
        head_dim = hidden_size // audio.divisor("num_attention_heads", hidden_size, 12)
        scale = (num_parts * head_dim) ** -0.5
        input_norm_eps = audio.positive("feature_layer_norm_eps", 1e-5)
        audio = audio.with_defaults(layer_norm_eps=1e-7)
        if audio.get("hidden_act", "gelu_python") == "gelu_python":
            audio = audio.with_values({"hidden_act": "gelu"})
    if kind == SpeechKind.WAV2VEC2_CONFORMER:
        conformer = conformer_layers(audio, hidden_size)
        audio = audio.with_values({"feat_proj_layer_norm": True, "do_stable_layer_norm": True})
    elif kind == SpeechKind.WAVLM:
        audio = audio.with_values({"feat_proj_layer_norm": True, "adapter_attn_dim": None})
        num_buckets = audio.integer("num_buckets", 320, minimum=4, maximum=MAX_POSITIONS)
    rows = audio.integer(rows_name, num_rows, maximum=1024)
    groups = audio.divisor("num_conv_pos_embedding_groups", hidden_size, 16)
    channels = _numbers(audio, "conv_dim", (512,) * 7)
    kernels = _numbers(audio, "conv_kernel", (10, 3, 3, 3, 3, 2, 2))
    strides = _numbers(audio, "conv_stride", (5, 2, 2, 2, 2, 2, 2))
    if not len(channels) == len(kernels) == len(strides):
        raise audio.wrong("conv_dim", f"{len(kernels)} numbers, as conv_kernel", channels)
    norm: Literal["layer", "group"] = "layer"
    if audio.choice("feat_extract_norm", ("layer", "group"), "group") == "group":
        norm = "group"
    activation = audio.text("hidden_act", "gelu")
    audio.require("feat_extract_activation", activation)
    norms_sums = not audio.boolean("do_stable_layer_norm", False)
    adapter_size = 0
    # As in transformers, layers whose norms follow their sums have no adapters.
    if not is_omniasr and not norms_sums and audio.get("adapter_attn_dim") is not None:
        adapter_size = audio.integer("adapter_attn_dim", maximum=MAX_POSITIONS)
    return SamplesSpec(
        convolutions=tuple(zip(channels, kernels, strides, strict=True)),
        hidden_size=hidden_size,
        intermediate_size=audio.integer("intermediate_size", 3072, maximum=MAX_POSITIONS),
        num_layers=audio.integer("num_hidden_layers", 12, maximum=1024),
        num_heads=audio.divisor("num_attention_heads", hidden_size, 12),
        num_frames=480_000,
        position_rows=rows,
        position_groups=groups,
        num_position_layers=num_position_layers,
        activation=activation,
        norm_eps=audio.positive("layer_norm_eps", 1e-5),
        output_size=hidden_size,
        decoder=decoder,
        conv_norm=norm,
        has_conv_bias=audio.boolean("conv_bias", False),
        has_input_norm=audio.boolean("feat_proj_layer_norm", True),
        norms_sums=norms_sums,
        adapter_size=adapter_size,
        num_buckets=num_buckets or 0,
        max_distance=audio.integer("max_bucket_distance", 800, maximum=MAX_POSITIONS),
        squeezed_rows=audio.integer("squeeze_factor", 2, maximum=64) if is_squeezed else 1,
        conformer=conformer,
        attention_scale=scale,
        distances=distances,
        has_norm=kind != SpeechKind.SEW_D,
        has_input_matrix=not is_squeezed or channels[-1] != hidden_size,
        input_norm_eps=input_norm_eps,
    )


def _disentangled(audio: ConfigFields) -> DistanceScores:
    """Return the scores of distances of SEW-D, which are those of DeBERTa v2."""
    audio.require("relative_attention", True, default=True)
    audio.require("share_att_key", True, default=True)
    audio.require("conv_kernel_size", 0, default=0)
    kinds = audio.convert("pos_att_type", ("p2c", "c2p"), tuple[str, ...], "a list of texts")
    furthest = audio.get("max_relative_positions", -1)
    if furthest == -1:
        furthest = audio.integer("max_position_embeddings", 512, maximum=MAX_POSITIONS)
    else:
        furthest = audio.integer("max_relative_positions", maximum=MAX_POSITIONS)
    buckets = audio.get("position_buckets", 256)
    has_buckets = buckets != -1
    if has_buckets:
        buckets = audio.integer("position_buckets", 256, minimum=4, maximum=MAX_POSITIONS)
    return DistanceScores(
        span=buckets if has_buckets else furthest,
        max_distance=furthest if has_buckets else 0,
        projected=True,
        norms_table="layer_norm" in audio.text("norm_rel_ebd", "layer_norm").lower(),
        compares_queries="c2p" in kinds,
        compares_keys="p2c" in kinds,
    )


def speecht5_spec(fields: ConfigFields) -> SamplesSpec:
    """Return the encoder of SpeechT5. Raise CheckpointError if a field is missing or invalid."""
    names = {
        "num_hidden_layers": "encoder_layers",
        "num_attention_heads": "encoder_attention_heads",
        "intermediate_size": "encoder_ffn_dim",
    }
    own = {name: fields.get(other) for name, other in names.items()}
    own |= {"feat_proj_layer_norm": True, "do_stable_layer_norm": False}
    return msgspec.structs.replace(
        _samples_encoder(fields.with_values(own), SpeechKind.SPEECHT5, None),
        distances=DistanceScores(
            span=fields.integer("encoder_max_relative_position", 160, maximum=MAX_POSITIONS)
        ),
        first_sinusoid=fields.integer("pad_token_id", 1, minimum=0) + 1,
        has_projection=False,
    )


def _numbers(audio: ConfigFields, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    return audio.convert(name, default, _Numbers, f"1 to 16 numbers from 1 to {MAX_POSITIONS}")


def granite_spec(fields: ConfigFields) -> ConformerSpec:
    """Return the encoder of Granite Speech 5. Raise CheckpointError if a field is missing or invalid."""
    fields = with_encoder_fields(fields)
    vocab_size = fields.integer("vocab_size")
    fields.require("tie_word_embeddings", True, default=True)
    encoder = fields.section_or_empty("encoder_config")
    for name, value in (
        ("hidden_act", "silu"),
        ("attention_bias", True),
        ("vocab_size", vocab_size),
    ):
        encoder.require(name, value, default=value if name != "vocab_size" else 16_384)
    hidden_size = encoder.integer("hidden_size", 1024, maximum=MAX_POSITIONS)
    num_heads = encoder.integer("num_attention_heads", 8)
    encoder.require("num_key_value_heads", num_heads)
    num_layers = encoder.integer("num_hidden_layers", 16, maximum=1024)
    max_distance = encoder.integer("max_position_embeddings", 512, maximum=MAX_POSITIONS)
    needed = f"at most 6 rising layers below {num_layers}"
    halving = encoder.convert("subsample_layers", (0, 1), tuple[_Duration, ...], needed)
    if (
        len(halving) > 6
        or list(halving) != sorted({*halving})
        or max(halving, default=0) >= num_layers
    ):
        raise encoder.wrong("subsample_layers", needed, list(halving))
    return ConformerSpec(
        num_mel_bins=GRANITE_STACKED * encoder.integer("num_mel_bins", 80, maximum=1024),
        hidden_size=hidden_size,
        intermediate_size=encoder.integer("intermediate_size", 4096, maximum=MAX_POSITIONS),
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=encoder.integer("head_dim", hidden_size // num_heads),
        num_frames=1500,
        num_classes=vocab_size,
        block_rows=encoder.integer("context_size", 128, maximum=max_distance),
        max_distance=max_distance,
        kernel_size=encoder.odd("conv_kernel_size", 7, maximum=1023),
        conv_channels=hidden_size * encoder.integer("conv_expansion_factor", 2, maximum=64),
        output_size=hidden_size,
        halving_layers=halving,
        decoder=CtcSpec(
            vocab_size, fields.integer("pad_token_id", 0, minimum=0, maximum=vocab_size - 1)
        ),
        tensor_names=_GRANITE_NAMES,
    )


def parakeet_spec(fields: ConfigFields) -> FastConformerSpec:
    """Return the encoder of Parakeet. Raise CheckpointError if a field is missing or invalid."""
    fields = with_encoder_fields(fields)
    spec = fast_conformer_spec(fields, **_SIZES)
    decoder = _decoder(fields)
    size = decoder.hidden_size if isinstance(decoder, TransducerSpec) else spec.layers.hidden_size
    return msgspec.structs.replace(spec, decoder=decoder, has_projection=False, output_size=size)


def _decoder(fields: ConfigFields) -> CtcSpec | TransducerSpec:
    vocab_size = fields.integer("vocab_size")
    is_ctc = fields.text("model_type") == SpeechKind.PARAKEET_CTC
    name = "pad_token_id" if is_ctc else "blank_token_id"
    blank = fields.integer(name, vocab_size - 1, minimum=0, maximum=vocab_size - 1)
    if is_ctc:
        return CtcSpec(vocab_size, blank)
    durations: tuple[int, ...] = ()
    if fields.text("model_type") == SpeechKind.PARAKEET_TDT:
        default = (0, 1, 2, 3, 4)
        durations = fields.convert("durations", default, _Durations, "a list of numbers of rows")
    return TransducerSpec(
        vocab_size=vocab_size,
        blank=blank,
        hidden_size=fields.integer("decoder_hidden_size", 640, maximum=MAX_POSITIONS),
        num_layers=fields.integer("num_decoder_layers", 2, maximum=1024),
        activation=fields.text("hidden_act", "relu"),
        max_symbols=fields.integer("max_symbols_per_step", 10, maximum=1024),
        durations=durations,
    )
