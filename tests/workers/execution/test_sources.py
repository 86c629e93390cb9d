"""Encoder-decoder models give the logits of transformers, whatever shares the step."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from engine.frontend.client.encoder_inputs import text_source
from engine.protocol.arrays import float32_view, int32_bytes, int32_view
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.checkpoint.speech import read_audio_processor
from engine.protocol.config import CPUBackend, DeviceConfig
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.protocol.encoder_inputs.payloads import ImagePayload
from engine.protocol.pooling_params import PoolingKind, PoolingParams
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import EncoderWork, ModelRunnerOutput
from PIL import Image
from support.checkpoints.source import greedy, logits, source, source_directory, write_generation
from support.checkpoints.source_models import MODELS, SPEECH, VOCAB_SIZE
from support.gguf.t5 import write_t5
from support.gpu.host_accelerator import HostAccelerator
from support.media.image_requests import picture
from support.vision.florence2 import SIDE, florence2_directory, next_logprobs
from support.workers.worker_steps import Steps
from transformers.models.whisper.generation_whisper import _median_filter

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
SCORED = SamplingParams(temperature=0, logprobs=-1)
BACKENDS = {
    "native": {"device": DeviceConfig(cpu_backend=CPUBackend.NATIVE)},
    "torch": {"device": DeviceConfig(cpu_backend=CPUBackend.TORCH)},
    "device": {
        "device": DeviceConfig(cpu_backend=CPUBackend.TORCH),
        "accelerator": HostAccelerator(),
    },
}

IN_TORCH = {"global-longt5", "led", "pegasus_x", "prophetnet", "switch"}
"""The models that native programs do not compute."""


def encode(*rows: tuple[int, int]) -> EncoderWork:
    """Return the work to compute inputs, given as (slot, index)."""
    return EncoderWork(computed=int32_bytes([number for row in rows for number in row]))


def scores(output: ModelRunnerOutput, vocab_size: int = VOCAB_SIZE) -> list[np.ndarray]:
    """Return the log-probabilities of each row, by token."""
    found = []
    for row in output.logprobs:
        of_row = np.empty(vocab_size, np.float32)
        of_row[int32_view(row.token_ids)] = float32_view(row.logprobs)
        found.append(of_row)
    return found


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *(
            (kind, backend)
            for backend in BACKENDS
            for kind in MODELS
            if backend != "native" or kind not in IN_TORCH
        ),
        *((f"{kind} gguf", "native") for kind in ("flan-t5", "t5", "umt5")),
        ("flan-t5 gguf", "torch"),
    ],
)
def test_logits_equal_those_of_transformers(tmp_path, kind, backend):
    kind, *in_gguf = kind.split()
    # GGUF files do not contain the maximum distance.
    changes = {"relative_attention_max_distance": 128} if in_gguf else {}
    path, model = source_directory(tmp_path, kind, changes)
    if in_gguf:
        path = write_t5(tmp_path / "tiny.gguf", model)
    steps = Steps(path, VOCAB_SIZE, block_size=16, **BACKENDS[backend])
    sources = [
        source(model, seed, length)
        for seed, length in ((0, 0), (1, 2000 if kind in SPEECH else 37))
    ]
    prompts = [[3, 5, 7, 11], [3, 8]]

    def new(slot: int, inputs: list[EncoderInput]):
        return steps.new(slot, prompts[slot], SCORED, inputs=inputs)

    texts = [list(prompt) for prompt in prompts]

    def check(output: ModelRunnerOutput, slots: list[int]) -> None:
        tokens = int32_view(output.sampled_token_ids).tolist()
        for slot, found, token in zip(slots, scores(output), tokens, strict=True):
            expected = logits(model, sources[slot][0], texts[slot])[-1].log_softmax(-1)
            np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)
            texts[slot].append(token)

    new_a = new(0, [sources[0][1]])
    check(steps.run(slots=[0], chunks=[(0, 4)], new=[new_a], encoders=encode((0, 0))), [0])
    # The second prompt is computed in chunks, beside a request that decodes.
    new_b = new(1, [sources[1][1]])
    check(steps.run(slots=[0, 1], new=[new_b], encoders=encode((1, 0))), [0])
    for _ in range(20):
        check(steps.run(slots=[0, 1]), [0, 1])
    for slot in (0, 1):
        expected = greedy(model, sources[slot][0], prompts[slot], 20)
        assert texts[slot][len(prompts[slot]) :][:20] == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_alignments_are_the_attention_of_transformers_heads(tmp_path, backend):
    path, model = source_directory(tmp_path, "whisper")
    write_generation(path, alignment_heads=[[0, 2], [2, 1], [2, 5]])
    fields = [ConfigFields.read(path / f"{name}.json") for name in ("config", "generation_config")]
    audio = read_audio_processor(path, *fields)
    steps = Steps(path, VOCAB_SIZE, block_size=16, audio=audio, **BACKENDS[backend])
    inputs, item = source(model, 0)
    prompt, frames = [3, 5, 7, 11, 13, 20, 33], 31
    pooling = PoolingParams(PoolingKind.ALIGNMENT, True, num_frames=frames)
    aligned = steps.new(1, prompt, inputs=[item], pooling=pooling)
    other = steps.new(0, [3, 5], inputs=[item])
    begin = {"new": [other, aligned], "encoders": encode((0, 0)), "slots": [0, 1]}
    first = steps.run(chunks=[(0, 2), (1, 4)], **begin)
    last = steps.run(slots=[0, 1], chunks=[(1, 3)])
    assert not first.pooled and [row.slot for row in last.pooled] == [1]
    with torch.inference_mode():
        output = model(inputs, decoder_input_ids=torch.tensor([prompt]), output_attentions=True)
    heads = [output.cross_attentions[i][0, j] for i, j in audio.alignment_heads]
    weights = torch.stack(heads)[..., :frames]
    deviation, mean = torch.std_mean(weights, 1, keepdim=True, correction=0)
    normed = (weights - mean) / deviation
    expected = _median_filter(normed[None], 7)[0].mean(0)
    found = float32_view(last.pooled[0].vector).reshape(len(prompt), frames)
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-3)
    # The queries of later steps are not recorded.
    steps.run(slots=[0], removed=[1])


@pytest.mark.parametrize("is_published", [False, True])
def test_images_replace_tokens_of_a_source(tmp_path, is_published):
    path, model, processor = florence2_directory(tmp_path, is_published=is_published)
    size = model.config.text_config.vocab_size
    steps = Steps(path, size, block_size=16, **BACKENDS["native"])
    prompts, pictures = ("<CAPTION>", "a cat"), (picture(1, 90, 60), picture(2, 50, 80))
    texts = [[2, 5], [2]]
    new = []
    for slot, (prompt, image) in enumerate(zip(prompts, pictures, strict=True)):
        inputs = processor(text=prompt, images=image, return_tensors="np")
        resized = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        values = processor.image_processor
        pixels = ImagePayload(
            *(SIDE, SIDE, resized.tobytes(), values.rescale_factor),
            *(tuple(values.image_mean), tuple(values.image_std)),
        )
        placed = EncoderInput(0, 10, b"", 10, msgspec.msgpack.encode(pixels))
        tokens = inputs["input_ids"][0].astype(np.int32)
        new.append(steps.new(slot, texts[slot], SCORED, inputs=[text_source(tokens, [placed])]))
    begin = {"new": new, "chunks": [(0, 2), (1, 1)], "encoders": encode((0, 0), (1, 0))}
    for number in range(4):
        output = steps.run(slots=[0, 1], **({} if number else begin))
        tokens = int32_view(output.sampled_token_ids).tolist()
        for slot, found in enumerate(scores(output, size)):
            expected = next_logprobs(model, processor, prompts[slot], pictures[slot], texts[slot])
            np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)
            texts[slot].append(tokens[slot])
