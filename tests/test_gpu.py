"""The benchmark for accelerators, as far as a machine without one can tell."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax import export

from benchmarks import gpu
from benchmarks.program import step
from jaxsim.engine import lanes

HLO = """HloModule jit_advance

%fused (p: s32[4]) -> s32[4] {
  %p = s32[4]{0} parameter(0)
  ROOT %add.1 = s32[4]{0} add(%p, %p)
}

%inner (q: (s32[4])) -> (s32[4]) {
  %q = (s32[4]{0}) parameter(0)
  %e.1 = s32[4]{0} get-tuple-element(%q), index=0
  %sort.1 = s32[4]{0} sort(%e.1), dimensions={0}, to_apply=%less
  ROOT %t.1 = (s32[4]{0}) tuple(%sort.1)
}

%yes (a: s32[4]) -> s32[4] {
  %a = s32[4]{0} parameter(0)
  ROOT %copy.9 = s32[4]{0} copy(%a)
}

%no (b: s32[4]) -> s32[4] {
  ROOT %b = s32[4]{0} parameter(0)
}

%body (r: (s32[4], pred[])) -> (s32[4], pred[]) {
  %r = (s32[4]{0}, pred[]) parameter(0)
  %e.2 = s32[4]{0} get-tuple-element(%r), index=0
  %e.3 = pred[] get-tuple-element(%r), index=1
  %f.1 = s32[4]{0} fusion(%e.2), kind=kLoop, calls=%fused
  %t.2 = (s32[4]{0}) tuple(%f.1)
  %w.1 = (s32[4]{0}) while(%t.2), condition=%go, body=%inner
  %e.4 = s32[4]{0} get-tuple-element(%w.1), index=0
  %c.1 = s32[4]{0} conditional(%e.3, %e.4, %e.4), true_computation=%yes, false_computation=%no
  %c.2 = s32[4]{0} conditional(%e.3, %c.1, %c.1), branch_computations={%yes, %no}
  ROOT %t.3 = (s32[4]{0}, pred[]) tuple(%c.2, %e.3)
}

ENTRY %main (x: s32[4]) -> (s32[4], pred[]) {
  %x = s32[4]{0} parameter(0)
  %true = pred[] constant(true)
  %copy.1 = s32[4]{0} copy(%x)
  %t.4 = (s32[4]{0}, pred[]) tuple(%copy.1, %true)
  ROOT %w.2 = (s32[4]{0}, pred[]) while(%t.4), condition=%go, body=%body
}
"""


def test_kernels_are_those_of_the_loop_and_of_what_is_in_it():
    assert step(HLO).dispatched == {"fusion": 1, "while": 1, "sort": 1, "conditional": 2, "copy": 2}


@pytest.mark.parametrize("name", gpu.PROGRAMS)
def test_its_programs_lower_for_a_gpu(name):
    prepared = gpu.ready(name, 20)
    prepared = prepared._replace(limits=replace(prepared.limits, fenced=False))
    mesh = lanes.devices_mesh(jax.local_devices()[:1])
    with lanes.x64():
        filling, stepping = gpu.arguments(prepared, 512, mesh)
        picking = np.zeros(lanes.BLOCK, np.int32), stepping[-1]
        functions: Any = lanes.compiled(prepared.limits, mesh, gpu.STEPS)
        for function, arguments in zip(functions, (filling, stepping, picking), strict=True):
            shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
            assert export.export(function, platforms=["cuda"])(*shapes).platforms == ("cuda",)


def test_a_row_without_memory_stops_none_of_the_others(tmp_path, monkeypatch, capsys):
    def measure(program: Any, *_: Any) -> dict[str, Any]:
        if program.lanes == 64:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        speed = {16: 100.0, 256: 99.0}[program.lanes]
        keys = "step_us", "steps_per_request", "ns_per_request", "requests_per_s"
        return dict.fromkeys(keys, 1.0) | {"lane_steps_per_s": speed}

    chunk = SimpleNamespace(as_text=lambda: HLO)
    monkeypatch.setattr(
        gpu, "compiled", lambda name, prepared, count, _: gpu.Program(name, count, prepared, 0, chunk, 1.0)
    )
    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(gpu, "end_to_end", lambda *_: {"requests_per_s": 1e6})
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--quick", "--out", str(tmp_path / "gpu.json")])
    gpu.main()
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert [row.get("left_out") for row in result["rows"]] == ["out of memory"] * 3 + [None] * 6
    assert result["best_lanes"] == dict.fromkeys(gpu.PROGRAMS, 16) and result["kernels"]["plain"]["fusion"] == 1
    assert capsys.readouterr().out.count("out of memory") == 3
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--quick", "--seconds", "0", "--out", str(tmp_path / "gpu.json")])
    gpu.main()
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["left_out"] for row in result["rows"]] == ["no time"] * 9
