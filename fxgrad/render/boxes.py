"""What a picture or a profile shows as one box: a node, a collapsed module call, or a run of repeated blocks.

A node's *container* is the module whose forward made it (for a leaf module: the module that called the leaf).  Down
to ``depth`` module levels containers are drawn as clusters; deeper ones collapse into one box per call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fxgrad.graph import sites_of
from fxgrad.render.passing import pass_through
from fxgrad.schema import GradientFlow, Node, Site

__all__ = ["READABLE", "Box", "Splitter", "boxes_of", "container_of", "grouped"]

READABLE = 40  # boxes that fit on one screen
REPEATS = 3  # fewer repeated blocks are drawn one by one
_PERIOD = 10  # boxes that one repeated block may have
_CONTAINERS = frozenset({"Sequential", "ModuleList", "ModuleDict"})  # their class says nothing of what is inside


@dataclass(slots=True)
class Box:
    """One box of the picture.

    Attributes:
        container: the modules in whose clusters it lies, outermost first.
        path: of the collapsed module, "" for a single node.
        type: class name of the collapsed module.
        nodes: what it stands for, in order; behind a single node those that pass its gradient on as it is.
        outputs: the sites that leave it.
        blocks: for a run of repeated blocks, the boxes folded into this one.
        parts: for one block of several boxes, these.
    """

    container: tuple[str, ...]
    path: str
    type: str
    nodes: list[Node]
    outputs: list[Site] = field(default_factory=list)
    blocks: list[Box] = field(default_factory=list)
    parts: list[Box] = field(default_factory=list)

    @property
    def single(self) -> bool:
        """Whether it is one node, and no module and no run."""
        return not self.path and not self.blocks and not self.parts

    @property
    def all_nodes(self) -> list[Node]:
        """Its nodes, those of folded blocks included, in order."""
        return [node for block in self.blocks for node in block.all_nodes] or self.nodes

    @property
    def name(self) -> str:
        """The module's path, or the key of the first node."""
        return self.path or self.all_nodes[0].key

    @property
    def kind(self) -> str:
        """The module's class, or what the node calls."""
        return self.type or _kind(self.all_nodes[0])


def container_of(node: Node, called: frozenset[str]) -> tuple[str, ...]:
    """The modules around a node, outermost first.

    Only modules that were called count: a ModuleList groups names, but nothing runs in it.
    """
    if node.op in ("placeholder", "output") or not node.module_path:
        return ()
    parts = node.module_path.split(".")
    prefixes = (".".join(parts[: n + 1]) for n in range(len(parts)))
    leaf = node.op in ("call_module", "external") and node.target == node.module_path
    return tuple(path for path in prefixes if path in called and not (leaf and path == node.module_path))


def boxes_of(
    flow: GradientFlow, depth: int | None, *, fold: bool, readable: int = READABLE
) -> tuple[list[Box], dict[str, int]]:
    """The boxes in forward order, and the box of each node key.  ``depth`` None: as deep as stays ``readable``."""
    maker = Splitter(flow, fold=fold)
    if depth is None:
        found = maker.at(0)
        for level in range(1, maker.deepest + 1):
            deeper = maker.at(level)
            if len(deeper) <= readable:
                found = deeper
        if fold and len(found) > readable:
            found = grouped(found, readable)
    else:
        found = maker.at(depth)
    number = {node.key: n for n, box in enumerate(found) for node in box.all_nodes}
    _find_outputs(flow, found)
    return found, number


class Splitter:
    """The boxes of a flow at any depth."""

    def __init__(self, flow: GradientFlow, *, fold: bool) -> None:
        self.flow, self.fold = flow, fold
        self.types = {call.path: call.type for call in flow.calls}
        called = frozenset(self.types)
        self.containers = {node.key: container_of(node, called) for node in flow.nodes}
        self.deepest = max(map(len, self.containers.values()), default=0)
        self.passing = pass_through(flow) if fold else frozenset[str]()
        self.sources: dict[str, list[str]] = {}
        for edge in flow.edges:
            self.sources.setdefault(edge.consumer.key, []).append(edge.producer)
        self.sites = sites_of(flow)

    def at(self, depth: int) -> list[Box]:
        """The boxes of the whole flow at this depth, folded where that is wanted."""
        boxes = self.split(self.flow.nodes, depth)
        return self.folded(boxes) if self.fold else boxes

    def split(self, nodes: Iterable[Node], depth: int, *, into_modules: bool = True) -> list[Box]:
        """A box for each call of a module at this depth, and for each node above it.

        A value that passes its gradient on as it is goes into the box of what it was made of, a module's box only
        if ``into_modules``.
        """
        boxes: list[Box] = []
        home: dict[str, Box] = {}
        for node in nodes:
            container = self.containers[node.key]
            if len(container) > depth:
                path = container[depth]
                # The nodes of one module call follow each other, so a run of them is a call.
                if not boxes or boxes[-1].path != path:
                    boxes.append(Box(container[:depth], path, self.types.get(path, ""), []))
                box = boxes[-1]
            else:
                source = home.get(self.sources[node.key][0]) if node.key in self.passing else None
                box = source if source and (into_modules or source.single) else Box(container, "", "", [])
                if box is not source:
                    boxes.append(box)
            box.nodes.append(node)
            home[node.key] = box
        return boxes

    def folded(self, boxes: list[Box]) -> list[Box]:
        """Runs of three or more equal blocks, of one box or of several that repeat, become one box each."""
        tokens = [self._token(box) for box in boxes]
        result: list[Box] = []
        place = 0
        while place < len(boxes):
            period, count = max(
                ((period, self._repeats(boxes, tokens, place, period)) for period in range(1, _PERIOD + 1)),
                key=lambda found: (found[0] * found[1] if found[1] >= REPEATS else 0, -found[0]),
            )
            if count < REPEATS:
                result.append(boxes[place])
                place += 1
                continue
            starts = range(place, place + period * count, period)
            result.append(_run([_block(boxes[start : start + period]) for start in starts]))
            place += period * count
        return result

    def _repeats(self, boxes: list[Box], tokens: list[_Token], place: int, period: int) -> int:
        """How often the ``period`` boxes from ``place`` on come in a row, each fed by those before it."""
        count, total = 1, len(boxes)
        while place + (count + 1) * period <= total:
            here = place + count * period
            if not all(tokens[here + n].equals(tokens[here - period + n]) for n in range(period)):
                break
            before = {node.key for box in boxes[here - period : here] for node in box.nodes}
            after = [node.key for box in boxes[here : here + period] for node in box.nodes]
            if not any(source in before for key in after for source in self.sources.get(key, [])):
                break
            count += 1
        return count

    def _token(self, box: Box) -> _Token:
        parent = box.path.rpartition(".")[0]
        if box.single:
            node = box.nodes[0]
            shapes = tuple(site.shape for site in self.sites.get(node.key, []))
            kind = (node.op, _kind(node), shapes, box.container, node.module_path.rpartition(".")[0])
            return _Token(kind, Counter({node.key: 1} if node.op in ("placeholder", "output") else {}))
        strip = len(box.path)
        inner: Counter[object] = Counter((node.op, node.module_type, node.module_path[strip:]) for node in box.nodes)
        return _Token((box.type, box.container, parent), inner, exact=box.type in _CONTAINERS)


@dataclass(frozen=True, slots=True)
class _Token:
    """What makes two boxes equal: where they are, what they are, and what is in them.

    A block of a class of the model may have a little more than the next, such as the first of a stage, which also
    changes the size.
    """

    kind: tuple[object, ...]
    inner: Counter[object]
    exact: bool = False

    def equals(self, other: _Token) -> bool:
        if self.kind != other.kind:
            return False
        if self.exact or other.exact:
            return self.inner == other.inner
        return self.inner <= other.inner or other.inner <= self.inner


def _kind(node: Node) -> str:
    """A module's class; else what the key calls the function, which is the name that was written."""
    return node.module_type if node.op == "call_module" else node.key.rpartition("/")[2].partition("#")[0]


def _block(boxes: Sequence[Box]) -> Box:
    if len(boxes) == 1:
        return boxes[0]
    nodes = [node for box in boxes for node in box.nodes]
    return Box(boxes[0].container, "", "", nodes, parts=list(boxes))


def _run(blocks: list[Box]) -> Box:
    return Box(blocks[0].container, blocks[0].path, blocks[0].type, [], blocks=blocks)


def grouped(boxes: list[Box], most: int) -> list[Box]:
    """At most ``most`` boxes: neighbours become runs, all about equally long."""
    size = -(-len(boxes) // most)
    if size <= 1:
        return boxes
    found = []
    for start in range(0, len(boxes), size):
        part = boxes[start : start + size]
        flat = [block for box in part for block in (box.blocks or [box])]
        found.append(_run(flat) if len(flat) > 1 else part[0])
    return found


def _find_outputs(flow: GradientFlow, boxes: list[Box]) -> None:
    """The sites that somebody outside of a box uses: what the box receives its gradient through."""
    users: dict[str, set[str]] = {}
    for edge in flow.edges:
        users.setdefault(edge.producer + edge.output_position, set()).add(edge.consumer.key)
    by_key = sites_of(flow)
    for box in boxes:
        for part in (box, *box.blocks):
            own = {node.key for node in part.all_nodes}
            sites = [site for node in part.all_nodes for site in by_key.get(node.key, [])]
            used = [site for site in sites if users.get(site.id, set()) - own]
            part.outputs = sites if part.single and (len(part.nodes) == 1 or not used) else used
        if box.blocks:
            box.outputs = box.blocks[-1].outputs
