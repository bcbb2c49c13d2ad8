"""What XLA made of the engine: the compiled chunk of scan steps, and what one step of it does."""

import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxsim.engine import lanes
from jaxsim.engine.layout import Limits

# What takes no time: names for values that are there.
FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant"}


@dataclass
class Program:
    """A chunk of scan steps as it was compiled for some shapes, with the number of times that it ran."""

    limits: Limits
    steps: int  # of a chunk
    arguments: Any  # arrays without values
    executable: Any
    calls: int = 0

    @property
    def text(self) -> str:
        """Optimised HLO of one device."""
        return self.executable.as_text()

    @property
    def lanes(self) -> int:
        """Lanes of all devices."""
        return self.arguments[-1].memory.shape[0]

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one lane, with what it is run with."""
        knobs, state = self.arguments[1], self.arguments[-1]
        return sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in jax.tree.leaves((knobs, state)))

    @property
    def temporary_bytes(self) -> int:
        """Bytes that a device needs while a chunk runs, beyond arguments and results."""
        return self.executable.memory_analysis().temp_size_in_bytes


@dataclass
class Watch:
    """The programs that ran while somebody watched."""

    programs: list[Program] = field(default_factory=list)

    @property
    def sole(self) -> Program:
        (program,) = self.programs
        return program


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    """Collects the programs that the engine steps its lanes with."""
    watch, original = Watch(), lanes.compiled
    found: dict[Any, Program] = {}

    def compiled(limits: Limits, mesh: Any, steps: int) -> tuple[Callable, Callable, Callable]:
        fill, chunk, pick = original(limits, mesh, steps)

        def watched(*arguments: Any) -> Any:
            shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
            leaves, structure = jax.tree.flatten(shapes)
            key = (limits, mesh, steps, tuple((leaf.shape, leaf.dtype) for leaf in leaves), structure)
            if key not in found:
                found[key] = Program(limits, steps, shapes, chunk.lower(*arguments).compile())
                watch.programs.append(found[key])
            found[key].calls += 1
            return found[key].executable(*arguments)

        watched.lower = chunk.lower  # pyright: ignore[reportFunctionMemberAccess]
        return fill, watched, pick

    lanes.compiled = compiled
    try:
        yield watch
    finally:
        lanes.compiled = original


@dataclass(frozen=True)
class Step:
    """What one scan step of a compiled chunk does, for all lanes of a device at once."""

    dispatched: Counter  # operations that are started one by one, by name; a fusion is one of them
    operations: int  # with what is inside fusions: the more, the more is computed twice

    @property
    def total(self) -> int:
        return sum(self.dispatched.values())


INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*)$")
OPERATION = re.compile(r"(?<=[ )}\]])([a-z][\w-]*)\(")
CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


def computations(text: str) -> dict[str, list[tuple[str, str]]]:
    """The computations of an HLO module: (operation, line) of every instruction, by name."""
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" ") and "(" in line:
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
            current = found["ENTRY" if line.startswith("ENTRY") else name] = []
        elif match := INSTRUCTION.match(line):
            operation = OPERATION.search(" " + match[2])
            if operation:
                current.append((operation[1], line))
    return found


def step(text: str) -> Step:
    """Counts in the body of the loop over scan steps, the largest loop of a program's optimised HLO.

    Of a fence the larger branch counts: the other never runs.
    """
    parts = computations(text)

    def called(line: str) -> list[str]:
        branches = BRANCHES.search(line)
        return [name.strip().lstrip("%") for name in branches[1].split(",")] if branches else CALLED.findall(line)

    def count(name: str) -> Step:
        dispatched, operations = Counter(), 0
        for operation, line in parts[name]:
            if operation in FREE:
                continue
            inner = [count(one) for one in called(line)] if operation in ("conditional", "call", "while") else []
            dispatched[operation] += 1
            operations += 1
            if operation == "fusion":
                operations += sum(sum(one not in FREE for one, _ in parts[body]) for body in called(line))
            elif inner:
                most = max(inner, key=lambda one: one.operations)
                dispatched += most.dispatched
                operations += most.operations
        return Step(dispatched, operations)

    loops = [line for part in parts.values() for operation, line in part if operation == "while"]
    return max((count(CALLED.findall(loop)[-1]) for loop in loops), key=lambda found: found.total)
