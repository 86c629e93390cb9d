"""A trainer that joins a group with a server and broadcasts tensors: `trainer.py URL CHECKPOINT JSON_SETTINGS`."""

from __future__ import annotations

import json
import os
import socket
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import distributed as dist
from torch.distributed import distributed_c10d


def main(url: str, path: str, settings: dict[str, Any]) -> None:
    def post(route: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(
            f"{url}/{route}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            urllib.request.urlopen(request, timeout=60).close()
        except urllib.error.HTTPError as error:
            sys.exit(f"{error.code} {error.read().decode()}")

    with urllib.request.urlopen(f"{url}/get_world_size") as answer:
        world_size = 1 + json.load(answer)["world_size"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    of_sglang, is_packed = settings["dialect"] == "sglang", settings["packed"]
    group: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": port}
    group |= {"rank_offset": 1, "world_size": world_size}
    tensors = {
        name: value
        for file in Path(path).glob("*.safetensors")
        for name, value in load_file(file).items()
    }
    tensors = {name: tensors[name] for name in settings.get("names", tensors)}
    options = dist.BroadcastOptions()
    options.rootRank = 0
    chunk_bytes = settings.get("chunk_bytes", 1 << 40) if is_packed else 0
    with ThreadPoolExecutor(1) as pool:
        if of_sglang:
            joined = pool.submit(post, "init_weights_update_group", {**group, "backend": "gloo"})
            member = named_group(port, world_size)
        else:
            packing = {"packed": is_packed, "packed_buffer_size_bytes": chunk_bytes}
            joined = pool.submit(
                post, "init_weight_transfer_engine", {"init_info": {**group, **packing}}
            )
            store = dist.TCPStore("127.0.0.1", port, world_size, True)
            member = dist.ProcessGroupGloo(store, 0, world_size, timedelta(seconds=60))
        joined.result()
        for _ in range(settings.get("rounds", 1)):
            post("begin_weight_update" if of_sglang else "start_weight_update", {})
            announced: dict[str, Any] = {
                "names": [*tensors],
                "shapes": [[*value.shape] for value in tensors.values()],
                "dtypes" if of_sglang else "dtype_names": [
                    str(value.dtype).removeprefix("torch.") for value in tensors.values()
                ],
            }
            announced |= settings.get("announced", {})
            if of_sglang:
                flat = {"load_format": "flattened_bucket"} if is_packed else {}
                sent = pool.submit(post, "update_weights_from_distributed", announced | flat)
            else:
                sent = pool.submit(post, "update_weights", {"update_info": announced})
            for number, part in enumerate(broadcasts(list(tensors.values()), chunk_bytes)):
                if number == settings.get("ends_before"):
                    os._exit(1)
                if number == settings.get("stalls_before"):
                    wait([sent])
                try:
                    member.broadcast([part], options).wait()
                except RuntimeError:
                    # The server has left the group and says why.
                    break
            sent.result()
            version = {"weight_version": settings["version"]} if "version" in settings else {}
            post("end_weight_update" if of_sglang else "finish_weight_update", version)


def broadcasts(tensors: list[torch.Tensor], chunk_bytes: int) -> list[torch.Tensor]:
    parts: list[torch.Tensor] = []
    waiting: list[torch.Tensor] = []
    for tensor in tensors:
        if not chunk_bytes:
            parts.append(tensor)
            continue
        waiting.append(tensor.contiguous().view(-1).view(torch.uint8))
        if sum(each.numel() for each in waiting) > chunk_bytes:
            parts.append(torch.cat(waiting))
            waiting.clear()
    return [*parts, torch.cat(waiting)] if waiting else parts


def named_group(port: int, world_size: int) -> Any:
    """Return a group as trainers for SGLang make it beside their own default group."""
    timeout, name = timedelta(seconds=60), "weight_update_group"
    store, *_ = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=timeout))
    store = distributed_c10d.PrefixStore(name, store)
    # Frameworks for training copy this call.
    make = distributed_c10d._new_process_group_helper  # noqa: SLF001
    group, _ = make(
        world_size, 0, [], distributed_c10d.Backend("gloo"), store, group_name=name, timeout=timeout
    )
    return group


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
