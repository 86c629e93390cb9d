"""The rule for what a served model can do, which several APIs list with their models."""

from __future__ import annotations

from enum import StrEnum

from ....protocol.config import ModelConfig
from ..serving import Serving


class Task(StrEnum):
    """The main task of a model. The values are the words of llama.cpp and Ollama where these have one."""

    COMPLETION = "completion"
    EMBEDDING = "embedding"
    CLASSIFICATION = "classification"
    TRANSCRIPTION = "transcription"


def task_of(model: ModelConfig) -> Task:
    """Return the main task of a model.

    A speech model transcribes, with a decoder or without one. A chat model that reads audio completes text.
    """
    if model.audio is not None:
        return Task.TRANSCRIPTION
    if model.classifier is not None:
        return Task.CLASSIFICATION
    return Task.COMPLETION if model.generates else Task.EMBEDDING


def reads_images(serving: Serving) -> bool:
    """Return True if requests to this server may have images."""
    return serving.config.model.images is not None and serving.media is not None


def reads_audio(serving: Serving) -> bool:
    """Return True if requests to this server may have audio clips, in chats or to transcribe."""
    model = serving.config.model
    return model.audio is not None or (model.chat_audio is not None and serving.media is not None)


def list_for_llama_cpp(serving: Serving) -> list[str]:
    """Return the capabilities of the served model in the words of llama.cpp, which calls all media "multimodal"."""
    found: list[str] = [task_of(serving.config.model)]
    if reads_images(serving) or reads_audio(serving):
        found.append("multimodal")
    return found


def list_for_ollama(serving: Serving) -> list[str]:
    """Return the capabilities of the served model in the words of Ollama."""
    task = task_of(serving.config.model)
    completes = task is Task.COMPLETION
    has = {
        "tools": completes and serving.formats.calls_tools,
        "thinking": completes and serving.formats.separates_reasoning,
        "vision": reads_images(serving),
        "audio": reads_audio(serving),
        "insert": completes and serving.infill_format is not None,
    }
    return [task, *(word for word, is_so in has.items() if is_so)]
