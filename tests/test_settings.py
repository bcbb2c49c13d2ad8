"""The settings' types and ranges, the presets against them, and what vLLM would choose."""

import dataclasses

import pytest

from jaxsim import settings
from jaxsim.composition import conf_dir, defaults, presets, sweeps
from jaxsim.engine import EngineConfig
from jaxsim.errors import ConfigError
from jaxsim.hardware import hardware_from_mapping
from jaxsim.model import model_from_mapping
from jaxsim.results.serve import vllm_serve
from jaxsim.settings import EngineSettings, SearchSettings, SloSettings
from jaxsim.tuning.space import Server, Space


def server(*overrides: str, **flags) -> Server:
    composed = defaults(overrides)
    return Server.of(composed, settings.read(EngineSettings, "engine", composed["engine"] | flags))


COUNT = "an integer from 1 up to 4194303, or a range: "
COUNT += "LOW..HIGH[:STEP], LOW..HIGH:pow2 or LOW..HIGH:log (5 % apart), or null"


@pytest.mark.parametrize(
    ("kind", "key", "value", "allowed"),
    [
        (EngineSettings, "max_num_seqs", 0, "an integer from 1 up to 4194303, or null"),
        (EngineSettings, "max_num_seqs", 8.0, "an integer from 1 up to 4194303, or null"),
        (EngineSettings, "max_num_seqs", True, "an integer from 1 up to 4194303, or null"),
        (EngineSettings, "block_size", "16k", "an integer from 1 up to 1024"),
        (EngineSettings, "gpu_memory_utilization", 0, "a number above 0 up to 1, or null"),
        (EngineSettings, "gpu_memory_utilization", 1.01, "a number above 0 up to 1, or null"),
        (EngineSettings, "watermark", float("nan"), "a number from 0 up to 1, or null"),
        (EngineSettings, "enable_chunked_prefill", "yes", "true or false"),
        (EngineSettings, "batching", "dynamic", "one of continuous, static"),
        (SloSettings, "percentile", 100.5, "a number above 0 up to 100"),
        (SearchSettings, "max_num_seqs", [], f"a list, not empty, each {COUNT}"),
        (SearchSettings, "max_num_seqs", 8, f"a list, not empty, each {COUNT}"),
        (SearchSettings, "max_num_seqs", [8, "x"], f"a list, not empty, each {COUNT}"),
        (EngineSettings, "max_num_batched_tokens", 2**22, "an integer from 1 up to 4194303, or null"),
        (SearchSettings, "num_requests", 10**7 + 1, "an integer from 10 up to 10000000, or null"),
        (SearchSettings, "seeds", 10**400, "an integer from 1 up to 1000"),
        (SloSettings, "ttft_ms", 10**400, "a number above 0 up to 1000000000, or null"),
        (settings.RuntimeSettings, "lanes", 2**20 + 1, "an integer from 1 up to 1048576, or null"),
        (SearchSettings, "seeds", None, "an integer from 1 up to 1000"),
    ],
)
def test_a_bad_value_is_refused_with_what_is_allowed(kind, key, value, allowed):
    with pytest.raises(ConfigError) as caught:
        settings.read(kind, "group", {key: value})
    assert str(caught.value) == f"group.{key}={settings.show(value)}: must be {allowed}"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("8..11", (8, 9, 10, 11)),
        ("8..30:8", (8, 16, 24)),
        ("5..64:pow2", (8, 16, 32, 64)),
        ("64..64", (64,)),
    ],
)
def test_a_range_is_the_list_of_its_values(text, values):
    assert settings.read(SearchSettings, "search", {"max_num_seqs": text}).max_num_seqs == values


def test_a_range_of_numbers_and_a_logarithmic_one():
    search = settings.read(
        SearchSettings, "search", {"gpu_memory_utilization": "0.8..0.95:0.05", "max_num_seqs": "8..1024:log"}
    )
    assert search.gpu_memory_utilization == (0.8, 0.85, 0.9, 0.95)
    seats = search.max_num_seqs
    assert seats is not None and seats[0] == 8 and seats[-1] == 1024
    assert all(a < b <= a * 1.05 + 1 for a, b in zip(seats, seats[1:], strict=False))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("8..", "is no range; "),
        ("9..8", "ends below its start; "),
        ("8..9:0.5", "must have whole numbers; "),
        ("8..9:0", "needs a step above 0; "),
        ("0..8:log", "must start above 0 for log; "),
        ("5..7:pow2", "holds no power of two; "),
        ("1..4000000", "has 4000000 values, more than 100000; "),
        ("0..8", "must be a list"),
    ],
)
def test_a_bad_range_says_why(text, reason):
    with pytest.raises(ConfigError) as caught:
        settings.read(SearchSettings, "search", {"max_num_seqs": text})
    assert str(caught.value).startswith(f"search.max_num_seqs={text}: {reason}") or "0..8" == text


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(ConfigError, match=r"^engine.max_num_seq=3: no such key, did you mean max_num_seqs\?"):
        settings.read(EngineSettings, "engine", {"max_num_seq": 3})


def test_numbers_and_lists_are_converted():
    read = settings.read(settings.EvaluateSettings, "evaluate", {"load_rps": 3, "clients": [1, 2]})
    assert read.load_rps == (3.0,) and read.clients == (1, 2)


@pytest.mark.parametrize("group", sorted(set(settings.GROUPS) - {"baseline", "runtime"}))
def test_every_preset_names_every_key_and_agrees_with_the_defaults_in_code(group):
    sweep = [f"+sweep={group}"] if group in presets("sweep") else []
    choices = [""] if sweep else presets(group)
    for preset in choices:
        values = defaults([*sweep, *([f"{group}={preset}"] if preset else [])])[group]
        fields = [field.name for field in dataclasses.fields(settings.GROUPS[group])]
        assert sorted(values) == sorted(fields)
    first = settings.read(settings.GROUPS[group], group, defaults(sweep)[group])
    assert first == settings.GROUPS[group]()


def test_every_engine_key_reaches_the_engine():
    given = {field.name for field in dataclasses.fields(EngineConfig)} - {"num_gpu_blocks", "num_cpu_blocks"}
    assert given <= {field.name for field in dataclasses.fields(EngineSettings)}


@pytest.mark.parametrize("model", presets("model"))
@pytest.mark.parametrize("hardware", presets("hardware"))
def test_every_preset_reads(model, hardware):
    composed = defaults([f"model={model}", f"hardware={hardware}"])
    assert model_from_mapping(composed["model"]).name == model
    assert hardware_from_mapping(composed["hardware"]).memory_gib > 10


def test_every_sweep_has_a_module_and_a_line():
    folder = conf_dir().parent / "jaxsim" / "studies"
    for name, line in sweeps().items():
        assert (folder / f"{name}.py").is_file() and line.endswith(".")


# vLLM 0.33.0, engine/arg_utils.py get_batch_defaults, OpenAI server.
@pytest.mark.parametrize(
    ("hardware", "expected"),
    [
        ("b200", (1024, 16384)),
        ("h100", (1024, 8192)),
        ("h200", (1024, 8192)),
        ("a100", (256, 2048)),
        ("l4", (256, 2048)),
    ],
)
def test_batch_defaults_are_those_of_vllm(hardware, expected):
    assert server(f"hardware={hardware}").batch_defaults() == expected


# The wheels 0.11.0 and 0.20.0 have no branch for 160 GiB; offline is vLLM's class LLM.
@pytest.mark.parametrize(
    ("hardware", "flags", "expected"),
    [
        ("b200", {"vllm_version": "v0.20"}, (1024, 8192)),
        ("b200", {"usage": "offline"}, (1024, 16384)),
        ("h100", {"usage": "offline"}, (1024, 16384)),
        ("a100", {"usage": "offline", "vllm_version": "0.11.2"}, (256, 8192)),
    ],
)
def test_batch_defaults_follow_version_and_use(hardware, flags, expected):
    assert server(f"hardware={hardware}", **flags).batch_defaults() == expected


def test_versions_set_what_is_not_given_and_say_so():
    old = server(vllm_version="v0.11")
    flags = old.flags
    assert (flags.gpu_memory_utilization, flags.async_scheduling, flags.scheduler_reserve_full_isl) == (
        0.9,
        False,
        False,
    )
    assert flags.lone_request_without_threshold is False and flags.self_preemption == "ends"
    assert flags.enable_prefix_caching is True and flags.freed_unhashed_blocks == "tail"
    # Where the rule of a version is not modelled together with what was asked for, the nearest is taken, and named.
    swaps = server(vllm_version="v0.20", preemption_mode="swap")
    assert swaps.taken()["enable_prefix_caching"] == (
        False,
        "true in v0.20 is not modelled together with preemption_mode=swap and policy=fcfs",
    )
    assert server(vllm_version="v0.20", policy="priority").taken()["self_preemption"] == ("ends", "vLLM v0.20")
    between = server(vllm_version="0.25.1", async_scheduling=False)
    assert between.taken()["scheduler_reserve_full_isl"] == (True, "vLLM v0.20, the nearest known below v0.25")
    assert "async_scheduling" not in between.taken() and between.flags.async_scheduling is False
    today = server()
    assert today.flags.async_scheduling and today.flags.enable_prefix_caching and today.flags.watermark == 0
    assert today.taken()["max_num_seqs"] == (1024, "vLLM v0.33, server on 70 GiB or more")
    for name in ("v0.10", "1.0", "latest"):
        with pytest.raises(ConfigError, match=rf"^engine.vllm_version={name}: must be v0.11 or later"):
            server(vllm_version=name)


def test_what_cannot_be_simulated_together_is_turned_off_unless_it_was_asked_for():
    ranked = server(policy="priority")
    assert ranked.flags.enable_prefix_caching is True and ranked.flags.async_scheduling is True
    swapping = server(preemption_mode="swap", swap_space=1.0)
    assert swapping.flags.async_scheduling is True and swapping.flags.enable_prefix_caching is False
    assert server(preemption_mode="swap", policy="priority").flags.enable_prefix_caching is True
    engine = swapping.candidate(64, 4096).engine
    # Llama 3.1 8B: 2 x 32 layers x 8 heads x 128 x 2 bytes = 128 KiB a token, 2 MiB a block: 512 in 1 GiB.
    assert engine is not None and engine.num_cpu_blocks == 512
    assert vllm_serve(swapping.model, swapping.flags, engine) is None
    assert "preemption_mode=swap" in swapping.taken()["enable_prefix_caching"].source
    with pytest.raises(ConfigError, match="^engine.preemption_mode=swap: is not modelled together with enable_prefix"):
        server(preemption_mode="swap", enable_prefix_caching=True).candidate(64, 4096)


def test_swapping_is_priced_by_the_link():
    # 131,072 bytes a token over 64 GB/s.
    assert server().cost(64, 8).table(64, 8).swap_token_ps == round(131072 / 64e9 * 1e12)


def test_serve_line_follows_the_version():
    assert "--async-scheduling" not in serve_line(server(vllm_version="v0.11"))
    assert "--async-scheduling" in serve_line(server(vllm_version="v0.11", async_scheduling=True))
    assert "--gpu-memory-utilization" not in serve_line(server(vllm_version="v0.11"))
    assert serve_line(server(max_new_tokens=64)).endswith("--override-generation-config '{\"max_new_tokens\": 64}'")


def test_batch_defaults_follow_the_caps():
    assert server(max_num_batched_tokens=100).batch_defaults() == (100, 100)
    assert server(max_num_seqs=2, max_model_len=512).batch_defaults() == (2, 1024)
    assert server(enable_chunked_prefill=False).batch_defaults() == (1024, 16384)


def serve_line(of: Server) -> str:
    engine = of.candidate(64, 4096).engine
    assert engine is not None
    line = vllm_serve(of.model, of.flags, engine)
    assert line is not None
    return line


def test_serve_line_names_what_differs_from_the_defaults_of_vllm():
    plain = server(max_model_len=131072)
    line = serve_line(plain)
    assert line == "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-num-seqs 64 --max-num-batched-tokens 4096"
    for key, flag in (("async_scheduling", "async-scheduling"), ("enable_prefix_caching", "enable-prefix-caching")):
        assert serve_line(server(max_model_len=131072, **{key: False})) == f"{line} --no-{flag}"
    other = server(
        gpu_memory_utilization=0.9,
        tensor_parallel_size=2,
        long_prefill_token_threshold=256,
        scheduler_reserve_full_isl=False,
        watermark=0.01,
        max_num_active_seqs=32,
    )
    line = serve_line(other)
    for flag in (
        "--max-model-len 16384",
        "--gpu-memory-utilization 0.9",
        "--tensor-parallel-size 2",
        "--long-prefill-token-threshold 256",
        "--no-scheduler-reserve-full-isl",
        "--watermark 0.01",
        "--max-num-active-seqs 32",
    ):
        assert flag in line


def test_serve_line_asks_for_fp8_only_where_the_checkpoint_is_not():
    assert "--quantization fp8" in serve_line(server("model.dtype=float8"))
    published = server("model=deepseek_v3", "hardware=h200", tensor_parallel_size=8)
    assert published.model.dtype == "float8" and "--quantization" not in serve_line(published)


def test_a_grid_keeps_a_setting_that_cannot_start_with_its_reason():
    search = SearchSettings(max_num_seqs=(64, 4096), max_num_batched_tokens=(2048,))
    good, bad = Space.of(server(), search).grid()
    assert good.engine is not None and bad.engine is None
    assert bad.reason == "engine.max_num_batched_tokens=2048: must be at least max_num_seqs=4096"


def test_a_grid_that_cannot_start_at_all_is_refused():
    with pytest.raises(ConfigError, match=r"^search.max_num_seqs=\[4096\]: none of these settings can start"):
        Space.of(server(), SearchSettings(max_num_seqs=(4096,), max_num_batched_tokens=(1024, 2048))).grid()
    with pytest.raises(ConfigError, match=r"^model\S*=llama3_1_70b: no memory is left"):
        Space.of(server("model=llama3_1_70b"), SearchSettings()).grid()
    with pytest.raises(ConfigError, match=r"^engine.policy=priority: must be fcfs when batching=static"):
        Space.of(server(policy="priority", batching="static"), SearchSettings()).grid()


def test_max_model_len_may_not_exceed_that_of_the_model():
    with pytest.raises(ConfigError, match=r"^engine.max_model_len=131073: must be at most 131072"):
        server(max_model_len=131073)
