"""The simulator: pure JAX, knows no file, no Hydra, no W&B."""

from jaxsim.engine.cost import AffineCost, Cost, CostTable
from jaxsim.engine.simulate import simulate, simulate_many
from jaxsim.engine.statistics import itl_edges_s
from jaxsim.engine.types import EngineConfig, Requests, Simulation, Status, Totals

__all__ = [
    "AffineCost",
    "Cost",
    "CostTable",
    "EngineConfig",
    "Requests",
    "Simulation",
    "Status",
    "Totals",
    "itl_edges_s",
    "simulate",
    "simulate_many",
]
