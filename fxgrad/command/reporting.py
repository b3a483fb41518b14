"""Errors of ours on the command line."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from fxgrad.errors import FxgradError

__all__ = ["MISUSE", "reported"]

MISUSE = 2  # exit code, as of other command lines


@contextmanager
def reported(show_traceback: bool) -> Iterator[None]:
    """Turn an error of ours into a message and the exit code of misuse."""
    try:
        yield
    except FxgradError as error:
        if show_traceback:
            traceback.print_exception(error)
        typer.echo(f"fxgrad: {error}", err=True)
        if not show_traceback and error.__cause__ is not None:
            typer.echo("(--traceback shows where it was raised)", err=True)
        raise typer.Exit(MISUSE) from error
