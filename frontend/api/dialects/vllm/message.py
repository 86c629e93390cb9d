"""The messages that vLLM's derender routes and `/inference/v1/generate` write from generated text."""

from __future__ import annotations

from dataclasses import dataclass

from ....client.engine_client import Delta
from ...chats.answer import ChatChoice, show_reasoning
from ...generation import PreparedPrompt
from ...logprobs import Json
from ...schema import ChatCompletionRequest
from ...serving import Serving
from ...tools.tool_choice import ToolChoice


@dataclass(frozen=True, slots=True)
class Conversation:
    """The request of an answer, as far as the parsers of the answer need it."""

    serving: Serving
    request: ChatCompletionRequest
    tools: ToolChoice
    prompt: PreparedPrompt
    envelope: Json

    def new_choice(self, index: int) -> ChatChoice:
        """Return the parsers of one output."""
        answer_id = self.envelope["id"]
        return ChatChoice(self.serving, self.request, self.tools, self.prompt, answer_id, index)

    def whole_choice(self, index: int, output: Delta) -> Json:
        """Return the choice with the message in a complete output."""
        choice = self.new_choice(index)
        found = choice.read(output)
        message: Json = {"role": "assistant", "content": found.content, "refusal": None}
        if found.tool_calls:
            message["content"] = found.content or None
            message |= choice.calls.whole(found.tool_calls)
        message |= show_reasoning(found)
        return {"index": index, "message": message} | choice.ending(output)
