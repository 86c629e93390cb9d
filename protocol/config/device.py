"""The configuration of the device that the model runs on."""

import enum
from typing import Annotated

import msgspec

from .option import option


class Device(enum.StrEnum):
    """The kind of device. `AUTO` is CUDA if torch finds a GPU, else the CPU. `NULL` computes nothing."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    NULL = "null"


class CPUBackend(enum.StrEnum):
    """The implementation of the model's operations on a CPU. `AUTO` is native if that can run the model, else torch."""

    AUTO = "auto"
    NATIVE = "native"
    TORCH = "torch"


class DeviceConfig(msgspec.Struct, frozen=True):
    """The device that the model runs on, its threads and its kernels.

    If `threads` is 0, the torch backend leaves one core to the other processes. Results on a CPU are always
    batch-invariant. Workers keep packed weights in the directory `packed_weights_path`; "" if they do not.
    """

    device: Annotated[
        Device, option("Device of the model; null generates random tokens without a model")
    ] = Device.AUTO
    threads: Annotated[
        int, option("CPU threads per worker; 0 uses every allowed core", "-t", ge=0, le=4096)
    ] = 0
    cpu_backend: Annotated[
        CPUBackend, option("CPU kernels; auto prefers native and falls back to torch")
    ] = CPUBackend.AUTO
    null_step_ms: Annotated[
        float,
        option(
            "Duration of a step on the null device, in milliseconds",
            metavar="MS",
            ge=0,
            le=3_600_000,
        ),
    ] = 10.0
    enforce_eager: Annotated[
        bool,
        option(
            "Disable CUDA graphs (faster startup, slower steps)",
            "--disable-cuda-graph --disable-decode-cuda-graph",
        ),
    ] = False
    max_cudagraph_capture_size: Annotated[
        int,
        option(
            "Maximum tokens of a captured CUDA graph; 0 disables graphs",
            "--cuda-graph-max-bs --cuda-graph-max-bs-decode",
            ge=0,
            le=65536,
        ),
    ] = 512
    packed_weights_gib: Annotated[
        float,
        option(
            "Disk for packed weights of all models, on CPUs; 0 disables",
            metavar="GIB",
            ge=0,
            le=65536,
        ),
    ] = 16.0
    packed_weights_path: str = ""
    batch_invariant: Annotated[
        bool, option("Use batch-invariant GPU kernels (slower)", "--enable-deterministic-inference")
    ] = False
