"""The command line: the commands ``run``, ``render``, ``diagnose``, ``compare``, ``plot``, ``log`` and the others.

Only wiring: what the words mean is in ``fxgrad.command``.  torch is imported by the commands that need it.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from fxgrad.command.options import (
    All,
    Check,
    Depth,
    FailOn,
    Files,
    FindingsFiles,
    Fold,
    Forward,
    Inputs,
    Keywords,
    Loss,
    Lr,
    Norm,
    Quiet,
    Scale,
    Step,
    Target,
    Theme,
    Traceback,
)
from fxgrad.command.reporting import MISUSE, reported
from fxgrad.command.run_line import export_run, log_run, replay_step
from fxgrad.command.script_line import SCRIPT, Commands, run_script
from fxgrad.errors import OptionError
from fxgrad.schema import GradientFlow, Level, SiteKind

if TYPE_CHECKING:
    from fxgrad.command.findings import Judged, Wanted
    from fxgrad.command.outputs import View

__all__ = ["app", "main"]

_FOUND = 1  # exit code: a warning or an error was found
_DEMO_FILES = ("flow.svg", "flow.json")

app = typer.Typer(
    name="fxgrad",
    cls=Commands,
    help="See where the gradient of a PyTorch model dies, explodes or never arrives.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a traceback comes from --traceback, or from a fault of ours
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line that this process was started with."""
    # torch warns where NumPy is not installed, which neither torch nor fxgrad requires.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    app(prog_name="fxgrad")


def _show_version(asked: bool) -> None:
    if asked:
        from fxgrad import __version__

        typer.echo(f"fxgrad {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""


@app.command()
def run(
    target: Target,
    keywords: Keywords = None,
    inputs: Inputs = None,
    loss: Loss = None,
    train: Annotated[
        bool | None, typer.Option("--train/--eval", help="Mode of the model. Without it: as it comes.")
    ] = None,
    capture: Annotated[Literal["auto", "symbolic", "eager"], typer.Option(help="Front end.")] = "auto",
    statistics: Annotated[Level, typer.Option(help="Statistics of each gradient.")] = "full",
    sites: Annotated[SiteKind, typer.Option(help="edge: also the part that each use of a value sends back.")] = "edge",
    forward: Forward = None,
    norm: Norm = "l2_norm",
    depth: Depth = None,
    fold: Fold = True,
    lr: Lr = False,
    theme: Theme = "light",
    scale: Scale = "relative",
    seed: Annotated[int, typer.Option(help="Of parameters, inputs and targets.")] = 0,
    output: Files = None,
    check: Check = False,
    findings: FindingsFiles = None,
    fail_on: FailOn = None,
    every: All = False,
    quiet: Quiet = False,
    show_traceback: Traceback = False,
) -> None:
    """Measure one forward and one backward pass of a model; run a training script (`run --help train.py`)."""
    with reported(show_traceback):
        from fxgrad.command.findings import Wanted, judge
        from fxgrad.command.outputs import Drawing, View, check_paths

        check_paths(output or [])
        wanted = Wanted("text", findings or [], fail_on or [])
        wanted.check(output or [])
        with _working(f"Running {target}"):
            from fxgrad.command.measure import Request, measure

            request = Request(
                target, keywords or [], inputs or [], loss, train, capture, statistics, sites, seed, forward
            )
            flow = measure(request)
        judged = judge([flow])
        whole = check or bool(findings or fail_on)
        drawing = Drawing(norm, depth, fold, scale, theme, "right" if lr else "down")
        _present(flow, output or [], View(drawing, judged.diagnosis, whole, every), quiet=quiet)
        if whole:
            _conclude(judged, wanted)


app.command(SCRIPT, hidden=True, context_settings={"allow_interspersed_args": False})(run_script)


@app.command()
def render(
    file: Annotated[
        Path,
        typer.Argument(metavar="FLOW.JSON", help="A saved flow, or the latest of a series or run file."),
    ],
    norm: Norm = "l2_norm",
    depth: Depth = None,
    fold: Fold = True,
    lr: Lr = False,
    theme: Theme = "light",
    scale: Scale = "relative",
    output: Files = None,
    every: All = False,
    quiet: Quiet = False,
    step: Step = None,
    show_traceback: Traceback = False,
) -> None:
    """Draw a saved flow, or print its profile; of a run, the page (`-o x.html`) shows all steps."""
    with reported(show_traceback):
        from fxgrad.command.outputs import Drawing, View, check_paths
        from fxgrad.command.recorded import at_step, recorded

        check_paths(output or [])
        found = recorded(file)
        flow = at_step(found, step)
        run = None if isinstance(found, GradientFlow) or step is not None else found
        drawing = Drawing(norm, depth, fold, scale, theme, "right" if lr else "down")
        silent = quiet or (bool(output) and not every)
        _present(flow, output or [], View(drawing, flow.diagnosis, every=every, run=run), quiet=silent)


@app.command()
def diagnose(
    files: Annotated[
        list[Path], typer.Argument(metavar="FLOW.JSON...", help="One flow, a saved series, or several, oldest first.")
    ],
    form: Annotated[Literal["text", "json", "sarif"], typer.Option("--format", help="Of what is printed.")] = "text",
    findings: FindingsFiles = None,
    fail_on: FailOn = None,
    show_traceback: Traceback = False,
) -> None:
    """Say what is wrong in saved flows, where, and what to do; exit with 1 for a warning or an error."""
    with reported(show_traceback):
        from fxgrad.command.findings import Wanted, judge, load_findings, load_flows

        wanted = Wanted(form, findings or [], fail_on or [])
        wanted.check(files)
        judged = judge(load_flows(files), load_findings(files))
        if form == "text" and sys.stdout.isatty():
            Console().print(judged.diagnosis)
        else:
            typer.echo(judged.text(form), nl=False)
        _conclude(judged, wanted)


@app.command("compare")
def compare_flows(
    before: Annotated[Path, typer.Argument(metavar="BEFORE.JSON", help="A saved flow, series or run.")],
    after: Annotated[
        Path | None, typer.Argument(metavar="AFTER.JSON", help="Another one, of the same model. Not with --steps.")
    ] = None,
    steps: Annotated[
        tuple[int, int] | None,
        typer.Option("--steps", metavar="A B", help="Two steps, of one run or of the two files."),
    ] = None,
    norm: Norm = "l2_norm",
    depth: Depth = None,
    theme: Theme = "light",
    output: Files = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 for an error or a warning that the first flow does not have.")
    ] = False,
    show_traceback: Traceback = False,
) -> None:
    """Say what became of a model's gradient from one saved flow to another, and draw the difference."""
    with reported(show_traceback):
        from fxgrad.command.outputs import check_paths, write_difference
        from fxgrad.command.recorded import pair
        from fxgrad.comparison import compare

        check_paths(output or [], (".html", ".svg", ".png", ".pdf", ".txt"))
        found = compare(*pair(before, after, steps), norm=norm)
        typer.echo(str(found))
        write_difference(found, output or [], {"depth": depth, "theme": theme})
        for path in output or []:
            typer.echo(f"wrote {path}")
        if check and found.worse:
            raise typer.Exit(_FOUND)


@app.command()
def plot(
    files: Annotated[
        list[Path], typer.Argument(metavar="FLOW.JSON...", help="One flow, a saved series, or several, oldest first.")
    ],
    norm: Norm = "l2_norm",
    values: Annotated[
        list[str] | None, typer.Option("--value", metavar="KEY", help="Show this value, too. May be repeated.")
    ] = None,
    output: Annotated[
        list[Path] | None, typer.Option("-o", "--output", metavar="FILE", help="Write .png, .svg or .pdf (matplotlib).")
    ] = None,
    show_traceback: Traceback = False,
) -> None:
    """Show the gradient of each block over the steps of a series, or over the depth of one flow."""
    with reported(show_traceback):
        from fxgrad.command.findings import load_flows
        from fxgrad.command.plotting import plain, shown, write_figures

        flows = load_flows(files, spread=True)
        part = shown(flows, norm, values or [])
        if sys.stdout.isatty():
            Console().print(part)
        else:
            typer.echo(plain(part), nl=False)
        write_figures(flows, output or [], norm, values or [])
        for path in output or []:
            typer.echo(f"wrote {path}")


app.command("log")(log_run)
app.command("export")(export_run)
app.command("replay")(replay_step)


@app.command()
def explain(
    check: Annotated[
        str | None, typer.Argument(metavar="CHECK", help="The name of a check, such as dead. Without it: all names.")
    ] = None,
    show_traceback: Traceback = False,
) -> None:
    """Print the page of a check: what it says, why it happens, how it is measured, what to do."""
    with reported(show_traceback):
        from fxgrad.command.explaining import listing, page

        if check is None:
            typer.echo(listing())
        elif sys.stdout.isatty():
            from rich.markdown import Markdown

            Console().print(Markdown(page(check), hyperlinks=False))
        else:
            typer.echo(page(check), nl=False)


@app.command()
def demo(
    folder: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="Where to write flow.svg and flow.json.")
    ] = Path(),
    model: Annotated[
        Literal["sigmoid_mlp", "residual_cnn"], typer.Option(help="Which stock model to draw.")
    ] = "sigmoid_mlp",
    show_traceback: Traceback = False,
) -> None:
    """Measure the stock models: a healthy one in a line, the other one whole, with its picture."""
    with reported(show_traceback):
        paths = [folder / name for name in _DEMO_FILES]
        _make_folder(folder)
        from fxgrad.command.outputs import View, check_paths

        check_paths(paths)
        with _working("Loading torch"):
            from fxgrad.api import gradient_flow
            from fxgrad.demo import MODELS
            from fxgrad.render.verdict import verdict
        # The one to draw comes last, so that what stands above the prompt belongs to the files.
        for name in sorted(MODELS, key=lambda name: name == model):
            stock = MODELS[name]
            typer.echo(f"{name}: {stock.about}")
            flow = gradient_flow(stock.model(), stock.inputs())
            if name == model:
                _present(flow, paths, View(diagnosis=flow.diagnosis), quiet=False)
            else:
                typer.echo(f"  {verdict(flow, flow.findings)}\n")


@app.command("build")
def build_library(
    force: Annotated[bool, typer.Option("--force", help="Build again, also where a library is there.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Only say whether there is one, and why not.")] = False,
) -> None:
    """Build the native library that makes measuring cheap; exit with 1 where there is none in the end."""
    from fxgrad.command import building

    if status:
        report = building.status()
    else:
        console = Console(stderr=True)
        with console.status("compiling") if console.is_terminal else nullcontext() as shown:
            report = building.build_now(
                force=force, progress=lambda part: shown.update(f"compiling, {part}") if shown is not None else None
            )
    for line in report.lines:
        typer.echo(line, err=not report.good and not status)
    if not report.good:
        raise typer.Exit(_FOUND)


def _present(flow: GradientFlow, paths: list[Path], view: View, *, quiet: bool) -> None:
    """Print the flow, or its errors only where it is to be ``quiet``; then write the files and say where they are."""
    from fxgrad.command.outputs import error_lines, plain_text, write_all

    if quiet:
        for line in error_lines(view):
            typer.echo(line)
    elif sys.stdout.isatty():
        console = Console()
        for part in view.shown(flow):
            console.print(part)
    else:
        typer.echo(plain_text(flow, view), nl=False)
    write_all(flow, paths, view)
    for path in paths:
        typer.echo(f"wrote {path}")


def _conclude(judged: Judged, wanted: Wanted) -> None:
    """Write the files of findings, and leave with the exit code that they call for."""
    judged.write(wanted.files)
    for path in wanted.files:
        typer.echo(f"wrote {path}", err=wanted.form != "text")  # what another program reads is nothing but that
    unanswered = judged.unanswered(wanted.fail_on)
    for line in unanswered:
        typer.echo(f"fxgrad: {line}", err=True)
    if judged.fails(wanted.fail_on):
        raise typer.Exit(_FOUND)
    if unanswered:  # what was not checked has not passed
        raise typer.Exit(MISUSE)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"-o {folder}: cannot make this folder: {error.strerror or error}"
        raise OptionError(message) from error


def _working(words: str) -> AbstractContextManager[Any]:
    """Show that something long is going on, where somebody watches."""
    console = Console(stderr=True)
    return console.status(words) if console.is_terminal else nullcontext()
