"""The tokenizer that `LLM.get_tokenizer` returns, with the methods of transformers' tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from ...chat.template import ChatTemplate
from ...tokenizer.tokenizer import Tokenizer

Conversation: TypeAlias = Sequence[Mapping[str, Any]]


class Encoding(dict[str, Any]):
    """Tokens by the names `input_ids` and `attention_mask`, which are also attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the encoding has no {name!r}, only {', '.join(self)}") from None


class ModelTokenizer:
    """The model's tokenizer, with those methods and names of transformers' tokenizers that scripts for vLLM use.

    Results are lists, not tensors.

    Attributes:
        name_or_path: The directory of the tokenizer's files.
        bos_token, eos_token, pad_token: Texts of the tokens; None without one. `bos_token_id`, `eos_token_id` and
            `pad_token_id` are their IDs.
    """

    is_fast = True

    def __init__(
        self, tokenizer: Tokenizer, find_template: Callable[[str | None, bool], ChatTemplate]
    ) -> None:
        """Wrap a tokenizer.

        Args:
            tokenizer: The tokenizer.
            find_template: Returns the chat template for a source (None for the model's own), with or without tools.
        """
        self._tokenizer = tokenizer
        self._find_template = find_template
        self.name_or_path = str(tokenizer.path.parent)
        self.bos_token, self.bos_token_id = tokenizer.bos_token, tokenizer.bos_token_id
        self.eos_token, self.eos_token_id = tokenizer.eos_token, tokenizer.eos_token_id
        self.pad_token, self.pad_token_id = tokenizer.pad_token, tokenizer.pad_token_id

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
    ) -> Encoding:
        """Return the `input_ids` and the `attention_mask` of a text, or lists of them for several texts."""
        texts = [text] if isinstance(text, str) else text
        rows = [
            self.encode(
                each,
                add_special_tokens=add_special_tokens,
                truncation=truncation,
                max_length=max_length,
            )
            for each in texts
        ]
        masks = [[1] * len(row) for row in rows]
        if isinstance(text, str):
            return Encoding(input_ids=rows[0], attention_mask=masks[0])
        return Encoding(input_ids=rows, attention_mask=masks)

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        truncation: bool = False,
        max_length: int | None = None,
    ) -> list[int]:
        """Return the token IDs of a text. With `truncation`, at most `max_length` are kept, from the start."""
        token_ids = [*self._tokenizer.encode(text, add_special_tokens)]
        if not truncation or max_length is None or len(token_ids) <= max_length:
            return token_ids
        bare = self._tokenizer.encode(text, add_special_tokens=False)
        num_special = len(token_ids) - len(bare)
        if not num_special:
            return token_ids[:max_length]
        # The special tokens after the text are kept.
        num_before = next(
            (i for i in range(num_special + 1) if token_ids[i : i + len(bare)] == [*bare]), 0
        )
        after = token_ids[num_before + len(bare) :]
        return [*token_ids[: max(max_length - len(after), 0)], *after][:max_length]

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token IDs."""
        wanted = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(wanted, skip_special_tokens)

    def batch_decode(
        self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        """Return the text of each list of token IDs."""
        return [self.decode(each, skip_special_tokens) for each in sequences]

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[str | None]:
        """Return the tokens of a text as they are spelled in the vocabulary."""
        return [*map(self._tokenizer.id_to_token, self.encode(text, add_special_tokens))]

    def convert_ids_to_tokens(
        self, ids: int | Iterable[int], skip_special_tokens: bool = False
    ) -> str | list[str | None] | None:
        """Return the spelling of a token, or of several."""
        if isinstance(ids, int):
            return self._tokenizer.id_to_token(ids)
        hidden = self._tokenizer.special_ids if skip_special_tokens else ()
        return [self._tokenizer.id_to_token(i) for i in ids if i not in hidden]

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> int | list[int | None] | None:
        """Return the ID of a token, or of several; None for one that is not in the vocabulary."""
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [*map(self._tokenizer.token_to_id, tokens)]

    def get_vocab(self) -> dict[str, int]:
        """Return the IDs of all tokens by their spelling."""
        return self._tokenizer.vocabulary()

    @property
    def vocab(self) -> dict[str, int]:
        """The IDs of all tokens by their spelling."""
        return self.get_vocab()

    @property
    def vocab_size(self) -> int:
        """The number of tokens without the added ones, as in transformers. `len` counts all."""
        return len(self._tokenizer.vocabulary(has_added=False))

    @property
    def all_special_ids(self) -> list[int]:
        """The IDs of the special tokens."""
        return sorted(self._tokenizer.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens."""
        return [*map(str, map(self._tokenizer.id_to_token, self.all_special_ids))]

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """The tokens that have a name, such as `bos_token`."""
        names = ("bos_token", "eos_token", "pad_token")
        tokens = self._tokenizer.named_tokens | {name: getattr(self, name) for name in names}
        return {name: token for name, token in tokens.items() if token is not None}

    @property
    def chat_template(self) -> str | None:
        """The source of the model's chat template; None without one."""
        return self._tokenizer.chat_templates.get("default")

    def apply_chat_template(
        self,
        conversation: Conversation | Sequence[Conversation],
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **variables: Any,
    ) -> str | list[str] | list[int] | list[list[int]] | Encoding:
        """Return the prompt of a conversation, or of each of several, as tokens or as text.

        Args:
            conversation: Messages in OpenAI's format, or a list of conversations.
            tools: Function definitions in OpenAI's format.
            documents: Documents for templates that use them.
            chat_template: A template or the path of one, instead of the model's own.
            add_generation_prompt: True if the prompt ends with the start of an assistant message.
            continue_final_message: True if the model continues the last message.
            tokenize: False returns texts.
            return_dict: False returns lists of token IDs in place of `input_ids` and `attention_mask`.
            variables: Extra variables for the template.

        Raises:
            ParameterError: There is no chat template, or a parameter is invalid.
            ChatTemplateError: The template rejects the messages.
        """
        template = self._find_template(chat_template, bool(tools))
        is_one = bool(conversation) and isinstance(conversation[0], Mapping)
        conversations: Any = [conversation] if is_one else conversation
        texts = [
            template.render(
                each,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
            for each in conversations
        ]
        if not tokenize:
            return texts[0] if is_one else texts
        found = self(texts[0] if is_one else texts, add_special_tokens=False)
        return found if return_dict else found["input_ids"]
