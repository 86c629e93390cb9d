"""Translate the metadata of audio towers in mmproj files to Hugging Face's fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from .fields import Audio, Mmproj


def _qwen2_audio(audio: Audio) -> Mmproj:
    around = audio.around_clip("<|audio_bos|>", "<|audio_eos|>")
    return _whisper(audio, "qwen2_audio", "Qwen2Audio", ["<|AUDIO|>"], around)


def _qwen2_5_omni(audio: Audio) -> Mmproj:
    tower = audio.sizes() | {"output_dim": audio.num_rows("mm.a.fc.weight")}
    return Mmproj(
        {
            "model_type": "qwen2_5_omni_thinker",
            "architectures": ["Qwen2_5OmniForConditionalGeneration"],
            "audio_config": tower,
            "audio_token_id": audio.token_id("<|AUDIO|>", "<|audio_pad|>"),
        },
        around_clip=audio.around_clip("<|audio_bos|>", "<|audio_eos|>"),
    )


def _qwen3(audio: Audio, family: str, name: str) -> Mmproj:
    tower = audio.sizes() | {
        "downsample_hidden_size": audio.num_channels("a.conv2d.1.weight"),
        "output_dim": audio.num_rows("mm.a.mlp.2.weight"),
    }
    return Mmproj(
        {
            "model_type": family,
            "architectures": [f"{name}ForConditionalGeneration"],
            "audio_config": tower,
            "audio_token_id": audio.token_id("<|audio_pad|>"),
        },
        around_clip=audio.around_clip("<|audio_start|>", "<|audio_end|>"),
    )


def _qwen3_asr(audio: Audio) -> Mmproj:
    return _qwen3(audio, "qwen3_asr", "Qwen3ASR")


def _qwen3_omni(audio: Audio) -> Mmproj:
    return _qwen3(audio, "qwen3_omni_moe_thinker", "Qwen3OmniMoe")


def _voxtral(audio: Audio) -> Mmproj:
    around = audio.around_clip("[BEGIN_AUDIO]", "")
    return _whisper(audio, "voxtral", "Voxtral", ["[AUDIO]"], around)


def _glm_asr(audio: Audio) -> Mmproj:
    sizes = audio.sizes()
    tower = {
        "hidden_size": sizes["d_model"],
        "intermediate_size": sizes["encoder_ffn_dim"],
        "num_hidden_layers": sizes["encoder_layers"],
        "num_attention_heads": sizes["encoder_attention_heads"],
        "num_mel_bins": sizes["num_mel_bins"],
        "max_position_embeddings": audio.num_rows("a.position_embd.weight"),
    }
    return Mmproj(
        {
            "model_type": "glmasr",
            "architectures": ["GlmAsrForConditionalGeneration"],
            "audio_config": tower,
            "audio_token_id": audio.token_id("<|pad|>"),
        },
        around_clip=audio.around_clip("<|begin_of_audio|>", "<|end_of_audio|>"),
    )


def _audio_flamingo(audio: Audio) -> Mmproj:
    return _whisper(audio, "audioflamingo3", "AudioFlamingo3", ["<sound>"], ("", ""))


def _granite_speech(audio: Audio) -> Mmproj:
    hidden_size = audio.integer("embedding_length")
    num_blocks = audio.count_blocks("a.proj_blk")
    readers = [
        i for i in range(num_blocks) if audio.has_tensor(f"a.proj_blk.{i}.cross_attn_q.weight")
    ]
    kept = audio.optional_integers("feature_layer")
    return Mmproj(
        {
            "model_type": "granite_speech",
            "architectures": ["GraniteSpeechForConditionalGeneration"],
            "encoder_config": {
                "num_layers": audio.layer_count("block_count"),
                "hidden_dim": hidden_size,
                "num_heads": audio.integer("attention.head_count"),
                "dim_head": audio.num_columns("a.blk.0.attn_rel_pos_emb"),
                "feedforward_mult": audio.integer("feed_forward_length") // hidden_size,
                "input_dim": audio.integer("num_mel_bins"),
                "output_dim": audio.num_rows("a.enc_ctc_out.weight"),
                "context_size": audio.integer("chunk_size"),
                "max_pos_emb": audio.integer("max_pos_emb"),
                "conv_kernel_size": audio.num_columns("a.blk.0.conv_dw.weight"),
                "conv_expansion_factor": audio.num_rows("a.blk.0.conv_dw.weight") // hidden_size,
                "cat_hidden_layers": kept,
            },
            "projector_config": {
                "encoder_hidden_size": hidden_size * (1 + len(kept)),
                "hidden_size": audio.num_columns("a.proj_linear.weight"),
                "intermediate_size": audio.num_rows("a.proj_blk.0.ffn_up.weight"),
                "num_attention_heads": audio.integer("projector.head_count"),
                "num_hidden_layers": num_blocks,
                "cross_attention_frequency": readers[1] if len(readers) > 1 else num_blocks,
            },
            "window_size": audio.integer("projector.window_size"),
            "downsample_rate": audio.integer("projector.downsample_rate"),
            "audio_token_id": audio.token_id("<|audio|>"),
        }
    )


def _ultravox(audio: Audio) -> Mmproj:
    found = _whisper(audio, "ultravox", "Ultravox", PLACEHOLDERS, ("", ""))
    found.config.update(
        architectures=["UltravoxModel"],
        hidden_size=audio.num_rows("mm.a.mlp.1.weight"),
        stack_factor=audio.integer("projector.stack_factor", 8),
        projector_ln_mid=audio.has_tensor("mm.a.norm_mid.weight"),
    )
    return found


def _meralion(audio: Audio) -> Mmproj:
    tokens = ["<SpeechHere>", *PLACEHOLDERS]
    found = _whisper(audio, "meralion2", "MERaLiON2", tokens, ("", ""))
    found.config.update(
        projector_hidden_size=audio.num_rows("mm.a.mlp.0.weight"),
        speech_mlp_scale_factor=audio.integer("projector.stack_factor", 15),
    )
    return found


def _nemotron_omni(audio: Audio) -> Mmproj:
    tower = {
        "hidden_size": audio.integer("embedding_length"),
        "intermediate_size": audio.integer("feed_forward_length"),
        "num_hidden_layers": audio.layer_count("block_count"),
        "num_attention_heads": audio.integer("attention.head_count"),
        "num_mel_bins": audio.integer("num_mel_bins"),
        "conv_kernel_size": audio.integer("conv_kernel_size"),
        "subsampling_factor": audio.integer("subsampling_factor"),
        "subsampling_conv_channels": audio.num_channels("a.conv1d.0.weight"),
        "attention_bias": audio.has_tensor("a.blk.0.attn_q.bias"),
        "convolution_bias": audio.has_tensor("a.blk.0.conv_pw1.bias"),
        "projection_hidden_size": audio.num_rows("mm.a.mlp.1.weight"),
        "projection_bias": audio.has_tensor("mm.a.mlp.1.bias"),
    }
    return Mmproj({"audio_config": tower, "audio_token_id": audio.token_id("<so_embedding>")})


def _dots3_note(audio: Audio) -> Mmproj:
    tower = audio.sizes() | {"downsample_hidden_size": audio.num_channels("a.conv2d.1.weight")}
    around = audio.around_clip("<|audio_comp_start|>", "<|audio_comp_end|>")
    token_id = audio.token_id("<|audio_comp_pad|>")
    return Mmproj({"audio_config": tower, "audio_token_id": token_id}, around_clip=around)


def _lfm2_audio(audio: Audio) -> Mmproj:
    hidden_size = audio.integer("embedding_length")
    return Mmproj(
        {
            "model_type": "lfm2_audio",
            "architectures": ["Lfm2AudioForConditionalGeneration"],
            "audio_config": {
                "feat_in": audio.integer("num_mel_bins"),
                "d_model": hidden_size,
                "ff_expansion_factor": audio.num_rows("a.blk.0.ffn_up.weight") // hidden_size,
                "n_layers": audio.layer_count("block_count"),
                "n_heads": audio.integer("attention.head_count"),
                "conv_kernel_size": audio.num_columns("a.blk.0.conv_dw.weight"),
                "subsampling_conv_channels": audio.num_channels("a.conv1d.0.weight"),
            },
            "adapter_hidden_dims": [audio.num_rows("mm.a.mlp.1.weight")],
            "audio_token_id": audio.token_id(*LFM2_PLACEHOLDERS),
        }
    )


LFM2_PLACEHOLDERS: Final = ("<|audio_pad|>", "<|reserved_4|>", "<|reserved_0|>", "<unk>")
"""Tokens that may represent audio in LFM2-Audio, whose processor has none for it: the first that exists."""

PLACEHOLDERS: Final = (
    "<|audio|>",
    "<|reserved_special_token_0|>",
    "<|fim_pad|>",
    "<unused0>",
    "<SPECIAL_999>",
    "<unk>",
)
"""Tokens that may represent audio in Ultravox, whose decoders have none for it: the first that exists."""


def _whisper(
    audio: Audio, family: str, name: str, tokens: Sequence[str], around_clip: tuple[str, str]
) -> Mmproj:
    """Return the fields of a model with Whisper's encoder."""
    positions = {"max_source_positions": audio.num_rows("a.position_embd.weight")}
    return Mmproj(
        {
            "model_type": family,
            "architectures": [f"{name}ForConditionalGeneration"],
            "audio_config": audio.sizes() | positions,
            "audio_token_id": audio.token_id(*tokens),
        },
        around_clip=around_clip,
    )


def _gemma4(audio: Audio) -> Mmproj:
    tower = {
        "hidden_size": audio.integer("embedding_length"),
        "num_hidden_layers": audio.layer_count("block_count"),
        "num_attention_heads": audio.integer("attention.head_count"),
        "subsampling_conv_channels": [
            audio.num_channels(f"a.conv1d.{index}.weight") for index in range(2)
        ],
        "output_proj_dims": audio.num_rows("a.pre_encode.out.weight"),
        "use_clipped_linears": audio.has_tensor("a.blk.0.ffn_up.input_max"),
    }
    return Mmproj(_gemma4_tokens(audio) | {"audio_config": tower})


def _gemma4_unified(audio: Audio) -> Mmproj:
    tower = {"audio_embed_dim": audio.num_columns("mm.a.input_projection.weight")}
    return Mmproj(_gemma4_tokens(audio) | {"audio_config": tower})


def _gemma4_tokens(audio: Audio) -> dict[str, Any]:
    return {
        "boa_token_id": audio.token_id("<|audio>"),
        "audio_token_id": audio.token_id("<|audio|>"),
        "eoa_token_index": audio.token_id("<audio|>"),
    }


AudioReader: TypeAlias = Callable[[Audio], Mmproj]

AUDIO_KINDS: Final[dict[str, AudioReader]] = {
    "glma": _glm_asr,
    "granite_speech": _granite_speech,
    "lfm2a": _lfm2_audio,
    "meralion": _meralion,
    "musicflamingo": _audio_flamingo,
    "qwen2a": _qwen2_audio,
    "qwen3a": _qwen3_asr,
    "ultravox": _ultravox,
    "voxtral": _voxtral,
}
"""Type of the projector -> function that reads the fields of an audio tower without a vision tower."""

BESIDE_IMAGES: Final[dict[str, AudioReader]] = {
    "dots3note_a": _dots3_note,
    "gemma4a": _gemma4,
    "gemma4ua": _gemma4_unified,
    "parakeet": _nemotron_omni,
    "qwen2a": _qwen2_5_omni,
    "qwen3a": _qwen3_omni,
}
"""Type of the projector -> function that reads the fields of an audio tower beside a vision tower."""
