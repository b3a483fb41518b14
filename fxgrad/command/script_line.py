"""``fxgrad run train.py``: the words of this command, and how it is told from ``fxgrad run TARGET``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fxgrad.command.options import (
    Arguments,
    Check,
    FailOn,
    Files,
    FindingsFiles,
    Script,
    Traceback,
)
from fxgrad.command.reporting import reported
from fxgrad.command.scripts import is_script
from fxgrad.schema import Level, SiteKind

__all__ = ["SCRIPT", "Commands", "run_script"]

SCRIPT = "run train.py"  # the command that `run` is where a script follows; its own words would be no command


class Commands(TyperGroup):
    """``run`` with a script is a command of its own: what stands behind the script is the script's."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command, under the name that was typed."""
        name, command, rest = super().resolve_command(ctx, args)
        if name == "run" and any(is_script(word) for word in rest):
            script = self.commands[SCRIPT]
            if _first_word(script, rest):
                return name, script, rest
        return name, command, rest


def _first_word(command: Any, words: list[str]) -> bool:
    """Whether the first word that is no option of this command is a script."""
    context = command.make_context("run", list(words), resilient_parsing=True)
    return is_script(context.params.get("script") or "")


def run_script(
    script: Script,
    arguments: Arguments = None,
    module: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What to watch: a name in the script, or a class. Without it: found."),
    ] = None,
    run_file: Annotated[Path | None, typer.Option("--run-file", metavar="FILE", help="Where the flows go.")] = Path(
        "run.fxgrad"
    ),
    every: Annotated[int, typer.Option(min=1, help="Observe every n-th training forward.")] = 1,
    statistics: Annotated[Level, typer.Option(help="Statistics of each gradient.")] = "norm",
    sites: Annotated[SiteKind, typer.Option(help="edge: also the part that each use of a value sends back.")] = "node",
    forward: Annotated[bool, typer.Option("--forward/--no-forward", help="Measure the values themselves too.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Print a line every 50 steps.")] = False,
    output: Files = None,
    check: Check = False,
    findings: FindingsFiles = None,
    fail_on: FailOn = None,
    show_traceback: Traceback = False,
) -> None:
    """Run a training script as it is, watch the model that trains, and say what is wrong with it."""
    with reported(show_traceback):
        from fxgrad.command.findings import Wanted
        from fxgrad.command.outputs import View, check_paths, write_all
        from fxgrad.command.training import Asked, other_rank, train

        check_paths(output or [])
        wanted = Wanted("text", findings or [], fail_on or [])
        wanted.check(output or [])
        asked = Asked(script, arguments or [], module, run_file, every, statistics, sites, forward, status)
        trained = train(asked)
        if other_rank():
            raise typer.Exit(trained.code)
        typer.echo(trained.text(), err=True)
        if trained.judged is not None and output:
            write_all(trained.judged.flows[-1], output, View(diagnosis=trained.judged.diagnosis))
        if trained.judged is not None:
            trained.judged.write(wanted.files)
        raise typer.Exit(trained.exit_code(fail_on or [], check=check or bool(fail_on)))
