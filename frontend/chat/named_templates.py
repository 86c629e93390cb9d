"""The chat templates that `--chat-template` chooses by llama.cpp's names, for models that are published without one.

As in llama.cpp, prompts begin with BOS if the model's tokenizer adds it to texts.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

Frame = tuple[str, str]
"""The texts before and after the content of a message."""

_BOS: Final = '(bos_token or "")'

_TEMPLATE: Final = """
{%%- set frames = %(frames)s %%}
{%%- set merged = namespace(text="") %%}
{{- %(start)s }}
{%%- for message in messages %%}
    {%%- set content = (message.content or "")%(filter)s %%}
    {%%- if message.role == "system" and %(merges)s %%}
        {%%- set merged.text = %(before_system)s ~ content ~ %(after_system)s %%}
    {%%- else %%}
        {%%- set frame = frames[message.role] if message.role in frames else frames["user"] %%}
        {{- frame[0] }}
        {%%- if message.role != "assistant" %%}
            {{- merged.text }}
            {%%- set merged.text = "" %%}
        {%%- endif %%}
        {{- content ~ frame[1] }}
    {%%- endif %%}
{%%- endfor %%}
{%%- if add_generation_prompt %%}{{- %(generation)s }}{%% endif %%}
"""


class _Form(NamedTuple):
    """The form of a conversation.

    Attributes:
        user: The frame of messages of the user, and of other roles.
        assistant: That of the assistant.
        system: That of the system; for `merges`, within the next message of the user.
        generation: The text that begins an answer; None for that before messages of the assistant.
        start: An expression in Jinja for the beginning of the prompt.
        merges: True if the text of the system is part of the next message of the user.
        trims: True if whitespace around contents is dropped.
    """

    user: Frame
    assistant: Frame
    system: Frame
    generation: str | None = None
    start: str = _BOS
    merges: bool = False
    trims: bool = False

    def template(self) -> str:
        """Return the form as a template in Jinja."""
        frames = {"user": self.user, "assistant": self.assistant, "system": self.system}
        generation = self.assistant[0] if self.generation is None else self.generation
        values = {
            "frames": json.dumps(frames, ensure_ascii=False),
            "start": self.start,
            "filter": " | trim" if self.trims else "",
            "merges": "true" if self.merges else "false",
            "before_system": json.dumps(self.system[0], ensure_ascii=False),
            "after_system": json.dumps(self.system[1], ensure_ascii=False),
            "generation": json.dumps(generation, ensure_ascii=False),
        }
        return (_TEMPLATE % values).strip()


def _roles(before: str, after: str, *, start: str = _BOS, trims: bool = False) -> _Form:
    """Return a form in which a text with the role, in place of `{}`, is before each message."""
    user, assistant, system = (
        (before.format(role), after) for role in ("user", "assistant", "system")
    )
    return _Form(user, assistant, system, start=start, trims=trims)


def _inst(user: Frame, before: str, system: Frame, *, merges: bool = True) -> _Form:
    """Return a form in which the assistant's messages follow the mark at the end of the user's."""
    return _Form(user, (before, "</s>"), system, "", merges=merges)


def _spoken(system: Frame, user: Frame, name: str, end: str) -> _Form:
    """Return a form in which the assistant's name and a colon are before its messages."""
    return _Form(user, (f"{name}: ", end), system, f"{name}:")


_EXAONE: Final = _Form(
    ("[|user|]", "\n"),
    ("[|assistant|]", "[|endofturn|]\n"),
    ("[|system|]", "[|endofturn|]\n"),
    trims=True,
)
_GRANITE: Final = _roles("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>\n")
_INSTRUCTION: Final = "### Instruction:\n", "\n"
_PARAGRAPH: Final = "", "\n\n"
_SYS: Final = "<<SYS>>\n", "\n<</SYS>>\n\n"

_FORMS: Final[dict[str, _Form]] = {
    "chatml": _roles("<|im_start|>{}\n", "<|im_end|>\n"),
    "llama2": _inst(("[INST] ", " [/INST]"), "", ("", "\n")),
    "llama2-sys": _inst(("[INST] ", " [/INST]"), "", _SYS),
    "llama3": _roles("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", trims=True),
    "llama4": _roles("<|header_start|>{}<|header_end|>\n\n", "<|eot|>", trims=True),
    "mistral-v1": _inst((" [INST] ", " [/INST]"), " ", _PARAGRAPH),
    "mistral-v3": _inst(("[INST] ", "[/INST]"), " ", _PARAGRAPH),
    "mistral-v3-tekken": _inst(("[INST]", "[/INST]"), "", _PARAGRAPH),
    "mistral-v7": _inst(
        ("[INST] ", "[/INST]"), " ", ("[SYSTEM_PROMPT] ", "[/SYSTEM_PROMPT]"), merges=False
    ),
    "mistral-v7-tekken": _inst(
        ("[INST]", "[/INST]"), "", ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), merges=False
    ),
    "phi3": _roles("<|{}|>\n", "<|end|>\n"),
    "phi4": _roles("<|im_start|>{}<|im_sep|>", "<|im_end|>"),
    "falcon3": _roles("<|{}|>\n", "\n"),
    "zephyr": _roles("<|{}|>\n", "<|endoftext|>\n"),
    "gemma": _Form(
        ("<start_of_turn>user\n", "<end_of_turn>\n"),
        ("<start_of_turn>model\n", "<end_of_turn>\n"),
        ("", "\n\n"),
        merges=True,
        trims=True,
    ),
    "openchat": _spoken(
        ("", "<|end_of_turn|>"),
        ("GPT4 Correct User: ", "<|end_of_turn|>"),
        "GPT4 Correct Assistant",
        "<|end_of_turn|>",
    ),
    "vicuna": _spoken(("", "\n\n"), ("USER: ", "\n"), "ASSISTANT", "</s>\n"),
    "vicuna-orca": _spoken(("SYSTEM: ", "\n"), ("USER: ", "\n"), "ASSISTANT", "</s>\n"),
    "deepseek": _Form(_INSTRUCTION, ("### Response:\n", "\n<|EOT|>\n"), ("", "")),
    "deepseek2": _spoken(("", "\n\n"), ("User: ", "\n\n"), "Assistant", "<｜end▁of▁sentence｜>"),
    "deepseek3": _Form(
        ("<｜User｜>", ""), ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"), ("", "\n\n")
    ),
    "command-r": _Form(
        ("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        ("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        trims=True,
    ),
    "chatglm4": _roles("<|{}|>\n", "", start='"[gMASK]<sop>"'),
    "glmedge": _roles("<|{}|>\n", "")._replace(generation="<|assistant|>"),
    "exaone3": _EXAONE,
    "exaone4": _EXAONE,
    "exaone-moe": _roles("<|{}|>\n", "<|endofturn|>\n", trims=True),
    **dict.fromkeys(("granite", "granite-4.0", "granite-4.1"), _GRANITE),
    "megrez": _roles("<|role_start|>{}<|role_end|>", "<|turn_end|>"),
}

NAMED_TEMPLATES: Final = {name: form.template() for name, form in _FORMS.items()}
"""Name for `--chat-template`, as in llama.cpp -> the template."""
