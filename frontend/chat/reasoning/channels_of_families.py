"""The parsers of formats in which answers are sequences of channels (`--reasoning-parser`)."""

from typing import Final

from ....protocol.config.frontend import ReasoningParserName
from .channels import ChannelParser
from .cohere import CohereParser, CohereTextParser
from .harmony import HarmonyParser
from .inkling import InklingParser
from .muse import MuseParser
from .xtml import XtmlParser

CHANNEL_PARSERS: Final[dict[ReasoningParserName, type[ChannelParser]]] = {
    "openai_gptoss": HarmonyParser,
    "kimi_k3": XtmlParser,
    "cohere_command3": CohereParser,
    "cohere_command4": CohereTextParser,
    "inkling": InklingParser,
    "muse": MuseParser,
}
"""Name of `--reasoning-parser` -> the parser."""
