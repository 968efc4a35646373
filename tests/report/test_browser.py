"""The page in a real browser: no errors, no requests, charts, sorting. It needs playwright and a Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpcore.report.__main__ import main
from ddpcore.training import TrainConfig

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
for library in ("jinja2", "matplotlib"):
    pytest.importorskip(library)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (on Debian: apt install chromium)"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def page_file(make_run: Any, recorded_steps: Any, tmp_path: Path) -> Path:
    out = tmp_path / "report.html"
    other = TrainConfig.from_dict({"run": {"steps": 6}, "model": "mlp"}).to_dict()
    folders = [make_run("first", steps=recorded_steps), make_run("<b>second</b>".replace("/", "-"), config=other)]
    assert main([*map(str, folders), "--out", str(out)]) == 0
    return out


def test_a_report(browser: Any, page_file: Path) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(page_file.as_uri())
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [page_file.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= 390, "nothing is wider than the screen"
    assert page.locator("figure img:visible").count() == page.locator("figure").count() > 0
    sizes = page.locator("figure img").evaluate_all("(all) => all.map((one) => one.naturalWidth)")
    assert all(sizes)
    assert page.locator("b").count() == 0
    page.locator("summary").first.click()
    first = page.locator("table:has(th button:text-is('seed'))")
    cells = lambda: first.locator("tbody tr td:first-child").all_inner_texts()  # noqa: E731
    assert cells() == ["first", "<b>second<-b>"]
    head = first.locator("th button").first
    head.click()
    ascending = cells()
    head.click()
    assert cells() == ascending[::-1] and first.locator("th").first.get_attribute("aria-sort") == "descending"
    page.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_the_result_is_on_the_first_screen(browser: Any, page_file: Path, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.goto(page_file.as_uri())
    table = page.locator("table").first
    assert table.locator("th").nth(1).inner_text() == "accuracy"
    for place in (0, 1):  # what differs, and the result
        box = table.locator("tbody tr").last.locator("td").nth(place).bounding_box()
        assert box["x"] + box["width"] <= width and box["y"] + box["height"] <= 800
    page.close()
