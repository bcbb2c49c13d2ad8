"""A line per round: how far a search is."""

from typing import Any

from jaxsim.search.capacity import CapacitySearch


def line(capacity: CapacitySearch, seconds: float, found: int = 0) -> dict[str, Any]:
    """What is known after a round, `seconds` into the job, `found` of the simulations being taken from a store.

    Per kind of search: how many are open, the best mean over seeds so far with the half width of its 95 % interval, and
    the share of settings of which every seed has passed somewhere.
    """
    simulated = capacity.simulations - found
    known: dict[str, Any] = {
        "round": capacity.rounds,
        "simulations": capacity.simulations,
        "simulated_requests_per_s": simulated * capacity.count / seconds,
    }
    for kind, ladder in capacity.ladders.items():
        values = ladder.values().reshape(len(capacity.candidates), len(capacity.seeds))
        best = capacity.found(kind, int(values.mean(axis=1).argmax()))
        assert best is not None
        known |= {
            f"{kind}_open": int(ladder.open.sum()),
            f"{kind}_best": best.interval.mean,
            f"{kind}_best_ci95": best.interval.half_width,
            f"{kind}_feasible": float((values > 0).all(axis=1).mean()),
        }
    return known
