"""The arguments and options of the command line, with the words that ``--help`` says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fxgrad.schema import NormWord, ScaleWord, ThemeWord

__all__ = [
    "All", "Arguments", "Check", "Depth", "FailOn", "Files", "FindingsFiles", "Fold", "Forward", "Inputs", "Keywords",
    "Loss", "Lr", "Norm", "Quiet", "Scale", "Script", "Step", "Target", "Theme", "Traceback",
]  # fmt: skip

Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="package.module:name or file.py:name, a model or what makes one.")
]
Script = Annotated[str, typer.Argument(metavar="SCRIPT.py", help="A training script, run as it is.")]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="What the script gets, as it stands here.")]
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
    typer.Option(
        "-o",
        "--output",
        metavar="FILE",
        help="Write .html, .svg, .png, .pdf, .dot, .json, .csv, .parquet, .txt. May be repeated.",
    ),
]
Step = Annotated[int | None, typer.Option(metavar="N", help="Which step of a series or run. Without it: the latest.")]
Norm = Annotated[NormWord, typer.Option(help="Which norm colours and numbers mean.")]
Depth = Annotated[
    int | None, typer.Option(min=0, help="Module depth of the boxes in a picture. Without it: what fits one screen.")
]
Fold = Annotated[
    bool, typer.Option("--fold/--no-fold", help="Draw runs of equal blocks as one box, and fold values that pass on.")
]
Lr = Annotated[bool, typer.Option("--lr", help="Draw the forward pass from left to right.")]
Theme = Annotated[ThemeWord, typer.Option(help="Ground of a picture.")]
Scale = Annotated[
    ScaleWord, typer.Option(help="Colours: the gradient against that at the loss side, or the norm itself.")
]
All = Annotated[bool, typer.Option("--all", help="Print every value, in a table.")]
Check = Annotated[
    bool, typer.Option("--check", help="Say what is wrong in full; exit with 1 for a warning or an error.")
]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
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
