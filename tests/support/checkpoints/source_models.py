"""The configs of tiny encoder-decoder models."""

from __future__ import annotations

from typing import Any

from support.audio.sizes import SAMPLES

VOCAB_SIZE = 97
_BART_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 96,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "decoder_start_token_id": 3,
}
_BERT_ENCODER = {
    "model_type": "wav2vec2-bert",
    "feature_projection_input_dim": 32,
    "left_max_position_embeddings": 6,
    "right_max_position_embeddings": 3,
}
_WIDER = {"output_hidden_size": 48, "num_adapter_layers": 2}
_T5_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 48,
    "d_kv": 8,
    "d_ff": 80,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
_GEMMA_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 10,
    "sliding_window": 9,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 5.0,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


def _joined_speech(encoder: dict[str, Any], decoder: str) -> dict[str, Any]:
    """Return the sections of an encoder of speech and a decoder of this kind."""
    own: dict[str, Any]
    if decoder == "gpt2":
        own = {"model_type": "gpt2", "vocab_size": VOCAB_SIZE, "n_embd": 48, "n_layer": 3}
        own |= {"n_head": 6, "n_positions": 128, "add_cross_attention": True}
        own |= dict.fromkeys(("bos_token_id", "eos_token_id"), 1)
    elif decoder.endswith("bart"):
        own = _BART_SIZES | {"model_type": decoder, "max_position_embeddings": 128}
        own |= {"scale_embedding": True, "is_decoder": True, "encoder_layers": 3}
    else:
        own = _joined(decoder, decoder)["decoder"]
    return {"encoder": SAMPLES | encoder, "decoder": own, "decoder_start_token_id": 3}


def _joined(encoder: str, decoder: str) -> dict[str, Any]:
    """Return the sections of an encoder and a decoder of these kinds."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 6,
    }
    offsets = dict.fromkeys(("roberta", "xlm-roberta"), 2)
    parts = {
        kind: sizes
        | {"model_type": kind, "max_position_embeddings": 128 + offsets.get(kind, 0)}
        | {"pad_token_id": offsets.get(kind, 1) - 1}
        for kind in (encoder, decoder)
    }
    own = {"num_hidden_layers": 3, "is_decoder": True, "add_cross_attention": True}
    return {
        "encoder": parts[encoder] | {"num_hidden_layers": 2},
        "decoder": parts[decoder] | own,
    }


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "whisper": (
        "Whisper",
        _BART_SIZES | {"num_mel_bins": 8, "max_source_positions": 40, "max_target_positions": 128},
    ),
    "untied-whisper": (
        "Whisper",
        _BART_SIZES
        # Fewer layers in the decoder and more mel bins, like large-v3-turbo and Distil-Whisper.
        | {"num_mel_bins": 128, "encoder_layers": 4, "decoder_layers": 1}
        | {"max_source_positions": 40, "max_target_positions": 128}
        | {"scale_embedding": True, "tie_word_embeddings": False},
    ),
    "speech_to_text": (
        "Speech2Text",
        _BART_SIZES
        | {"input_feat_per_channel": 16, "conv_channels": 24, "max_target_positions": 128}
        | {"pad_token_id": 1},
    ),
    "moonshine": (
        "Moonshine",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "intermediate_size": 80,
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 3,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "max_position_embeddings": 128,
        },
    ),
    "moonshine_streaming": (
        "MoonshineStreaming",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 1536,
            "encoder_config": {
                "hidden_size": 32,
                "intermediate_size": 40,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "sliding_windows": [[5, 3], [4, 0]],
            },
        },
    ),
    "cohere_asr": (
        "CohereAsr",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "max_position_embeddings": 128,
            "encoder_config": {
                "num_mel_bins": 16,
                "hidden_size": 32,
                "intermediate_size": 40,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "subsampling_conv_channels": 6,
            },
        },
    ),
    "canary": (
        "Canary",
        {
            "vocab_size": VOCAB_SIZE,
            "decoder_config": {
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 32,
                "intermediate_size": 80,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "head_dim": 8,
                "max_position_embeddings": 128,
            },
            "encoder_config": {
                "model_type": "parakeet_encoder",
                "num_mel_bins": 16,
                "hidden_size": 32,
                "intermediate_size": 40,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "subsampling_conv_channels": 6,
                "scale_input": False,
            },
        },
    ),
    "bart": ("Bart", _BART_SIZES | {"max_position_embeddings": 128}),
    "mbart": ("MBart", _BART_SIZES | {"max_position_embeddings": 128, "scale_embedding": True}),
    "marian": ("Marian", _BART_SIZES | {"scale_embedding": True, "activation_function": "swish"}),
    "separate-marian": (
        "Marian",
        _BART_SIZES
        | {"vocab_size": 131, "decoder_vocab_size": VOCAB_SIZE}
        | {"share_encoder_decoder_embeddings": False},
    ),
    "fsmt": (
        "FSMT",
        {name: value for name, value in _BART_SIZES.items() if name != "vocab_size"}
        | {"src_vocab_size": 131, "tgt_vocab_size": VOCAB_SIZE, "max_position_embeddings": 128},
    ),
    "m2m100": ("M2M100", _BART_SIZES | {"max_position_embeddings": 128}),
    "nllb-moe": (
        "NllbMoe",
        _BART_SIZES
        | {"max_position_embeddings": 128, "num_experts": 6, "moe_token_dropout": 0.3}
        | {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    ),
    "pegasus": ("Pegasus", _BART_SIZES | {"max_position_embeddings": 128}),
    "pegasus_x": (
        "PegasusX",
        # The second layer's blocks begin in the middle of those of the first.
        _BART_SIZES | {"max_position_embeddings": 128, "num_global_tokens": 3, "block_size": 8},
    ),
    "prophetnet": (
        "ProphetNet",
        # transformers has caches only for as many layers as the encoder has.
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "num_encoder_layers": 3,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 6,
            "encoder_ffn_dim": 80,
            "decoder_ffn_dim": 96,
            "max_position_embeddings": 129,
            "num_buckets": 8,
            "relative_max_distance": 20,
            "decoder_start_token_id": 3,
        },
    ),
    "blenderbot": ("Blenderbot", _BART_SIZES),
    "plbart": ("PLBart", _BART_SIZES | {"max_position_embeddings": 128}),
    # Encoder, decoder and output projection have tables of their own.
    "mvp": ("Mvp", _BART_SIZES | {"max_position_embeddings": 128, "tie_word_embeddings": False}),
    "switch": (
        "SwitchTransformers",
        # A source has more tokens than an expert computes.
        _T5_SIZES | {"num_experts": 4, "num_sparse_encoder_layers": 1, "expert_capacity": 7},
    ),
    "led": (
        "LED",
        _BART_SIZES
        | {"max_encoder_position_embeddings": 512, "max_decoder_position_embeddings": 128}
        | {"attention_window": [8, 4]},
    ),
    "longt5": ("LongT5", _T5_SIZES | {"local_radius": 4, "n_positions": 512}),
    "global-longt5": (
        "LongT5",
        _T5_SIZES
        | {"local_radius": 4, "encoder_attention_type": "transient-global"}
        | {"global_block_size": 3, "n_positions": 512},
    ),
    "bert2bert": ("EncoderDecoder", _joined("bert", "bert")),
    "roberta2generation": ("EncoderDecoder", _joined("roberta", "bert-generation")),
    "xlmr2roberta": ("EncoderDecoder", _joined("xlm-roberta", "roberta")),
    "wav2vec2-mbart": (
        "SpeechEncoderDecoder",
        _joined_speech({"model_type": "wav2vec2", **_WIDER, "add_adapter": True}, "mbart"),
    ),
    "hubert-bart": (
        "SpeechEncoderDecoder",
        _joined_speech({"model_type": "hubert", "do_stable_layer_norm": True}, "bart"),
    ),
    "sew-bert": (
        "SpeechEncoderDecoder",
        _joined_speech({"model_type": "sew", "hidden_size": 48}, "bert"),
    ),
    "wavlm-gpt2": (
        "SpeechEncoderDecoder",
        _joined_speech({"model_type": "wavlm", "num_buckets": 12}, "gpt2"),
    ),
    "w2v-bert-mbart": (
        "SpeechEncoderDecoder",
        _joined_speech(_BERT_ENCODER | {"hidden_size": 32}, "mbart"),
    ),
    "adapted-w2v-bert-bert": (
        "SpeechEncoderDecoder",
        _joined_speech(_BERT_ENCODER | {"hidden_size": 48, "add_adapter": True}, "bert"),
    ),
    "speecht5": (
        "SpeechT5",
        SAMPLES
        | {name: size for name, size in _BART_SIZES.items() if name.startswith("decoder_")}
        | {"vocab_size": VOCAB_SIZE, "encoder_layers": 2, "encoder_attention_heads": 4}
        | {"decoder_attention_heads": 4, "encoder_ffn_dim": 40, "max_text_positions": 128}
        | {"encoder_max_relative_position": 7, "pad_token_id": 1},
    ),
    "mt5": ("MT5", _T5_SIZES),
    "umt5": ("UMT5", _T5_SIZES),
    "t5": ("T5", _T5_SIZES),
    "t5gemma": (
        "T5Gemma",
        {
            "vocab_size": VOCAB_SIZE,
            "encoder": _GEMMA_SIZES | {"hidden_size": 36, "num_hidden_layers": 2},
            "decoder": _GEMMA_SIZES,
        },
    ),
    "flan-t5": (
        "T5",
        _T5_SIZES | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
}
SPEECH = (
    *("whisper", "untied-whisper", "speech_to_text", "moonshine", "moonshine_streaming"),
    *("cohere_asr", "canary", "wav2vec2-mbart", "hubert-bart", "sew-bert"),
    *("wavlm-gpt2", "w2v-bert-mbart", "adapted-w2v-bert-bert", "speecht5"),
)
