"""The native yardstick: `native.c` compiled and run on the requests and settings that the engine gets."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxsim.engine import Cost, EngineConfig, Requests

SOURCE = Path(__file__).with_name("native.c")


class NativeRun(NamedTuple):
    """What the program did with each of `C` settings and `N` requests; times in picoseconds."""

    seconds: float  # CPU time of the simulations
    iterations: np.ndarray  # [C] int64
    num_preemptions: np.ndarray  # [C] int64
    first_scheduled_ps: np.ndarray  # [C, N] int64, as the next two
    first_token_ps: np.ndarray
    finish_ps: np.ndarray


def build(folder: Path) -> Path | None:
    """The compiled program in `folder`; None without a C compiler."""
    compiler, program = shutil.which("cc"), folder / "native"
    if compiler is None:
        return None
    subprocess.run([compiler, "-O3", "-march=native", SOURCE, "-o", program], check=True)
    return program


def write_input(path: Path, requests: Requests, engines: Sequence[EngineConfig], cost: Cost, stretch: float) -> None:
    """The program's input: requests in order of arrival, outputs within max_model_len, and what it models."""
    (full_sequence,) = {engine.scheduler_reserve_full_isl for engine in engines}
    (block_size,) = {engine.block_size for engine in engines}
    longest = min(engine.max_model_len for engine in engines)
    prices = cost.table(max(engine.max_num_batched_tokens for engine in engines), len(requests.prompt_len))
    order = np.argsort(requests.arrival_s, kind="stable")
    arrival_ps = np.rint(np.rint(np.asarray(requests.arrival_s)[order] * 1e12) * stretch).astype(np.int64)
    prompt = np.asarray(requests.prompt_len)[order]
    output = np.minimum(np.asarray(requests.output_len)[order], longest - prompt)
    rows: list[tuple[Any, ...]] = [(len(prompt), len(engines), block_size, int(full_sequence))]
    rows += [(prices.step_ps, prices.prefill_token_ps, prices.decode_seq_ps, prices.decode_ctx_ps)]
    rows += zip(prompt, output, arrival_ps, strict=True)
    rows += [(one.max_num_seqs, one.max_num_batched_tokens, one.num_gpu_blocks - 1) for one in engines]
    path.write_text("".join(" ".join(map(str, row)) + "\n" for row in rows))


def run(program: Path, input_path: Path, requests: int, whole: bool = True) -> NativeRun:
    """Runs the program; without `whole` only for the time. Requests are in order of arrival."""
    output = input_path.with_suffix(".out")
    command = [str(program), str(input_path), *([str(output)] if whole else [])]
    seconds = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    table = np.fromfile(output, np.int64) if whole else np.empty(0, np.int64)
    table = table.reshape(-1, 2 + 3 * requests)
    times = table[:, 2:].reshape(-1, requests, 3)
    return NativeRun(seconds, table[:, 0], table[:, 1], times[..., 0], times[..., 1], times[..., 2])
