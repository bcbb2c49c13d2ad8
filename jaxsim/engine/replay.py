"""The schedule of every iteration, rebuilt on the host from the events of the array program."""

from typing import Any

import jax
import numpy as np

from jaxsim.engine.layout import NONE
from jaxsim.engine.state import Event
from jaxsim.engine.types import Simulation


class Replay:
    """Collects the events of one simulation; `rows` gives its iterations."""

    def __init__(self, asynchronous: bool) -> None:
        self._asynchronous = asynchronous
        self._chunks: list[Event] = []

    def add(self, events: Event) -> None:
        """Events of a chunk of steps, shape [steps, W] each; the simulation is in the first lane."""
        self._chunks.append(jax.tree.map(lambda leaf: leaf[:, 0], events))

    def clear(self) -> None:
        """Forget what was collected: the simulation starts again."""
        self._chunks = []

    def rows(self, order: np.ndarray, simulation: Simulation) -> list[list[Any]]:
        """Rows in the golden columns: i, start, dur (ps), n_running, n_waiting, n_prefill_tok, n_decode, ctx_sum,
        free_blocks, sched, preempted, admitted, finished, and sched_time (ps) under async scheduling; `order[k]` is the
        caller's index of the k-th request."""
        rows: list[list[Any]] = []
        running: list[int] = []
        held: set[int] = set()  # finished by the iteration in flight when this one is scheduled
        chunks: dict[int, int] = {}  # tokens of prompts in this iteration
        waiting_for_prompt: set[int] = set()
        preempted: list[int] = []
        admitted: list[int] = []
        prompts = simulation.prompt_len
        known = {}
        done: dict[int, int] = {}
        events = jax.tree.map(lambda *leaves: np.concatenate(leaves).tolist(), *self._chunks)
        for event in zip(*(leaf or [NONE] * len(events.ran) for leaf in events), strict=True):
            e = Event(*event)
            if e.missed != NONE:
                request = int(order[e.missed])
                waiting_for_prompt.add(request)
                done[request] = known[request] - 1
            if e.finished != NONE:
                request = int(order[e.finished])
                rows[-1][12].append(request)
                if self._asynchronous:
                    held.add(request)
                else:
                    running.remove(request)
            if e.preempted != NONE:
                request = int(order[e.preempted])
                running.remove(request)
                preempted.append(request)
                held.discard(request)
                chunks.pop(request, None)
                waiting_for_prompt.discard(request)
            if e.continued != NONE:
                chunks[int(order[e.continued])] = int(e.continued_tokens)
            if e.admitted != NONE:
                request = int(order[e.admitted])
                running.append(request)
                admitted += [request, e.hit_tokens]
                if e.admitted_tokens:  # static batching admits requests whose prompt starts later
                    chunks[request] = int(e.admitted_tokens)
                waiting_for_prompt.add(request)
                done[request] = int(e.hit_tokens)
            if e.ran:
                scheduled: list[int] = []
                for request in running:
                    if request in chunks:
                        scheduled += [request, chunks[request]]
                    elif e.decodes and request not in waiting_for_prompt and request not in held:
                        scheduled += [request, 1]
                _progress(chunks, waiting_for_prompt, done, known, prompts)
                for request in scheduled[::2]:
                    if request not in waiting_for_prompt:
                        known[request] = known.get(request, int(prompts[request])) + 1
                row = [len(rows), e.start_ps, e.duration_ps, e.running, e.waiting, e.prefill_tokens, e.decodes]
                row += [e.context, e.free, scheduled, preempted, admitted, []]
                row += [e.look_ps] if self._asynchronous else []
                if not scheduled:
                    row[5:8] = [0, 0, 0]
                rows.append(row)
                preempted, admitted, chunks = [], [], {}
                running = [request for request in running if request not in held]
                held = set()
        finish = simulation.finish_ps
        position = {
            request: i for row in rows for i, request in enumerate(row[9][::2]) if finish[request] == row[1] + row[2]
        }
        for row in rows:
            row[12].sort(key=position.__getitem__)
        return rows


def _progress(
    chunks: dict[int, int],
    waiting_for_prompt: set[int],
    done: dict[int, int],
    known: dict[int, int],
    prompts: np.ndarray,
) -> None:
    """Count the prompt tokens of an iteration; prompts that are complete leave `waiting_for_prompt`."""
    for request, tokens in chunks.items():
        done[request] += tokens
        if done[request] == known.get(request, int(prompts[request])):
            waiting_for_prompt.discard(request)


def series_of(rows: list[list[Any]], blocks: int) -> np.ndarray:
    """Time series by iteration: time_s, running, waiting, kv_usage (share of blocks), preemptions (so far)."""
    result = np.zeros(
        len(rows), [("time_s", "f8"), ("running", "i4"), ("waiting", "i4"), ("kv_usage", "f8"), ("preemptions", "i4")]
    )
    result["time_s"] = [row[1] / 1e12 for row in rows]
    result["running"] = [row[3] for row in rows]
    result["waiting"] = [row[4] for row in rows]
    result["kv_usage"] = [1 - row[8] / blocks for row in rows]
    result["preemptions"] = np.cumsum([len(row[10]) for row in rows])
    return result
