"""Where the boxes of a picture go: each column is laid out by Graphviz, and a long graph takes several columns.

Nothing here knows what a box shows: boxes are sizes, numbered in forward order, and edges are pairs of numbers.
Lengths are points; y runs down.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from fxgrad.render.engine import lay_out

__all__ = ["Layout", "Pair", "Parts", "Path", "Room", "arrange"]

Pair = tuple[int, int]  # the boxes at an edge's tail and head
Point = tuple[float, float]

_GAP = 46.0  # between columns
_TRIED = 6  # columns at most where all numbers of columns are tried
_LARGE = 120  # boxes from which one number of columns is tried
_RANK = 26.0  # between ranks
_ACROSS = 10  # edges from column to column that are drawn; the ends of others are named
_PASSED = 8  # boxes that all edges of a column may pass, for each box in it
_STUB = (150.0, 14.0)  # room for the name of an edge's start
_WINDOW = 4  # boxes around an even cut among which the one with the fewest edges is looked for
_HEAD = 8.0  # length of an arrow head
_HASTY = 200  # boxes and edges from which the layout of a column is hurried


@dataclass(frozen=True, slots=True)
class Room:
    """Width and height that a picture should fit in."""

    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Path:
    """A drawn edge: the points of a B-spline's Bezier pieces, and where its arrow points to."""

    points: tuple[Point, ...]
    tip: Point


@dataclass(slots=True)
class Layout:
    """Where everything is.

    Attributes:
        width, height: of all.
        boxes: centre of each box.
        frames: the modules around boxes: name, left, top, width, height.
        edges: the drawn edges.
        stubs: of each box into which edges go that are only named, the first of them and the place for the names.
    """

    width: float = 0.0
    height: float = 0.0
    boxes: dict[int, Point] = field(default_factory=dict)
    frames: list[tuple[str, float, float, float, float]] = field(default_factory=list)
    edges: dict[Pair, Path] = field(default_factory=dict)
    stubs: dict[Pair, Point] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Parts:
    """What is to be laid out: the size of each box, the modules around it (outermost first), and the edges.

    ``turned``: x and y are exchanged in the end, so that a frame's name stands at its left side for now.
    """

    sizes: Sequence[tuple[float, float]]
    containers: Sequence[tuple[str, ...]]
    edges: Sequence[Pair]
    turned: bool = False


def arrange(parts: Parts, room: Room) -> Layout | None:
    """The layout with as many columns as make it largest in the ``room``; None where no engine is installed."""
    count = len(parts.sizes)
    if count > _LARGE:
        height = sum(size[1] + _RANK for size in parts.sizes)
        width = max(size[0] for size in parts.sizes) + _GAP
        return _in_columns(parts, max(1, round(math.sqrt(height / width * room.width / room.height))))
    best: Layout | None = None
    for columns in range(1, min(_TRIED, count) + 1):
        found = _in_columns(parts, columns)
        if found is None:
            return None
        if best is None or _fit(found, room) > _fit(best, room) * 1.02:
            best = found
        if _fit(best, room) >= 1:
            break
    return best


def _fit(layout: Layout, room: Room) -> float:
    return min(room.width / max(layout.width, 1), room.height / max(layout.height, 1))


def _in_columns(parts: Parts, columns: int) -> Layout | None:
    cuts = _cuts(parts, columns)
    column = [sum(cut <= box for cut in cuts) for box in range(len(parts.sizes))]
    across = [pair for pair in parts.edges if column[pair[0]] != column[pair[1]]]
    neighbours = [(a, b) for a, b in across if column[b] == column[a] + 1]
    trunk = {(cut - 1, cut) for cut in cuts}
    drawn = set(neighbours) if len(neighbours) <= _ACROSS * max(1, columns - 1) else trunk & set(neighbours)
    result, left, lefts = Layout(), 0.0, list[float]()
    for number in range(len(cuts) + 1):
        members = [box for box in range(len(parts.sizes)) if column[box] == number]
        inside = [pair for pair in parts.edges if column[pair[0]] == column[pair[1]] == number]
        kept = _shortest(inside, len(members))
        stubs: dict[int, int] = {}  # one for each head, however many there are
        for tail, head in [*across, *inside]:
            if column[head] == number and (tail, head) not in drawn and (tail, head) not in kept:
                stubs.setdefault(head, tail)
        made = _column(parts, members, sorted(kept), stubs)
        if made is None:
            return None
        lefts.append(left)
        _add(result, made, left)
        left = result.width + _GAP
    if columns == 2 and _nested(drawn - trunk) and not any(frame[1] > lefts[1] for frame in result.frames):  # noqa: PLR2004
        _flip(result, lefts[1])
    for tail, head in sorted(drawn):
        gap = lefts[column[head]] - _GAP / 2 if (tail, head) in trunk else None
        result.edges[tail, head] = _link(parts, result, (tail, head), gap)
    return result


def _cuts(parts: Parts, columns: int) -> list[int]:
    """Numbers of the boxes at which columns begin: about equally high, and where few edges are cut."""
    heights = [size[1] + _RANK for size in parts.sizes]
    total, crossing = sum(heights), [0] * (len(heights) + 1)
    for tail, head in parts.edges:
        for place in range(min(tail, head) + 1, max(tail, head) + 1):
            crossing[place] += 1
    cuts: list[int] = []
    for number in range(1, columns):
        wanted, sum_, even = total * number / columns, 0.0, 0
        while even < len(heights) and sum_ + heights[even] / 2 < wanted:
            sum_ += heights[even]
            even += 1
        near = [n for n in range(even - _WINDOW, even + _WINDOW + 1) if (cuts[-1] if cuts else 0) < n < len(heights)]
        if near:
            cuts.append(min(near, key=lambda n: (crossing[n] + abs(n - even) + _shared(parts, n), n)))
    return cuts


def _shortest(pairs: Iterable[Pair], boxes: int) -> set[Pair]:
    """The edges of a column that are drawn: the shortest, until they pass ``_PASSED`` boxes for each box.

    Each box that an edge passes is a dummy to Graphviz and widens the column; in a thicket nobody follows a line.
    """
    kept, passed = set[Pair](), 0
    for tail, head in sorted(pairs, key=lambda pair: (pair[1] - pair[0], pair)):
        passed += head - tail
        if passed > _PASSED * (boxes + _PASSED):
            break
        kept.add((tail, head))
    return kept


def _shared(parts: Parts, place: int) -> int:
    """How many modules a cut at this box goes through."""
    one, two = parts.containers[place - 1], parts.containers[place]
    return sum(a == b for a, b in zip(one, two, strict=False))


def _column(parts: Parts, members: list[int], edges: list[Pair], stubs: Mapping[int, int]) -> Layout | None:
    lines = ["digraph {", f"graph [nodesep=0.28 ranksep={_RANK / 72:.3f}{_haste(len(members), len(edges))}]"]
    lines.append('node [shape=box fixedsize=true label="" fontsize=1]')
    frames: list[str] = []
    lines += _clusters(parts, members, (), frames)
    for head, tail in stubs.items():
        lines.append(f"s{tail}_{head} [width={_STUB[0] / 72:.3f} height={_STUB[1] / 72:.3f}]")
        lines.append(f"s{tail}_{head} -> n{head} [weight=0]")
    for tail, head in edges:
        lines.append(f"n{tail} -> n{head} [weight={12 if head == tail + 1 else 1}]")
    laid = lay_out("\n".join([*lines, "}"]), "json0")
    return None if laid is None else _read(laid, frames)


def _haste(boxes: int, edges: int) -> str:
    """Graph attributes that keep the layout of a large column fast: network simplex is what grows."""
    size = max(boxes, edges // 3)
    if size <= _HASTY:
        return ""
    return f" splines=line nslimit={min(1.0, (1000 / size) ** 2):.4f} nslimit1=1 mclimit=0.2 maxiter=100 searchsize=10"


def _clusters(parts: Parts, members: Iterable[int], path: tuple[str, ...], frames: list[str]) -> list[str]:
    """The nodes below ``path``, and a cluster around each module with several boxes."""
    lines: list[str] = []
    deeper: dict[tuple[str, ...], list[int]] = {}
    for box in members:
        container = parts.containers[box]
        if len(container) == len(path):
            width, height = parts.sizes[box]
            lines.append(f"n{box} [width={width / 72:.3f} height={height / 72:.3f}]")
        else:
            deeper.setdefault(container[: len(path) + 1], []).append(box)
    for inner, boxes in deeper.items():
        rest = {parts.containers[box][: len(inner) + 1] for box in boxes}
        alone = len(rest) == 1 and len(next(iter(rest))) > len(inner)  # all in one module inside, which says more
        if len(boxes) == 1 or alone:
            lines += _clusters(parts, boxes, inner, frames)
            continue
        frames.append(inner[-1])
        # Room of one line for the name, which is written by whoever draws.
        room = "margin=17" if parts.turned else 'label=" " fontsize=9 labelloc=t margin=7'
        lines.append(f"subgraph cluster_{len(frames) - 1} {{ {room}")
        lines += [*_clusters(parts, boxes, inner, frames), "}"]
    return lines


def _read(laid: str, frames: Sequence[str]) -> Layout:
    found = json.loads(laid)
    width, height = (float(part) for part in found["bb"].split(",")[2:])
    result = Layout(width, height)
    names: dict[int, str] = {}
    for thing in found.get("objects", []):
        name = str(thing["name"])
        if name.startswith("cluster_"):
            x0, y0, x1, y1 = (float(part) for part in thing["bb"].split(","))
            result.frames.append((frames[int(name.removeprefix("cluster_"))], x0, height - y1, x1 - x0, y1 - y0))
            continue
        names[thing["_gvid"]] = name
        x, y = (float(part) for part in thing["pos"].split(","))
        if name.startswith("s"):
            tail, head = name[1:].split("_")
            result.stubs[int(tail), int(head)] = (x, height - y)
        else:
            result.boxes[int(name[1:])] = (x, height - y)
    for edge in found.get("edges", []):
        tail, head = names[edge["tail"]], names[edge["head"]]
        path = _path(edge["pos"], height)
        pair = (int(tail[1:]), int(head[1:])) if tail.startswith("n") else tuple(map(int, tail[1:].split("_")))
        result.edges[pair[0], pair[1]] = path
    return result


def _path(pos: str, height: float) -> Path:
    """Of dot's ``e,x,y x,y x,y ...``: the tip first, then the points."""
    first, *rest = pos.split()
    tip = tuple(float(part) for part in first.removeprefix("e,").split(","))
    points = tuple((float(x), height - float(y)) for x, y in (part.split(",") for part in rest))
    return Path(points, (tip[0], height - tip[1]))


def _add(result: Layout, made: Layout, left: float) -> None:
    def moved(point: Point) -> Point:
        return point[0] + left, point[1]

    result.boxes |= {box: moved(point) for box, point in made.boxes.items()}
    result.stubs |= {pair: moved(point) for pair, point in made.stubs.items()}
    result.frames += [(name, x + left, y, w, h) for name, x, y, w, h in made.frames]
    for pair, path in made.edges.items():
        result.edges[pair] = Path(tuple(map(moved, path.points)), moved(path.tip))
    result.width, result.height = left + made.width, max(result.height, made.height)


def _nested(pairs: Iterable[Pair]) -> bool:
    """Whether edges lie inside of each other, as the skips of a U-Net: the first value is used last."""
    listed = sorted(pairs)
    return len(listed) > 1 and all(one[1] > two[1] and one[0] < two[0] for one, two in pairwise(listed))


def _flip(layout: Layout, left: float) -> None:
    """Let what lies to the right of ``left`` run up, so that nested edges lie side by side."""
    tall = layout.height

    def turned(point: Point) -> Point:
        return (point[0], tall - point[1]) if point[0] > left else point

    layout.boxes = {box: turned(point) for box, point in layout.boxes.items()}
    layout.stubs = {pair: turned(point) for pair, point in layout.stubs.items()}
    layout.edges = {p: Path(tuple(map(turned, path.points)), turned(path.tip)) for p, path in layout.edges.items()}


def _link(parts: Parts, layout: Layout, pair: Pair, gap: float | None) -> Path:
    """An edge from one column to the next: the trunk up through the ``gap`` at that x, others from side to side."""
    (x0, y0), (x1, y1) = layout.boxes[pair[0]], layout.boxes[pair[1]]
    start, tip = (x0 + parts.sizes[pair[0]][0] / 2, y0), (x1 - parts.sizes[pair[1]][0] / 2, y1)
    if gap is None:
        reach = max(24.0, (tip[0] - start[0]) / 2)
        return Path((start, (start[0] + reach, y0), (tip[0] - reach, y1), (tip[0] - _HEAD, y1)), tip)
    turn = math.copysign(min(_GAP / 2, abs(y0 - y1) / 2), y1 - y0)
    first, last = (gap, y0 + turn), (gap, y1 - turn)
    near, far = (gap - abs(turn), y0), (gap + abs(turn), y1)
    points = (
        start, start, near, near, (gap, y0), (gap, y0), first, first, last, last, (gap, y1), (gap, y1), far,
        far, (tip[0] - _HEAD, y1), (tip[0] - _HEAD, y1),
    )  # fmt: skip
    return Path(points, tip)
