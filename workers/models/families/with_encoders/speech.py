"""Families of models that transcribe speech.

Voxtral Realtime is a decoder. Parakeet, Granite Speech 5 and wav2vec 2.0 are encoders alone. The others are
encoder-decoder models.
"""

from __future__ import annotations

import math
from typing import Any, Final

from msgspec.structs import replace

from .....protocol.checkpoint.audio.seamless import seamless_fields, seamless_spec
from .....protocol.checkpoint.audio.speech_encoders import (
    canary_encoder_spec,
    fast_conformer_spec,
    streaming_spec,
)
from .....protocol.checkpoint.audio.token_writers import (
    speecht5_spec,
    with_encoder_fields,
    writer_spec,
)
from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.checkpoint.speech import max_source_positions, speech_to_text_stem
from .....protocol.config.audio.bases import LayeredSpec
from .....protocol.config.audio.tower import AnyAudioSpec, CausalSpec
from ....layers.layer_spec import LayerSpec
from ....layers.read_rope import read_rope
from ....layers.spec import ModelSpec, SourceSpec
from ....layers.specs.convolution import ConvolutionSpec
from ....layers.specs.norm_names import NormNames
from ....loaders.row_factors import RowFactors
from ..common import Family, base_spec, uniform_layers
from ..llama import mistral
from .encoder_decoders import (
    BART_LAYER_NAMES,
    POST_NORMED,
    SINUSOIDS,
    bart_fields,
    bart_spec,
    with_source,
)

_WHISPER_DECODER_NAMES: Final = (
    (r"^(model\.)?encoder\..*", ""),
    (r"^proj_out\.", "lm_head."),
    (r"^(model\.)?decoder\.", ""),
    *BART_LAYER_NAMES,
)
_AUDIO_ENCODER_NAMES: Final = (
    (r"^(model\.)?decoder\..*", ""),
    (r"^proj_out\..*", ""),
    # These tensors are loaded together with the convolutions. Some checkpoints also store the decoder's embedding here.
    (r"^(model\.)?encoder\.(conv\d?|groupnorm|embed_positions|embed_tokens)\..*", ""),
    (r"^(model\.)?encoder\.", ""),
)
_MOONSHINE_NORMS: Final = NormNames(
    "input_layernorm", None, "final_layernorm", None, "post_attention_layernorm"
)
_COHERE_DECODER_NAMES: Final = (
    (r"^model\.", ""),
    (r"^encoder\..*", ""),
    # The projection of the encoder's outputs is loaded together with the encoder.
    (r"^(preprocessor|encoder_decoder_proj|decoder\.proj)\..*", ""),
    (r"^(proj_out|log_softmax\.mlp\.layer0)\.", "lm_head."),
    # The names of Cohere's own checkpoints.
    (r"^transf_decoder\._embedding\.position_embedding\.pos_enc$", "embed_positions.weight"),
    (r"^transf_decoder\._embedding\.token_embedding\.", "embed_tokens."),
    (r"^transf_decoder\._embedding\.layer_norm\.", "embed_norm."),
    (r"^transf_decoder\._decoder\.final_layer_norm\.", "norm."),
    (r"^transf_decoder\._decoder\.", ""),
    (r"\.first_sub_layer\.([qkv])\w+_net\.", r".self_attn.\1_proj."),
    (r"\.first_sub_layer\.out_projection\.", ".self_attn.o_proj."),
    (r"\.second_sub_layer\.([qkv])\w+_net\.", r".cross_attn.\1_proj."),
    (r"\.second_sub_layer\.out_projection\.", ".cross_attn.o_proj."),
    (r"\.third_sub_layer\.dense_in\.", ".mlp.up_proj."),
    (r"\.third_sub_layer\.dense_out\.", ".mlp.down_proj."),
    (r"\.layer_norm_1\.", ".input_layernorm."),
    (r"\.layer_norm_2\.", ".post_attention_layernorm."),
    (r"\.layer_norm_3\.", ".final_layernorm."),
    # The names of transformers.
    (r"^decoder\.", ""),
    (r"^pos_emb\.", "embed_positions."),
    (r"^embedding_layernorm\.", "embed_norm."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.mlp\.fc1\.", ".mlp.up_proj."),
    (r"\.mlp\.fc2\.", ".mlp.down_proj."),
)
_SEAMLESS_NAMES: Final = (
    # The parts that read texts and speak.
    (r"^(speech_encoder|text_encoder|t2u_model|vocoder)\..*", ""),
    (r"^text_decoder\.embed_positions\..*", ""),
    (r"^(text_decoder\.embed_tokens|shared)\.", "embed_tokens."),
    (r"^text_decoder\.", ""),
    (r"\.cross_attention_layer_norm\.", ".cross_norm."),
    (r"\.cross_attention\.", ".cross_attn."),
    (r"\.ffn_layer_norm\.", ".mlp_norm."),
    (r"\.ffn\.fc", ".fc"),
    *BART_LAYER_NAMES,
)
_SPEECHT5_NAMES: Final = (
    (r"^speecht5\.encoder\..*", ""),
    (r"^speecht5\.decoder\.(prenet|wrapped_decoder)\.", ""),
    (r"^text_decoder_postnet\.", ""),
    (r"\.feed_forward\.intermediate_dense\.", ".fc1."),
    (r"\.feed_forward\.output_dense\.", ".fc2."),
    *BART_LAYER_NAMES,
)
_KYUTAI_NAMES: Final = (
    (r"^codec_model\..*", ""),
    (r"\.embed_tokens\.embed_tokens\.", ".embed_tokens."),
    (r"_proj\.linear\.", "_proj."),
    (r"\.mlp\.fc1\.", ".mlp.gate_up_proj."),
    (r"\.mlp\.fc2\.", ".mlp.down_proj."),
)
_MOONSHINE_MLP_NAMES: Final = ((r"\.mlp\.fc2\.", ".mlp.down_proj."),)
_MOONSHINE_DECODER_NAMES: Final = (
    (r"^proj_out\.", "lm_head."),
    (r"^(model\.)?decoder\.", ""),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.mlp\.fc1\.", ".mlp.up_gate_proj."),
    *_MOONSHINE_MLP_NAMES,
)


def _encoder_fields(fields: ConfigFields, **names: str) -> ConfigFields:
    """Return the encoder's fields under Llama's names, given the names that this family uses."""
    return fields.with_values(
        {name: fields.get(other) for name, other in names.items() if fields.get(other) is not None}
    )


def _whisper(fields: ConfigFields) -> ModelSpec:
    decoder, encoder = bart_fields(fields.with_defaults(max_position_embeddings=448))
    positions = max_source_positions(fields)
    channels = fields.integer("hidden_size")
    source = SourceSpec(
        bart_spec(
            encoder.with_values({"max_position_embeddings": positions}),
            key_bias=False,
            has_embedding=False,
            embedding_scale=1.0,
            tensor_names=(*_AUDIO_ENCODER_NAMES, *BART_LAYER_NAMES),
        ),
        positions,
        convolutions=(
            ConvolutionSpec("conv1", channels, 3, 1, 1),
            ConvolutionSpec("conv2", channels, 3, 2, 1),
        ),
        num_inputs=fields.integer("num_mel_bins", 80),
        has_positions=True,
    )
    spec = bart_spec(
        decoder,
        key_bias=False,
        # transformers stores the factor of `scale_embedding`, but does not apply it.
        embedding_scale=1.0,
        num_positions=decoder.integer("max_position_embeddings"),
        tensor_names=_WHISPER_DECODER_NAMES,
    )
    return with_source(spec, source)


def _speech_to_text(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        activation_function="relu", scale_embedding=True, max_position_embeddings=1024
    )
    decoder, encoder = bart_fields(fields)
    positions, size = max_source_positions(fields), fields.integer("hidden_size")
    # With another padding token, transformers mistakes rows for padding.
    fields.require("pad_token_id", 1)
    first = 2
    audio = speech_to_text_stem(fields)
    channels = [fields.integer("conv_channels", 1024, maximum=1 << 16)] * (len(audio.kernels) - 1)
    source = SourceSpec(
        bart_spec(
            encoder.with_values({"max_position_embeddings": positions}),
            has_embedding=False,
            embedding_scale=1.0,
            tensor_names=(*_AUDIO_ENCODER_NAMES, *BART_LAYER_NAMES),
        ),
        positions,
        convolutions=tuple(
            ConvolutionSpec(f"conv.conv_layers.{i}", count, kernel, 2, padding, activation="glu")
            for i, (count, kernel, padding) in enumerate(
                zip([*channels, 2 * size], audio.kernels, audio.paddings, strict=True)
            )
        ),
        num_inputs=audio.num_mel_bins,
        first_sinusoid=first,
        output_scale=math.sqrt(size) if fields.boolean("scale_embedding", True) else 1.0,
    )
    spec = bart_spec(
        decoder,
        num_positions=decoder.integer("max_position_embeddings"),
        position_offset=first,
        sinusoids="by last",
        tensor_names=(*SINUSOIDS, *_WHISPER_DECODER_NAMES),
    )
    return with_source(spec, source)


def _moonshine(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        tie_word_embeddings=True,
        partial_rotary_factor=0.9,
        max_position_embeddings=512,
        encoder_hidden_act="gelu",
    )
    for name in ("encoder_num_hidden_layers", "encoder_num_attention_heads"):
        fields.integer(name)
    fields = fields.with_values({"rms_norm_eps": 1e-5})
    size = fields.integer("hidden_size")
    bias = fields.boolean("attention_bias", False)
    moonshine: dict[str, Any] = {
        "norm_kind": "layer",
        "rope_order": "interleaved",
        "qkv_bias": bias,
        "mlp_bias": True,
    }
    encoder = _encoder_fields(
        fields.with_values({"num_key_value_heads": None}),
        num_hidden_layers="encoder_num_hidden_layers",
        num_attention_heads="encoder_num_attention_heads",
        num_key_value_heads="encoder_num_key_value_heads",
        hidden_act="encoder_hidden_act",
    )
    source = SourceSpec(
        base_spec(
            encoder,
            _rotary_layers(encoder),
            has_embedding=False,
            has_gate=False,
            tensor_names=(
                *_AUDIO_ENCODER_NAMES,
                (r"\.mlp\.fc1\.", ".mlp.up_proj."),
                *_MOONSHINE_MLP_NAMES,
                (r"^layer_norm\.", "norm."),
            ),
            **moonshine,
        ),
        max_source_positions(fields),
        convolutions=(
            ConvolutionSpec(
                "conv1", size, 127, 64, has_bias=False, activation="tanh", has_group_norm=True
            ),
            ConvolutionSpec("conv2", 2 * size, 7, 3),
            ConvolutionSpec("conv3", size, 3, 2),
        ),
        num_inputs=1,
    )
    decoder = _encoder_fields(fields, hidden_act="decoder_hidden_act")
    spec = base_spec(
        decoder,
        _rotary_layers(decoder),
        norms=_MOONSHINE_NORMS,
        tensor_names=(
            (r"^(model\.)?encoder\..*", ""),
            *_MOONSHINE_DECODER_NAMES,
        ),
        **moonshine,
    )
    return with_source(spec, source)


def _moonshine_streaming(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        tie_word_embeddings=False, partial_rotary_factor=0.8, max_position_embeddings=4096
    ).with_values({"rms_norm_eps": 1e-5})
    spec = base_spec(
        fields,
        _rotary_layers(fields),
        norms=_MOONSHINE_NORMS,
        norm_kind="layer",
        rope_order="interleaved",
        qkv_bias=fields.boolean("attention_bias", False),
        mlp_bias=True,
        tensor_names=(
            # The positions and the projection of the encoder's outputs are loaded together with the encoder.
            (r"^(model\.)?(encoder|decoder\.(pos_emb|proj))\..*", ""),
            *_MOONSHINE_DECODER_NAMES,
        ),
    )
    return with_tower(fields, spec, streaming_spec(fields))


def with_tower(fields: ConfigFields, spec: ModelSpec, tower: AnyAudioSpec) -> ModelSpec:
    """Return a decoder whose layers attend to the outputs of an audio tower."""
    return replace(
        spec,
        layers=tuple(replace(layer, reads_source=True) for layer in spec.layers),
        source=SourceSpec(None, max_source_positions(fields), output_size=spec.hidden_size),
        audio_encoder=tower,
    )


def _cohere_asr(fields: ConfigFields) -> ModelSpec:
    return with_tower(fields, _bart_decoder(fields), fast_conformer_spec(fields))


def _canary(fields: ConfigFields) -> ModelSpec:
    spec = replace(_bart_decoder(fields), sinusoids="by size, scaled")
    return with_tower(fields, spec, canary_encoder_spec(fields))


def _seamless(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the part of SeamlessM4T that writes texts of speech. Its decoder is that of M2M100."""
    fields = seamless_fields(fields).with_defaults(activation_function="relu", scale_embedding=True)
    fields = fields.with_values(
        {"rms_norm_eps": 1e-5, "hidden_act": fields.get("activation_function")}
    )
    spec = bart_spec(
        fields.with_defaults(tie_word_embeddings=True),
        num_positions=fields.integer("max_position_embeddings"),
        position_offset=fields.integer("pad_token_id", minimum=0) + 1,
        sinusoids="by last",
        tensor_names=_SEAMLESS_NAMES,
    )
    return with_tower(fields, spec, seamless_spec(fields))


def _speecht5(fields: ConfigFields) -> ModelSpec:
    """Return the spec of SpeechT5 (arXiv 2110.07205) that writes texts of speech."""
    fields = fields.with_defaults(vocab_size=81, hidden_act="gelu", tie_word_embeddings=True)
    fields = fields.with_values({"rms_norm_eps": fields.positive("layer_norm_eps", 1e-5)})
    spec = bart_spec(
        fields,
        num_positions=fields.integer("max_position_embeddings"),
        position_offset=fields.integer("pad_token_id", 1, minimum=0) + 1,
        sinusoids="by last",
        tensor_names=_SPEECHT5_NAMES,
        **POST_NORMED,
    )
    return with_tower(fields, spec, speecht5_spec(fields))


def _bart_decoder(fields: ConfigFields) -> ModelSpec:
    """Return the decoder of Cohere Transcribe and Canary."""
    fields = fields.with_defaults(
        rms_norm_eps=1e-5, tie_word_embeddings=False, hidden_act="relu"
    ).with_values({"rope_theta": None})
    fields.require("attention_bias", True, default=True)
    return bart_spec(
        fields,
        norms=_MOONSHINE_NORMS,
        has_embedding_norm=True,
        num_positions=fields.integer("max_position_embeddings"),
        head_bias=True,
        tensor_names=_COHERE_DECODER_NAMES,
    )


def _token_writer(fields: ConfigFields) -> ModelSpec:
    """Return a model without layers, whose audio tower writes tokens."""
    tower = writer_spec(fields)
    sizes = tower if isinstance(tower, LayeredSpec) else tower.layers
    fields = with_encoder_fields(fields)
    return ModelSpec(
        model_type=fields.text("model_type"),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=sizes.hidden_size,
        layers=(),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        tie_word_embeddings=True,
        has_embedding=False,
        is_causal=False,
        intermediate_size=sizes.intermediate_size,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_heads,
        head_dim=sizes.hidden_size // sizes.num_heads,
        attention_scale=1.0,
        norm_eps=1e-5,
        audio_encoder=tower,
    )


def _rotary_layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    head_size = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    return uniform_layers(fields, read_rope(fields, head_size, partial=True))


def _voxtral_realtime(fields: ConfigFields) -> ModelSpec:
    return mistral(
        fields.with_defaults(rope_theta=1e6, rms_norm_eps=1e-5, head_dim=128, sliding_window=8192)
    )


def _kyutai(fields: ConfigFields) -> ModelSpec:
    spec = mistral(fields.with_defaults(rope_theta=1e4, hidden_act="silu"))
    return replace(
        spec,
        num_unused_embeddings=fields.integer("num_unused_embeddings"),
        tensor_names=(*_KYUTAI_NAMES, *spec.tensor_names),
    )


def with_delay(spec: ModelSpec, tower: CausalSpec) -> ModelSpec:
    """Return the decoder of Voxtral Realtime, whose MLPs read hidden states with factors that depend on the delay."""
    norm = r"post_attention_layernorm\.weight$"
    factors = RowFactors(norm, "ada_rms_norm.linear{}.weight", delay=tower.delay)
    return replace(spec, row_factors=(*spec.row_factors, factors))


FAMILIES = (
    Family("CanaryForConditionalGeneration", "canary", _canary),
    Family("CohereAsrForConditionalGeneration", "cohere_asr", _cohere_asr),
    Family("GraniteSpeech5ForCTC", "granite_speech5_ctc", _token_writer),
    Family("Data2VecAudioForCTC", "data2vec-audio", _token_writer),
    Family("HubertForCTC", "hubert", _token_writer),
    Family("LasrForCTC", "lasr_ctc", _token_writer),
    Family("SEWForCTC", "sew", _token_writer),
    Family("Speech2TextForConditionalGeneration", "speech_to_text", _speech_to_text),
    Family("SeamlessM4TForSpeechToText", "seamless_m4t", _seamless),
    Family("SeamlessM4Tv2ForSpeechToText", "seamless_m4t_v2", _seamless),
    Family("SEWDForCTC", "sew-d", _token_writer),
    Family("SpeechT5ForSpeechToText", "speecht5", _speecht5),
    Family("Wav2Vec2BertForCTC", "wav2vec2-bert", _token_writer),
    Family("Wav2Vec2ConformerForCTC", "wav2vec2-conformer", _token_writer),
    Family("WavLMForCTC", "wavlm", _token_writer),
    Family(
        "MoonshineStreamingForConditionalGeneration", "moonshine_streaming", _moonshine_streaming
    ),
    Family("MoonshineForConditionalGeneration", "moonshine", _moonshine),
    Family("OmniASRForCTC", "omniasr_ctc", _token_writer),
    Family("ParakeetForCTC", "parakeet_ctc", _token_writer),
    Family("ParakeetForRNNT", "parakeet_rnnt", _token_writer),
    Family("ParakeetForTDT", "parakeet_tdt", _token_writer),
    Family("UniSpeechForCTC", "unispeech", _token_writer),
    Family("UniSpeechSatForCTC", "unispeech-sat", _token_writer),
    Family("VoxtralRealtimeForConditionalGeneration", "voxtral_realtime", _voxtral_realtime),
    Family("KyutaiSpeechToTextForConditionalGeneration", "kyutai_speech_to_text", _kyutai),
    Family("Wav2Vec2ForCTC", "wav2vec2", _token_writer),
    Family("WhisperForConditionalGeneration", "whisper", _whisper),
)
