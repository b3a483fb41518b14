"""``fxgrad explain``: the page of a check, which ships with the package.

Imports no torch.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from fxgrad.errors import OptionError
from fxgrad.schema import RULES

__all__ = ["listing", "page"]

_PACKAGE = Path(__file__).resolve().parents[1]
#: In a wheel, where the build puts the pages; and in a checkout, where they are written.
_FOLDERS = (_PACKAGE / "pages", _PACKAGE.parent / "docs" / "findings")


def listing() -> str:
    """A line for each check: its name and what it says."""
    width = max(map(len, RULES))
    return "\n".join(f"{name:{width}}  {says}" for name, says in RULES.items())


def page(check: str) -> str:
    """The page of a check, as Markdown.

    Raises:
        OptionError: there is no such check, or this installation lacks its pages.
    """
    if check not in RULES:
        near = difflib.get_close_matches(check, RULES, n=3, cutoff=0.4) or list(RULES)
        message = f"explain {check}: there is no such check. Use one of {', '.join(near)}"
        raise OptionError(message)
    for folder in _FOLDERS:
        file = folder / f"{check}.md"
        if file.is_file():
            return file.read_text(encoding="utf-8")
    message = f"explain {check}: no page in {' or '.join(map(str, _FOLDERS))}. Install fxgrad again"
    raise OptionError(message)
