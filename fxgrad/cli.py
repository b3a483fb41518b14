"""The command line: ``fxgrad run``, ``fxgrad render``, ``fxgrad diagnose``, ``fxgrad explain``, ``demo``, ``build``.

Only wiring: what the words mean is in ``fxgrad.command``.  torch is imported by the commands that need it.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from fxgrad.errors import FxgradError, OptionError
from fxgrad.schema import GradientFlow, Level, NormWord, SiteKind

if TYPE_CHECKING:
    from fxgrad.command.findings import Judged, Wanted
    from fxgrad.command.outputs import View

__all__ = ["app", "main"]

_FOUND = 1  # exit code: a warning or an error was found
_MISUSE = 2  # exit code, as of other command lines
_DEMO_FILES = ("flow.svg", "flow.json")

app = typer.Typer(
    name="fxgrad",
    help="See where the gradient of a PyTorch model dies, explodes or never arrives.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a traceback comes from --traceback, or from a fault of ours
    context_settings={"help_option_names": ["-h", "--help"]},
)

Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="package.module:name or file.py:name, a model or what makes one.")
]
Keywords = Annotated[list[str] | None, typer.Argument(metavar="NAME=VALUE", help="Arguments of what makes the model.")]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        "-i",
        metavar="SPEC",
        help="8x3x224x224:float32, 8x128:int64:0-30522, NAME=SPEC, batch.pt, or file.py:function. May be repeated.",
    ),
]
Loss = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="sum, mean, cross_entropy, mse_loss ... against random targets, or package.module:callable. "
        "Without it: the model's own loss, or a random direction.",
    ),
]
Forward = Annotated[
    bool | None,
    typer.Option("--forward/--no-forward", help="Measure the values themselves too. Without it: unless norm."),
]
Files = Annotated[
    list[Path] | None,
    typer.Option("-o", "--output", metavar="FILE", help="Write .svg, .dot, .json or .txt. May be repeated."),
]
Norm = Annotated[NormWord, typer.Option(help="Which norm colours and numbers mean.")]
Depth = Annotated[
    int | None, typer.Option(min=0, help="Module depth of the boxes in a picture. Without it: a readable one.")
]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no table.")]
FindingsFiles = Annotated[
    list[Path] | None,
    typer.Option("--findings", metavar="FILE", help="Write findings to .txt, .json or .sarif. May be repeated."),
]
FailOn = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CHECK", help="Exit with 1 only for findings of this check (error or warning). May be repeated."
    ),
]


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
    seed: Annotated[int, typer.Option(help="Of parameters, inputs and targets.")] = 0,
    output: Files = None,
    check: Annotated[
        bool, typer.Option("--check", help="Print what is wrong; exit with 1 for a warning or an error.")
    ] = False,
    findings: FindingsFiles = None,
    fail_on: FailOn = None,
    quiet: Quiet = False,
    show_traceback: Traceback = False,
) -> None:
    """Measure one forward and one backward pass of a model."""
    with _reported(show_traceback):
        from fxgrad.command.findings import Wanted, judge
        from fxgrad.command.outputs import View, check_paths

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
        listed = check or bool(findings or fail_on)
        _present(flow, output or [], View(norm, depth, judged.diagnosis.findings, listed), quiet=quiet)
        if listed:
            if not quiet:
                typer.echo()
            _conclude(judged, wanted)


@app.command()
def render(
    file: Annotated[Path, typer.Argument(metavar="FLOW.JSON", help="A flow that `run` or `to_json` wrote.")],
    norm: Norm = "l2_norm",
    depth: Depth = None,
    output: Files = None,
    quiet: Quiet = False,
    show_traceback: Traceback = False,
) -> None:
    """Draw a saved flow, or print its table."""
    with _reported(show_traceback):
        from fxgrad.command.outputs import View, check_paths
        from fxgrad.store import load

        check_paths(output or [])
        flow = load(file)
        _present(flow, output or [], View(norm, depth, flow.findings), quiet=quiet or bool(output))


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
    with _reported(show_traceback):
        from fxgrad.command.findings import Wanted, judge, load_flows

        wanted = Wanted(form, findings or [], fail_on or [])
        wanted.check(files)
        _conclude(judge(load_flows(files)), wanted)


@app.command()
def explain(
    check: Annotated[
        str | None, typer.Argument(metavar="CHECK", help="The name of a check, such as dead. Without it: all names.")
    ] = None,
    show_traceback: Traceback = False,
) -> None:
    """Print the page of a check: what it says, why it happens, how it is measured, what to do."""
    with _reported(show_traceback):
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
    """Trace the stock models, print their tables, and draw one."""
    with _reported(show_traceback):
        paths = [folder / name for name in _DEMO_FILES]
        _make_folder(folder)
        from fxgrad.command.outputs import View, check_paths

        check_paths(paths)
        with _working("Loading torch"):
            from fxgrad.api import gradient_flow
            from fxgrad.demo import MODELS
        # The one to draw comes last, so that what stands above the prompt belongs to the files.
        for name in sorted(MODELS, key=lambda name: name == model):
            stock = MODELS[name]
            typer.echo(f"\n{name}: {stock.about}\n")
            flow = gradient_flow(stock.model(), stock.inputs())
            _present(flow, paths if name == model else [], View(findings=flow.findings), quiet=False)


@app.command("build")
def build_library(
    force: Annotated[bool, typer.Option("--force", help="Build again, also where a library is there.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Only say whether there is one, and why not.")] = False,
) -> None:
    """Build the native library that makes measuring cheap; exit with 1 where there is none in the end."""
    from fxgrad.command import building

    if status:
        told = building.status()
    else:
        console = Console(stderr=True)
        with console.status("compiling") if console.is_terminal else nullcontext() as shown:
            told = building.build_now(
                force=force, progress=lambda part: shown.update(f"compiling, {part}") if shown is not None else None
            )
    for line in told.lines:
        typer.echo(line, err=not told.good and not status)
    if not told.good:
        raise typer.Exit(_FOUND)


def _present(flow: GradientFlow, paths: list[Path], view: View, *, quiet: bool) -> None:
    """Print the flow unless ``quiet``, then write the files and say where they are."""
    from rich.text import Text

    from fxgrad.command.outputs import plain_text, write_all

    if quiet:
        pass
    elif sys.stdout.isatty():
        console = Console()
        console.print(flow.table(norm=view.norm, findings=view.findings))
        console.print(Text(view.summary(flow)))  # names are no markup
    else:
        typer.echo(plain_text(flow, view), nl=False)
    write_all(flow, paths, view)
    for path in paths:
        typer.echo(f"wrote {path}")


def _conclude(judged: Judged, wanted: Wanted) -> None:
    """Print the findings, write the files, and leave with the exit code that they call for."""
    if wanted.form == "text" and sys.stdout.isatty():
        Console().print(judged.diagnosis)
    else:
        typer.echo(judged.text(wanted.form), nl=False)
    judged.write(wanted.files)
    for path in wanted.files:
        typer.echo(f"wrote {path}", err=wanted.form != "text")  # what another program reads is nothing but that
    unanswered = judged.unanswered(wanted.fail_on)
    for line in unanswered:
        typer.echo(f"fxgrad: {line}", err=True)
    if judged.fails(wanted.fail_on):
        raise typer.Exit(_FOUND)
    if unanswered:  # what was not checked has not passed
        raise typer.Exit(_MISUSE)


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


@contextmanager
def _reported(show_traceback: bool) -> Iterator[None]:
    """Turn an error of ours into a message and the exit code of misuse."""
    try:
        yield
    except FxgradError as error:
        if show_traceback:
            traceback.print_exception(error)
        typer.echo(f"fxgrad: {error}", err=True)
        if not show_traceback and error.__cause__ is not None:
            typer.echo("(--traceback shows where it was raised)", err=True)
        raise typer.Exit(_MISUSE) from error
