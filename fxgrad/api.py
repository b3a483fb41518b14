"""The wiring: ``gradient_flow``, ``watch``, ``instrument``, ``rewrite``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from fxgrad.engine.logbook import Logbook, checked_logs
from fxgrad.engine.objective import Objective, default_loss
from fxgrad.engine.run_writer import Errors, checked_run_file
from fxgrad.engine.step import Options
from fxgrad.errors import OptionError
from fxgrad.handles.instrumented import Instrumented
from fxgrad.handles.one_shot import measured
from fxgrad.handles.rewritten import Rewrite
from fxgrad.handles.watching import Around, Watch
from fxgrad.losses import named_loss
from fxgrad.rewriting.rules import Rule
from fxgrad.schema import Finding, GradientFlow, Level, Log, SiteKind
from fxgrad.torch_support.private_compiled import compiled_call_of

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
        InputError, OptionError: ``args`` or ``kwargs`` are not arguments; an option has an unknown value.
        CaptureError: the front end that was asked for cannot capture the model.
        WatchError: ``model`` is not a module or is scripted.
    """
    sites = sites or ("node" if capture == "dynamo" else "edge")
    if forward is None:
        forward = statistics != "norm" and capture != "dynamo"
    _check_options(capture, statistics, sites, forward, channels)
    if capture == "dynamo":
        _only_norm(statistics, sites, "capture='dynamo'", forward=forward)
    objective = Objective(named_loss(loss, seed) if isinstance(loss, str) else loss, seed)
    return measured(model, args, kwargs, objective, Options(statistics, capture, sites, forward, channels))


def watch(  # noqa: PLR0913  # the public signature of the design
    model: nn.Module, *, every: int = 1, statistics: Level = "norm", sites: SiteKind = "node",
    capture: InPlace = "auto", forward: bool = False, channels: bool = False,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scaler: GradScaler | None = None, limits: Mapping[str, float] | None = None,
    on_finding: Callable[[Finding], Any] | None = None, native: bool = True,
    log_to: Log | Sequence[Log] = (), log_every: int | None = 50, status: bool = False,
    run_file: str | Path | None = None, keep: int | tuple[int, int] | None = None,
    run_file_errors: Errors = "warn", capture_batch: bool = False,
) -> Watch:  # fmt: skip
    """Observe the gradients of ``model`` in place, while the training loop stays as it is.

    Args:
        model: any module that runs Python; its own Python runs in every step, once, and nothing takes its place.
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
            (``ParameterRecord.update``, ``flow.optimizer``).  A step copies the parameters that have a gradient.
        scaler: the ``torch.amp.GradScaler``: flows then have the loss scale, and how many steps were skipped.
        limits: your own alarms: the largest values of statistics (``{"l2_norm": 1e3}``) at any site or parameter, with
            a loss scale divided out, judged at the end of each backward pass, which then waits for the device.
        on_finding: called with each alarm, and with what ``diagnose()`` or a log entry finds for the first time.  None:
            an alarm is a ``fxgrad.FindingWarning``.  What it raises, ``backward()`` raises when it is done.
        native: whether the native recorder may be used, and built in the background (see ``docs/native.md``).
        log_to: where the run is logged: logs of ``fxgrad.integrations``, or objects with ``write(entry)``, ``close()``.
        log_every: a step is read, which waits for the device, and logged when this many have passed since the one
            before; also the last one, when the watch is removed.  None: only by ``log()`` of the watch.
        run_file: a file that gets every event while training goes on, by a thread of its own; see ``fxgrad.open_run``.
        keep: how many of its latest flows are kept; ``(10_000, 100)``: and every 100th of those before.  None: all.
        capture_batch: whether each step's batch, parameters and buffers are copied before it, and those of the first
            error kept beside the run file, for ``fxgrad.replay``.
        run_file_errors: ``"warn"`` once and go on, or ``"raise"`` in the next step, where it cannot be written.
        status: whether each logged step is also one line on the screen: loss if noted, worst gradient, findings.

    Returns:
        A handle and context manager with ``flow()``, ``history`` and ``remove()``.

    Raises:
        WatchError: not a module, compiled, scripted or already watched.
        OptionError: an option has an unknown value.
        RunFileError: the run file cannot be written, and ``run_file_errors`` is ``"raise"``.
    """
    _check_options(capture, statistics, sites, forward, channels)
    _only_in_place(capture, "watches")
    _check_every(every)
    around = Around.of(statistics, optimizer=optimizer, scaler=scaler, limits=limits, on_finding=on_finding)
    around = replace(
        around, logbook=Logbook(checked_logs(log_to, log_every, status=status), log_every),
        run_file=checked_run_file(run_file, keep, run_file_errors, capture_batch),
    )  # fmt: skip
    options = Options(statistics, capture, sites, forward, channels, native)
    compiled = compiled_call_of(model)
    if compiled is not None:
        from fxgrad.handles.compiled_watch import CompiledWatch

        return CompiledWatch(compiled, options, every=every, around=around)
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


__all__ = ["Capture", "Rewrite", "Watch", "default_loss", "gradient_flow", "instrument", "rewrite", "watch"]
