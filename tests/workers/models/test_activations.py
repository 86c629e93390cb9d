"""The activations of MLPs are those of transformers, in torch and in native programs."""

import random

import pytest
import torch
from engine.workers.layers.activations import ACTIVATIONS, NAMES_IN_CONFIGS
from engine.workers.layers.layer_spec import LayerSpec
from support.checkpoints.random import random_checkpoint
from support.workers.decoders import Runner
from support.workers.native_decoders import ROPE, native_decoder, small_spec, torch_decoder
from transformers.activations import ACT2FN

WITH_PARAMETERS = {"prelu", "xielu"}
OF_FLASH_LINEAR_ATTENTION = {"sqrelu"}


def test_activations_are_those_of_transformers():
    names = {*NAMES_IN_CONFIGS} - OF_FLASH_LINEAR_ATTENTION
    # The square root is a scoring function of routers.
    assert names | WITH_PARAMETERS == {*ACT2FN} - {"sqrtsoftplus"}
    x = torch.linspace(-30, 30, 4001)
    for name in names - WITH_PARAMETERS:
        found, expected = ACTIVATIONS[NAMES_IN_CONFIGS[name]](x), ACT2FN[name](x)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_native_activations_equal_those_of_torch(name, tmp_path):
    tokens = random.Random(0).choices(range(97), k=20)
    for has_gate in (True, False):
        spec = small_spec(activation=name, has_gate=has_gate, layers=(LayerSpec(ROPE),))
        (path := tmp_path / str(has_gate)).mkdir()
        checkpoint = random_checkpoint(path, spec)
        logits, expected = (
            Runner(make(spec, checkpoint)).step({0: tokens})[0]
            for make in (native_decoder, torch_decoder)
        )
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-5)
