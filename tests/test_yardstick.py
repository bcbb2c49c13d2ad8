"""The benchmark suite's native program: it must do what the engine does, or the suite's ratios mean nothing."""

import numpy as np
import pytest

from benchmarks import yardstick
from benchmarks.timing import same
from benchmarks.workloads import YardstickCost, default_mix, fixed_lengths, settings
from jaxsim.engine import EngineConfig, Requests, simulate_many


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    built = yardstick.build(tmp_path_factory.mktemp("native"))
    if built is None:
        pytest.skip("no C compiler `cc`")
    return built


def compare(program, folder, requests: Requests, engines, stretch: float = 1.0) -> yardstick.NativeRun:
    """The native program's outcome, after it was found to be the engine's; lanes and sizes share one compile."""
    yardstick.write_input(folder / "input", requests, engines, YardstickCost(), stretch)
    done = yardstick.run(program, folder / "input", len(requests.prompt_len))
    runs = simulate_many(requests, engines, YardstickCost(), stretch=stretch, statistics=False, lanes=64)
    assert same(done, runs)
    return done


def test_the_default_mix_agrees_to_the_picosecond(program, tmp_path):
    done = compare(program, tmp_path, default_mix(1000), settings(24), 1 / 12)
    assert done.num_preemptions.sum() == 0 and (done.finish_ps > 0).all() and done.seconds > 0


def test_heavy_preemption_agrees(program, tmp_path):
    done = compare(program, tmp_path, default_mix(1000), settings(24, fewest=8, blocks=300), 1 / 12)
    assert done.num_preemptions.sum() > 10_000


def test_a_burst_of_equal_requests_agrees(program, tmp_path):
    burst = fixed_lengths(1000, seed=1)._replace(arrival_s=np.zeros(1000))
    done = compare(program, tmp_path, burst, settings(8, blocks=2000, max_num_batched_tokens=512))
    assert done.num_preemptions.sum() > 0


@pytest.mark.parametrize("full_sequence", [False, True])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_small_pools_and_budgets_agree(program, tmp_path, block_size, full_sequence):
    """Chunks of a few tokens, so that prompts are in progress when they are preempted, and end in one token."""
    draw = np.random.default_rng(block_size)
    requests = Requests(np.cumsum(draw.exponential(0.05, 1000)), draw.integers(1, 60, 1000), draw.integers(1, 40, 1000))
    engines = [
        EngineConfig(
            max_num_seqs=int(draw.integers(2, 9)),
            max_num_batched_tokens=int(draw.integers(9, 50)),
            num_gpu_blocks=-(-pool // block_size) + 1,
            max_model_len=90,  # shortens some outputs
            block_size=block_size,
            scheduler_reserve_full_isl=full_sequence,
        )
        for pool in range(100, 340, 10)
    ]
    done = compare(program, tmp_path, requests, engines)
    assert done.num_preemptions.sum() > 100
