"""What the picture shows as one box: a node, a collapsed module call, or a run of repeated blocks.

A node's *container* is the module whose forward made it (for a leaf module: the module that called the leaf).  Down
to ``depth`` module levels containers are drawn as clusters; deeper ones collapse into one box per call.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fxgrad.graph import sites_of
from fxgrad.schema import GradientFlow, Node, Site

READABLE = 60  # boxes that fit on one screen
REPEATS = 3  # fewer repeated blocks are drawn one by one


@dataclass(slots=True)
class Box:
    """One box of the picture.

    Attributes:
        container: the modules in whose clusters it lies, outermost first.
        path: of the collapsed module, "" for a single node.
        type: class name of the collapsed module.
        nodes: what it stands for, in order.
        outputs: the sites that leave it.
        blocks: for a run of repeated blocks, the boxes folded into this one.
    """

    container: tuple[str, ...]
    path: str
    type: str
    nodes: list[Node]
    outputs: list[Site] = field(default_factory=list)
    blocks: list[Box] = field(default_factory=list)

    @property
    def single(self) -> bool:
        """Whether it is one node and not a module."""
        return not self.path

    @property
    def all_nodes(self) -> list[Node]:
        """Its nodes, those of folded blocks included, in order."""
        return [node for block in self.blocks for node in block.nodes] or self.nodes


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


def boxes_of(flow: GradientFlow, depth: int | None, *, fold: bool) -> tuple[list[Box], dict[str, int]]:
    """The boxes in forward order, and the box of each node key.  ``depth`` None: as deep as stays readable."""
    called = frozenset(call.path for call in flow.calls)
    deepest = max((len(container_of(node, called)) for node in flow.nodes), default=0)
    if depth is None:
        found = _at_depth(flow, 0, fold=fold)
        for level in range(1, deepest + 1):
            deeper = _at_depth(flow, level, fold=fold)
            if len(deeper) > READABLE:
                break
            found = deeper
    else:
        found = _at_depth(flow, depth, fold=fold)
    number = {node.key: n for n, box in enumerate(found) for node in box.all_nodes}
    _find_outputs(flow, found)
    return found, number


def _at_depth(flow: GradientFlow, depth: int, *, fold: bool) -> list[Box]:
    types = {call.path: call.type for call in flow.calls}
    called = frozenset(types)
    boxes: list[Box] = []
    for node in flow.nodes:
        container = container_of(node, called)
        if len(container) <= depth:
            boxes.append(Box(container, "", "", [node]))
            continue
        path = container[depth]
        # The nodes of one module call follow each other, so a run of them is a call.
        if boxes and boxes[-1].path == path:
            boxes[-1].nodes.append(node)
        else:
            boxes.append(Box(container[:depth], path, types.get(path, ""), [node]))
    return _folded(boxes) if fold else boxes


def _folded(boxes: list[Box]) -> list[Box]:
    result: list[Box] = []
    run: list[Box] = []
    for box in [*boxes, None]:
        if box is not None and run and _signature(box) == _signature(run[0]) and not box.single:
            run.append(box)
            continue
        if len(run) >= REPEATS:
            result.append(Box(run[0].container, run[0].path, run[0].type, [], blocks=run))
        else:
            result += run
        run = [] if box is None else [box]
    return result


def _signature(box: Box) -> object:
    """Equal for repeated blocks: same parent, same type, the same ops in the same inner places."""
    strip = len(box.path)
    inner = tuple((node.op, node.module_type, node.module_path[strip:]) for node in box.nodes)
    return (box.container, box.path.rpartition(".")[0], box.type, inner)


def _find_outputs(flow: GradientFlow, boxes: list[Box]) -> None:
    """The sites that somebody outside of a box uses: what the box receives its gradient through."""
    users: dict[str, set[str]] = {}
    for edge in flow.edges:
        users.setdefault(edge.producer + edge.output_position, set()).add(edge.consumer.key)
    by_key = sites_of(flow)
    for box in boxes:
        for part in (box, *box.blocks):
            own = {node.key for node in part.nodes}
            sites = [site for node in part.nodes for site in by_key.get(node.key, [])]
            part.outputs = sites if part.single else [site for site in sites if users.get(site.id, set()) - own]
        if box.blocks:
            box.outputs = box.blocks[-1].outputs
