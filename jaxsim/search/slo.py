"""Whether a run meets the SLO."""

import numpy as np

from jaxsim.engine import Simulation, Status
from jaxsim.metrics import is_growing, latencies
from jaxsim.search.load import Verdict
from jaxsim.settings import SloSettings


def judge(simulation: Simulation, slo: SloSettings, warmup: float) -> Verdict:
    """Whether a run finished, was stable and met every limit; the reason names the first that was missed."""
    if simulation.status != Status.DONE:
        return Verdict(False, f"the run ended as {Status(simulation.status).name}")
    times = latencies(simulation, warmup)
    for name, limit in limits_ms(slo).items():
        values = times.tpot[times.output_tokens > 1] if name == "tpot" else getattr(times, name)
        value = float(np.percentile(values, slo.percentile)) if len(values) else 0.0
        if value > limit:
            return Verdict(False, f"p{slo.percentile:g} {name.upper()} {value:.4g} ms above {limit:g} ms")
    if is_growing(simulation):
        return Verdict(False, "the waiting queue grows")
    return Verdict(True, "")


def limits_ms(slo: SloSettings) -> dict[str, float]:
    """The limits that are set, in milliseconds."""
    limits = {"ttft": slo.ttft_ms, "tpot": slo.tpot_ms, "e2el": slo.e2el_ms}
    return {name: limit for name, limit in limits.items() if limit is not None}
