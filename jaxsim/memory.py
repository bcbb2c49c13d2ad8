"""KV cache capacity: how many blocks vLLM would report at start-up, and how many requests fit in them."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxsim.errors import ConfigError
from jaxsim.hardware import HardwareSpec
from jaxsim.model import ModelSpec, check_tensor_parallel, kv_bytes_per_token, weight_bytes

GIB = 2**30
COMMUNICATION_GIB = 0.6  # NCCL and custom all-reduce buffers of each GPU under tensor parallelism
LOGIT_BYTES = 14  # per logit at the sampler's peak: one in the model's 16 bits, three copies in float32


class Capacity(NamedTuple):
    """Memory of one GPU after start-up."""

    num_gpu_blocks: int  # total, with the null block, as vLLM prints it
    kv_bytes: int
    weight_bytes: int
    activation_bytes: int
    tokens: int  # num_gpu_blocks * block_size, as vLLM prints it
    max_concurrency: float  # requests of max_model_len that the blocks hold at once


def activation_bytes(
    model: ModelSpec, tensor_parallel_size: int, max_num_batched_tokens: int, max_num_seqs: int
) -> int:
    """Peak memory of vLLM's profiling run on one GPU, beyond the weights.

    The larger of two moments: a layer over the full token budget (its input, its residual and the feed-forward or the
    attention part), and the sampler over the logits of max_num_seqs sequences.
    """
    tp = tensor_parallel_size
    heads, kv_heads = model.num_attention_heads / tp, max(1.0, model.num_key_value_heads / tp)
    attention = (2 * heads + 2 * kv_heads) * model.head_dim
    feed_forward = 3 * model.intermediate_size / tp
    if model.moe_layers:
        expert = model.moe_intermediate_size / tp
        routed = max(2 * expert, model.hidden_size) + expert  # one buffer serves both products of an expert
        feed_forward = model.num_experts_per_tok * routed + 3 * model.n_shared_experts * expert
    layer = max_num_batched_tokens * 2 * (2 * model.hidden_size + max(attention, feed_forward))
    sampler = min(max_num_seqs, max_num_batched_tokens) * model.vocab_size * LOGIT_BYTES
    return round(max(layer, sampler))


def kv_capacity(
    model: ModelSpec,
    hardware: HardwareSpec,
    *,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    tensor_parallel_size: int = 1,
    gpu_memory_utilization: float = 0.92,
    block_size: int = 16,
    num_gpu_blocks_override: int | None = None,
    enforce_eager: bool = False,
) -> Capacity:
    """What vLLM 0.33.0 would find on each GPU: its share of the memory less weights, activations, context and graphs.

    With `num_gpu_blocks_override` the blocks are given and only the weights must fit. `enforce_eager` captures no
    graphs. Raises ConfigError: heads that cannot be split, weights that leave no memory, a pool below one request.
    """
    check_tensor_parallel(model, tensor_parallel_size)
    for key, value in (("block_size", block_size), ("max_model_len", max_model_len)):
        if value < 1:
            raise ConfigError(f"engine.{key}", value, "at least 1")
    if not 0 < gpu_memory_utilization <= 1:
        raise ConfigError("engine.gpu_memory_utilization", gpu_memory_utilization, "above 0 and at most 1")
    weights = weight_bytes(model, tensor_parallel_size)
    activations = activation_bytes(model, tensor_parallel_size, max_num_batched_tokens, max_num_seqs)
    fixed_gib = hardware.non_torch_gib + (COMMUNICATION_GIB if tensor_parallel_size > 1 else 0)
    fixed_gib += 0 if enforce_eager else hardware.graph_gib
    usable = hardware.memory_gib * GIB * gpu_memory_utilization
    kv_bytes = math.floor(usable - weights - activations - fixed_gib * GIB)
    block_bytes = kv_bytes_per_token(model, tensor_parallel_size) * block_size
    blocks = max(0, kv_bytes) // block_bytes
    if weights >= usable or (kv_bytes <= 0 and num_gpu_blocks_override is None):
        reason = (
            f"no memory is left for cache blocks on {hardware.name}: weights {weights / GIB:.1f} GiB, "
            f"activations and overheads {activations / GIB + fixed_gib:.1f} GiB per GPU, usable {usable / GIB:.1f} GiB "
            f"(tensor_parallel_size={tensor_parallel_size}, gpu_memory_utilization={gpu_memory_utilization:g})"
        )
        raise ConfigError("model", model.name, reason)
    if num_gpu_blocks_override is not None:
        blocks = num_gpu_blocks_override
        kv_bytes = blocks * block_bytes
    needed = math.ceil(max_model_len / block_size)
    if needed > blocks - 1:
        longest = max(0, blocks - 1) * block_size
        reason = (
            f"one request of that length needs {needed} KV blocks and {max(0, blocks - 1)} are usable on "
            f"{hardware.name}, at most {longest} tokens"
        )
        raise ConfigError("engine.max_model_len", max_model_len, reason)
    return Capacity(
        num_gpu_blocks=blocks,
        kv_bytes=kv_bytes,
        weight_bytes=weights,
        activation_bytes=activations,
        tokens=blocks * block_size,
        max_concurrency=blocks / needed,
    )


def requests_that_fit(capacity: Capacity, lengths: Sequence[int] | np.ndarray) -> Mapping[str, int]:
    """How many requests of mean, p95 and p99 total length (prompt and output, in tokens) the cache holds at once.

    `lengths` is the total length of each request, [N]. Block 0 is never handed out. Raises ValueError if empty.
    """
    values = np.asarray(lengths, dtype=np.float64)
    if values.size == 0:
        raise ValueError("lengths is empty")
    block_size = capacity.tokens // capacity.num_gpu_blocks
    at = {"mean": values.mean(), "p95": np.percentile(values, 95), "p99": np.percentile(values, 99)}
    usable = capacity.num_gpu_blocks - 1
    return {name: int(usable // max(1, math.ceil(length / block_size))) for name, length in at.items()}
