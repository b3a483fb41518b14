"""The commands for run files: ``fxgrad log``, ``fxgrad export`` and ``fxgrad replay``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fxgrad.command.exporting import What
from fxgrad.command.options import All, Files, Keywords, Target, Traceback
from fxgrad.command.reporting import reported

__all__ = ["export_run", "log_run", "replay_step"]

RunFile = Annotated[Path, typer.Argument(metavar="RUN.FXGRAD", help="What `watch(run_file=...)` wrote, or writes.")]


def log_run(
    file: RunFile,
    last: Annotated[int, typer.Option("--last", "-n", min=0, help="How many of the latest steps to show.")] = 10,
    show_traceback: Traceback = False,
) -> None:
    """Say what a run file holds: sessions, findings, what was noted, and the latest steps."""
    with reported(show_traceback):
        from fxgrad.command.run_log import log_text
        from fxgrad.run_file import open_run

        with open_run(file) as run:
            typer.echo(log_text(run, last), nl=False)


def export_run(
    file: Annotated[Path, typer.Argument(metavar="RUN.FXGRAD", help="A run file, a saved series or a flow.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Write .csv, .parquet or .json.")],
    of: Annotated[What, typer.Option("--of", help="Rows of what.")] = "values",
    show_traceback: Traceback = False,
) -> None:
    """Write a run as rows: one for each step and value, parameter or note."""
    with reported(show_traceback):
        from fxgrad.command.exporting import export
        from fxgrad.command.recorded import recorded
        from fxgrad.schema import GradientFlow

        found = recorded(file)
        export([found] if isinstance(found, GradientFlow) else found, output, of)
        typer.echo(f"wrote {output}")


def replay_step(
    file: RunFile,
    target: Target,
    keywords: Keywords = None,
    output: Files = None,
    every: All = False,
    show_traceback: Traceback = False,
) -> None:
    """Run the step of a run's first error again, with full statistics; kept by `watch(capture_batch=True)`."""
    with reported(show_traceback):
        from fxgrad.command.outputs import View, check_paths, plain_text, write_all
        from fxgrad.command.targets import load_model
        from fxgrad.handles.replaying import replay

        check_paths(output or [])
        found = replay(file, load_model(target, keywords or []))
        typer.echo(str(found).partition("\n")[0] + "\n")
        view = View(diagnosis=found.flow.diagnosis, whole=True, every=every)
        typer.echo(plain_text(found.flow, view), nl=False)
        write_all(found.flow, output or [], view)
        for path in output or []:
            typer.echo(f"wrote {path}")
