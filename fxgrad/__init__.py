"""See where the gradient of a PyTorch model dies, explodes or never arrives, in the graph of the model you wrote.

    import fxgrad

    flow = fxgrad.gradient_flow(model, (x,))     # one forward, one backward
    flow.to_svg("flow.svg")                      # the model's graph, coloured by gradient norm

    with fxgrad.watch(model) as watch:           # the training loop stays as it is
        train(model)
        print(watch.flow().table())

What happens inside, left to right; each arrow is a frozen dataclass of ``fxgrad.schema`` or ``fxgrad.capture``::

                    capture                  instrument            your forward and backward
    model, args ──▶ the graph, a key    ──▶  an identity probe ──▶ each probe's hook writes the     ──▶ GradientFlow
                    for every node           on every value        gradient's statistics to a slot         │
                                                                                                           │
         findings   to_networkx()   to_json()   table()   to_dot()   to_svg()   ◀──────────────────────────┘

Importing ``fxgrad`` imports nothing of weight: each name below is loaded when it is first used, so that a saved flow
can be read and drawn without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fxgrad.presenting import Presenter, presented_by

if TYPE_CHECKING:
    from fxgrad import integrations, rules, testing
    from fxgrad.api import Rewrite, Watch, gradient_flow, instrument, rewrite, watch
    from fxgrad.comparison import compare
    from fxgrad.diagnosis import Thresholds, diagnose
    from fxgrad.errors import FindingWarning, FxgradError, LogWarning
    from fxgrad.handles.dynamo_backend import flow_of
    from fxgrad.handles.replaying import Replay, replay
    from fxgrad.run_file import Run, open_run
    from fxgrad.schema import (
        BlindSpot,
        Comparison,
        Diagnosis,
        Edge,
        Finding,
        GradientFlow,
        History,
        Log,
        LogEntry,
        ModuleFlow,
        Node,
        NotChecked,
        ParameterRecord,
        RewriteReport,
        Series,
        Site,
        Statistics,
    )
    from fxgrad.store import load, load_series, save_series

    __version__: str

__all__ = [
    "BlindSpot",
    "Comparison",
    "Diagnosis",
    "Edge",
    "Finding",
    "FindingWarning",
    "FxgradError",
    "GradientFlow",
    "History",
    "Log",
    "LogEntry",
    "LogWarning",
    "ModuleFlow",
    "Node",
    "NotChecked",
    "ParameterRecord",
    "Replay",
    "Rewrite",
    "RewriteReport",
    "Run",
    "Series",
    "Site",
    "Statistics",
    "Thresholds",
    "Watch",
    "compare",
    "diagnose",
    "flow_of",
    "gradient_flow",
    "instrument",
    "integrations",
    "load",
    "load_series",
    "open_run",
    "replay",
    "rewrite",
    "rules",
    "save_series",
    "testing",
    "watch",
]

_HOME = {
    "BlindSpot": "fxgrad.schema",
    "Comparison": "fxgrad.schema",
    "Diagnosis": "fxgrad.schema",
    "Edge": "fxgrad.schema",
    "Finding": "fxgrad.schema",
    "FindingWarning": "fxgrad.errors",
    "FxgradError": "fxgrad.errors",
    "GradientFlow": "fxgrad.schema",
    "History": "fxgrad.schema",
    "Log": "fxgrad.schema",
    "LogEntry": "fxgrad.schema",
    "LogWarning": "fxgrad.errors",
    "ModuleFlow": "fxgrad.schema",
    "Node": "fxgrad.schema",
    "NotChecked": "fxgrad.schema",
    "ParameterRecord": "fxgrad.schema",
    "Replay": "fxgrad.handles.replaying",
    "Rewrite": "fxgrad.api",
    "RewriteReport": "fxgrad.schema",
    "Run": "fxgrad.run_file",
    "Series": "fxgrad.schema",
    "Site": "fxgrad.schema",
    "Statistics": "fxgrad.schema",
    "Thresholds": "fxgrad.diagnosis",
    "Watch": "fxgrad.api",
    "compare": "fxgrad.comparison",
    "diagnose": "fxgrad.diagnosis",
    "flow_of": "fxgrad.handles.dynamo_backend",
    "gradient_flow": "fxgrad.api",
    "instrument": "fxgrad.api",
    "integrations": "fxgrad",
    "load": "fxgrad.store",
    "load_series": "fxgrad.store",
    "open_run": "fxgrad.run_file",
    "replay": "fxgrad.handles.replaying",
    "rewrite": "fxgrad.api",
    "rules": "fxgrad",
    "save_series": "fxgrad.store",
    "testing": "fxgrad",
    "watch": "fxgrad.api",
}


def _presenter() -> Presenter:
    from fxgrad.loading import loaded

    found: Presenter = loaded("fxgrad.presenter")
    return found


presented_by(_presenter)


def __getattr__(name: str) -> Any:
    """Load a public name from its home when it is first asked for (PEP 562)."""
    from fxgrad.loading import loaded

    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("fxgrad")
    elif _HOME.get(name) == __name__:  # a module
        value = loaded(f"{__name__}.{name}")
    elif name in _HOME:
        value = getattr(loaded(_HOME[name]), name)
    else:
        message = f"module 'fxgrad' has no attribute {name!r}"
        raise AttributeError(message)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, so that completion shows them before they are loaded."""
    return sorted({*__all__, "__version__"})
