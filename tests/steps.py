"""The steps a random program is made of: each takes a ``Writer`` and appends a line or a few."""

from __future__ import annotations

from collections.abc import Callable

from tests.programs import BINARY, INPLACE, MODULES, UNARY, VIEWS, Writer, marked, plain

Step = Callable[[Writer], None]


def unary(w: Writer) -> None:
    template, keeps_input, keeps_output = w.rng.choice(UNARY)
    a = w.pick()
    if keeps_input:
        w.keep(a)
    needs = w.things[a].needs or "self.weight" in template
    name = w.new(safe=not keeps_output, needs=needs)
    w.say(f"{name} = " + template.format(a=a))


def view(w: Writer) -> None:
    a = w.pick()
    name = w.new(safe=w.things[a].safe, needs=w.things[a].needs, root=w.things[a].root)
    w.say(f"{name} = " + w.rng.choice(VIEWS).format(a=a))
    w.features.add("view")


def binary(w: Writer) -> None:
    template, keeps = w.rng.choice(BINARY)
    a = w.pick()
    b = a if w.rng.random() < 0.15 else w.pick()
    if keeps:
        w.keep(a, b)
    name = w.new(safe="softmax" not in template, needs=w.things[a].needs or w.things[b].needs)
    w.say(f"{name} = " + template.format(a=a, b=b))
    w.features.add("fan-out")


def in_place(w: Writer) -> None:
    """A change in place: mostly where autograd allows it, now and then anywhere."""
    template, twin, keeps_result, two = w.rng.choice(INPLACE)
    allowed = [name for name, thing in w.things.items() if thing.safe and not thing.foreign]
    if w.rng.random() < 0.08:
        allowed = [name for name, thing in w.things.items() if not thing.safe] or allowed
        w.features.add("bold")
    if not allowed:
        return
    named_twice = [name for name in allowed if len(w.names_of(w.things[name])) > 1]
    a = w.rng.choice(named_twice if named_twice and w.rng.random() < 0.4 else allowed[-3:])
    b = w.pick()
    thing = w.things[a]
    shared = any(other.root == thing.root and other is not thing for other in w.things.values())
    if shared or (thing.foreign and not w.root):
        w.has_twin = False  # other tensors change with it
        w.features.add("changed through a view")
    names = w.names_of(thing)
    w.lines.append(plain(template.format(a=a, b=b)))
    w.twin.append(" = ".join(names) + " = " + marked(twin.format(a=a, b=b)))
    thing.needs = thing.needs or (two and w.things[b].needs)
    if keeps_result:
        w.keep(a)
    if len(names) > 1:
        w.features.add("alias")
    w.features.add("in-place")


def alias(w: Writer) -> None:
    """A second name for an object; reads of it see later changes in place."""
    a = w.pick()
    name = f"v{len(w.things)}"
    w.things[name] = w.things[a]
    w.say(f"{name} = {a}")


def module(w: Writer) -> None:
    make, keeps_input, keeps_output = w.rng.choice(MODULES)
    attribute = w.attribute(make)
    frozen = "Linear" in make and w.rng.random() < 0.15
    if frozen:
        w.attributes[attribute] = make + ".requires_grad_(False)"
        w.features.add("frozen")
    trains = make.startswith(("nn.Linear", "nn.LayerNorm", "nn.Batch")) and not frozen
    w.reusable.append((attribute, keeps_input, keeps_output, trains))
    _call(w, attribute, keeps_input, keeps_output, trains)


def reuse(w: Writer) -> None:
    """A module that was called before."""
    if w.reusable:
        _call(w, *w.rng.choice(w.reusable))
        w.features.add("reuse")


def _call(w: Writer, attribute: str, keeps_input: bool, keeps_output: bool, trains: bool) -> None:
    a = w.pick()
    if keeps_input:
        w.keep(a)
    name = w.new(safe=not keeps_output, needs=trains or w.things[a].needs)
    w.say(f"{name} = self.{attribute}({a})", f'{name} = at(p + "{attribute}", self.{attribute}({a}))')


def relu_module(w: Writer) -> None:
    """``nn.ReLU(inplace=True)`` right behind a linear map, as people write it."""
    linear, relu = w.attribute("nn.Linear(6, 6)"), w.attribute("nn.ReLU(inplace=True)")
    a = w.pick()
    w.keep(a)
    name = w.new(safe=False, needs=True)
    twin = f'{name} = at(p + "{relu}", F.relu(at(p + "{linear}", self.{linear}({a}))))'
    w.say(f"{name} = self.{relu}(self.{linear}({a}))", twin)
    w.features.add("in-place")


def sequential(w: Writer) -> None:
    stack = w.attribute("nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())")
    a = w.pick()
    w.keep(a)
    name = w.new(safe=False, needs=True)
    twin = a
    for layer in range(3):
        twin = f'at(p + "{stack}.{layer}", self.{stack}[{layer}]({twin}))'
    w.say(f"{name} = self.{stack}({a})", f"{name} = {twin}")
    w.features.add("nested")


def dropout(w: Writer) -> None:
    a = w.pick()
    as_module = w.rng.random() < 0.5
    attribute = w.attribute("nn.Dropout(0.3)") if as_module else ""
    call = f"self.{attribute}({a})" if as_module else f"F.dropout({a}, 0.3, self.training)"
    site = f'p + "{attribute}"' if as_module else 's + "dropout"'
    if w.training:
        name = w.new(safe=True, needs=w.things[a].needs)
        w.say(f"{name} = {call}", f"{name} = at({site}, {call})")
    else:
        _same(w, a, call, site)
    w.features.add("dropout")


def same_object(w: Writer) -> None:
    """Calls that return the tensor they were given."""
    a = w.pick()
    attribute = w.attribute("nn.Identity()") if w.rng.random() < 0.5 else ""
    if attribute:
        _same(w, a, f"self.{attribute}({a})", f'p + "{attribute}"')
    else:
        _same(w, a, f"{a}.float()", 's + "float"')


def _same(w: Writer, a: str, call: str, site: str) -> None:
    name = f"v{len(w.things)}"
    w.things[name] = w.things[a]
    w.say(f"{name} = {call}", f"{name} = at.same({site}, {a})")
    w.features.add("same object")


def tuples(w: Writer) -> None:
    """A call that returns several tensors, and one that joins them again."""
    a = w.pick()
    kind = w.rng.choice(("chunk", "split", "unbind", "max"))
    safe = {"chunk": "{a}.chunk(2, dim=1)", "split": "torch.split({a}, [2, 4], dim=1)", "unbind": "{a}.unbind(0)"}
    if kind == "max":
        w.keep(a)
        name = w.new(safe=True, needs=w.things[a].needs)
        call = f"{a}.max(dim=1, keepdim=True)"
        w.say(f"top, _ = {call}", f'top, _ = at.many(s + "max", {call})')
        w.say(f"{name} = <sub:{a} - top>")
    else:
        name = w.new(safe=True, needs=w.things[a].needs)
        call = safe[kind].format(a=a)
        w.say(f"parts = {call}", f'parts = at.many(s + "{kind}", {call})')
        join = "stack:torch.stack(parts[::-1])" if kind == "unbind" else "cat:torch.cat(parts[::-1], dim=1)"
        w.say(f"{name} = <{join}>")
    w.features.add("tuple")


def lstm(w: Writer) -> None:
    """A module with a nested output, one part of which nobody uses."""
    attribute = w.attribute("nn.LSTM(6, 6)")
    a = w.pick()
    w.keep(a)
    name = w.new(safe=True, needs=True)
    call = f"self.{attribute}(<unsqueeze:{a}.unsqueeze(0)>)"
    w.say(f"seq, (hid, _) = {call}", f'seq, (hid, _) = at.many(p + "{attribute}", {call})')
    w.say(f"{name} = <add:<squeeze:seq.squeeze(0)> + <getitem:hid[0]>>")
    w.features.add("tuple")


def detach(w: Writer) -> None:
    a = w.pick()
    name = w.new(safe=w.things[a].safe, needs=False, root=w.things[a].root)
    w.say(f"{name} = <detach:{a}.detach()>")
    w.features.add("detach")


def no_grad(w: Writer) -> None:
    """A region without gradients; now and then one that changes a value in place behind autograd's back."""
    a = w.pick()
    w.static = False
    w.say("with torch.no_grad():")
    thing = w.things[a]
    if w.rng.random() < 0.15 and thing.safe and not thing.foreign:
        w.say(f"{a}.mul_(0.5)", indent="    ")
        w.has_twin = False
    else:
        name = w.new(safe=True, needs=False)
        w.say(f"{name} = <tanh:torch.tanh(<mul:{a} * 0.7>)>", indent="    ")
    w.features.add("no_grad")


def block(w: Writer) -> None:
    """A submodule with a forward of its own, called once or again."""
    if not w.inner:
        return
    inner = w.rng.choice(w.inner)
    known = [name for name, make in w.attributes.items() if make == f"{inner.name}()"]
    attribute = w.rng.choice(known) if known and w.rng.random() < 0.6 else w.attribute(f"{inner.name}()")
    a = w.pick()
    w.keep(a)
    surely = w.things[a].needs
    name = w.new(safe=False, needs=surely)
    twin = f'{name} = twin_{inner.name}(self.{attribute}, at, p + "{attribute}.", {a})'
    if w.dynamic and w.rng.random() < 0.4:
        reentrant = surely and w.rng.random() < 0.3
        w.say(f"{name} = checkpoint(self.{attribute}, {a}, use_reentrant={reentrant})", twin)
        w.static = False
        w.features.add("checkpoint")
    else:
        w.say(f"{name} = self.{attribute}({a})", twin)
    w.has_twin = w.has_twin and inner.has_twin
    w.static = w.static and inner.static
    w.features |= inner.features | {"nested"}


# ---- steps that no trace can take ---------------------------------------------------------------------------------


def branch(w: Writer) -> None:
    a, b = w.pick(), w.pick()
    w.keep(a, b)
    name = w.new(safe=False, needs=w.things[a].needs and w.things[b].needs)
    w.say(f"if bool(torch.gt(<sum:<detach:{a}.detach()>.sum()>, 0)):")
    w.say(f"{name} = <sin:torch.sin({a})>", indent="    ")
    w.say("else:")
    w.say(f"{name} = <mul:{b} * <sigmoid:{a}.sigmoid()>>", indent="    ")


def loop(w: Writer) -> None:
    a = w.pick()
    name = w.new(safe=True, needs=w.things[a].needs)
    w.say(f"{name} = <mul:{a} * 1.0>")
    w.say(f"for column in range({a}.shape[1] // 3):")
    w.say(f"{name} = <add:{name} + <mul:{a} * (column + 0.5)>>", indent="    ")


def item(w: Writer) -> None:
    a = w.pick()
    name = w.new(safe=True, needs=w.things[a].needs)
    w.say(f"scale = 1.0 / (1.0 + abs(<mean:<detach:{a}.detach()>.mean()>.item()))")
    w.say(f"{name} = <mul:{a} * scale>")


def set_item(w: Writer) -> None:
    a, b = w.pick(), w.pick()
    name = w.new(safe=True, needs=w.things[a].needs or w.things[b].needs)
    w.say(f"{name} = <clone:{a}.clone()>")
    part = f"<getitem:{b}[:, 2:4]>"
    w.say(f"{name}[:, :2] = {part}", f"{name} = <setitem:torch.cat([{part}, {name}[:, 2:]], dim=1)>")
    w.features.add("in-place")


def made_in_forward(w: Writer) -> None:
    a = w.pick()
    w.keep(a)
    name = w.new(safe=True, needs=w.things[a].needs)
    w.say(f"{name} = nn.Softplus()({a})", f"{name} = <softplus:F.softplus({a})>")


def custom_function(w: Writer) -> None:
    a = w.pick()
    name = w.new(safe=True, needs=w.things[a].needs)
    w.say(f"{name} = Clipped.apply({a})")
    w.has_twin = False


def noise(w: Writer) -> None:
    a = w.pick()
    name = w.new(safe=True, needs=w.things[a].needs)
    draw = "<mul:0.1 * <randn:torch.randn(4, 6)>>"
    w.say(f"{name} = <add:{a} + {draw}>")


def user_hook(w: Writer) -> None:
    a = w.pick()
    w.lines.append(f"{a}.register_hook(lambda gradient: gradient * 0.5) if {a}.requires_grad else None")
    w.has_twin = False


STEPS: tuple[tuple[Step, int], ...] = (
    (unary, 20), (binary, 14), (module, 16), (reuse, 5), (in_place, 16), (alias, 4), (view, 5), (relu_module, 4),
    (sequential, 2), (dropout, 5), (same_object, 3), (tuples, 7), (lstm, 1), (detach, 3), (no_grad, 3), (block, 10),
)  # fmt: skip
DYNAMIC: tuple[Step, ...] = (branch, loop, item, set_item, made_in_forward, custom_function, noise, user_hook)


def write_step(w: Writer) -> None:
    """One step more."""
    if w.dynamic and w.rng.random() < 0.2:
        step = w.rng.choice(DYNAMIC)
        step(w)
        w.static = False
        w.features.add(step.__name__)
    else:
        steps, weights = zip(*STEPS, strict=True)
        w.rng.choices(steps, weights)[0](w)
