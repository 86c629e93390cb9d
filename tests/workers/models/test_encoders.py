"""Every encoder gives the hidden states of transformers, whatever shares the step."""

import random
import re

import pytest
import torch
import transformers
from support.decoders import Runner, load_decoder, load_native_decoder

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 1200,
}
MODELS = {
    "bert": ("BertModel", {}),
    "bert-masked-lm": ("BertForMaskedLM", {"hidden_act": "gelu_new"}),
    "distilbert": (
        "DistilBertModel",
        {"dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 6},
    ),
    "roberta": ("RobertaModel", {"pad_token_id": 1}),
    "xlm-roberta": ("XLMRobertaModel", {"pad_token_id": 1}),
}


@pytest.fixture(scope="module", params=[*MODELS, *(f"{name} native" for name in MODELS)])
def models(request, tmp_path_factory):
    """Engine's encoder and the model of transformers."""
    key, *native = request.param.split()
    name, differences = MODELS[key]
    path = tmp_path_factory.mktemp(key)
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    config = model_class.config_class(**SMALL | differences)
    reference = model_class._from_config(config, attn_implementation="eager")
    for parameter_name, parameter in reference.named_parameters():
        if re.search(r"[Nn]orm|bias$", parameter_name):
            torch.nn.init.normal_(parameter, 0.8, 0.3)
        else:
            torch.nn.init.normal_(parameter, 0, 0.15)
    reference.save_pretrained(path)
    load = load_native_decoder if native else load_decoder
    return load(path, max_model_len=1100), reference.eval()


def test_hidden_states_equal_those_of_transformers(models):
    encoder, reference = models
    runner = Runner(encoder, num_requests=6, max_tokens=1100)
    rng = random.Random(1)
    prompts = {
        request: [rng.randrange(2, SMALL["vocab_size"]) for _ in range(length)]
        for request, length in enumerate((1, 7, 190, 64, 1100, 300))
    }
    hidden = runner.hidden(prompts).split([len(prompt) for prompt in prompts.values()])
    for prompt, found in zip(prompts.values(), hidden, strict=True):
        with torch.inference_mode():
            outputs = reference(torch.tensor([prompt]), output_hidden_states=True)
        torch.testing.assert_close(found, outputs.hidden_states[-1][0], atol=1e-4, rtol=1e-4)
