"""Writes random forward functions as Python source, each with its out-of-place twin for the oracle.

A program is a list of steps over a pool of ``BATCH x WIDTH`` values.  Templates mark what fxgrad should see as a
site: ``<tanh:torch.tanh({a})>`` is ``torch.tanh(v3)`` in the model and ``at(s + "tanh", torch.tanh(v3))`` in the
twin.  Which names stand for one tensor object, and which objects share memory, is tracked, so that the twin of an
in-place step rebinds every name of the object; where that cannot be said simply, the program has no twin.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

BATCH, WIDTH = 4, 6
_SITE = re.compile(r"<([a-z_0-9.]+):([^<>]*)>")

#: Functions, methods and operators of one value: template, whether autograd keeps the input, whether the output.
UNARY = (
    ("<tanh:torch.tanh({a})>", False, True),
    ("<relu:F.relu({a})>", False, True),
    ("<sigmoid:{a}.sigmoid()>", False, True),
    ("<softmax:F.softmax({a}, dim=1)>", False, True),
    ("<exp:torch.exp(<neg:-<abs:{a}.abs()>>)>", True, True),
    ("<sin:torch.sin({a})>", True, False),
    ("<gelu:F.gelu({a})>", True, False),
    ("<clamp:{a}.clamp(-1.0, 1.0)>", True, False),
    ("<layer_norm:F.layer_norm({a}, (6,))>", True, False),
    ("<pow:{a} ** 2>", True, False),
    ("<neg:-{a}>", False, False),
    ("<mul:{a} * 0.5>", False, False),
    ("<sub:1.5 - {a}>", False, False),
    ("<div:{a} / 2.0>", False, False),
    ("<add:{a} + 1.0>", False, False),
    ("<div:1.0 / (<add:<square:{a}.square()> + 1.0>)>", True, True),
    ("<mul:{a} * <mean:{a}.mean(dim=1, keepdim=True)>>", True, False),
    ("<div:{a} / (<add:<norm:{a}.norm()> + 1.0>)>", True, False),
    ("<sub:{a} - <amax:{a}.amax(1, keepdim=True)>>", True, False),
    ("<matmul:torch.matmul({a}, self.weight)>", True, False),
    ("<linear:F.linear({a}, self.weight, self.bias)>", True, False),
    ("<roll:torch.roll({a}, 1, dims=1)>", False, False),
    ("<cumsum:<flip:{a}.flip(1)>.cumsum(1)>", False, False),
    ("<masked_fill:{a}.masked_fill(torch.gt({a}, 0.5), 0.1)>", False, False),
    ("<clone:{a}.clone()>", False, False),
    ("<cat:torch.cat([<getitem:{a}[:, 3:]>, <getitem:{a}[:, :3]>], dim=1)>", False, False),
    ("<fft_irfft:torch.fft.irfft(<fft_rfft:torch.fft.rfft({a})>, n=6)>", False, False),
)
#: The same memory under another tensor object.
VIEWS = (
    "<view:<view_as:{a}.view_as({a})>.view(4, 6)>",
    "<reshape:<flatten:torch.flatten({a})>.reshape(4, 6)>",
    "<transpose:<t:{a}.t()>.transpose(0, 1)>",
    "<squeeze:<unsqueeze:{a}.unsqueeze(0)>.squeeze(0)>",
    "<getitem:{a}[:]>",
)
#: Functions of two values: template, whether autograd keeps the inputs.
BINARY = (
    ("<add:{a} + {b}>", False),
    ("<sub:{a} - {b}>", False),
    ("<add:torch.add({a}, {b}, alpha=0.5)>", False),
    ("<mul:{a} * {b}>", True),
    ("<maximum:torch.maximum({a}, {b})>", True),
    ("<where:torch.where(torch.gt({a}, 0.0), {a}, {b})>", False),
    ("<mul:{a} * <unsqueeze:<sum:(<mul:{a} * {b}>).sum(1)>.unsqueeze(1)>>", True),
    ("<matmul:(<softmax:(<matmul:{a} @ <t:{b}.t()>>).softmax(-1)>) @ {a}>", True),
    ("<lerp:torch.lerp({a}, {b}, 0.3)>", False),
)
#: In place: statement, its twin, whether autograd keeps the result, whether the old value, whether it takes two.
INPLACE = (
    ("{a}.mul_(0.5)", "<mul_:{a} * 0.5>", False, False),
    ("{a}.add_(0.1)", "<add_:{a} + 0.1>", False, False),
    ("{a} += 1.0", "<add_:{a} + 1.0>", False, False),
    ("{a} -= 0.5", "<sub_:{a} - 0.5>", False, False),
    ("{a} *= 1.5", "<mul_:{a} * 1.5>", False, False),
    ("{a} /= 2.0", "<div_:{a} / 2.0>", False, False),
    ("{a} += {b}", "<add_:{a} + {b}>", False, True),
    ("{a}.sub_({b})", "<sub_:{a} - {b}>", False, True),
    ("{a}.add_({b}, alpha=0.5)", "<add_:torch.add({a}, {b}, alpha=0.5)>", False, True),
    ("{a}.relu_()", "<relu_:F.relu({a})>", True, False),
    ("torch.tanh_({a})", "<tanh_:torch.tanh({a})>", True, False),
    ("F.relu({a}, inplace=True)", "<relu:F.relu({a})>", True, False),
    ("{a}.neg_()", "<neg_:-{a}>", False, False),
    ("{a}.clamp_(-1.0, 1.0)", "<clamp_:{a}.clamp(-1.0, 1.0)>", False, False),
)
#: Modules that return a new value: how to make one, whether autograd keeps the input, whether the output.
MODULES = (
    ("nn.Linear(6, 6)", True, False),
    ("nn.Linear(6, 6)", True, False),
    ("nn.LayerNorm(6)", True, False),
    ("nn.BatchNorm1d(6)", True, False),
    ("nn.ReLU()", False, True),
    ("nn.Tanh()", False, True),
    ("nn.GELU()", True, False),
    ("nn.Softplus()", True, False),
)


@dataclass
class Thing:
    """A tensor object: memory it shares, and what an in-place change of it would mean.

    Attributes:
        root: number of the memory; objects with one root are views of each other.
        safe: whether autograd has kept neither it nor anything of it, so that a change in place is allowed.
        needs: whether it surely requires a gradient.
        foreign: whether it came in as an argument.
    """

    root: int
    safe: bool
    needs: bool
    foreign: bool = False


@dataclass
class Written:
    """A finished program.

    Attributes:
        name: class name.
        source: of the class.  twin_source: of the twin function, ``twin_<name>(self, at, p, ...)``.
        has_twin: whether the twin is right.
        static: whether nothing in it is decided at run time, so that a trace may be right.
        features: words for what occurs in it.
    """

    name: str
    source: str
    twin_source: str
    has_twin: bool
    static: bool
    features: set[str] = field(default_factory=set)


def plain(template: str) -> str:
    """A template as the model's own code."""
    while _SITE.search(template):
        template = _SITE.sub(r"\2", template)
    return template


def marked(template: str) -> str:
    """A template as the twin's code, each site passed through ``at``."""
    while _SITE.search(template):
        template = _SITE.sub(lambda m: f'at(s + "{m[1]}", {m[2]})', template)
    return template


class Writer:
    """Writes one forward function and its twin, step by step.

    Args:
        rng: every choice comes from here.
        name: of the class to write.
        training: mode the model will be in: outside training, dropout returns the tensor it was given.
        arguments: names of the arguments, and whether each requires a gradient.
        inner: finished programs whose modules this one may use.
        dynamic: whether steps that no trace can take are allowed.
    """

    def __init__(
        self,
        rng: random.Random,
        name: str,
        arguments: dict[str, bool],
        *,
        training: bool,
        inner: tuple[Written, ...] = (),
        dynamic: bool = False,
    ) -> None:
        self.rng, self.name, self.training, self.inner, self.dynamic = rng, name, training, inner, dynamic
        self.root = name == "Root"
        self.things = {n: Thing(i, not needs, needs, True) for i, (n, needs) in enumerate(arguments.items())}
        self.roots = len(arguments)
        self.arguments = list(arguments)
        self.attributes: dict[str, str] = {}
        self.reusable: list[tuple[str, bool, bool, bool]] = []
        self.lines: list[str] = []
        self.twin: list[str] = []
        self.has_twin = True
        self.static = True
        self.features: set[str] = set()
        if self.root:
            self.twin += [f'{n} = at("input:{n}", {n})' for n in arguments]

    # ---- names and objects ------------------------------------------------------------------------------------

    def pick(self) -> str:
        """A name from the pool; the newer the likelier."""
        names = list(self.things)
        return self.rng.choice(names[-4:] if self.rng.random() < 0.7 else names)

    def new(self, *, safe: bool, needs: bool, root: int | None = None) -> str:
        """A fresh name for a new tensor object."""
        if root is None:
            root, self.roots = self.roots, self.roots + 1
        name = f"v{len(self.things)}"
        self.things[name] = Thing(root, safe, needs)
        return name

    def names_of(self, thing: Thing) -> list[str]:
        """All names of one tensor object."""
        return [name for name, other in self.things.items() if other is thing]

    def keep(self, *names: str) -> None:
        """Autograd keeps these: a later change in place makes the backward raise."""
        roots = {self.things[name].root for name in names}
        for thing in self.things.values():
            thing.safe = thing.safe and thing.root not in roots

    def attribute(self, make: str) -> str:
        """A new submodule."""
        stem = re.sub(r"[^a-z]", "", make.split("(", maxsplit=1)[0].rpartition(".")[2].lower())
        name = f"{stem}{len(self.attributes)}"
        self.attributes[name] = make
        return name

    def say(self, template: str, twin: str | None = None, indent: str = "") -> None:
        """Append a line to the model, and its twin."""
        self.lines.append(indent + plain(template))
        self.twin.append(indent + marked(template if twin is None else twin))

    # ---- the end -----------------------------------------------------------------------------------------------

    def finish(self, result: str) -> Written:
        """The sources; ``result`` is the expression to return."""
        made = [f"        self.{name} = {make}" for name, make in self.attributes.items()]
        uses = any("self.weight" in line for line in self.lines)
        if uses:
            made.append("        self.weight = nn.Parameter(torch.randn(6, 6) * 0.4)")
            made.append("        self.bias = nn.Parameter(torch.zeros(6))")
        given = ", ".join(self.arguments)
        source = [
            f"class {self.name}(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *made,
            f"    def forward(self, {given}):",
            *(f"        {line}" for line in self.lines),
            f"        return {result}",
        ]
        twin = [
            f"def twin_{self.name}(self, at, p, {given}):",
            '    s = p[:-1] + "/"',
            *(f"    {line}" for line in self.twin),
            f"    return {result}",
        ]
        return Written(self.name, "\n".join(source), "\n".join(twin), self.has_twin, self.static, self.features)
