"""Molmo 2 gives the logits of transformers."""

import random

import pytest
import torch
import transformers
from support.decoders import Runner, load_decoder, load_native_decoder

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
NUM_TOKENS, NUM_ADDED = 97, 8
TEXT = {
    "vocab_size": NUM_TOKENS,
    "additional_vocab_size": NUM_ADDED,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
OLMO = {
    "norm_after": True,
    "qk_norm_type": "olmo",
    "attention_bias": True,
    "rope_scaling_layers": [1],
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
PATCH = 4
TOWER = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "image_size": [28, 28],
    "patch_size": PATCH,
}
ADAPTER = {
    "hidden_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 40,
    "text_hidden_size": 48,
    "vision_feature_layer": [2, 0],
}


def _model(text):
    config = transformers.Molmo2Config(
        text_config=TEXT | text,
        vision_config=TOWER,
        adapter_config=ADAPTER,
        image_patch_id=NUM_TOKENS + 2,
    )
    torch.manual_seed(0)
    model = transformers.Molmo2ForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    )
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 0.8 if "norm" in name else 0.0, 0.2)
    return model.eval()


@pytest.mark.parametrize(("text", "is_original"), [({}, True), (OLMO, True), ({}, False)])
def test_logits_of_text_equal_those_of_transformers(tmp_path, text, is_original):
    model = _model(text)
    model.save_pretrained(tmp_path, save_original_format=is_original)
    # Prompts may have the tokens that the model never writes.
    prompt = random.Random(1).choices(range(NUM_TOKENS + NUM_ADDED), k=60)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt])).logits[0]
    for load in (load_decoder, load_native_decoder):
        runner = Runner(load(tmp_path, max_model_len=256), 1, max_tokens=256)
        chunks = prompt[:25], prompt[25:]
        found = torch.cat([runner.step({0: chunk})[0] for chunk in chunks])
        torch.testing.assert_close(found[:, :NUM_TOKENS], expected, atol=1e-4, rtol=1e-4)
        assert found.shape[1] == NUM_TOKENS + NUM_ADDED
        assert found[:, NUM_TOKENS:].max() < -1e20
