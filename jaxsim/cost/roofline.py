"""Iteration time from first principles: bytes over bandwidth or operations over rate, whichever takes longer.

Prefill is bound by compute once a chunk holds a few hundred tokens, decode by reading weights and KV cache
(Williams et al. 2009, "Roofline"; Pope et al. 2022, "Efficiently Scaling Transformer Inference").
"""

import dataclasses

import numpy as np

from jaxsim.engine.cost import CostTable
from jaxsim.errors import ConfigError
from jaxsim.hardware import HardwareSpec
from jaxsim.model import WEIGHT_BYTES, ModelSpec, check_tensor_parallel, kv_bytes_per_token, parameters

PS = 10**12
# Fused attention reaches less of the dense rate than a matrix product: softmax runs on other units, and causal tiles
# are half empty. FlashAttention-2 and -3 report 0.6 to 0.75 of the peak at long prompts, GEMMs 0.8 to 0.9.
ATTENTION_SHARE = 0.7
LONGEST_ITERATION_S = 1000.0


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Iteration time of `model` on `tensor_parallel_size` pieces of `hardware`. Construction raises ConfigError."""

    model: ModelSpec
    hardware: HardwareSpec
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        check_tensor_parallel(self.model, self.tensor_parallel_size)

    def table(self, max_tokens: int, max_seqs: int) -> CostTable:
        """Costs of iterations of up to `max_tokens` scheduled tokens, integer picoseconds, each rounded once.

        Raises ConfigError (key `hardware`) where an iteration would take so long that the clock may run out.
        """
        per_seq_s = self.head_flops / self.rate(16) + self.hardware.overhead_per_seq_us * 1e-6
        kv_read_s = self.kv_bytes / self.bandwidth
        # MLA's heads all read one latent vector: there decode attention can be bound by compute.
        decode_ctx_s = max(kv_read_s, self.decode_attention_flops / (self.rate(16) * ATTENTION_SHARE))
        pair_s = self.prefill_attention_flops / (self.rate(16) * ATTENTION_SHARE)
        linear_s = self.linear_s(np.arange(max_tokens + 1))
        prompt = min(max_tokens, self.model.max_position_embeddings)
        worst_s = self.hardware.overhead_us * 1e-6 + linear_s.max() + per_seq_s * max_seqs
        worst_s += pair_s * prompt * (prompt + 1) / 2 + decode_ctx_s * self.model.max_position_embeddings
        if not worst_s <= LONGEST_ITERATION_S:
            allowed = f"must be fast enough: an iteration takes up to {worst_s:.3g} s, at most "
            raise ConfigError("hardware", self.hardware.name, f"{allowed}{LONGEST_ITERATION_S:,.0f} s are simulated")
        return CostTable(
            step_ps=_ps(self.hardware.overhead_us * 1e-6),
            prefill_token_ps=0,
            prefill_seq_ps=_ps(per_seq_s),
            decode_seq_ps=_ps(per_seq_s),
            prefill_ctx_ps=_ps(kv_read_s),
            pair_ps=_ps(pair_s),
            decode_ctx_ps=_ps(decode_ctx_s),
            swap_token_ps=_ps(self.kv_bytes / (self.hardware.host_link_gbps * 1e9)),
            linear_ps=np.rint(linear_s * PS).astype(np.int64),
            decode_base_ps=None,
            decode_ctx_table_ps=None,
        )

    def linear_s(self, tokens: np.ndarray) -> np.ndarray:
        """Seconds of everything but attention for `tokens` scheduled tokens, any shape; 0 where there are none.

        The layers read each weight once; of the routed experts, those that at least one token was sent to (expected
        number, tokens choosing independently). The output head is read once more, it is a kernel of its own.
        """
        model, count = self.model, parameters(self.model, self.tensor_parallel_size)
        matrix_bytes = WEIGHT_BYTES[model.dtype]
        per_token = count.attention + count.mlp + count.other
        read = (count.attention + count.mlp) * matrix_bytes + 2 * count.other + np.zeros(tokens.shape)
        if model.moe_layers:
            share = model.num_experts_per_tok / model.num_experts
            per_token += count.experts * share
            read = read + count.experts * matrix_bytes * (1 - (1 - share) ** tokens)
        bits = 8 if model.dtype == "float8" else 16
        layers_s = np.maximum(read / self.bandwidth, 2 * per_token * tokens / self.rate(bits))
        head_s = 2 * count.head / self.bandwidth
        return np.where(tokens > 0, layers_s + head_s + self.all_reduce_s(tokens), 0.0)

    def all_reduce_s(self, tokens: np.ndarray) -> np.ndarray:
        """Seconds of the ring all-reduces of one iteration: two per layer and one after the embedding."""
        tp, hardware = self.tensor_parallel_size, self.hardware
        if tp == 1:
            return np.zeros(tokens.shape)
        moved = 2 * (tp - 1) / tp * tokens * self.model.hidden_size * 2
        once_s = moved / (hardware.interconnect_gbps * 1e9) + hardware.interconnect_latency_us * 1e-6
        return (2 * self.model.num_hidden_layers + 1) * once_s

    @property
    def kv_bytes(self) -> int:
        """KV of one token on one GPU."""
        return kv_bytes_per_token(self.model, self.tensor_parallel_size)

    @property
    def bandwidth(self) -> float:
        """Bytes per second that streaming reaches."""
        return self.hardware.memory_bandwidth_gbps * 1e9 * self.hardware.bandwidth_efficiency

    def rate(self, bits: int) -> float:
        """Operations per second that large matrix products reach with operands of that width."""
        tflops = self.hardware.tflops_fp8 if bits == 8 else None
        return (tflops or self.hardware.tflops_16bit) * 1e12 * self.hardware.compute_efficiency

    @property
    def head_flops(self) -> float:
        """Operations of the output head for one sequence on one GPU."""
        return 2.0 * parameters(self.model, self.tensor_parallel_size).head

    @property
    def prefill_attention_flops(self) -> float:
        """Operations per (query, key) pair over all layers on one GPU: scores and weighted sum."""
        model = self.model
        dims = 2 * model.head_dim
        if model.kv_lora_rank:
            dims = model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim
        return 2.0 * model.num_hidden_layers * model.num_attention_heads / self.tensor_parallel_size * dims

    @property
    def decode_attention_flops(self) -> float:
        """As `prefill_attention_flops` for a decode row; MLA decodes in the latent space (DeepSeek-V2, section 2.1)."""
        model = self.model
        if not model.kv_lora_rank:
            return self.prefill_attention_flops
        dims = 2 * model.kv_lora_rank + model.qk_rope_head_dim
        return 2.0 * model.num_hidden_layers * model.num_attention_heads / self.tensor_parallel_size * dims


def _ps(seconds: float) -> int:
    return round(seconds * PS)
