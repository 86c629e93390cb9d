"""Native tower layers compute the same results as torch, with the same bits regardless of earlier inputs."""

import pytest
import torch
from engine.workers.cpu.tower_layers import NativeLayers
from engine.workers.towers.layers import LayersSpec, LayerWeights, Patches, TorchLayers
from engine.workers.towers.rotary import PatchRotary, grid_places
from engine.workers.towers.weights import Linear, Norm

SIZE, INNER, HEADS = 32, 48, 2
SPEC = LayersSpec(
    hidden_size=SIZE,
    intermediate_size=INNER,
    num_heads=HEADS,
    head_dim=SIZE // HEADS,
    feature_layers=(1, 3),
    activation="quick_gelu",
    rotary=PatchRotary("joined", 10_000.0, SIZE // HEADS),
    full_layers=(2,),
)


def _weights():
    torch.manual_seed(1)

    def linear(rows, columns):
        return Linear(torch.randn(rows, columns) / columns**0.5, torch.randn(rows) / 10)

    def norm():
        return Norm(torch.rand(SIZE) + 0.5, torch.randn(SIZE) / 10, SPEC.norm_eps, is_rms=False)

    for _ in range(SPEC.num_layers):
        yield LayerWeights(
            norm(),
            [linear(3 * SIZE, SIZE)],
            linear(SIZE, SIZE),
            norm(),
            None,
            linear(INNER, SIZE),
            linear(SIZE, INNER),
        )


def _inputs(num_rows, num_columns, windows):
    torch.manual_seed(num_rows)
    x = torch.randn(num_rows * num_columns, SIZE)
    return x, Patches(grid_places(num_rows, num_columns, x.device), windows)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_memory_of_large_images_changes_no_bit_of_small_ones(num_threads):
    native = NativeLayers(SPEC, _weights(), num_threads)
    reference = TorchLayers(SPEC, _weights())
    small = _inputs(6, 10, [(2, 20), (1, 12), (2, 4)])
    # More rows than the program keeps memory for.
    large = _inputs(60, 70, [(60, 70)])
    first = native(*small)
    for inputs in (large, small):
        found, expected = native(*inputs), reference(*inputs)
        assert list(found) == list(expected) == [1, 3]
        for layer, hidden in found.items():
            torch.testing.assert_close(hidden, expected[layer], atol=1e-4, rtol=1e-4)
    for layer, hidden in native(*small).items():
        assert torch.equal(hidden, first[layer])
