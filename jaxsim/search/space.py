"""The settings to try: a server on one deployment, its default flags, and a grid of candidates."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxsim.cost.roofline import Roofline
from jaxsim.engine import CostTable, EngineConfig
from jaxsim.errors import ConfigError
from jaxsim.hardware import HardwareSpec, hardware_from_mapping
from jaxsim.memory import Capacity, kv_capacity
from jaxsim.model import ModelSpec, model_from_mapping
from jaxsim.settings import EngineSettings, SearchSettings, show

LONGEST_DEFAULT = 16384  # tokens; max_model_len when none is asked for, so that small GPUs start too


class Candidate(NamedTuple):
    """One setting of the grid; `engine` is None where the server would not start, and `reason` says why."""

    max_num_seqs: int
    max_num_batched_tokens: int
    engine: EngineConfig | None
    capacity: Capacity | None
    reason: str = ""


@dataclass(frozen=True)
class Server:
    """A model on a GPU (or a tensor-parallel group) with the flags that the grid does not vary."""

    model: ModelSpec
    hardware: HardwareSpec
    flags: EngineSettings

    @classmethod
    def of(cls, settings: Mapping[str, Any], flags: EngineSettings) -> "Server":
        """From the groups model and hardware as plain mappings. Raises `ConfigError`."""
        server = cls(model_from_mapping(settings["model"]), hardware_from_mapping(settings["hardware"]), flags)
        longest = server.model.max_position_embeddings
        if server.max_model_len > longest:
            allowed = f"must be at most {longest}, the max_position_embeddings of {server.model.name}"
            raise ConfigError("engine.max_model_len", server.max_model_len, allowed)
        return server

    @property
    def max_model_len(self) -> int:
        return self.flags.max_model_len or min(self.model.max_position_embeddings, LONGEST_DEFAULT)

    def batch_defaults(self) -> tuple[int, int]:
        """(max_num_seqs, max_num_batched_tokens): what is asked for, else vLLM 0.33.0's choice for an OpenAI server.

        Source: vllm/engine/arg_utils.py, get_batch_defaults; the caps on both follow it too.
        """
        hardware = self.hardware
        if hardware.memory_gib >= 160:
            seqs, tokens = 1024, 16384
        elif hardware.memory_gib >= 70 and "a100" not in hardware.name.lower():
            seqs, tokens = 1024, 8192
        else:
            seqs, tokens = 256, 2048
        if not self.flags.enable_chunked_prefill:
            tokens = max(tokens, self.max_model_len)
        seqs = self.flags.max_num_seqs or min(seqs, self.flags.max_num_batched_tokens or tokens)
        tokens = self.flags.max_num_batched_tokens or max(seqs, min(tokens, seqs * self.max_model_len))
        return seqs, tokens

    def candidate(self, max_num_seqs: int, max_num_batched_tokens: int, **changes: Any) -> Candidate:
        """One setting, ready to simulate. Raises `ConfigError` with vLLM's reason if the server would not start."""
        flags = self.flags
        capacity = kv_capacity(
            self.model,
            self.hardware,
            tensor_parallel_size=flags.tensor_parallel_size,
            gpu_memory_utilization=flags.gpu_memory_utilization,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            block_size=flags.block_size,
            num_gpu_blocks_override=flags.num_gpu_blocks_override,
        )
        given = {key: value for key, value in vars(flags).items() if key in EngineConfig.__dataclass_fields__}
        given |= {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        given |= {"num_gpu_blocks": capacity.num_gpu_blocks, "max_model_len": self.max_model_len}
        return Candidate(max_num_seqs, max_num_batched_tokens, EngineConfig(**(given | changes)), capacity)

    def grid(self, search: SearchSettings) -> list[Candidate]:
        """Every pair of the grid, in its order; a setting that cannot start stays in, with the reason.

        Raises `ConfigError` if not one can.
        """
        candidates, errors = [], []
        for seqs, tokens in itertools.product(search.max_num_seqs, search.max_num_batched_tokens):
            try:
                candidates.append(self.candidate(seqs, tokens))
            except ConfigError as error:
                candidates.append(Candidate(seqs, tokens, None, None, str(error)))
                errors.append(error)
        if len(errors) == len(candidates):
            if len({(error.key, str(error.value)) for error in errors}) == 1 and len(errors) > 1:
                raise errors[0]  # nothing on the grid has to do with it
            reason = f"none of these settings can start; the first: {candidates[0].reason}"
            raise ConfigError("search.max_num_seqs", show(search.max_num_seqs), reason)
        return candidates

    def cost(self, max_tokens: int, max_seqs: int) -> "FixedCost":
        """Iteration times up to these sizes; one table for all settings, so that they share one compiled engine."""
        roofline = Roofline(self.model, self.hardware, self.flags.tensor_parallel_size)
        return FixedCost(roofline.table(max_tokens, max_seqs))


@dataclass(frozen=True, eq=False)
class FixedCost:
    """A cost whose table has been made, for the largest sizes it will be asked for."""

    costs: CostTable

    def table(self, max_tokens: int, max_seqs: int) -> CostTable:
        return self.costs
