"""Ranges of values as one types them: `8..1024`, `8..1024:8`, `8..1024:pow2`, `8..1024:log`."""

import math
import re

FORMS = "LOW..HIGH[:STEP], LOW..HIGH:pow2 or LOW..HIGH:log (5 % apart)"
RATIO = 1.05  # of neighbours on a logarithmic range
MOST = 100_000  # values


def values(text: str, integer: bool) -> tuple:
    """The values of a range, ascending, both ends included where the step meets them; at most 100,000.

    Without a step integers are 1 apart and numbers a hundredth of the range. Raises ValueError.
    """
    number = r"(\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"
    match = re.fullmatch(rf"\s*{number}\.\.{number}(?::(pow2|log|{number}))?\s*", text)
    if match is None:
        raise ValueError("is no range")
    low, high = float(match[1]), float(match[2])
    if not low <= high:
        raise ValueError("ends below its start")
    spread = _geometric(low, high, match[3]) if match[3] in ("pow2", "log") else _arithmetic(low, high, match, integer)
    return tuple(dict.fromkeys(round(value) for value in spread)) if integer else tuple(spread)


def _arithmetic(low: float, high: float, match: re.Match, integer: bool) -> list[float]:
    step = float(match[3]) if match[3] else 1.0 if integer else (high - low) / 100 or 1.0
    if not step > 0 or (integer and any(value % 1 for value in (low, high, step))):
        raise ValueError("needs a step above 0" if not step > 0 else "must have whole numbers")
    count = math.floor((high - low) / step * (1 + 1e-12) + 1e-9) + 1
    if count > MOST:
        raise ValueError(f"has {count} values, more than {MOST}")
    return [float(f"{low + i * step:.12g}") for i in range(count)]


def _geometric(low: float, high: float, kind: str) -> list[float]:
    if low <= 0:
        raise ValueError(f"must start above 0 for {kind}")
    if kind == "log":
        steps = max(1, math.ceil(math.log(high / low) / math.log(RATIO)))
        return [float(f"{low * (high / low) ** (i / steps):.12g}") for i in range(steps + 1)]
    powers = range(math.ceil(math.log2(low) - 1e-12), math.floor(math.log2(high) + 1e-12) + 1)
    if not powers:
        raise ValueError("holds no power of two")
    return [2.0**power for power in powers]
