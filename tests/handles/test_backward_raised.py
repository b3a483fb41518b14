"""A backward pass that raised: what is said of it, and that the user sees what plain torch shows."""

from __future__ import annotations

import linecache
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import ModelError, NoFlowError
from fxgrad.schema import Finding
from fxgrad.store import from_json
from tests.handles.raising import (
    CASES,
    ChangedValue,
    Custom,
    Plain,
    Refusing,
    WrongShape,
    X,
    plain_step,
    step_between,
)

case = pytest.mark.parametrize("name", CASES)


def line_of(finding: Finding) -> str:
    file, _, line = str(finding.source).rpartition(":")
    return linecache.getline(file, int(line)).strip()


def check(findings: Any, name: str, *, seen: bool = True) -> Finding:
    """One finding, which names node, line and cause."""
    _, _, key, line, words = CASES[name]
    assert [finding.rule for finding in findings] == ["backward_failed"]
    finding: Finding = findings[0]
    assert finding.severity == "error"
    assert finding.node is not None
    assert finding.node.key == key, finding.message
    assert line_of(finding).startswith(line) or line in line_of(finding)
    for word in words if seen else ():
        assert word in finding.message + finding.suggestion, (word, finding.message)
    return finding


def raising(model: nn.Module, step: Callable[[Any], None]) -> Exception:
    with pytest.raises((RuntimeError, KeyError)) as info:
        step(model)
    return info.value


def watched(name: str, *, read: Callable[[fxgrad.Watch], Any], native: bool = True, **options: Any) -> Any:
    """Three steps, of which the last is read inside of the ``except`` block."""
    make, step, *_ = CASES[name]
    torch.manual_seed(0)
    model = make()
    with fxgrad.watch(model, native=native, **options) as watch:
        for last in (False, False, True):
            model.zero_grad()
            try:
                step(model)
            except (RuntimeError, KeyError):
                if last:
                    return read(watch)
    raise AssertionError(name)


@case
@pytest.mark.parametrize(("native", "statistics"), [(True, "norm"), (False, "norm"), (True, "full")])
def test_a_watch_names_the_node_the_line_and_the_cause(name: str, native: bool, statistics: Any) -> None:
    found = watched(name, native=native, statistics=statistics, read=lambda watch: watch.diagnose().findings)
    finding = check(found, name)
    assert ("KeyError" if name == "refusing" else "RuntimeError") in finding.message


@case
def test_with_edges_and_values(name: str) -> None:
    check(watched(name, sites="edge", forward=True, read=lambda watch: watch.diagnose().findings), name)


@case
def test_the_flow_is_marked(name: str) -> None:
    flow = watched(name, read=lambda watch: watch.flow())
    failure = flow.event.failed
    assert failure is not None
    assert failure.exception == ("KeyError" if name == "refusing" else "RuntimeError")
    assert failure.site is None or flow.site(failure.site).measured
    check(flow.findings, name) if failure.node is not None else None
    assert from_json(flow.to_json()) == flow


@case
def test_where_the_exception_is_not_seen_the_place_is_known_all_the_same(name: str) -> None:
    make, step, *_ = CASES[name]
    torch.manual_seed(0)
    model = make()
    with fxgrad.watch(model) as watch:
        for _ in range(3):
            raising(model, step)
        finding = check(watch.diagnose().findings, name, seen=False)
        assert watch.flow().event.failed.exception is None
    words = CASES[name][4]
    if name in ("value", "view", "leaf", "parameter", "buffer", "max_norm", "step", "twice", "kept", "carried"):
        for word in words:  # no exception is needed to know
            assert word in finding.message + finding.suggestion, finding.message


@case
def test_the_user_sees_what_plain_torch_shows(name: str) -> None:
    """Exception, traceback and the half of the gradients that came."""
    make, step, *_ = CASES[name]
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    plain = make()  # a copy would count other versions
    with fxgrad.watch(model) as watch:
        for _ in range(3):
            want, got = raising(plain, step), raising(model, step)
            assert type(got) is type(want)
            assert str(got) == str(want)
            one, two = (traceback.extract_tb(error.__traceback__) for error in (want, got))
            assert [(frame.filename, frame.name) for frame in one] == [(frame.filename, frame.name) for frame in two]
            assert got.__cause__ is None
            assert got.__context__ is None
            watch.history  # noqa: B018  # read, which changes nothing
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, other.grad)
            assert torch.equal(mine, other)


@case
def test_limits_judge_nothing_and_tell(name: str) -> None:
    told: list[Finding] = []

    def read(watch: fxgrad.Watch) -> Any:
        watch.flow()
        return watch.alarms

    # Every gradient is beyond the limit.
    alarms = watched(name, limits={"l2_norm": 0.0}, on_finding=told.append, read=read)
    failed = [finding for finding in alarms if finding.rule == "backward_failed"]
    check(failed[-1:], name)
    assert told[-1] is failed[-1]


@case
def test_a_one_shot_call_says_it_in_its_error(name: str) -> None:
    make, step, key, _, words = CASES[name]
    if step is not plain_step:
        pytest.skip("what happens around the call is none of its business")
    torch.manual_seed(0)
    model = make()
    warnings.simplefilter("ignore")  # that the model writes into its own parameters; pytest gives the filters back
    with pytest.raises(ModelError) as info:
        fxgrad.gradient_flow(model, X, loss=torch.sum)
    message = str(info.value)
    for word in (key, *words):
        assert word in message, message
    assert type(info.value.__cause__).__name__ in message


def test_good_steps_around_are_judged_without_it() -> None:
    """Neither ``unused`` nor ``detached``: what was not reached says nothing."""
    model = Plain()
    with fxgrad.watch(model) as watch:
        for _ in range(6):
            plain_step(model)
        raising(model, step_between)
        assert [finding.rule for finding in watch.diagnose().findings] == ["backward_failed"]
        assert watch.history[-1].event.failed is not None
        assert all(flow.event.failed is None for flow in watch.history[:6])


def test_what_it_hides_is_not_checked() -> None:
    model = ChangedValue()
    with fxgrad.watch(model) as watch:
        raising(model, plain_step)
        found = watch.diagnose()
        assert {"unused", "detached", "vanishing"} <= {one.rule for one in found.not_checked}
        flow = watch.flow()
    assert {spot.reason for spot in flow.blind_spots if spot.key == "a"} == {"not_reached"}
    assert any("raised" in spot.detail for spot in flow.blind_spots)


def test_a_step_behind_it_is_an_event_of_its_own() -> None:
    class Sometimes(ChangedValue):
        bad = True

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).exp()
            if self.bad:
                h.add_(1)
            return self.b(h)

    model = Sometimes()
    with fxgrad.watch(model) as watch:
        raising(model, plain_step)
        good = model.b(torch.ones(1, 8)).sum()
        model.bad = False
        plain_step(model)
        good.backward()
        plain_step(model)
        assert watch.history[0].event.failed is not None
        assert not any(flow.event.failed for flow in watch.history[1:])
        assert watch.flow().site("/exp").measured


def test_leaving_the_watch_by_the_exception() -> None:
    model = ChangedValue()
    with pytest.raises(RuntimeError, match="inplace"), fxgrad.watch(model) as watch:
        plain_step(model)
    finding = check(watch.diagnose().findings, "value")
    assert "RuntimeError" in finding.message


def test_an_exception_of_something_else_is_not_taken_for_it() -> None:
    model = ChangedValue()
    with fxgrad.watch(model) as watch:
        raising(model, plain_step)
        try:
            int("no number")
        except ValueError:
            assert watch.flow().event.failed.exception is None


def test_an_older_exception_is_not_taken_for_it() -> None:
    model = Custom(Refusing)
    with fxgrad.watch(model) as watch:
        try:
            plain_step(model)
        except KeyError:
            model.function = WrongShape
            raising(model, plain_step)
            flows = watch.history
    assert [flow.event.failed.exception for flow in flows] == ["KeyError", None]


def test_an_exception_that_another_was_raised_from() -> None:
    model = ChangedValue()
    with fxgrad.watch(model) as watch:
        try:
            try:
                plain_step(model)
            except RuntimeError as error:
                raise ValueError from error
        except ValueError:
            assert watch.flow().event.failed.exception == "RuntimeError"


def test_a_backward_inside_of_a_hook_that_raises_and_is_caught() -> None:
    model, other = Plain(), ChangedValue()

    def hook(_: Tensor) -> None:
        with torch.enable_grad():
            raising(other, plain_step)

    with fxgrad.watch(model) as watch:
        out = model(X)
        out.register_hook(hook)
        out.sum().backward()
        assert watch.flow().event.failed is None
        assert watch.flow().site("a").measured


def test_the_hook_of_a_user_that_raises() -> None:
    class Hooked(Plain):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            h.register_hook(self.refuse)
            return self.b(h.tanh())

        @staticmethod
        def refuse(_: Tensor) -> None:
            message = "a hook"
            raise KeyError(message)

    model = Hooked()
    with fxgrad.watch(model) as watch:
        try:
            plain_step(model)
        except KeyError:
            found = watch.diagnose().findings
    assert [one.rule for one in found] == ["backward_failed"]
    assert found[0].node is not None
    assert found[0].node.key == "a"
    assert "a hook" in found[0].message
    assert "test_backward_raised.py" in found[0].message  # where it was raised


def test_nothing_is_kept_where_no_gradient_came_to_the_model() -> None:
    model = Plain()
    with fxgrad.watch(model) as watch:
        loss = Refusing.apply(model(X)).sum()
        with pytest.raises(KeyError):
            loss.backward()
        with pytest.raises(NoFlowError):
            watch.flow()


def test_a_graph_module_names_it_too() -> None:
    model = fxgrad.instrument(ChangedValue())
    for _ in range(3):
        raising(model, plain_step)
    check(model.flow().findings, "value", seen=False)


def test_a_graph_module_for_the_compiler_judges_nothing() -> None:
    model = fxgrad.instrument(Plain(), engine="function")
    model(X).sum().backward()
    loss = model(X).sum()
    next(model.parameters()).data.add_(0)
    with torch.no_grad():
        model.b.weight.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
    flows = model.history
    assert [flow.event.failed is None for flow in flows] in ([True], [True, False])
    assert not {f.rule for f in flows[-1].findings} & {"unused", "detached"}


def test_no_gradient_is_kept_behind_it() -> None:
    import gc
    import weakref

    gone: list[Any] = []
    model = ChangedValue()
    with fxgrad.watch(model, statistics="full", sites="edge") as watch:
        out = model(X)
        out.register_hook(lambda grad: gone.append(weakref.ref(grad)))
        with pytest.raises(RuntimeError):
            out.square().sum().backward()
        del out
        watch.flow()
        gc.collect()
        assert all(ref() is None for ref in gone)
