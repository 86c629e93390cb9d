"""InstructBLIP of transformers, whose Q-Former reads the text of the prompt, and its greedy answers."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from PIL import Image
from support.checkpoints.tiny import sentencepiece_tokenizer
from support.own_code.model import fill
from tokenizers.processors import TemplateProcessing

_SIDE = 24
_NUM_QUERIES = 6
_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80}
_DECODERS: dict[str, dict[str, Any]] = {
    "llama": _SIZES | {"hidden_size": 64, "num_key_value_heads": 2},
    "opt": _SIZES | {"hidden_size": 64, "ffn_dim": 80, "word_embed_proj_dim": 64},
    "t5": {"d_model": 64, "d_ff": 80, "d_kv": 16, "num_layers": 2, "num_heads": 4}
    | {
        "feed_forward_proj": "gated-gelu",
        "decoder_start_token_id": 0,
        "tie_word_embeddings": False,
    },
}


class InstructBlip:
    """A checkpoint with a `decoder` of this type, and transformers' processor and model of it."""

    def __init__(self, directory: Path, decoder: str, max_text_tokens: int = 80) -> None:
        self.path = directory
        tokenizer = sentencepiece_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
        start, end = "<bos>:0 ", ""
        if decoder == "t5":
            start, end = "", " <eos>:0"
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{start}$A:0{end}", special_tokens=[("<bos>", 2), ("<eos>", 1)]
        )
        config = transformers.InstructBlipConfig(
            vision_config={**_SIZES, "hidden_size": 32, "image_size": _SIDE, "patch_size": 6},
            qformer_config={**_SIZES, "num_hidden_layers": 3, "hidden_size": 40, "vocab_size": 99}
            | {"max_position_embeddings": max_text_tokens, "encoder_hidden_size": 32},
            text_config={"model_type": decoder, "vocab_size": len(tokenizer)}
            | {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
            | _DECODERS[decoder],
            num_query_tokens=_NUM_QUERIES,
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        )
        self.model = transformers.InstructBlipForConditionalGeneration(config)
        fill(self.model)
        self.model.save_pretrained(directory)
        sizes = {"height": _SIDE, "width": _SIDE}
        self.processor = transformers.InstructBlipProcessor(
            transformers.BlipImageProcessorPil(size=sizes),
            tokenizer,
            _letters(),
            num_query_tokens=_NUM_QUERIES,
        )
        self.processor.save_pretrained(directory)

    @torch.inference_mode()
    def logprobs(
        self, image: Image.Image, text: str, written: list[int]
    ) -> tuple[list[int], torch.Tensor]:
        """Return the tokens of the decoder's prompt, and the log-probabilities at the places of `written`."""
        inputs = self.processor(images=image, text=text, return_tensors="pt")
        prompt = inputs["input_ids"][0].tolist()
        if self.model.language_model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = torch.tensor([[0, *written[:-1]]])
            prompt, logits = [0], self.model(**inputs).logits[0]
        else:
            inputs["input_ids"] = torch.tensor([[*prompt, *written]])
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            logits = self.model(**inputs).logits[0, len(prompt) - 1 : -1]
        return prompt, logits.log_softmax(-1)


def _letters() -> transformers.BertTokenizer:
    """Return a tokenizer of the Q-Former, which has letters."""
    texts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *string.ascii_lowercase]
    texts += [f"##{letter}" for letter in string.ascii_lowercase]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({text: i for i, text in enumerate(texts)}, unk_token="[UNK]")
    )
    return transformers.BertTokenizer(vocab=dict(backend.get_vocab()))
