"""Rewriting under the native recorder is rewriting under Python's, bit for bit, in every call."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad import rules
from fxgrad.courses.beside import Beside
from fxgrad.rewriting.apply import Pass
from tests.native import rewritten as zoo
from tests.native.rewritten import batch, differences, once, total, trained

pytestmark = [pytest.mark.usefixtures("recorder"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """What other tests compiled is forgotten: where dynamo compiled something, Python's recorder is taken."""
    torch._dynamo.reset()


EVERY = [
    zoo.Blocks, zoo.Functions, zoo.Swapped, zoo.Quiet, zoo.Deep, zoo.Late, zoo.Hidden, zoo.Again, zoo.Reentrant,
    zoo.Views, zoo.Inner, zoo.Raising, zoo.Parts, zoo.Hooked,
]  # fmt: skip


def may(*args: Any, **kwargs: Any) -> Any:
    """Nodes that a model may do without."""
    return rules.nodes(*args, optional=True, **kwargs)


RULES: dict[str, Any] = {
    "by op": lambda: [rules.scale(0.5, may(op=("relu", "relu_", "sort", "external", "Double")))],
    "by glob": lambda: [rules.clip_by_norm(0.01, may("*a*")), rules.sign(may("*relu#1"))],
    "by module": lambda: [
        rules.scale(2.0, may(module_type=nn.ReLU)), rules.scale(3.0, may("other")),
        rules.clip_by_value(1e-3, may("same*")),
    ],
    "random": lambda: [rules.add_noise(0.1, may(op="relu")), rules.add_noise(0.1, may(module_type=nn.Linear))],
    "everywhere": lambda: [rules.scale(1.1, rules.nodes())],
    "what modules return": lambda: [
        rules.scale(0.3, rules.outputs("*", optional=True)), rules.scale(2.0, rules.outputs("")),
    ],
    "edges": lambda: [
        rules.scale(0.3, rules.edges(rules.nodes(op="relu"), optional=True)),
        rules.scale(0.7, rules.edges(consumer="c", optional=True)),
    ],
    "through": lambda: [rules.guided_relu(), rules.scale(2.0, may("a"))],
    "replaced": lambda: [
        rules.custom(lambda g: torch.ones_like(g) * 1e-3, may("b")), rules.zero_out(may(op="sigmoid")),
        rules.custom(lambda g: g.relu(), rules.parameters("*weight*")),
    ],
    "a predicate": lambda: [rules.scale(0.1, may(predicate=lambda site: site.shape[-1:] == (6,)))],
}  # fmt: skip
PYTHONS = ("a predicate", "edges")  # what only Python's recorder can do


@pytest.mark.parametrize("chosen", RULES)
@pytest.mark.parametrize("kind", EVERY)
def test_training_is_the_same_bit_for_bit(kind: Any, chosen: str) -> None:
    found, native = differences(kind, RULES[chosen], once)
    assert found == []
    if kind in (zoo.Blocks, zoo.Functions, zoo.Parts, zoo.Again) and chosen not in PYTHONS:
        assert native.recorders == ["python", *["native"] * 5]


@pytest.mark.parametrize("chosen", RULES)
@pytest.mark.parametrize("kind", EVERY)
def test_a_watched_training_is_the_same_too_and_so_is_its_flow(kind: Any, chosen: str) -> None:
    found, native = differences(kind, RULES[chosen], once, watched=True)
    assert found == []
    if kind in (zoo.Blocks, zoo.Parts, zoo.Again) and chosen not in PYTHONS:
        assert native.recorders == ["python", *["native"] * 5]
        assert [flow.capture.recorder for flow in native.flows if flow is not None] == native.recorders


# ---- ways to train ---------------------------------------------------------------------------------------------------


def _several(model: Any, step: int) -> None:
    """Two backward passes through one graph."""
    loss = total(model(batch(step)))
    loss.backward(retain_graph=True)
    (loss * 2).backward()


def _accumulated(model: Any, step: int) -> None:
    """Two calls before any backward pass, of two shapes, in train and eval mode."""
    one = total(model.train()(batch(step)))
    other = total(model.eval()(batch(step + 1)))
    model.train()
    (one + other).backward()
    total(model(batch(step + 2))).backward()


def _with_inputs(model: Any, step: int) -> None:
    """Inputs that are trained as well, and outlive the calls; a call without gradients in between."""
    x = model.__dict__.setdefault("given", batch(0).requires_grad_())
    with torch.no_grad():
        model(x)
    total(model(x * 2 if step % 2 else x)).backward()
    with torch.no_grad():
        x -= 0.01 * x.grad


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("chosen", ["by op", "random", "everywhere", "edges", "through"])
@pytest.mark.parametrize("act", [_several, _accumulated, _with_inputs])
@pytest.mark.parametrize("kind", [zoo.Blocks, zoo.Quiet, zoo.Parts])
def test_however_it_is_trained(kind: Any, act: Any, chosen: str, *, watched: bool) -> None:
    if kind is zoo.Parts and act is _several:
        pytest.skip("torch cannot go twice through an LSTM's graph that dropout changed")
    found, native = differences(kind, RULES[chosen], act, watched=watched)
    assert found == []
    assert native.recorders[-1] == ("python" if chosen in PYTHONS else "native")


def test_rules_that_come_and_go() -> None:
    calls = itertools.count()

    def act(model: Any, step: int) -> None:
        capture: Any = "eager" if next(calls) < 6 else "auto"  # the reference comes first
        if step == 2:
            model.__dict__["more"] = fxgrad.rewrite(model, rules.sign(rules.nodes(op="relu")), capture=capture)
        if step == 4:
            model.__dict__.pop("more").remove()
        once(model, step)

    found, native = differences(zoo.Blocks, lambda: [rules.scale(0.1, rules.nodes("layers.1.1"))], act)
    assert found == []
    assert native.recorders[-1] == "native"


# ---- against plain torch ---------------------------------------------------------------------------------------------


def test_it_does_what_hooks_put_by_hand_do() -> None:
    class Plain(zoo.Blocks):
        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                inner = layer(x)
                if number == 1:
                    inner.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
                x = x + inner.relu()
            return self.head(x)

    want = trained(Plain, [rules.scale(1.0, may("nowhere"))], once, 6, "eager")
    got = trained(zoo.Blocks, [rules.clip_by_value(1e-3, rules.outputs("layers.1"))], once, 6, "auto")
    direct = trained(zoo.Blocks, [rules.clip_by_value(1e-3, rules.nodes("layers.1.2"))], once, 6, "auto")
    assert got.recorders[1:] == direct.recorders[1:] == ["native"] * 5
    for mine, same, theirs in zip(got.states, direct.states, want.states, strict=True):
        assert all(map(torch.equal, mine, theirs))
        assert all(map(torch.equal, same, theirs))


# ---- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("watched", [False, True])
def test_hooks_are_put_only_where_a_rule_acts(monkeypatch: pytest.MonkeyPatch, *, watched: bool) -> None:
    put: list[int] = []
    own = Pass.put

    def counted(self: Pass, value: Tensor, index: int) -> Any:
        put.append(index)
        return own(self, value, index)

    monkeypatch.setattr(Pass, "put", counted)
    counts = []

    def act(model: Any, step: int) -> None:
        put.clear()
        once(model, step)
        counts.append(len(put))

    trained(zoo.Blocks, [rules.scale(0.1, rules.nodes("layers.1.1"))], act, 4, "auto", watched=watched)
    assert counts[0] > 10  # Python's recorder: everywhere
    assert counts[1:] == [1, 1, 1]


# ---- which recorder, and why -----------------------------------------------------------------------------------------


def _reasons(kind: Any, chosen: Any, **options: Any) -> list[str]:
    found = trained(kind, chosen, once, 4, "auto", **options)
    return [report.capture.reason for report in found.reports if report.capture is not None]


def test_the_report_says_which_recorder_ran_and_why() -> None:
    reasons = _reasons(zoo.Swapped, RULES["by op"]())
    assert reasons[0] == "the first call of a kind; the native recorder learns its way"
    assert reasons[1].startswith("left the known ways behind b (")
    assert reasons[2] == "every call was that of a known way"
    assert set(_reasons(zoo.Blocks, RULES["a predicate"]())) == {
        "a predicate of a rule may ask for what only Python's recorder looks at"
    }
    assert _reasons(zoo.Hidden, RULES["by op"](), watched=True)[1].startswith("code ran that no recorder can see")


# ---- what torch keeps for all models ---------------------------------------------------------------------------------


def test_compiled_functions_have_pythons_recorder() -> None:
    class Compiled(zoo.Moving):
        def __init__(self) -> None:
            super().__init__()
            torch._dynamo.reset()
            self.compiled = torch.compile(lambda h: h.relu() * 2, backend="aot_eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.compiled(self.a(x)).tanh())

    def act(model: Any, step: int) -> None:
        total(model(batch(2 * step))).backward()

    found, native = differences(Compiled, lambda: [rules.scale(0.5, rules.nodes())], act)
    assert not [words for words in found if "weights" in words]  # what runs while dynamo compiles has names of its own
    assert native.recorders == ["python"] * 6


def test_nothing_is_left_behind_where_a_leaf_module_is_interrupted() -> None:
    class Interrupted(nn.ReLU):
        stop = False

        def forward(self, x: Tensor) -> Tensor:
            if self.stop:
                raise KeyboardInterrupt
            return super().forward(x)

    Interrupted.__module__ = nn.ReLU.__module__  # a leaf, as torch's own
    model = zoo.Moving()
    model.relu = Interrupted()
    model.forward = lambda x: model.c(model.relu(model.a(x)))  # type: ignore[method-assign]
    hooks = torch.nn.modules.module._global_forward_hooks
    with fxgrad.rewrite(model, rules.scale(0.5, rules.nodes("relu"))) as rewrite:
        once(model, 0)
        model.relu.stop = True
        with pytest.raises(KeyboardInterrupt):
            once(model, 1)
        assert torch._C._len_torch_function_stack() == 0
        assert not hooks
        model.relu.stop = False
        once(model, 2)
        assert rewrite.report().capture is not None
        assert rewrite.report().capture.recorder == "native"


def test_another_thread_runs_other_modules_meanwhile() -> None:
    other = zoo.Blocks()

    class Threaded(zoo.Blocks):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=once, args=(other, 0))
            thread.start()
            thread.join()
            return super().forward(x)

    found, native = differences(Threaded, RULES["by op"], once)
    assert found == []
    assert native.recorders[1:] == ["native"] * 5


def test_an_observer_that_fails_costs_the_flow_and_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = rules.scale(0.1, rules.nodes("layers.1.1"))
    want = trained(zoo.Blocks, [chosen], once, 4, "eager")
    monkeypatch.setattr(Beside, "finish", lambda *_: None)
    monkeypatch.setattr(Beside, "failed", "forced")
    got = trained(zoo.Blocks, [chosen], once, 4, "auto", watched=True)
    for mine, theirs in zip(got.states, want.states, strict=True):
        assert all(map(torch.equal, mine, theirs))
    assert len(got.flows) == 3  # none of the first call
    assert got.reports[-1].capture is not None
    assert got.reports[-1].capture.reason == "the native observer failed: forced"
