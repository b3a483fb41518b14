"""Flows made by hand, without torch: what the renderers, the store and the graph are tested on."""

from __future__ import annotations

import math
from itertools import pairwise

from fxgrad.schema import (
    BlindSpot,
    CaptureReport,
    Consumer,
    Edge,
    EventInfo,
    Finding,
    GradientFlow,
    ModuleCall,
    Node,
    ParameterRecord,
    Site,
    Statistics,
)


def full(norm: float, *, nan: int = 0, inf: int = 0, zero: int = 0, numel: int = 8) -> Statistics:
    """Statistics of level ``full`` with this l2 norm."""
    largest = 0.0 if norm == 0 else norm / 2
    return Statistics("full", numel, norm, largest, largest or None, 0.5, 1.0, nan, inf, zero, 0, 0, 0)


def node(key: str, op: str = "call_function", kind: str = "Net", call_index: int = 0) -> Node:
    """A node whose other names follow from its key."""
    stem = key.partition("#")[0]
    module = stem.rpartition("/")[0] if "/" in stem else stem
    if op in ("placeholder", "output"):
        module = ""
    target = stem if op == "call_module" else stem.rpartition("/")[2]
    name = "".join(c if c.isalnum() else "_" for c in key).strip("_")
    return Node(key, name, op, target, module, kind, call_index, f"/home/user/net.py:{len(key)}")


def site(of: Node, statistics: Statistics | None, position: str = "") -> Site:
    """A float32 site on the CPU."""
    return Site(of, position, (2, 4), "float32", "cpu", statistics)


def flow(
    nodes: list[Node],
    sites: list[Site],
    uses: list[tuple[str, str, str]],
    *,
    level: str = "full",
    calls: tuple[ModuleCall, ...] = (),
    spots: tuple[BlindSpot, ...] = (),
) -> GradientFlow:
    """A flow; ``uses`` are (producer id, consumer key, argument)."""
    edges = []
    for producer, consumer, argument in uses:
        key, bracket, rest = producer.partition("[")
        edges.append(Edge(key, bracket + rest, Consumer(consumer, argument)))
    return GradientFlow(
        nodes=tuple(nodes),
        sites=tuple(sites),
        edges=tuple(edges),
        parameters=(
            ParameterRecord("fc.weight", (4, 4), "float32", "cpu", True, full(0.25), aliases=("tied.weight",)),
            ParameterRecord("fc.bias", (4,), "float32", "cpu", False, None, reason="frozen"),
        ),
        blind_spots=spots,
        capture=CaptureReport("eager", "asked for", "Net", True, "2.14.1", (("dynamo", "a branch on a value"),)),
        event=EventInfo(0, 0, "mse", level),  # type: ignore[arg-type]
        calls=calls,
    )


def chain(length: int = 4, factor: float = 0.1, level: str = "full") -> GradientFlow:
    """Functions in a row; from the loss backwards each passes ``factor`` of the gradient."""
    nodes = [node("input:x", "placeholder"), *(node(f"/op{n}") for n in range(length)), node("output", "output")]
    norms = [factor ** (length - n) for n in range(length)]
    make = (lambda v: Statistics("norm", 8, v)) if level == "norm" else full
    sites = [site(nodes[0], None), *(site(nodes[n + 1], make(norm)) for n, norm in enumerate(norms))]
    uses = [(nodes[n].key, nodes[n + 1].key, "args[0]") for n in range(length + 1)]
    spot = BlindSpot("input:x", "", "no_grad_required", "nothing requires a gradient")
    root = ModuleCall("", "Net", 0, ("input:x",), (nodes[-2].key,))
    return flow(nodes, sites, uses, level=level, calls=(root,), spots=(spot,))


def lost(flow: GradientFlow) -> tuple[Finding]:
    """A finding that the gradient gets lost on the way through the whole flow."""
    way = tuple(node.key for node in reversed(flow.nodes))
    return (Finding("vanishing", "error", "it falls", "", path=way),)


def residual() -> GradientFlow:
    """fc (a leaf) beside a skip, a tuple output, and a value that one op uses twice."""
    x, fc, add, split, out = (
        node("input:x", "placeholder"),
        node("block.fc", "call_module", "Linear"),
        node("block/add"),
        node("/chunk"),
        node("output", "output"),
    )
    sites = [
        site(x, full(5.0)), site(fc, full(4.0)), site(add, full(3.0)), site(split, full(3.0), "[0]"),
        site(split, None, "[1]"),
    ]  # fmt: skip
    uses = [
        ("input:x", "block.fc", "args[0]"), ("input:x", "block/add", "args[1]"), ("block.fc", "block/add", "args[0]"),
        ("block/add", "/chunk", "args[0]"), ("/chunk[0]", "output", "args[0][0]"),
        ("/chunk[0]", "output", "args[0][1]"),
    ]  # fmt: skip
    calls = (
        ModuleCall("block.fc", "Linear", 0, ("input:x",), ("block.fc",)),
        ModuleCall("block", "Block", 0, ("input:x",), ("block/add",)),
        ModuleCall("", "Net", 0, ("input:x",), ("/chunk[0]",)),
    )
    spots = (BlindSpot("/chunk", "[1]", "output_unused", "nobody uses it"),)
    return flow([x, fc, add, split, out], sites, uses, calls=calls, spots=spots)


def special() -> GradientFlow:
    """One site of each look: measured, zero, NaN, Inf, outside the accumulator's range, not measured."""
    looks = {
        "/fine": full(1.0),
        "/zero": full(0.0, zero=8),
        "/nan": full(2.0, nan=3),
        "/inf": full(2.0, inf=8),
        "/tiny": Statistics("norm", 8, 0.0),
        "/huge": Statistics("norm", 8, math.inf),
        "/blind": None,
    }
    nodes = [node(key) for key in looks]
    uses = [(one.key, two.key, "args[0]") for one, two in pairwise(nodes)]
    spots = (BlindSpot("/blind", "", "frozen", "only frozen parameters"),)
    return flow(nodes, [site(n, looks[n.key]) for n in nodes], uses, spots=spots)


def nested(blocks: int, per_block: int) -> GradientFlow:
    """``blocks`` equal blocks of ``per_block`` leaf modules, in a Sequential that is called."""
    nodes = [node("input:x", "placeholder")]
    calls = []
    for b in range(blocks):
        nodes += [node(f"body.{b}.op{n}", "call_module", "Linear") for n in range(per_block)]
        last = nodes[-1].key
        calls.append(ModuleCall(f"body.{b}", "Block", 0, (nodes[-per_block - 1].key,), (last,)))
    nodes.append(node("output", "output"))
    calls += [
        ModuleCall("body", "Sequential", 0, ("input:x",), (nodes[-2].key,)),
        ModuleCall("", "Net", 0, ("input:x",), (nodes[-2].key,)),
    ]
    count = len(nodes) - 2
    sites = [site(n, full(10 ** (-6 * i / max(count, 1)))) for i, n in enumerate(nodes[:-1])]
    uses = [(one.key, two.key, "args[0]") for one, two in pairwise(nodes)]
    return flow(nodes, sites, uses, calls=tuple(calls))


NASTY = (
    'say "hi"', "<b>bold</b>", "<<table>>", "back\\slash\\n", "line\nbreak", "tab\tand\x00null", "ünïcødé 梯度 🙂",
    "a" * 500, "&amp;", "[red]markup[/red]", "</svg><script>alert(1)</script>", "port:name:n", "{record|label}",
    "%s %(x)s {0}", "--", "", " ",
)  # fmt: skip


def named(word: str) -> GradientFlow:
    """A flow in which everything that a user can name is called ``word``."""
    first = Node(f"m/{word}", word or "x", "call_function", word, word, word, 0, word)
    second = Node("/second", "second", "call_function", "second", "", word, 0, None)
    made = flow(
        [first, second], [site(first, full(1.0), word), site(second, full(0.5))], [(first.key, "/second", word)]
    )
    return GradientFlow(
        made.nodes, made.sites, (Edge(first.key, word, Consumer("/second", word)),), made.parameters,
        (BlindSpot("/second", word, "detached", word),),
        CaptureReport("eager", word, word, True, "2"), EventInfo(0, 0, word, "full"),
        (ModuleCall(word, word, 0, (), ()),),
    )  # fmt: skip
