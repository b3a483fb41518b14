"""``fxgrad run train.py``: a training script, watched without a change to it."""

from __future__ import annotations

import os
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

__all__ = ["Asked", "Trained", "other_rank", "train"]


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


def other_rank() -> bool:
    """Whether a launcher such as torchrun started this process as another one than the first."""
    return os.environ.get("RANK", "0") != "0"


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
    """Finds the module that trains when an optimizer first steps, and puts the watch on.

    By a hook of torch's for all optimizers, of which the script notices nothing.  What is not called until the next
    step gives way to a part of it.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._handle: Any = None
        self._settled = False
        self._first: int | None = None  # id of the optimizer that stepped first
        self._model: nn.Module | None = None
        self._watch: Watch | None = None
        self._others: list[str] = []
        self._why = "it never imported torch"
        self._seen = _Seen()

    def begin(self) -> None:
        """Torch is there: look at what is stepped."""
        hooks = loaded("torch.optim.optimizer")
        self._handle = hooks.register_optimizer_step_pre_hook(self._stepping)
        self._why = "no torch.optim optimizer was stepped"

    def _stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer is about to step.  The hook stays, for the hooks are being gone through right now."""
        del args, kwargs
        if self._settled or loaded("torch").compiler.is_compiling():
            return
        try:
            tools: Any = loaded("fxgrad.integrations.outermost")
            if self._watch is None:
                self._first = id(optimizer)
                self._choose(tools, tools.parameters_of([optimizer]))
            elif self._first != id(optimizer):  # it may step before a backward pass has come
                return
            elif not self._watch.history:
                part = tools.part_of(self._model, tools.parameters_of(tools.optimizers_of(self._model)))
                self._settled = part is None
                if part is not None:
                    self._watch_it(part, tools)
            else:
                self._settled = True
        except Exception as error:  # noqa: BLE001  # the script goes on
            self._settled, self._why = True, str(error) if isinstance(error, FxgradError) else repr(error)

    def _choose(self, tools: Any, trained: set[int]) -> None:
        """The outermost module with these parameters, or the one that was named."""
        modules = [one for one in tools.alive(loaded("torch").nn.Module) if "_modules" in vars(one)]
        roots, name = tools.outermost(modules, trained), self._asked.module
        self._others = [type(tools.unwrapped(module)).__name__ for module in roots]
        if name is not None:
            roots = list(_named(name, modules))
            self._others = self._others if not roots else []
        if roots:
            self._others = self._others[1:]
            self._watch_it(tools.unwrapped(roots[0]), tools)
        elif name is not None:
            self._settled = True
            self._why = (
                f"--module {name}: no such name in the script leads to a module, and no module is of that class. "
                f"Trained are {', '.join(self._others)}"
            )
        else:
            self._why = "no module has parameters of the optimizer"

    def _watch_it(self, model: nn.Module, tools: Any) -> None:
        if self._watch is not None:
            self._watch.remove()
        asked = self._asked
        self._model = model
        self._settled = asked.module is not None or not list(model.children())
        self._watch = loaded("fxgrad.api").watch(
            model, every=asked.every, statistics=asked.statistics, sites=asked.sites, forward=asked.forward,
            optimizer=tools.optimizers_of(model), scaler=tools.scaler(), log_to=self._seen, status=asked.status,
            run_file=None if other_rank() else asked.run_file,
        )  # fmt: skip

    def stop(self) -> None:
        """The script has ended: take everything off."""
        if self._handle is not None:
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
        words = f"{last.capture.model}: {last.event.backward + 1} backward passes watched"
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


def _named(name: str, modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """The module that a dotted name in the script leads to; else those of that class."""
    first, *rest = name.split(".")
    found = vars(sys.modules["__main__"]).get(first)
    for part in rest:
        found = getattr(found, part, None)
    yield from (module for module in modules if module is found)
    yield from (module for module in modules if type(module).__name__ == name)
