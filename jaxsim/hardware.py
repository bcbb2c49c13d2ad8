"""What the simulator knows of an accelerator: a few data-sheet figures and how much of them is reached."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxsim.presets import require, typed

HIGHEST = 1e6  # of any figure: a thousand times today's


@dataclasses.dataclass(frozen=True)
class HardwareSpec:
    """One accelerator and the host that drives it. Raises ConfigError (key `hardware.FIELD`) for impossible values."""

    name: str
    memory_gib: float  # as CUDA reports it
    memory_bandwidth_gbps: float  # GB/s (10^9 bytes), data sheet
    tflops_16bit: float  # dense, bfloat16 or float16
    tflops_fp8: float | None = None  # dense; None: float8 weights are multiplied in 16 bits
    interconnect_gbps: float = 32.0  # GB/s per GPU and direction
    interconnect_latency_us: float = 20.0  # per all-reduce
    host_link_gbps: float = 32.0  # GB/s per GPU and direction to CPU memory
    compute_efficiency: float = 0.7  # share of the dense rate that large matrix products reach
    bandwidth_efficiency: float = 0.85  # share of the memory bandwidth that streaming weights and KV reaches
    overhead_us: float = 2000.0  # per iteration
    overhead_per_seq_us: float = 20.0  # per scheduled sequence and iteration
    non_torch_gib: float = 0.2  # context, libraries, communication buffers of one GPU
    graph_gib: float = 0.7  # captured CUDA graphs, taken off the KV cache since vLLM 0.21
    price_per_hour: float | None = None  # any currency

    def __post_init__(self) -> None:
        require(
            "hardware",
            self,
            "memory_gib memory_bandwidth_gbps tflops_16bit interconnect_gbps host_link_gbps",
            upto=HIGHEST,
        )
        require("hardware", self, "compute_efficiency bandwidth_efficiency", upto=1)
        require("hardware", self, "interconnect_latency_us overhead_us overhead_per_seq_us", upto=HIGHEST, zero=True)
        require("hardware", self, "non_torch_gib graph_gib", upto=HIGHEST, zero=True)
        for key in ("tflops_fp8", "price_per_hour"):
            if getattr(self, key) is not None:
                require("hardware", self, key, upto=HIGHEST)


def hardware_from_mapping(values: Mapping[str, Any]) -> HardwareSpec:
    """The accelerator of the configuration group `hardware`. Raises ConfigError."""
    return typed("hardware", HardwareSpec, values)
