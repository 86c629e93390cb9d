"""The audio preprocessing and the decoder prompt of a speech model."""

import enum
import math

import msgspec


class SpeechKind(enum.StrEnum):
    """The kind of a speech model, which determines the decoder's prompt.

    Whisper's prompt has tokens for language and task; Moonshine's is a single start token. Only the language changes
    Cohere Transcribe's, and the languages of speech and text change Canary's. Others never change, or do not exist.
    """

    WHISPER = "whisper"
    MOONSHINE = "moonshine"
    SPEECH_TO_TEXT = "speech_to_text"
    MOONSHINE_STREAMING = "moonshine_streaming"
    COHERE = "cohere_asr"
    CANARY = "canary"
    VOXTRAL_REALTIME = "voxtral_realtime"
    KYUTAI = "kyutai_speech_to_text"
    PARAKEET_CTC = "parakeet_ctc"
    PARAKEET_RNNT = "parakeet_rnnt"
    PARAKEET_TDT = "parakeet_tdt"
    GRANITE_CTC = "granite_speech5_ctc"
    OMNIASR_CTC = "omniasr_ctc"
    WAV2VEC2 = "wav2vec2"
    WAV2VEC2_BERT = "wav2vec2-bert"
    WAV2VEC2_CONFORMER = "wav2vec2-conformer"
    WAVLM = "wavlm"
    JOINED = "speech-encoder-decoder"
    SEAMLESS = "seamless_m4t"
    SEAMLESS_2 = "seamless_m4t_v2"
    SEW = "sew"
    SEW_D = "sew-d"
    SPEECHT5 = "speecht5"
    LASR_CTC = "lasr_ctc"
    DATA2VEC = "data2vec-audio"
    HUBERT = "hubert"
    UNISPEECH = "unispeech"
    UNISPEECH_SAT = "unispeech-sat"


class AddedAudioConfig(msgspec.Struct, frozen=True):
    """The places of the outputs of an audio clip that are added to all tokens, one to each.

    Attributes:
        samples_before: The samples of the silence before the clip.
        samples_after: The samples of the silence after it, of which the last output may not need all.
        samples_per_output: The number of samples of an output.
        outputs_per_part: The maximum number of outputs of an encoder input.
        marks: The tokens that are not text.
    """

    samples_before: int
    samples_after: int
    samples_per_output: int
    outputs_per_part: int
    marks: tuple[str, ...]

    def num_outputs(self, num_samples: int) -> int:
        """Return the number of outputs of a clip and the silence around it."""
        num_samples += self.samples_before + self.samples_after
        return num_samples // self.samples_per_output


class AudioProcessorConfig(msgspec.Struct, frozen=True):
    """The audio preprocessing and decoder prompt of a speech model. Token id -1: the model has no such token.

    Attributes:
        kind: The kind of the decoder's prompt.
        num_mel_bins: The number of log-mel features per frame; 0 if the encoder reads samples.
        sampling_rate: Samples per second.
        hop_length: Samples from the start of a frame to the start of the next.
        frame_length: The samples of a frame; 0 if the center of a frame is its start, with zeros before the first.
        chunk_seconds: The maximum length of one encoder input in seconds. Whisper's inputs are padded to this length.
        strides: The stride of each of the encoder's convolutions over frames or samples.
        kernels: The kernel size of each convolution.
        paddings: The number of zeros that each convolution adds on both sides.
        max_source_positions: The maximum number of encoder outputs.
        start_token_id: The first token of the decoder's prompt.
        forced_token_id: The second one, if it is always the same.
        language_token_ids: Language code -> token; empty if the model has only one language.
        transcribe_token_id: The token of the task "transcribe".
        translate_token_id: The token of the task "translate", which produces English text.
        no_timestamps_token_id: The token that asks for text without timestamps. The first timestamp follows it.
        previous_token_id: The token before the text of the previous chunk or of the client's prompt.
        no_speech_token_id: The token whose probability after `start_token_id` is the probability of silence.
        time_precision: Seconds between two successive timestamp tokens.
        max_initial_timestamp: The maximum first timestamp in units of `time_precision`; -1 for no limit.
        suppressed_token_ids: Tokens that are never sampled.
        begin_suppressed_token_ids: Tokens that are never sampled as the first token.
        alignment_heads: The cross-attention heads, as (layer, head), whose weights show when each word is spoken.
        prompt: The texts of the prompt's tokens, if these are the prompt. They have the codes of the languages of the
            speech and of the text for "{language}" and "{target}".
        languages: The codes of the languages that may be given for such a prompt, or for one with the token of the
            text's language alone.
        max_tokens_per_second: The maximum number of text tokens per second of audio; 0 for no limit.
        added: The way in which outputs are added to tokens; None if the decoder reads them by cross attention.
        variance_term: The number that is added to the variance of standardized samples; 0 if they are not standardized.
        writes_tokens: True if the encoder's outputs are the tokens of the text and their times (see `TOKEN_FIELDS`).
    """

    kind: SpeechKind
    num_mel_bins: int
    sampling_rate: int
    hop_length: int
    chunk_seconds: float
    strides: tuple[int, ...]
    kernels: tuple[int, ...]
    paddings: tuple[int, ...]
    max_source_positions: int
    start_token_id: int
    forced_token_id: int = -1
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
    prompt: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    added: AddedAudioConfig | None = None
    variance_term: float = 0.0
    writes_tokens: bool = False
    frame_length: int = 0

    @property
    def seconds_per_output(self) -> float:
        """Seconds between two successive encoder outputs."""
        return self.hop_length * math.prod(self.strides) / self.sampling_rate

    @property
    def least_samples(self) -> int:
        """The number of samples of one encoder output."""
        num_frames = 1
        for stride, kernel, padding in zip(
            reversed(self.strides), reversed(self.kernels), reversed(self.paddings), strict=True
        ):
            num_frames = max(1, (num_frames - 1) * stride + kernel - 2 * padding)
        return (num_frames - 1) * self.hop_length + max(self.hop_length, self.frame_length)

    @property
    def translates(self) -> bool:
        """True if the model can write English text for speech in other languages."""
        names_target = any("{target}" in text for text in self.prompt)
        return self.translate_token_id >= 0 or names_target or self.names_text_language

    @property
    def names_text_language(self) -> bool:
        """True if a token of the prompt is the language of the text, which may differ from that of the speech."""
        return bool(self.language_token_ids) and self.transcribe_token_id < 0

    def num_outputs(self, num_frames: int) -> int:
        """Return the number of encoder outputs for `num_frames` frames (samples if `num_mel_bins` is 0)."""
        for stride, kernel, padding in zip(self.strides, self.kernels, self.paddings, strict=True):
            num_frames = max(0, (num_frames + 2 * padding - kernel) // stride + 1)
        return num_frames
