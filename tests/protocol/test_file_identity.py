"""Changes of a model's files since the start of the server are detected."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
from engine.protocol.checkpoint.content_hash import hash_content
from engine.protocol.checkpoint.files import find_tokenizer_files, find_weight_files
from engine.protocol.errors import CheckpointError
from engine.protocol.file_identity import HEAD_BYTES, identify_copies, identify_files, verify_files
from safetensors.numpy import save_file
from support.gguf.finish import finish


def test_every_kind_of_change_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    content = b"head" + bytes(2 * HEAD_BYTES)
    path.write_bytes(content)
    files = identify_files([path], hash_content)
    verify_files(files)
    (time,) = (file.modified_ns for file in files)

    def refused(match: str) -> None:
        with pytest.raises(CheckpointError, match=match) as error:
            verify_files(files)
        assert str(path) in str(error.value)

    path.write_bytes(content[:-1])
    refused(f"its size was {len(content)} bytes and is {len(content) - 1}")
    path.write_bytes(content[:-1] + b"x")
    os.utime(path, ns=(time, time + 1))
    refused("its modification time is new")
    path.write_bytes(b"HEAD" + content[4:])
    os.utime(path, ns=(time, time))
    refused("its first bytes are different")
    path.unlink()
    refused("cannot be read")
    path.write_bytes(content)
    os.utime(path, ns=(time, time))
    verify_files(files)


def test_a_revision_with_another_small_tensor_has_another_identity(tmp_path: Path) -> None:
    tensors = {f"t{n}": np.full(24 if n % 2 else 1 << 19, n, np.float32) for n in range(16)}
    paths = [tmp_path / "model.safetensors", tmp_path / "model.gguf"]

    def write() -> list[bytes]:
        save_file(tensors, paths[0])
        writer = gguf.GGUFWriter(paths[1], "llama")
        for name, tensor in tensors.items():
            writer.add_tensor(name, tensor)
        finish(writer)
        return [file.content for file in identify_files(paths, hash_content)]

    before = write()
    assert write() == before
    for name in ("t5", "t15"):
        tensors[name][7] += 1
        assert not set(write()) & set(before)
        tensors[name][7] -= 1
    tensors["t0"], tensors["t2"] = tensors["t2"], tensors["t0"]
    assert not set(write()) & set(before)


def test_another_machine_must_have_identical_files(tmp_path: Path) -> None:
    original, copy = tmp_path / "a.gguf", tmp_path / "b.gguf"
    original.write_bytes(b"model")
    copy.write_bytes(b"model")
    os.utime(copy, ns=(1, 1))
    files = identify_files([original], hash_content)
    assert identify_copies([copy], files, hash_content) == identify_files([copy], hash_content)
    copy.write_bytes(b"Model")
    with pytest.raises(CheckpointError, match=r"b\.gguf: differs from .*a\.gguf"):
        identify_copies([copy], files, hash_content)
    with pytest.raises(CheckpointError, match="the model has 0 files on this machine and 1"):
        identify_copies([], files, hash_content)


def test_all_shards_and_templates_are_part_of_the_identity(tmp_path: Path) -> None:
    names = ("config.json", "a-1.safetensors", "a-2.safetensors", "model.safetensors.index.json")
    for name in (*names, "tokenizer.json", "chat_template.jinja", "README.md"):
        (tmp_path / name).write_text(name)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("x")
    assert {path.name for path in find_weight_files(tmp_path)} == set(names)
    tokenizer = {path.name for path in find_tokenizer_files(tmp_path)}
    assert tokenizer == {"tokenizer.json", "chat_template.jinja", "rag.jinja"}
    for i in (1, 2):
        (tmp_path / f"m-0000{i}-of-00002.gguf").touch()
    (tmp_path / "m.gguf").touch()
    split = find_weight_files(tmp_path / "m-00001-of-00002.gguf")
    assert [path.name for path in split] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert find_weight_files(tmp_path / "m.gguf") == [tmp_path / "m.gguf"]
