"""The wiring: ``gradient_flow``, ``watch``, ``instrument``, ``rewrite``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from fxgrad.capture.unregistered import unregistered
from fxgrad.engine.objective import Objective, default_loss, naming_the_cut
from fxgrad.engine.step import Options
from fxgrad.errors import FxgradError, InputError, ModelError, NoFlowError, OptionError
from fxgrad.handles.instrumented import Instrumented
from fxgrad.handles.rewritten import Rewrite
from fxgrad.handles.watching import Around, Watch, refuse_unwatchable, watch_of
from fxgrad.losses import named_loss
from fxgrad.rewriting.rules import Rule
from fxgrad.schema import Finding, GradientFlow, Level, SiteKind
from fxgrad.torch_support.preserve import preserved
from fxgrad.torch_support.private import acts_after_accumulation, compiled_original
from fxgrad.torch_support.structure import tensors_in

if TYPE_CHECKING:
    from fxgrad.handles.compilable import Compilable

Capture = Literal["auto", "symbolic", "eager", "dynamo"]
InPlace = Literal["auto", "eager"]


def gradient_flow(  # noqa: PLR0913  # the public signature of the design
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], Tensor] | str | None = None,
    capture: Capture = "auto",
    statistics: Level = "full",
    sites: SiteKind | None = None,
    forward: bool | None = None,
    channels: bool = False,
    seed: int = 0,
) -> GradientFlow:
    """One forward and one backward pass of ``model``, and the gradient at every intermediate value.

    The model is given back as it was: ``.grad``, buffers, random streams, attributes, flags and hooks.

    Args:
        model: any module.  A compiled one is measured by the original inside of it.
        args: positional arguments (a tuple), or the only one.
        kwargs: keyword arguments.
        loss: takes what the model returns and gives a scalar; or a name as on the command line (``"mse"`` ...), against
            a random target.  None: a scalar output is the loss; an output with ``.loss`` gives it; otherwise a random
            direction of norm 1 over all floating outputs (``flow.event.loss`` says which).
        capture: front end; ``"auto"`` and ``"eager"`` run the model's own Python, once; ``"symbolic"`` traces it with
            torch.fx, Python state baked in, and runs the graph as ``instrument`` does; ``"dynamo"`` runs it in the
            graphs that ``torch.compile`` makes, at level ``norm``.
        statistics: ``"full"``, ``"norm"`` or ``"histogram"``.
        sites: ``"node"``, the total gradient of each value; ``"edge"``, also the part that each consumer of a value
            sends back (in ``flow.edges``).  None: ``"edge"``, but ``"node"`` with ``capture="dynamo"``.
        forward: whether the values themselves are measured too, in the forward pass: ``site.value``,
            ``site.activity``, ``parameter.value``, ``flow.buffers``.  None: where ``statistics`` is not ``"norm"``.
        channels: with ``forward``, also the gradient of what convolutions, linear and matmul-like nodes returned, unit
            by unit, in ``site.channels``.
        seed: of the random direction, or of a named loss's target.

    Raises:
        ModelError: the model or the loss raised, or there is nothing to differentiate.
        InputError: ``args`` or ``kwargs`` are not arguments.
        OptionError: an option has an unknown value.
        CaptureError: the front end that was asked for cannot capture the model.
        WatchError: ``model`` is not a module or is scripted.
    """
    sites = sites or ("node" if capture == "dynamo" else "edge")
    if forward is None:
        forward = statistics != "norm" and capture != "dynamo"
    _check_options(capture, statistics, sites, forward, channels)
    if capture == "dynamo":
        _only_norm(statistics, sites, "capture='dynamo'", forward=forward)
    options = Options(statistics, capture, sites, forward, channels)
    return _measured(model, args, kwargs, _objective(loss, seed), options)


def _objective(loss: Callable[[Any], Tensor] | str | None, seed: int) -> Objective:
    return Objective(named_loss(loss, seed) if isinstance(loss, str) else loss, seed)


def _measured(
    model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None, objective: Objective, options: Options
) -> GradientFlow:  # fmt: skip
    """One step of a model that is given back as it was."""
    if isinstance(model, nn.Module):
        model = compiled_original(model) or model
    outer = watch_of(model) if isinstance(model, nn.Module) else None
    if outer is None:
        refuse_unwatchable(model)
    positional, named = _arguments(args, kwargs)
    leaves = [tensor for _, tensor in tensors_in((positional, named))]
    with _given_back(model, leaves, compiled=options.capture == "dynamo"), _paused(outer), torch.enable_grad():
        if options.capture == "dynamo":
            return _by_dynamo(model, positional, named, objective)
        watch = Watch(model, dataclasses.replace(options, one_shot=True), one_shot=True)
        try:
            with naming_the_cut(lambda: watch.engine.plan):
                scalar, words, met = _run(model, positional, named, objective)
            watch.engine.loss_words = words
            _backward(scalar, model, lambda: _failure_in_words(watch))
            del scalar
            flow = watch.flow()
            return dataclasses.replace(flow, event=dataclasses.replace(flow.event, margins_met=met))
        finally:
            watch.remove()


def watch(  # noqa: PLR0913  # the public signature of the design
    model: nn.Module, *, every: int = 1, statistics: Level = "norm", sites: SiteKind = "node",
    capture: InPlace = "auto", forward: bool = False, channels: bool = False,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scaler: GradScaler | None = None, limits: Mapping[str, float] | None = None,
    on_finding: Callable[[Finding], Any] | None = None, native: bool = True,
) -> Watch:  # fmt: skip
    """Observe the gradients of ``model`` in place, while the training loop stays as it is.

    The model's own Python runs in every step, once; nothing takes its place.

    Args:
        model: any module that runs Python; the optimizer, ``state_dict`` and hooks are not touched.
        every: observe every n-th training forward.
        statistics: ``"norm"`` (one reduction a site), ``"full"`` or ``"histogram"``.
        sites: ``"node"``, the total gradient of each value; ``"edge"``, also the part that each consumer of a value
            sends back (in ``flow.edges``).
        capture: ``"auto"`` picks the recorder; ``"eager"`` insists on the one in Python.
        forward: whether the values themselves are measured too, in the forward pass: ``site.value``,
            ``site.activity``, ``parameter.value``, ``flow.buffers``.
        channels: with ``forward``, also the gradient of what convolutions, linear and matmul-like nodes returned, unit
            by unit, in ``site.channels``.
        optimizer: the optimizer, or several: flows then have what the step behind a backward pass did to each parameter
            (``ParameterRecord.update``, ``flow.optimizer``), in accumulation each of their flows.  A step copies the
            parameters that have a gradient, for as long as it runs.
        scaler: the ``torch.amp.GradScaler``: flows then have the loss scale (``flow.event.loss_scale``) and how many
            steps were skipped.
        limits: your own alarms: the largest values of statistics (``{"l2_norm": 1e3}``) at any site or parameter, with
            a loss scale divided out.  They are judged at the end of each backward pass, which then waits for the device
            once; see ``alarms`` of the watch.
        on_finding: called with each alarm, and with what ``diagnose()`` of the watch finds for the first time.  None:
            an alarm is a ``fxgrad.FindingWarning``.  What it raises, ``backward()`` raises when it is done.
        native: whether the native recorder, which makes watching cheap, may be used, and built in the background once
            the watch has run for some seconds (see ``docs/native.md``).  False: the Python recorder, always.

    Returns:
        A handle and context manager with ``flow()``, ``history`` and ``remove()``.

    Raises:
        WatchError: not a module, compiled, scripted or already watched.
        OptionError: an option has an unknown value.
    """
    _check_options(capture, statistics, sites, forward, channels)
    _only_in_place(capture, "watches")
    _check_every(every)
    around = Around.of(statistics, optimizer=optimizer, scaler=scaler, limits=limits, on_finding=on_finding)
    options = Options(statistics, capture, sites, forward, channels, native)
    return Watch(model, options, every=every, around=around)


def instrument(  # noqa: PLR0913  # the public signature of the design
    model: nn.Module, *, engine: Literal["hook", "function"] = "hook", sites: SiteKind = "node",
    statistics: Level = "norm", capture: Literal["auto", "symbolic"] = "auto", forward: bool = False,
) -> Instrumented | Compilable:  # fmt: skip
    """The pass as a module: an ``fx.GraphModule`` with a probe behind every value, sharing the model's parameters.

    It has the semantics of torch.fx: **Python state is baked in**.  Numbers, flags, entries of dictionaries, globals
    and branches are what they were when the model was traced, and a later change of them has no effect; parameters,
    buffers and leaf modules are the model's own.  Train and eval each have a graph, and arguments of another structure,
    autocast and swapped modules are traced anew.  What a trace would lose (control flow on values, custom autograd
    functions, checkpointing, hooks on inlined modules, attributes and buffers bound in forward) is refused.

    With ``engine="hook"`` the graph is what runs: edit ``gm.graph``, call ``gm.recompile()``, print ``gm.code``.  A
    graph that was edited is no longer compared with the model.  ``fxgrad.watch`` runs the model's own Python instead.

    Args:
        model: a module that torch.fx can trace faithfully.
        engine: ``"hook"``, tensor hooks; ``"function"``, an ``autograd.Function`` at each site, for
            ``torch.compile(..., fullgraph=True)``, at level ``norm``.
        sites: ``"node"``, the total gradient of each value; ``"edge"``, also the part that each consumer of a value
            sends back (in ``flow.edges``).
        statistics: ``"norm"``, ``"full"`` or ``"histogram"``.
        capture: ``"auto"``: the first observed call of each kind runs the model's own Python, and the graph is compared
            with what it did; ``"symbolic"``: the graph is trusted.
        forward: whether the values themselves are measured too, in the forward pass: ``site.value``,
            ``site.activity``, ``parameter.value``, ``flow.buffers``.  With ``engine="hook"`` only.

    Returns:
        The graph module; ``flow()`` and ``history`` as on a watch.

    Raises:
        CaptureError: the model cannot be traced faithfully; the message says why.  ``fxgrad.watch`` takes any model.
            Raised by the first call where the graph differs from the model's own run.
        WatchError: not a module, compiled, scripted or watched already.
        OptionError: an option has an unknown value.
    """
    _check_options(capture, statistics, sites, forward)
    if engine not in ("hook", "function"):
        message = f"engine={engine!r} is not known; it is 'hook' or 'function'"
        raise OptionError(message)
    if capture not in ("auto", "symbolic"):
        message = f"capture={capture!r} makes no graph module: use fxgrad.watch, or capture='auto' or 'symbolic'"
        raise OptionError(message)
    if engine == "function":
        _only_norm(statistics, sites, "engine='function'", forward=forward)
        from fxgrad.handles.compilable import Compilable

        return Compilable(model, capture)
    return Instrumented(model, Options(statistics, capture, sites, forward))


def rewrite(
    model: nn.Module, rules: Rule | Sequence[Rule], *, capture: InPlace = "auto",
    audit: Literal["count", "full"] = "count",
) -> Rewrite:  # fmt: skip
    """Rewrite the gradients of ``model`` by rule, in place, in every training step.

    Args:
        model: any module that runs Python.
        rules: what the functions of ``fxgrad.rules`` return; they run in this order, behind those of earlier rewrites.
        capture: as for ``watch``, of which one on the same model has precedence.
        audit: ``"count"``: how often each rule ran; ``"full"``: also changed entries and norms, which takes three
            reductions per rewritten gradient.

    Returns:
        A handle and context manager with ``report()``, ``apply()``, ``step`` and ``remove()``.

    Raises:
        WatchError: not a module, compiled or scripted.
        RuleError: not a rule, or one that selects no parameter.  One that selects no site or edge raises at the
            first call of the model.
        OptionError: an option has an unknown value.
    """
    _check_options(capture, "norm", "node")
    _only_in_place(capture, "rewrites")
    if audit not in ("count", "full"):
        message = f"audit={audit!r} is not known; it is one of 'count', 'full'"
        raise OptionError(message)
    return Rewrite(model, rules, capture=capture, audit=audit)


def _check_every(every: Any) -> None:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        message = f"every must be a whole number of at least 1, but is {every!r}"
        raise OptionError(message)


def _check_options(
    capture: str, statistics: str, sites: str, forward: object = False, channels: object = False,  # noqa: FBT002
) -> None:  # fmt: skip
    allowed = {
        "capture": (capture, ("auto", "symbolic", "eager", "dynamo")),
        "statistics": (statistics, ("norm", "full", "histogram")),
        "sites": (sites, ("node", "edge")),
        "forward": (forward, (False, True)),
        "channels": (channels, (False, True)),
    }
    for name, (value, values) in allowed.items():
        if value not in values:
            message = f"{name}={value!r} is not known; it is one of {', '.join(map(repr, values))}"
            raise OptionError(message)
    if channels and not forward:
        message = "channels=True needs forward=True: what makes the units is found in the forward pass"
        raise OptionError(message)


def _only_in_place(capture: str, what: str) -> None:
    """A watch or rewrite runs the model's own Python, never a graph."""
    if capture == "symbolic":
        message = (
            f"capture='symbolic' {what} no model in place, since a trace has Python state baked in: "
            "use fxgrad.instrument(model) for a graph module, fxgrad.gradient_flow(model, args, capture='symbolic') "
            "for one step, or capture='auto'"
        )
        raise OptionError(message)
    if capture == "dynamo":
        message = (
            f"capture='dynamo' {what} no model in place: use torch.compile(model, backend='fxgrad') and "
            "fxgrad.flow_of(model), or capture='auto'"
        )
        raise OptionError(message)


def _only_norm(statistics: str, sites: str, what: str, *, forward: bool) -> None:
    if sites != "node":
        message = f"{what} measures sites='node' only, but was asked for {sites!r}"
        raise OptionError(message)
    if statistics != "norm":
        message = f"{what} knows statistics='norm' only, but was asked for {statistics!r}: only sums go through a slot"
        raise OptionError(message)
    if forward:
        message = f"{what} takes no forward=True: it measures no values in the forward pass"
        raise OptionError(message)


def _arguments(args: Any, kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(args, Mapping) and kwargs is None:
        args, kwargs = (), args
    if isinstance(args, list):
        args = tuple(args)
    elif not isinstance(args, tuple):
        args = (args,)
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        message = f"kwargs must map argument names to values, but is {type(kwargs).__name__}"
        raise InputError(message)
    return args, dict(kwargs or {})


def _by_dynamo(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], objective: Objective) -> GradientFlow:
    """One step in the graphs of dynamo, run as they are (inner compiler ``eager``)."""
    from fxgrad.handles.dynamo_backend import measured_once

    def step(call: Callable[..., Any]) -> str:
        scalar, words, _ = _run(model, args, kwargs, objective, call)
        _backward(scalar, model)
        return words

    return measured_once(model, step)


@contextlib.contextmanager
def _given_back(model: nn.Module, leaves: Sequence[Tensor], *, compiled: bool) -> Iterator[None]:
    """``preserved``, with what the model keeps in plain lists and dicts."""
    known = {id(one) for one in (*model.modules(), *model.parameters())}
    beside = [found.item for found in unregistered(model, known)]
    parameters = [item for item in beside if isinstance(item, nn.Parameter)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserved(model, [*leaves, *parameters], compiled=compiled))
        for item in beside:
            if isinstance(item, nn.Module):
                stack.enter_context(preserved(item, (), compiled=compiled))
        yield


class _paused:  # noqa: N801  # used like a function in a with statement
    """An outer watch does not record what a one-shot call does."""

    def __init__(self, watch: Watch | None) -> None:
        self._recorder = watch.engine.recorder if watch is not None and watch.engine.recorder.on else None

    def __enter__(self) -> None:
        if self._recorder is not None:
            self._recorder.on = False

    def __exit__(self, *_: object) -> None:
        if self._recorder is not None:
            self._recorder.on = True


def _run(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], objective: Objective,
    call: Callable[..., Any] | None = None,
) -> tuple[Tensor, str, bool]:  # fmt: skip
    """The loss, how it came about in words, and whether every margin in it is met."""
    name = type(model).__name__
    try:
        output = (model if call is None else call)(*args, **kwargs)
    except FxgradError:
        raise
    except Exception as error:
        given = {"args": args, "kwargs": kwargs}
        shapes = ", ".join(
            f"{name}{position}: {'nested' if t.is_nested else tuple(t.shape)}"
            for name in given
            for position, t in tensors_in(given[name])
        )
        message = f"{name} raised {type(error).__name__} when called with tensors ({shapes}): {error}"
        raise ModelError(message) from error
    return objective.of(output, name)


def _failure_in_words(watch: Watch) -> str:
    """Where the backward pass stopped and why, as the finding says it; empty where that is not known."""
    try:
        found = watch.flow().findings
    except NoFlowError:
        return ""
    return "".join(f"\n{finding.message}. Try: {finding.suggestion}" for finding in found)


def _backward(scalar: Tensor, model: nn.Module, explain: Callable[[], str] = str) -> None:
    """Run the backward pass.  Parameters whose hooks act on the accumulated gradient must not see one."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    try:
        if any(acts_after_accumulation(p) for p in parameters):
            torch.autograd.grad(scalar.reshape(()), parameters, allow_unused=True)
        else:
            scalar.reshape(()).backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        message = f"the backward pass of {type(model).__name__} raised {type(error).__name__}: {error}"
        raise ModelError(message + explain()) from error


__all__ = ["Capture", "Rewrite", "Watch", "default_loss", "gradient_flow", "instrument", "rewrite", "watch"]
