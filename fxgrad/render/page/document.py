"""The page as one file: the data, the script and the style in a document in which nothing else can run."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from fxgrad.schema import Diagnosis

__all__ = ["document"]


def document(data: Mapping[str, object], title: str, diagnosis: Diagnosis, *, still: str = "") -> str:
    """HTML text.  ``still`` is the markup of a picture that is seen where no script runs.

    The policy in its head allows this very script and this very style, no other, and no request of any kind.  Names
    and code of the user's come as JSON in which no ``<`` is left, and the script writes them as text only.
    """
    script, style = _asset("page.js"), _asset("page.css")
    policy = "; ".join([
        "default-src 'none'",
        f"script-src '{_hash(script)}'",
        f"style-src '{_hash(style)}'",
        "img-src data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
    ])  # fmt: skip
    parts = {
        "POLICY": html.escape(policy),
        "TITLE": html.escape(f"{title} · fxgrad"),
        "THEME": html.escape(str(data.get("theme", "auto"))),
        "STYLE": style,
        "STILL": still + _in_words(diagnosis),
        "DATA": embedded(data),
        "SCRIPT": script,
    }
    text = _asset("page.html")
    pieces = text.split("%%")  # text and names of parts, in turns, so that nothing that is put in is read again
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def embedded(data: Mapping[str, object]) -> str:
    """JSON that ends no script element and starts no comment in one."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _in_words(diagnosis: Diagnosis) -> str:
    return diagnosis._repr_html_()  # the words of a notebook, escaped


@cache
def _asset(name: str) -> str:
    return (files("fxgrad.render.page") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
