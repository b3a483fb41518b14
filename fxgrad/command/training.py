"""``fxgrad run train.py``: a training script, watched without a change to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxgrad.command.findings import Judged, judge
from fxgrad.command.scripts import run_as_main, when_imported
from fxgrad.errors import FxgradError
from fxgrad.loading import loaded
from fxgrad.render.verdict import verdict
from fxgrad.schema import Finding, GradientFlow, Level, LogEntry, SiteKind

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from fxgrad.handles.watching import Watch
    from fxgrad.integrations.outermost import Calls

__all__ = ["Asked", "Trained", "train"]

_TRIES = 3  # optimizer steps until it is given up to find the model


@dataclass(frozen=True, slots=True)
class Asked:
    """What ``fxgrad run train.py`` was asked for.

    Attributes:
        script, arguments: the file, and what it gets in ``sys.argv``.
        module: which module to watch: a name in the script, dotted, or a class; None to find out.
        run_file: where the flows go; None for nowhere.
        every, statistics, sites, forward, status: as of ``fxgrad.watch``.
    """

    script: str
    arguments: Sequence[str] = ()
    module: str | None = None
    run_file: Path | None = None
    every: int = 1
    statistics: Level = "norm"
    sites: SiteKind = "node"
    forward: bool = False
    status: bool = False


@dataclass(frozen=True, slots=True)
class Trained:
    """What became of it.

    Attributes:
        code: the exit code of the script.
        words: what was watched, or why nothing was; a sentence.
        judged: the latest flows and what the checks say of them, and of those before; None where there is no flow.
        earlier: errors and warnings of earlier steps that the latest flows do not show.
    """

    code: int
    words: str
    judged: Judged | None = None
    earlier: tuple[Finding, ...] = ()

    def text(self) -> str:
        """What is printed at the end: what was watched, the answer in a line, and the findings."""
        lines = [f"fxgrad: {self.words}"]
        if self.judged is not None:
            found = self.judged.diagnosis
            lines.append(verdict(self.judged.flows[-1], found.findings))
            lines += [str(found)] if found.findings else []
        lines += [f"earlier, at backward {one.backward}: {one}" for one in self.earlier]
        return "\n".join(lines)

    def exit_code(self, rules: Sequence[str] = (), *, check: bool) -> int:
        """That of the script; with ``check`` and a script that ended well, 1 for an error or a warning, of these rules.

        2 where there is nothing to check, or a rule lacks what it needs: what was not checked has not passed.
        """
        if self.code or not check:
            return self.code
        earlier = any(not rules or one.rule in rules for one in self.earlier)
        if earlier or (self.judged is not None and self.judged.fails(rules)):
            return 1
        return 2 if self.judged is None or self.judged.unanswered(rules) else 0


def train(asked: Asked) -> Trained:
    """Run the script to its end, or to Ctrl-C.

    Raises:
        TargetError: there is no such script.
    """
    found = _Found(asked)
    when_imported("torch", found.begin)
    try:
        code = run_as_main(asked.script, asked.arguments)
    finally:
        found.stop()
    return found.told(code)


@dataclass(slots=True)
class _Seen:
    """A log that keeps what was found."""

    findings: list[Finding] = field(default_factory=list)

    def write(self, entry: LogEntry) -> None:
        """Keep what is new."""
        self.findings += entry.fresh

    def close(self) -> None:
        """Nothing is open."""


class _Found:
    """Finds the module that trains when the first optimizer steps, and puts the watch on.

    Two hooks of torch's for all modules and all optimizers, of which the script notices nothing.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._calls: Calls | None = None
        self._handle: Any = None
        self._tries = 0
        self._settled = False
        self._watch: Watch | None = None
        self._others: list[str] = []
        self._why = "it never imported torch"
        self._seen = _Seen()

    def begin(self) -> None:
        """Torch is there: look at what is called and stepped."""
        hooks = loaded("torch.optim.optimizer")
        self._calls = loaded("fxgrad.integrations.outermost").Calls()
        self._handle = hooks.register_optimizer_step_pre_hook(self._stepping)
        self._why = "no torch.optim optimizer was stepped"

    def _stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer is about to step.  The hooks stay, for they are being gone through right now."""
        del args, kwargs
        if self._settled or self._calls is None or loaded("torch").compiler.is_compiling():
            return
        self._tries += 1
        try:
            self._decide(optimizer, self._calls)
        except Exception as error:  # noqa: BLE001  # the script goes on
            self._settled, self._why = True, str(error) if isinstance(error, FxgradError) else repr(error)
        self._settled = self._settled or self._tries >= _TRIES
        if self._settled:
            self._calls.stop()

    def _decide(self, optimizer: Optimizer, calls: Calls) -> None:
        tools = loaded("fxgrad.integrations.outermost")
        trained = tools.parameters_of([optimizer])
        if self._asked.module is None:
            roots = calls.outermost(trained)
            self._why = "no module was called in training mode that has parameters of the optimizer"
        else:
            roots = list(_named(self._asked.module, calls))
            self._why = (
                f"--module {self._asked.module}: no such name in the script leads to a module, and no module of that "
                f"class was called. Called were {', '.join(dict.fromkeys(type(one).__name__ for one in calls.called))}"
            )
        if roots:
            self._settled = True
            self._others = [type(module).__name__ for module in roots[1:]] if self._asked.module is None else []
            self._watch = self._watched(tools.unwrapped(roots[0]))

    def _watched(self, model: nn.Module) -> Watch:
        asked, around = self._asked, loaded("fxgrad.command.surroundings")
        return loaded("fxgrad.api").watch(  # type: ignore[no-any-return]
            model, every=asked.every, statistics=asked.statistics, sites=asked.sites, forward=asked.forward,
            optimizer=around.optimizers_of(model), scaler=around.scaler(), log_to=self._seen, status=asked.status,
            run_file=asked.run_file,
        )  # fmt: skip

    def stop(self) -> None:
        """The script has ended: take everything off."""
        if self._calls is not None:
            self._calls.stop()
            self._handle.remove()
        if self._watch is not None:
            self._watch.remove()

    def told(self, code: int) -> Trained:
        """What was watched, and what the checks say of it."""
        if self._watch is None:
            return Trained(code, f"nothing was watched: {self._why}")
        flows: Sequence[GradientFlow] = self._watch.history
        if not flows:
            return Trained(code, f"{self._watch!r}: no backward pass came")
        last = flows[-1]
        words = f"{last.capture.model}: {last.event.backward + 1} backward passes watched, from the second step on"
        if self._others:
            words += f"; trained too, and not watched: {', '.join(self._others)} (name one with --module)"
        judged = judge(flows)
        now = {(finding.rule, finding.place) for finding in _all(judged.diagnosis.findings)}
        gone = tuple(one for one in self._seen.findings if (one.rule, one.place) not in now)
        return Trained(code, words, judged, gone)


def _all(findings: Sequence[Finding]) -> Iterator[Finding]:
    for finding in findings:
        yield finding
        yield from finding.explained


def _named(name: str, calls: Calls) -> Iterator[nn.Module]:
    """The module that a dotted name in the script leads to; else those of that class that were called."""
    kind = loaded("torch").nn.Module
    first, *rest = name.split(".")
    found = vars(sys.modules["__main__"]).get(first)
    for part in rest:
        found = getattr(found, part, None)
    if isinstance(found, kind):
        yield found
    yield from (module for module in calls.called if type(module).__name__ == name)
