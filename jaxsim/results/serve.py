"""The `vllm serve` command that starts the server as it was simulated."""

from jaxsim.defaults import version_of
from jaxsim.engine import EngineConfig
from jaxsim.model import ModelSpec
from jaxsim.settings import EngineSettings

VERSIONED = "by version"
# Flag of an engine key and vLLM's default: printed only where the simulation differs.
FLAGS = {
    "block_size": ("--block-size", 16),
    "long_prefill_token_threshold": ("--long-prefill-token-threshold", 0),
    "policy": ("--scheduling-policy", "fcfs"),
    "watermark": ("--watermark", VERSIONED),
    "max_num_active_seqs": ("--max-num-active-seqs", None),
}
SWITCHES = {
    "enable_chunked_prefill": ("enable-chunked-prefill", True),
    "long_prefill_token_threshold_adaptive": ("long-prefill-token-threshold-adaptive", False),
    "scheduler_reserve_full_isl": ("scheduler-reserve-full-isl", VERSIONED),
    "enable_prefix_caching": ("enable-prefix-caching", VERSIONED),
    "async_scheduling": ("async-scheduling", VERSIONED),
}
# Asked for where the checkpoint holds another; int4 always comes from the checkpoint.
DTYPES = {"float8": "--quantization fp8", "float16": "--dtype float16"}


def vllm_serve(model: ModelSpec, flags: EngineSettings, engine: EngineConfig) -> str | None:
    """One line with every flag in which the simulation differs from vLLM's defaults.

    The two that the search chose are always there, since their defaults depend on the GPU. None where vLLM has no such
    server: static batching, swapping. Rejection by queue length has no flag, it is left to what stands in front.
    """
    if engine.batching == "static" or engine.preemption_mode == "swap":
        return None
    words = ["vllm serve", model.hf_id]
    words += [f"--max-num-seqs {engine.max_num_seqs}", f"--max-num-batched-tokens {engine.max_num_batched_tokens}"]
    if engine.max_model_len != model.max_position_embeddings:
        words.append(f"--max-model-len {engine.max_model_len}")
    if flags.tensor_parallel_size != 1:
        words.append(f"--tensor-parallel-size {flags.tensor_parallel_size}")
    usual = version_of(flags.vllm_version).flags
    if flags.gpu_memory_utilization != usual["gpu_memory_utilization"]:
        words.append(f"--gpu-memory-utilization {flags.gpu_memory_utilization:g}")
    if flags.num_gpu_blocks_override is not None:
        words.append(f"--num-gpu-blocks-override {flags.num_gpu_blocks_override}")
    if model.dtype in DTYPES and model.dtype != model.checkpoint_dtype:
        words.append(DTYPES[model.dtype])
    if model.kv_cache_dtype != "auto":
        words.append(f"--kv-cache-dtype {model.kv_cache_dtype}")
    for key, (name, default) in FLAGS.items():
        if getattr(engine, key) != (usual[key] if default == VERSIONED else default):
            words.append(f"{name} {getattr(engine, key)}")
    for key, (name, default) in SWITCHES.items():
        if getattr(engine, key) != (usual[key] if default == VERSIONED else default):
            words.append(f"--{'' if getattr(engine, key) else 'no-'}{name}")
    if engine.max_new_tokens is not None:
        words.append(f"--override-generation-config '{{\"max_new_tokens\": {engine.max_new_tokens}}}'")
    return " ".join(words)
