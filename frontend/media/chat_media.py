"""The steps from the images or audio of a conversation to encoder inputs, which a subclass completes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from ...protocol.config import EngineConfig
from ...protocol.encoder_inputs.inputs import EncoderInput
from ...protocol.errors import ParameterError
from ..client.executor import ThreadExecutor
from .decoding.limits import MAX_PROCESSES
from .decoding.processes import MediaProcesses
from .sources.media_options import DEFAULT_OPTIONS, MediaOptions
from .sources.media_urls import MediaUrls


class ChatMedia(ABC):
    """Takes images or audio out of conversations, preprocesses them, and places them in prompts.

    Files are decoded in separate processes, so that a crash of a decoder does not end this one.

    Args:
        config: The limits.
        executor: Runs the threads.
        processes: The decoder processes.
        names: The words for several files, and for the files to send instead, in an error about too many tokens.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: ThreadExecutor,
        processes: MediaProcesses,
        names: tuple[str, str],
    ) -> None:
        self._max_model_len = config.model.max_model_len
        self._processes = processes
        self._names = names
        self._executor = executor.create_separate(MAX_PROCESSES)
        self.urls = MediaUrls(config.frontend, executor)

    def start(self) -> None:
        """Start the decoder processes, so that the first file does not have to wait for them."""
        self._processes.start()

    def close(self) -> None:
        """Stop the decoder processes and threads."""
        self._processes.close()
        self._executor.close()
        self.urls.close()

    async def take(
        self, messages: Sequence[Any], body_size: int, options: MediaOptions = DEFAULT_OPTIONS
    ) -> tuple[list[Any], list[Any]]:
        """Return the messages with images or audio replaced by marks, and the preprocessed images or audio.

        Args:
            messages: The conversation.
            body_size: The size of the request in bytes.
            options: The choices of the request.

        Raises:
            ParameterError: One of them cannot be read, or they do not fit into the context.
        """
        taken, found = await self.find(messages, body_size, options)
        return taken, await self.prepare(found, options)

    async def find(
        self, messages: Sequence[Any], body_size: int, options: MediaOptions
    ) -> tuple[list[Any], list[Any]]:
        """Return the messages with images or audio replaced by marks, and what `prepare` takes. See `take`."""
        return await self._executor.run(body_size, self._take, messages, options)

    async def prepare(
        self, found: Sequence[Any], options: MediaOptions = DEFAULT_OPTIONS
    ) -> list[Any]:
        """Return preprocessed images or audio.

        Raises:
            ParameterError: One of them cannot be read, or they do not fit into the context.
        """
        prepared: list[Any] = []
        num_outputs = 0
        for item in found:
            prepared.append(await self._prepare_one(item, found))
            num_outputs += prepared[-1].num_outputs
            if num_outputs > self._max_model_len:
                names, instead = self._names
                raise ParameterError(
                    item.where.split("[")[0],
                    f"have {names} with more tokens than the {self._max_model_len} of this model's maximum "
                    f"context length; send {instead}",
                )
        return prepared

    @abstractmethod
    def wrap(self, given: Any, where: str) -> Any:
        """Return an image or an audio clip that a caller in this process passed, in the form that `prepare` takes.

        Raises:
            ParameterError: The value is not an image or an audio clip.
        """

    @abstractmethod
    def encode(
        self,
        text: str,
        prepared: Sequence[Any],
        encode: Callable[[str], tuple[str, Sequence[int]]],
        /,
    ) -> tuple[str, Sequence[int], list[EncoderInput]]:
        """Return a prompt with the tokens of the images or audio inserted, its token ids, and the encoder inputs.

        Args:
            text: The prompt, with a token for each image or audio clip.
            prepared: These, in the order of the prompt; videos follow the images.
            encode: Returns the text and the token ids of a prompt.

        Raises:
            ParameterError: The prompt has more or fewer places than there are images or audio.
        """

    @abstractmethod
    def _take(self, messages: Sequence[Any], options: MediaOptions) -> tuple[list[Any], list[Any]]:
        """Return the messages with images or audio replaced by marks, and these images or audio."""

    @abstractmethod
    async def _prepare_one(self, item: Any, found: Sequence[Any]) -> Any:
        """Return one of the images or audio clips that were found, preprocessed."""
