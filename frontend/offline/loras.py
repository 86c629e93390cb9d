"""The LoRA adapters of an offline engine: from `lora_modules`, or from the requests themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from ...protocol.config import ModelConfig
from ...protocol.errors import CheckpointError, ConfigError, ParameterError, counted
from ...protocol.file_identity import LoraAdapter
from ..model_source.lora import find_adapter
from ..supervisor.console import Console


class LoRARequest(msgspec.Struct, frozen=True):
    """A LoRA adapter to use, as in vLLM.

    `lora_path` is a directory, or a repository on the hub. The number `lora_int_id` has no effect: adapters are
    identified by the contents of their files.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


LoraChoice: TypeAlias = str | LoRARequest | None
"""The name of an adapter, an adapter, or None for the base model."""


class OfflineLoras:
    """Finds adapters, and reads each one only once."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._by_name = {adapter.name: adapter for adapter in config.loras}
        self._found: dict[LoRARequest, LoraAdapter] = {}

    def find_each(
        self, choice: LoraChoice | Sequence[LoraChoice], has_images: Sequence[bool]
    ) -> list[LoraAdapter | None]:
        """Return the chosen adapter of each prompt. Prompts with images for which none is chosen have a default.

        Raises:
            ParameterError: There is no such adapter, it cannot be read, or the number of choices is wrong.
        """
        if choice is None or isinstance(choice, str | LoRARequest):
            choice = [choice] * len(has_images)
        if len(choice) != len(has_images):
            raise ParameterError(
                "lora_request",
                f"has {counted(len(choice), 'adapter')} for {counted(len(has_images), 'prompt')}",
            )
        default = self._config.media_lora
        return [
            self.find(each) or (default if has_image else None)
            for each, has_image in zip(choice, has_images, strict=True)
        ]

    def find(self, choice: LoraChoice) -> LoraAdapter | None:
        """Return the chosen adapter, or that of the model's task if none is chosen.

        Raises:
            ParameterError: There is no such adapter, or it cannot be read.
        """
        if not choice:
            return self._config.default_lora
        if isinstance(choice, str):
            if choice not in self._by_name:
                raise ParameterError(
                    "lora_request",
                    f"{choice!r} is not served; adapters: {', '.join(self._by_name) or 'none'}",
                )
            return self._by_name[choice]
        if not self._config.enable_lora:
            raise ParameterError("lora_request", "needs LLM(..., enable_lora=True)")
        if choice not in self._found:
            try:
                self._found[choice] = find_adapter(
                    choice.lora_name,
                    choice.lora_path,
                    self._config.download_dir,
                    Console(),
                    "lora_path",
                )
            except (ConfigError, CheckpointError) as error:
                raise ParameterError("lora_request", str(error)) from None
        return self._found[choice]
