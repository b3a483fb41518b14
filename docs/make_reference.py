"""Makes ``docs/reference.md`` of the docstrings: ``python docs/make_reference.py``."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fxgrad
from fxgrad import rules, schema, testing

PAGE = Path(__file__).with_name("reference.md")
_HEAD = """# Reference

Every public name, as its docstring says it. This page is made by `python docs/make_reference.py`.
"""
_OPTIONS = ("PictureWords", "TableWords")


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name in fxgrad.__all__:
        thing = getattr(fxgrad, name)
        if not isinstance(thing, types.ModuleType):
            parts += _entry(f"fxgrad.{name}", thing)
    for module in (rules, testing):
        parts.append(f"## {module.__name__}\n\n{_text(module)}\n")
        for name in module.__all__:
            parts += _entry(f"{module.__name__}.{name}", getattr(module, name), "###")
    for name in _OPTIONS:
        parts += _entry(f"fxgrad.schema.{name}", getattr(schema, name))
    return "\n".join(parts)


def _entry(name: str, thing: Any, level: str = "##") -> Iterator[str]:
    yield f"{level} {name}\n"
    if inspect.isclass(thing):
        yield f"{_text(thing)}\n"
        yield from _members(thing)
    else:
        yield f"```text\n{name.rpartition('.')[2]}{_signature(thing)}\n```\n\n{_text(thing)}\n"


def _members(kind: type) -> Iterator[str]:
    """Properties and methods that the class itself defines, or a base of ours."""
    known = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    for name in dir(kind) if "__dir__" not in kind.__dict__ else kind.__dir__(kind.__new__(kind)):
        member = inspect.getattr_static(kind, name, None)
        ours = any(name in base.__dict__ and base.__module__.startswith("fxgrad") for base in kind.__mro__)
        if name.startswith("_") or name in known or not ours:
            continue
        if isinstance(member, property):
            yield f"- `.{name}`: {_first(member)}"
        elif inspect.isfunction(member):
            yield f"- `.{name}{_signature(member)}`: {_first(member)}"
    yield ""


def _signature(thing: Any) -> str:
    words = str(inspect.signature(thing)).replace("(self, ", "(").replace("(self)", "()")
    words = re.sub(r" at 0x[0-9a-f]+", "", words)  # where a default lies in memory is another place each time
    return re.sub(r"'([^']*)'(?=[,)\s]|$)", r"\1", words) if "'" in words else words


def _first(thing: Any) -> str:
    """The first paragraph, in one line."""
    return _marked(" ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split()))


def _text(thing: Any) -> str:
    """A docstring as Markdown: sections in bold, their entries as lists."""
    lines = []
    for line in (inspect.getdoc(thing) or "").splitlines():
        section = re.fullmatch(r"(Args|Returns|Raises|Attributes):", line)
        entry = re.match(r"    ([\w*, ]+|``[^`]+``): (.*)", line)
        if section:
            lines.append(f"**{section[1]}**\n")
        elif entry:
            lines.append(f"- `{entry[1].strip('`')}`: {entry[2]}")
        else:
            lines.append(f"  {line.strip()}" if line.startswith("    ") else line)
    return _marked("\n".join(lines))


def _marked(words: str) -> str:
    return words.replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
