"""The request bodies of the routes with which a trainer sends weights."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from .. import Int

Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Rank = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class GroupFields(msgspec.Struct, kw_only=True):
    """The group of a trainer, which has rank 0."""

    # The host of the trainer's TCPStore, and its port.
    master_address: str
    master_port: Port
    # The rank of the first worker.
    rank_offset: Rank = 1
    # The number of ranks, those of the trainer included.
    world_size: Rank


class VllmInitInfo(GroupFields, kw_only=True):
    """The value of `init_info`."""

    # True if a broadcast has several tensors, as bytes, and ends when it has more than `packed_buffer_size_bytes`.
    packed: bool = False
    packed_buffer_size_bytes: Size = 1 << 30

    # Accepted because clients send it; it has no effect.
    packed_num_buffers: Int | None = None

    # Rejected, because an answer that ignores it would be wrong.
    nccl_unique_id_b64: Any = None


class VllmInitRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /init_weight_transfer_engine`."""

    init_info: VllmInitInfo


class VllmUpdateInfo(msgspec.Struct, kw_only=True):
    """The value of `update_info`: tensors in the order in which they are sent. Empty, the tensors of the last time."""

    names: list[str] = []
    # "float32", "float16" or "bfloat16".
    dtype_names: list[str] = []
    shapes: list[list[Size]] = []


class VllmTensorsRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /update_weights`."""

    update_info: VllmUpdateInfo


class VllmFinishRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /finish_weight_update`."""

    # The name of the weights.
    weight_version: str | None = None


class SglangGroupRequest(GroupFields, kw_only=True):
    """The body of `POST /init_weights_update_group`."""

    group_name: str = "weight_update_group"
    backend: str = "nccl"


class SglangTensorsRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /update_weights_from_distributed`."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[Size]]
    # "flattened_bucket": one broadcast has the bytes of all tensors.
    load_format: str | None = None
    # The name of the weights.
    weight_version: str | None = None

    # Accepted because clients send them; they have no effect. Caches of the old weights are always cleared.
    group_name: str | None = None
    ignored: ClassVar[str] = "flush_cache torch_empty_cache abort_all_requests selector"


class SglangTensorRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /get_weights_by_name`."""

    name: str
    # The maximum number of rows.
    truncate_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 100
