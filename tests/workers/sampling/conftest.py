from collections.abc import Iterator
from functools import cache

import pytest
import torch
from engine.workers.cpu.decoder import NativeDecoder
from support.workers.native_decoders import native_decoder, small_spec
from support.workers.sampler_rows import NewRows, Rows


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, because tests share the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["torch", "native"])
def new_rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NewRows:
    """Return a function that makes rows of the torch or the native sampler."""
    if request.param == "torch":
        return Rows

    @cache
    def decoder(vocab_size: int) -> NativeDecoder:
        spec = small_spec(vocab_size=vocab_size)
        return native_decoder(spec, tmp_path_factory.mktemp("model"), num_threads=1)

    return lambda vocab_size: Rows(vocab_size, decoder=decoder(vocab_size))
