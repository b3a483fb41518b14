"""A real browser without a window, which opens pages as a double click does: from a file."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fxgrad import demo
from fxgrad.api import gradient_flow
from fxgrad.schema import GradientFlow

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="the Python package playwright is not installed")
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip(f"no Chromium on PATH (looked for {', '.join(_NAMES)})")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


class Opened:
    """A page in the browser, and all that it complained of or asked the network for."""

    def __init__(self, page, errors: list[str], requests: list[str]) -> None:
        self.page, self.errors, self.requests = page, errors, requests

    def names(self, kind: str = "node") -> list[str]:
        """Ids of what is seen, of one kind: ``node``, ``box``, ``strip``, ``frame``."""
        return self.page.eval_on_selector_all(f".seen.{kind}", "all => all.map(one => one.dataset.id)")

    def seen(self, name: str):
        return self.page.locator(f'.seen[data-id="{name}"]')

    def panel(self) -> str:
        return self.page.locator(".panel").inner_text()

    def serious_faults(self) -> list[str]:
        """What axe says of the page as it is now, from serious on."""
        self.page.evaluate((Path(__file__).parent / "vendor" / "axe.min.js").read_text(encoding="utf-8"))
        return [
            f"{one['id']}: {one['help']}: {[node['html'][:120] for node in one['nodes'][:3]]}"
            for one in self.page.evaluate("axe.run()")["violations"]
            if one["impact"] in ("serious", "critical")
        ]

    def fill_of(self, name: str) -> str:
        return self.seen(name).locator(".back").get_attribute("fill")


@pytest.fixture
def opened(browser, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Opens HTML text; at the end nothing may have been complained of or asked for."""
    pages: list[Opened] = []

    def open_page(text: str, fragment: str = "", **context: object) -> Opened:
        path = tmp_path / f"page{len(pages)}.html"
        path.write_text(text, encoding="utf-8")
        inside = browser.new_context(**{"viewport": {"width": 1366, "height": 768}, **context})
        inside.set_default_timeout(10_000)
        page = inside.new_page()
        errors: list[str] = []
        requests: list[str] = []
        page.on(
            "console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri() + fragment)
        page.wait_for_selector("html[data-ready]")
        pages.append(Opened(page, errors, requests))
        return pages[-1]

    yield open_page
    for one in pages:
        assert one.errors == []
        asked = [url for url in one.requests if not url.startswith(("file:", "data:", "blob:"))]
        assert asked == [] and sum(url.startswith("file:") for url in one.requests) == 1
        one.page.context.close()


@pytest.fixture(scope="session")
def vanishing() -> GradientFlow:
    return gradient_flow(demo.sigmoid_mlp(), demo.sigmoid_mlp_inputs(), statistics="histogram", forward=True)


@pytest.fixture(scope="session")
def residual() -> GradientFlow:
    return gradient_flow(demo.residual_cnn(), demo.residual_cnn_inputs(), statistics="histogram")
