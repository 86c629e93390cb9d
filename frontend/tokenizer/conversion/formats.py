"""The formats of tokenizers in directories that are converted."""

from typing import Final

from .encoder_pieces import convert_encoder_pieces, encoder_pieces_files
from .letters import convert_letters, letters_files
from .marian import convert_marian, convert_speech_pieces, marian_files, speech_pieces_files
from .plamo import convert_plamo, plamo_files
from .tekken import convert_tekken, tekken_files
from .tiktoken_files import convert_kimi, convert_phi, kimi_files, phi_files
from .tokenizer_model import convert_tokenizer_model, tokenizer_model_files
from .vocabulary import convert_vocabulary, vocabulary_files
from .world import convert_world, world_files

FORMATS: Final = (
    (marian_files, convert_marian),
    (speech_pieces_files, convert_speech_pieces),
    (encoder_pieces_files, convert_encoder_pieces),
    (tekken_files, convert_tekken),
    (kimi_files, convert_kimi),
    (phi_files, convert_phi),
    (tokenizer_model_files, convert_tokenizer_model),
    (vocabulary_files, convert_vocabulary),
    (letters_files, convert_letters),
    (world_files, convert_world),
    (plamo_files, convert_plamo),
)
"""For each format, the functions that find the files of its tokenizer in a directory, and that convert it."""
