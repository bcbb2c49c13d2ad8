"""The heat map, read back as XML."""

import math
import xml.etree.ElementTree as ElementTree

from jaxsim.results.heatmap import COLOURS, EMPTY, heat_map

SVG = "{http://www.w3.org/2000/svg}"
ROWS = [
    {"a": 8, "b": 2048, "load": 1.0},
    {"a": 64, "b": 2048, "load": 3.0},
    {"a": 64, "b": 2048, "load": 5.0},  # the larger one counts
    {"a": 8, "b": 4096, "load": None},
    {"a": 64, "b": 4096, "load": math.nan},
]


def read(rows):
    tree = ElementTree.fromstring(heat_map("most <b>", rows, "a", "b", "load"))
    texts = [element.text for element in tree.iter(f"{SVG}text")]
    cells = {(float(one.get("x", 0)), float(one.get("y", 0))): one.get("fill") for one in tree.iter(f"{SVG}rect")}
    return texts, cells


def test_cells_are_coloured_from_the_least_to_the_most():
    texts, cells = read(ROWS)
    columns, lines = (sorted({place[i] for place in cells}) for i in (0, 1))
    low, high = ("#" + "".join(f"{part:02x}" for part in COLOURS[end]) for end in (0, -1))
    # The larger b is above.
    assert [cells[x, y] for y in lines for x in columns] == [EMPTY, EMPTY, low, high]
    assert texts[0] == "most <b>" and {"1.000", "5.000", "8", "64", "2048", "4096", "a", "b"} <= set(texts)
    assert texts.count("-") == 2 and "3.000" not in texts


def test_one_value_and_none_are_no_error():
    assert len(read(ROWS[:1])[1]) == 1
    assert set(read([{"a": 1, "b": 2}])[1].values()) == {EMPTY}
