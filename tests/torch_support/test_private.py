"""Every private name of torch that fxgrad uses still does what it is used for."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fxgrad.record import events
from fxgrad.record.histogram import write_histogram
from fxgrad.torch_support import private as torch_private
from fxgrad.torch_support import private_compiled, private_passes, private_skipping


def test_our_own_calls_are_not_intercepted() -> None:
    class Refuse(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError(func)

    x = torch.ones(2)
    with Refuse(), torch_private.without_torch_function():
        assert (x + 1).sum() == 4


def test_a_functorch_transform_is_seen() -> None:
    seen: list[bool] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_private.functorch_active())
        return x.sum()

    torch.func.grad(f)(torch.ones(2))
    torch.func.vmap(f)(torch.ones(2, 2))
    f(torch.ones(2))
    assert seen == [True, True, False]


def test_versions_and_bases() -> None:
    x = torch.zeros(4)
    view = x[:2]
    assert torch_private.base_of(view) is x
    assert torch_private.base_of(x) is None
    before = torch_private.version_of(view)
    x.add_(1)
    assert torch_private.version_of(view) == before + 1
    with torch.inference_mode():
        assert torch_private.version_of(torch.ones(1)) == 0


def test_memory_has_an_identity_that_outlives_it() -> None:
    x = torch.zeros(4, 4)
    first, other = torch_private.storage_of(x), torch_private.storage_of(torch.zeros(4, 4))
    assert first == torch_private.storage_of(x.t()) == torch_private.storage_of(x[1:])
    assert hash(first) == hash(torch_private.storage_of(x[0]))
    assert first != other
    seen = {other}
    for _ in range(100):  # each of them may lie where the one before lay
        made = torch_private.storage_of(torch.zeros(4, 4))
        assert made not in seen
        seen.add(made)


def test_the_end_of_a_backward_is_announced() -> None:
    log: list[str] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: log.append(str(torch_private.at_end_of_backward(lambda: log.append("end")))))
    x.register_hook(lambda _: log.append("leaf"))
    y.sum().backward()
    log.append("after")
    assert log == ["True", "leaf", "end", "after"]
    assert not torch_private.at_end_of_backward(lambda: None)  # outside of any backward


def test_backwards_have_numbers() -> None:
    numbers: list[int] = []
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        y = x * 2
        y.register_hook(lambda _: numbers.append(torch_private.current_backward()))
        (y * 3).sum().backward()
    assert len(set(numbers)) == 2


def test_registries_and_hooks_of_modules() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    assert [set(r) for r in torch_private.registries_of(model)] == [{"0"}]
    assert len(list(torch_private.registries_of(model[0]))) == 2
    assert not torch_private.has_hooks(model)
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        handle = getattr(model, register)(lambda *_: None)
        assert torch_private.has_hooks(model), register
        handle.remove()
    assert list(torch_private.global_hooks()) == []
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert len(list(torch_private.global_hooks())) == 1
    handle.remove()


def test_post_accumulation_hooks_are_seen() -> None:
    p = nn.Parameter(torch.ones(1))
    assert not torch_private.acts_after_accumulation(p)
    p.register_post_accumulate_grad_hook(lambda _: None)
    assert torch_private.acts_after_accumulation(p)


def test_the_original_inside_of_a_compiled_module() -> None:
    model = nn.Linear(2, 2)
    assert torch_private.compiled_original(torch.compile(model, backend="eager")) is model
    assert torch_private.compiled_original(model) is None


def test_a_mode_is_seen() -> None:
    assert not torch_private.under_a_mode()
    with FakeTensorMode():
        assert torch_private.under_a_mode()


@pytest.mark.parametrize("missing", ["queue_callback"])
def test_without_an_announced_end_events_end_all_the_same(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fxgrad

    monkeypatch.setattr("fxgrad.record.events.at_end_of_backward", lambda _: False)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with fxgrad.watch(model) as watch:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
        loss = model(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert [flow.event.backward for flow in watch.history] == [0, 1, 2, 3, 4], missing


def test_wrapped_functions_are_entered_and_registered_again() -> None:
    register = torch.fx._symbolic_trace._wrapped_fns_to_patch
    before = dict(register)
    with torch_private.entering_wrapped_functions():
        assert not register
    assert register == before


def test_autograd_nodes_are_counted() -> None:
    x = torch.ones(2, requires_grad=True)
    before = torch_private.sequence_number()
    assert torch_private.sequence_number() == before
    kept = x * 2
    assert torch_private.sequence_number() > before
    x.detach()
    del kept


def test_fake_tensors_have_versions_views_and_autograd_without_data() -> None:
    with torch_private.fake_mode():
        x = torch.ones(4, requires_grad=True) * 2
        view = x.view(2, 2)
        assert view.untyped_storage() is x.untyped_storage()
        before = torch_private.version_of(x)
        view.add_(1)
        assert torch_private.version_of(x) == before + 1
        assert torch_private.base_of(view) is x


def test_hooks_are_cleared() -> None:
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda *_: None)
    model.register_full_backward_hook(lambda *_: None)
    torch_private.clear_hooks(model)
    assert not torch_private.has_hooks(model)


def test_backends_by_name() -> None:
    from fxgrad.errors import OptionError

    assert callable(torch_private.inner_compiler("eager"))
    with pytest.raises(OptionError, match="no-such-backend"):
        torch_private.inner_compiler("no-such-backend")


def test_a_symbolic_number_is_read_without_a_guard() -> None:
    seen: list[object] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[object]) -> object:
        seen.extend(torch_private.plain_number(value) for value in inputs if not isinstance(value, torch.Tensor))
        return gm.forward

    torch.compiler.reset()
    call = torch.compile(lambda x: x * 2, backend=backend, dynamic=True)
    for rows in (3, 5):
        call(torch.ones(rows, 2))
    assert 3 in seen
    assert 5 not in seen  # one graph for both
    assert torch_private.plain_number(7) == 7


def test_a_leaf_without_hooks_is_as_before_its_first() -> None:
    one, two = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    one.register_hook(lambda gradient: None).remove()
    kept = two.register_hook(lambda gradient: gradient * 3)
    for leaf in (one, two):
        torch_private.forget_empty_hooks(leaf)
    assert one._backward_hooks is None
    (one + two).sum().backward()
    assert two.grad is not None and two.grad.tolist() == [3.0, 3.0]
    kept.remove()
    again = one.register_hook(lambda gradient: gradient * 2)
    one.grad = None
    one.sum().backward()
    assert one.grad is not None and one.grad.tolist() == [2.0, 2.0]
    again.remove()


def test_the_scale_of_a_scaler_is_found_and_nothing_is_set_up() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert torch_private.loss_scale_of(scaler) is None
    assert scaler._scale is None
    scaler.scale(torch.ones(1))
    assert torch_private.loss_scale_of(scaler) == 8.0
    assert torch_private.loss_scale_of(object()) is None


ANSWERS: list[bool] = []  # not in the module, whose attributes torch.export gives back as they were


class Asked(nn.Module):
    """Notes what ``graph_in_the_making`` says in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        ANSWERS.append(torch_private.graph_in_the_making())
        return x * 2


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
def test_a_graph_in_the_making_is_known() -> None:
    x = torch.ones(2)
    for trace in (
        lambda asked: torch.jit.trace(asked, x, check_trace=False),
        torch.fx.symbolic_trace,
        lambda asked: torch.export.export(asked, (x,)),
    ):
        asked = Asked()
        ANSWERS.clear()
        trace(asked)
        assert ANSWERS and all(ANSWERS)
        ANSWERS.clear()
        asked(x)
        assert ANSWERS == [False]


class Waits(nn.Module):
    """Is traced until ``go``."""

    def __init__(self, inside: threading.Event, go: threading.Event) -> None:
        super().__init__()
        self.inside, self.go = inside, go

    def forward(self, x: Tensor) -> Tensor:
        self.inside.set()
        assert self.go.wait(60)
        return x * 2


def test_a_trace_in_another_thread_is_none_of_this_one() -> None:
    inside, go = threading.Event(), threading.Event()
    other = threading.Thread(target=torch.fx.symbolic_trace, args=(Waits(inside, go),))
    other.start()
    assert inside.wait(60)
    asked = Asked()
    ANSWERS.clear()
    try:
        with pytest.raises(NameError, match="not installed as a submodule"):  # torch.fx's own, without fxgrad
            asked(torch.ones(2))
        asked.forward(torch.ones(2))
    finally:
        go.set()
        other.join()
    assert ANSWERS == [False]


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def test_dispatch_modes_of_the_user_see_nothing_of_ours() -> None:
    with Names() as mode:
        with torch_private.without_dispatch_modes():
            torch.ones(2).mul(2)
        torch.ones(2).exp()
    assert mode.names == ["aten.ones.default", "aten.exp.default"]


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norms_of_many(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, *, there: bool) -> None:
    if not there:
        monkeypatch.setattr(torch_private, "_foreach_norm", None)
    tensors = [torch.full((100, 9), 300.0, dtype=dtype), torch.tensor(-2.0, dtype=dtype)]
    norms = list(torch_private.norms_of(tensors, torch.float32))
    assert [norm.dtype for norm in norms] == [torch.float32] * 2
    assert [norm.item() for norm in norms] == [9000, 2]


def test_autograd_nodes_are_numbered_as_they_are_made() -> None:
    x = torch.ones(2, requires_grad=True)
    first = x * 2
    between = torch_private.sequence_number()
    second = first.exp()
    assert private_passes.sequence_of(first.grad_fn) < between <= private_passes.sequence_of(second.grad_fn)
    assert private_passes.sequence_of(object()) == 0


def test_versions_of_many_tensors_at_once() -> None:
    x, y = torch.ones(2), torch.ones(2)
    x.add_(1)
    listed = [("x", x), ("y", y)]
    assert private_passes.versions_of(listed) == [torch_private.version_of(x), torch_private.version_of(y)] == [1, 0]
    with torch.inference_mode():
        frozen = torch.ones(2)
    assert private_passes.versions_of([("x", x), ("frozen", frozen)]) == [1, 0]


def test_whether_a_pass_keeps_its_graph() -> None:
    x = torch.ones(2, requires_grad=True)
    asked: list[bool] = []
    y = x * 2
    y.register_hook(lambda _: asked.append(private_passes.keeps_graph()))
    loss = y.sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert asked == [True, False]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("in_place", [True, False])
def test_what_a_compiled_module_calls(backend: str, in_place: bool) -> None:
    model = nn.Linear(2, 2)
    assert private_compiled.compiled_call_of(model) is None
    owner: Any = model
    if in_place:
        model.compile(backend=backend, fullgraph=True, dynamic=False)
    else:
        owner = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    found = private_compiled.compiled_call_of(owner)
    assert found is not None
    assert found.owner is owner and found.model is model and callable(found.code)
    assert (found.options["fullgraph"], found.options["dynamic"]) == (True, False)
    assert found.backend == backend or (backend == "inductor" and callable(found.backend))
    graphs: list[int] = []
    again = found.again(lambda gm, _: (graphs.append(len(gm.graph.nodes)), gm)[1])
    assert torch.equal(again(torch.ones(1, 2)), model.forward(torch.ones(1, 2))) and graphs


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_our_code_is_left_to_python() -> None:
    seen: list[str] = []
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(functools.partial(write_histogram, slot=torch.zeros(64)))  # type: ignore[no-untyped-call]

    def backend(gm: Any, _: Any) -> Any:
        seen.extend(str(node.stack_trace) for node in gm.graph.nodes)
        return gm

    def step() -> None:
        (leaf * 2).sum().backward()

    torch._dynamo.reset()
    private_skipping.leave_to_python()
    torch.compile(step, backend=backend)()
    assert seen and not any("histogram.py" in trace for trace in seen)
    codes = {code.co_name for code in private_skipping._codes(events)}
    assert {"running", "close_events", "end", "<lambda>", "_begin", "__call__"} <= codes
