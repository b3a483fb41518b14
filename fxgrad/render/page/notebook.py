"""The page inside of a notebook: a sandboxed frame, and the picture where no frame or no script is allowed."""

from __future__ import annotations

import base64
import html
from dataclasses import dataclass, field

from fxgrad.errors import OptionError

__all__ = ["Shown", "shown"]

_LEAST = 200  # pixels


@dataclass(frozen=True, slots=True)
class Shown:
    """What a notebook displays; made by ``flow.show()``.

    Attributes:
        page: the page's HTML text.
        picture: the same flow as SVG text; None where Graphviz is missing.
        words: the answer in a line.
        height: of the frame, in CSS pixels.
    """

    page: str = field(repr=False)
    picture: str | None = field(repr=False)
    words: str
    height: int

    def _repr_html_(self) -> str:
        """The frame lies on top of the picture, which is seen where a viewer takes the frame out."""
        still = ""
        if self.picture is not None:
            data = base64.b64encode(self.picture.encode("utf-8")).decode("ascii")
            still = (
                f'<img alt="{html.escape(self.words)}" src="data:image/svg+xml;base64,{data}" style="max-width:100%">'
            )
        # A frame with scripts but without same-origin runs in an origin of its own: it sees nothing of the notebook.
        frame = (
            f'<iframe title="fxgrad: {html.escape(self.words)}" sandbox="allow-scripts allow-downloads" '
            f'srcdoc="{html.escape(self.page)}" '
            'style="position:absolute;inset:0;width:100%;height:100%;border:0;background:#fff"></iframe>'
        )
        return f'<div style="position:relative;min-height:{self.height}px">{still}{frame}</div>'

    def _repr_mimebundle_(
        self,
        include: object = None,  # noqa: ARG002  # IPython's protocol; it takes out itself what it does not want
        exclude: object = None,  # noqa: ARG002
    ) -> dict[str, str]:
        """HTML first; the picture for what takes no HTML, as a printed notebook; the words for a terminal."""
        found = {"text/html": self._repr_html_(), "text/plain": self.words}
        return found if self.picture is None else {**found, "image/svg+xml": self.picture}


def shown(page: str, picture: str | None, words: str, height: int) -> Shown:
    """A page for a notebook, ``height`` CSS pixels high.

    Raises:
        OptionError: the height is no whole number of at least 200.
    """
    if not isinstance(height, int) or isinstance(height, bool) or height < _LEAST:
        message = f"height must be a whole number of pixels of at least {_LEAST}, but is {height!r}"
        raise OptionError(message)
    return Shown(page, picture, words, height)
