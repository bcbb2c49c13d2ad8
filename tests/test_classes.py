"""Classes of requests: drawn with lengths of their own, judged by limits of their own."""

import numpy as np
import pytest

from jaxsim.engine import AffineCost, EngineConfig, Requests, simulate
from jaxsim.errors import ConfigError
from jaxsim.settings import SloSettings
from jaxsim.tuning.figures import figures
from jaxsim.tuning.slo import judge, limits
from jaxsim.workload import workload_from_config

PLAIN = {"kind": "synthetic", "rate_rps": 1.0, "prompt": {"value": 100}, "output": {"value": 10}}
CLASSES = {
    "chat": {"share": 3, "prompt": {"value": 20}, "priority": 0},
    "batch": {"share": 1, "output": {"value": 500}, "priority": 5},
}


def test_a_class_has_its_share_and_its_lengths():
    requests = workload_from_config(PLAIN | {"classes": CLASSES}).sample(1, 4000)
    chat = requests.label == "chat"
    assert set(requests.label) == {"chat", "batch"} and abs(chat.mean() - 0.75) < 0.03  # 4 standard errors
    assert set(requests.prompt_len[chat]) == {20} and set(requests.output_len[chat]) == {10}
    assert set(requests.prompt_len[~chat]) == {100} and set(requests.output_len[~chat]) == {500}
    assert set(requests.priority[chat]) == {0} and set(requests.priority[~chat]) == {5}
    # Classes have a stream of their own: arrivals stay, and a longer sample begins with the shorter one.
    assert (requests.arrival_s == workload_from_config(PLAIN).sample(1, 4000).arrival_s).all()
    shorter = workload_from_config(PLAIN | {"classes": CLASSES}).sample(1, 10)
    assert (shorter.label == requests.label[:10]).all()


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        (5, "workload.classes=5: a mapping"),
        ({"chat": 5}, "workload.classes.chat=5: a group"),
        ({"chat": {"part": 1}}, "workload.classes.chat.part=1: no such key"),
        ({"chat": {"share": 0}}, "workload.classes.chat.share=0: a finite number above 0"),
        ({"4": {}}, "workload.classes=4: names of letters"),
        ({"chat": {"prompt": {"value": 0}}}, "workload.classes.chat.prompt.value=0: "),
    ],
)
def test_bad_classes_are_named(classes, said):
    with pytest.raises(ConfigError) as caught:
        workload_from_config(PLAIN | {"classes": classes})
    assert str(caught.value).startswith(said)


def test_classes_and_shared_prefixes_are_not_mixed():
    with pytest.raises(ConfigError, match="^workload.classes=chat, batch: null where prompts"):
        workload_from_config(PLAIN | {"classes": CLASSES, "prefix": {"groups": 2}})


def run():
    """Two long requests before two short ones, one after the other: TTFT 10, 20, 21 and 22 ms at 1 ms per 10 tokens."""
    requests = Requests(
        np.zeros(4), np.array([100, 100, 10, 10]), np.ones(4, int), label=np.array(["batch", "batch", "chat", "chat"])
    )
    engine = EngineConfig(max_num_seqs=1, max_num_batched_tokens=200, num_gpu_blocks=100, max_model_len=200)
    return simulate(requests, engine, AffineCost(0.0, 1e-4, 0.0, 0.0))


def test_figures_and_limits_of_a_class():
    row = figures(run(), SloSettings(limits={"mean_ttft_ms@chat": 21.4}), 0.0)
    assert row["mean_ttft_ms@batch"] == pytest.approx(15) and row["mean_ttft_ms@chat"] == pytest.approx(21.5)
    assert row["mean_ttft_ms"] == pytest.approx(18.25) and row["completed@chat"] == 2

    def verdict(**bounds):
        slo = SloSettings(ttft_ms=None, limits={key.replace("_of_", "@"): bound for key, bound in bounds.items()})
        return judge(figures(run(), slo, 0.0), slo)

    assert verdict(mean_ttft_ms_of_chat=21.6, p50_ttft_ms_of_batch=15.1).passed
    missed = verdict(mean_ttft_ms_of_chat=21.4)
    assert missed.passed is False and missed.reason == "mean TTFT of chat 21.5 ms above 21.4 ms"
    (limit,) = limits(SloSettings(ttft_ms=None, limits={"p95_ttft_ms@chat": 20}))
    assert (limit.figure, limit.decides, limit.label) == ("p95_ttft_ms@chat", "share_above_p95_ttft_ms@chat", "chat")
    assert figures(run(), SloSettings(ttft_ms=None, limits={"p50_ttft_ms@chat": 20}), 0.0)[
        "share_above_p50_ttft_ms@chat"
    ] == pytest.approx(1)
    with pytest.raises(ConfigError, match="must be of queue_wait, ttft, tpot, e2el for a class"):
        limits(SloSettings(limits={"p95_itl_ms@chat": 20}))
