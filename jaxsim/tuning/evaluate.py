"""Simulations as tasks, and what is kept of each: a verdict and figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jaxsim.engine import Requests, Simulation, simulate_many
from jaxsim.engine.width import steady
from jaxsim.settings import SearchSettings, SloSettings
from jaxsim.tuning.figures import figures, figures_as_of
from jaxsim.tuning.load import Verdict
from jaxsim.tuning.replicates import Replicates, warmup_share
from jaxsim.tuning.slo import judge
from jaxsim.tuning.space import Candidate

RATES = ("request_throughput", "request_goodput", "output_throughput", "total_token_throughput")  # of all instances


class Task(NamedTuple):
    """One simulation: a setting under one seed, at a load or, in a closed loop, with a number of clients.

    Of several instances, which are alike, one is simulated: the load and the `RATES` are of all, the rest is of one.
    """

    candidate: Candidate
    seed: int  # its place among the replicates
    load_rps: float | None = None
    clients: int | None = None  # of each instance
    count: int | None = None  # requests of an instance; None: as many as the replicates have at hand

    def sent(self, replicates: Replicates) -> tuple[Requests, float]:
        """The requests that the instance gets, and the factor on their arrival times."""
        instances = self.candidate.instances
        requests = replicates.of(self.seed, self.count, instances)
        if self.load_rps is None:
            return requests, 1.0
        return requests, replicates.stretch(self.seed, self.load_rps, self.count, instances)


class Outcome(NamedTuple):
    """What is kept of a simulation."""

    verdict: Verdict
    figures: dict[str, Any]  # see `figures.figures`
    computed: bool = True  # False: known already, or that of another task to the last bit


OnDone = Callable[[int, Outcome], None]  # index into the tasks


class Evaluate(Protocol):
    """Carries tasks out, all at once; outcomes come in the order of the tasks."""

    def __call__(self, tasks: Sequence[Task], on_done: OnDone | None = None) -> list[Outcome]: ...


@dataclass(frozen=True)
class Simulator:
    """Carries tasks out on the devices of this machine."""

    replicates: Replicates
    slo: SloSettings
    search: SearchSettings
    lanes: int | None = None  # None: what the device can do
    simulate: Callable[..., list[Simulation]] | None = None  # None: `simulate_many`

    def __call__(self, tasks: Sequence[Task], on_done: OnDone | None = None) -> list[Outcome]:
        outcomes: list[Any] = [None] * len(tasks)
        last: tuple[Simulation, Outcome] | None = None

        def note(index: int, simulation: Simulation) -> None:
            nonlocal last
            like = last[1].figures if last and last[0].finish_ps is simulation.finish_ps else None
            last = simulation, self.outcome(tasks[index], simulation, like)
            outcomes[index] = last[1]
            if on_done is not None:
                on_done(index, outcomes[index])

        sent = [task.sent(self.replicates) for task in tasks]
        (self.simulate or simulate_many)(
            [requests for requests, _ in sent],
            [task.candidate.engine for task in tasks],  # pyright: ignore[reportArgumentType]
            [task.candidate.cost for task in tasks],  # pyright: ignore[reportArgumentType]
            clients=[task.clients for task in tasks],
            stretch=[stretch for _, stretch in sent],
            think_time_s=self.search.think_time_s,
            on_done=note,
            lanes=steady(self.lanes),
            keep=False,
            reuse=True,
        )
        return outcomes

    def outcome(self, task: Task, simulation: Simulation, like: Mapping[str, Any] | None = None) -> Outcome:
        """The verdict on a simulation and its figures, after warm-up; `like` are those of one with the same records."""
        if like is not None:
            row = figures_as_of(like, simulation, self.slo)
        else:
            warmup = warmup_share(self.search.warmup, task.clients, len(simulation.prompt_len))
            row = figures(simulation, self.slo, warmup)
            row |= {rate: task.candidate.instances * row[rate] for rate in RATES if row[rate] is not None}
        return Outcome(judge(row, self.slo, simulation.status), row, computed=like is None)
