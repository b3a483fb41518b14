"""fxgrad's own configurations."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch

import fxgrad
from benchmarks.models import Built
from benchmarks.runners import CompiledPlain, Configuration, Runner, Seen, SkippedError, without_places


def seen_of(flow: fxgrad.GradientFlow) -> Seen:
    """What a flow holds."""
    sites = [site for site in flow.sites if site.consumer is None]
    level = flow.event.level
    return Seen(
        activations=sum(site.measured for site in sites),
        parameters=sum(record.measured for record in flow.parameters),
        told="norm" if level == "norm" else "12 scalars",
        derived=sum(site.derived_from is not None for site in sites),
        edges=sum(site.consumer is not None for site in flow.sites) + sum(edge.measured for edge in flow.edges),
        blind=dict(Counter(spot.reason for spot in flow.blind_spots)),
        front_end=flow.capture.front_end,
        more={"sites": len(sites), "reason": without_places(flow.capture.reason)},
    )


def _asked(make: Any, what: str) -> Any:
    """What ``make`` returns; an option that this version doesn't know skips the row, and nothing else does."""
    try:
        return make()
    except TypeError as error:
        message = f"{what} is not in this version: {error}"
        raise SkippedError(message) from error
    except fxgrad.FxgradError as error:
        if not isinstance(error, ValueError):
            raise
        message = f"{what} is not in this version: {error}"
        raise SkippedError(message) from error


class Watched(Runner):
    """``fxgrad.watch`` on the model.

    Args:
        built: the model.
        options: of ``fxgrad.watch``.
    """

    def __init__(self, built: Built, **options: Any) -> None:
        self.options = options
        super().__init__(built)

    def attach(self) -> None:
        """Watch the model."""
        words = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        self.watch = _asked(lambda: fxgrad.watch(self.built.model, **self.options), f"watch(model, {words})")

    def read(self) -> None:
        """The flow of the latest step: the one copy to the host."""
        self.watch.flow()

    def seen(self) -> Seen:
        """What the latest flow holds."""
        return seen_of(self.watch.flow())

    def close(self) -> None:
        """Give the model back."""
        self.watch.remove()


class Paused(Watched):
    """A watch that is switched off for the time being."""

    def attach(self) -> None:
        """Watch the model for some steps, then stop."""
        super().attach()
        for _ in range(3):
            self.step()
        self.last = seen_of(self.watch.flow())
        self.watch.pause()

    def read(self) -> None:
        """Nothing to read."""

    def seen(self) -> Seen:
        """Nothing; ``sites`` are those of the steps before."""
        return Seen(told="nothing (switched off)", more=self.last.more)


class Traced(Watched):
    """The graph module of ``fxgrad.instrument``."""

    def attach(self) -> None:
        """Trace the model and put probes into its graph."""
        made = _asked(lambda: fxgrad.instrument(self.built.model, **self.options), "instrument(model)")
        self.watch = self.model = made


class CompiledFunction(Runner):
    """``torch.compile`` of the model that the function engine instrumented."""

    def __init__(self, built: Built, **options: Any) -> None:
        self.options = options
        super().__init__(built)

    def attach(self) -> None:
        """Instrument and compile, in one graph."""
        made = _asked(
            lambda: fxgrad.instrument(self.built.model, engine="function", **self.options),
            'instrument(model, engine="function")',
        )
        self.instrumented = made
        self.model = torch.compile(made, fullgraph=True)

    def read(self) -> None:
        """The flow of the latest step."""
        self.instrumented.flow()

    def seen(self) -> Seen:
        """What the latest flow holds."""
        return seen_of(self.instrumented.flow())

    def close(self) -> None:
        """Give the model back."""
        self.instrumented.remove()


def _watched(name: str, words: str, steps: int = 1, **options: Any) -> Configuration:
    return Configuration(name, words, partial(Watched, **options), "ours", steps=steps)


OURS = (
    Configuration("aa", "plain (A/A)", Runner, "A/A"),
    _watched("norm", "watch, `norm`", statistics="norm"),
    _watched("full", "watch, `full`", statistics="full"),
    _watched("norm_edge", "watch, `norm`, edge sites", statistics="norm", sites="edge"),
    _watched("norm_forward", "watch, `norm`, forward statistics", statistics="norm", forward=True),
    _watched("norm_python", "watch, `norm`, Python recorder", statistics="norm", native=False),
    _watched("full_edge", "watch, `full`, edge sites", statistics="full", sites="edge"),
    Configuration("graph_norm", "graph module, `norm`", partial(Traced, statistics="norm"), "ours"),
    Configuration("graph_full", "graph module, `full`", partial(Traced, statistics="full"), "ours"),
    _watched("norm_every_10", "watch, `norm`, every 10", steps=10, statistics="norm", every=10),
    _watched("full_every_10", "watch, `full`, every 10", steps=10, statistics="full", every=10),
    Configuration("off", "watch, switched off", partial(Paused, statistics="norm"), "ours"),
    Configuration("aa_compiled", "compiled plain (A/A)", CompiledPlain, "A/A", plain=CompiledPlain),
    Configuration(
        "compiled", "compiled, function engine", partial(CompiledFunction, statistics="norm"), "ours",
        plain=CompiledPlain,
    ),
)  # fmt: skip
