"""The bits of a recurrent layer's outputs depend neither on the division of a prompt nor on other requests."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from engine.protocol.kv_cache_groups import AttentionKind, KVCacheGroup
from engine.workers.layers.layers import LayerKernels
from engine.workers.layers.parallel.shard import ModelShard
from engine.workers.loaders.open_checkpoint import open_checkpoint
from engine.workers.models.families import model_spec
from engine.workers.models.layer_source import LayerSource
from engine.workers.models.mixers import StateBatch, make_mixer
from engine.workers.models.weights import weight_reader
from support.checkpoints.tiny import RECURRENT, layers_directory
from support.families import assert_same, expected_logits, prompt
from support.families.published.rwkv import RWKV, save_rwkv, write_rwkv
from support.workers.batches import Scheduled, attention_batch
from support.workers.decoders import Runner, load_decoder, load_native_decoder

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
BLOCK_SIZE = 20
LENGTH = 100


class RowByRow(LayerKernels):
    """Products whose bits do not depend on the number of rows."""

    def linear(self, weight, bias_O=None):
        multiply = super().linear(weight, bias_O)
        return lambda x_TD: torch.cat([multiply(x_1D) for x_1D in x_TD.split(1)])


class Sequences:
    """Sequences of random inputs, whose states are in scattered blocks of one layer."""

    def __init__(self, mixer, layer, inputs_NLD):
        self._mixer, self._layer, self._inputs_NLD = mixer, layer, inputs_NLD
        count, dtype = len(inputs_NLD), inputs_NLD.dtype
        ids = random.Random(2).sample(range(1, 64), 63)
        self._blocks = [ids[i::count] for i in range(count)]
        # Blocks may hold anything before they are used.
        num_bytes = layer.state_parts.size(1).num_bytes(dtype.itemsize)
        self._memory = torch.full((64, num_bytes), 255, dtype=torch.uint8)
        self._computed = [0] * count

    def step(self, lengths, num_rejected=0):
        """Compute as many tokens of each sequence, and return their outputs.

        At most `num_rejected` wrong tokens come after them, as many as may be rejected.
        """
        scheduled, inputs = [], []
        for index, length in lengths.items():
            start = self._computed[index]
            end = self._computed[index] = start + length
            count = most_drafts(self._layer, end, num_rejected, BLOCK_SIZE)
            blocks = self._blocks[index][: -(-(end + count) // BLOCK_SIZE)]
            scheduled.append(Scheduled(start, length + count, blocks))
            inputs += [self._inputs_NLD[index, start:end], -self._inputs_NLD[index, :count]]
        batch = attention_batch(scheduled, BLOCK_SIZE)
        plan = StateBatch.build(batch, BLOCK_SIZE, self._layer, CPU)
        y_TD = self._mixer.forward(torch.cat(inputs), self._memory, plan)
        parts = y_TD.split([part.num_scheduled for part in scheduled])
        return {
            index: y_TD[:length]
            for (index, length), y_TD in zip(lengths.items(), parts, strict=True)
        }


def most_drafts(layer, num_tokens, num_drafts, block_size):
    """Return how many drafts may follow the first tokens of a sequence."""
    group = KVCacheGroup(AttentionKind.STATE_SPACE, layer.segment)
    return int(group.limit_drafts(np.array([num_drafts]), np.array([num_tokens]), block_size)[0])


def _save_layers(kind, path):
    layers_directory(path, kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [*RECURRENT, *RWKV])
def test_outputs_have_equal_bits_in_any_chunks_beside_any_requests(tmp_path, kind, dtype):
    """Rejected drafts do not matter either."""
    torch.set_num_threads(1)
    (save_rwkv if kind in RWKV else _save_layers)(kind, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    spec = model_spec(checkpoint.config, tmp_path)
    layer = spec.layers[0].recurrent
    weights = weight_reader(checkpoint, dtype, CPU, has_head=False, tensor_names=spec.tensor_names)
    shard = ModelShard.whole(spec)
    source = LayerSource(spec, weights, "layers.0.mixer.", shard, RowByRow())
    mixer = make_mixer(layer, source)
    generator = torch.Generator().manual_seed(1)
    inputs_NLD = torch.randn(4, LENGTH, spec.hidden_size, generator=generator).to(dtype)
    whole = Sequences(mixer, layer, inputs_NLD)
    expected = [whole.step({index: LENGTH})[index] for index in range(4)]
    assert all(y_TD.isfinite().all() for y_TD in expected)
    rng, mixed = random.Random(5), Sequences(mixer, layer, inputs_NLD)
    outputs, left = [[] for _ in range(4)], [LENGTH] * 4
    while unfinished := [i for i in range(4) if left[i]]:
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        lengths = {i: min(left[i], rng.choice([1, 1, 3, 16, 33])) for i in chosen}
        for index, y_TD in mixed.step(lengths, rng.randrange(9)).items():
            outputs[index].append(y_TD)
            left[index] -= len(y_TD)
    for parts, y_TD in zip(outputs, expected, strict=True):
        assert torch.equal(torch.cat(parts), y_TD)


@pytest.mark.parametrize("options", [{}, {"quantization": "int4"}], ids=["float32", "int4"])
@pytest.mark.parametrize("kind", RECURRENT)
def test_native_logits_have_equal_bits_in_any_chunks_beside_any_requests(tmp_path, kind, options):
    """Long prompts are computed in slices, on one thread or two. Rejected drafts do not matter either."""
    path, _ = layers_directory(tmp_path, kind)
    alone, pair = (load_native_decoder(path, num_threads=count, **options) for count in (1, 2))
    layer = next(x.recurrent for x in alone.spec.layers if x.recurrent)
    lengths, rng = [700, 100, 33, 530, 16], random.Random(5)
    prompts = [rng.choices(range(300), k=length) for length in lengths]
    whole = Runner(alone, len(prompts), 1024)
    expected = [whole.step({i: tokens})[i] for i, tokens in enumerate(prompts)]
    assert all(logits.isfinite().all() for logits in expected)
    together = Runner(pair, len(prompts), 1024).step(dict(enumerate(prompts)))
    mixed, parts = Runner(pair, len(prompts), 1024), [[] for _ in prompts]
    while unfinished := [i for i, length in enumerate(lengths) if mixed.computed[i] < length]:
        chunks, ends = {}, {}
        for i in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            start = mixed.computed[i]
            tokens = prompts[i][start : start + rng.choice([1, 1, 3, 16, 33, 600])]
            ends[i] = start + len(tokens)
            num_drafts = most_drafts(layer, ends[i], rng.randrange(9), mixed.block_size)
            chunks[i] = tokens + rng.choices(range(300), k=num_drafts)
        for i, logits in mixed.step(chunks).items():
            parts[i].append(logits[: len(logits) + ends[i] - mixed.computed[i]])
            mixed.computed[i] = ends[i]
    for i, logits in enumerate(expected):
        assert torch.equal(together[i], logits)
        assert torch.equal(torch.cat(parts[i]), logits)


@pytest.mark.parametrize("name", RWKV)
def test_logits_of_rwkv_equal_those_of_a_loop_over_tokens_in_any_chunks(tmp_path, name):
    reference = save_rwkv(name, tmp_path)
    texts = [prompt(length, seed) for seed, length in enumerate([60, 43, 17])]
    rng, runner = random.Random(7), Runner(load_decoder(tmp_path), len(texts))
    logits = [[] for _ in texts]
    while unfinished := [i for i, text in enumerate(texts) if runner.computed[i] < len(text)]:
        chunks = {}
        for i in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            start = runner.computed[i]
            chunks[i] = texts[i][start : start + rng.choice([1, 1, rng.randint(2, 40)])]
        for i, part in runner.step(chunks).items():
            logits[i].append(part)
    for parts, text in zip(logits, texts, strict=True):
        assert_same(torch.cat(parts), expected_logits(reference, text))


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("rwkv7", {}),
        ("arwkv7", {}),
        ("rwkv6", {"expand_k": 1.0, "norm_eps": 64e-5}),
        ("qrwkv6", {}),
    ],
)
def test_gguf_files_of_rwkv_give_the_same_logits(tmp_path, name, others):
    # The epsilon of the heads' outputs is a constant of llama.cpp.
    reference = save_rwkv(name, tmp_path, **{"norm_eps": 4e-5} | others)
    tokens = prompt(40)
    decoder = load_decoder(write_rwkv(tmp_path / "model.gguf", reference))
    assert_same(Runner(decoder).step({0: tokens})[0], expected_logits(reference, tokens))
