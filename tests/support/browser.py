"""Chromium for the tests of the report page: the system's, or the one that Playwright has installed."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

HOOKS = """() => {
  const inside = (frame, found) => {
    const { group, ox, oy } = frame;
    const size = ({ x, y, width, height }) => ({ x, y, width, height, frame: group.key });
    for (const placed of frame.boxes) found.boxes.push({ name: placed.of.key ?? placed.of.name, ...size(placed) });
    for (const wire of frame.wires) {
      const moved = (points) => points.map((v, k) => v + (k % 2 ? oy : ox));
      const strokes = wire.strokes.map(({ ortho, points }) => ({ ortho, points: moved(points) }));
      found.wires.push({ from: wire.flows[0].from.name, to: wire.flows[0].to.name, frame: group.key, strokes });
    }
    for (const inner of frame.frames) {
      found.frames.push({ name: inner.group.key, ...size(inner) });
      inside(inner, found);
    }
    return found;
  };
  fxq.drawn = (side = "after") => inside(fxq.panes[side].picture().root, { boxes: [], frames: [], wires: [] });
  fxq.where = (name, side = "after") => {
    const pane = fxq.panes[side];
    const { scene, places } = pane.picture();
    const item = scene.items.get(name);
    const placed = places.get(item ? fxq.shown(item) : scene.groups.get(name));
    if (!placed) return null;
    const { left, top } = pane.canvas.getBoundingClientRect();
    const { k, x, y } = pane.view();
    const down = placed.y + Math.min(placed.height / 2, 14);
    return { x: left + (placed.x + placed.width / 2) * k + x, y: top + down * k + y };
  };
  fxq.stats = () => ({
    pass: document.querySelector('#timeline [aria-current="step"] b').textContent,
    mode: document.querySelector('[data-mode][aria-pressed="true"]').dataset.mode,
    nodes: fxq.panes.after.picture().scene.items.size,
    boxes: fxq.panes.after.picture().boxes,
  });
}"""
"""Script that reads the graph tab. `drawn`: all boxes, frames of open groups and wires as numbers; `where`: the
middle of the box of a node, or of the head of a group, in the window; `stats`: what is shown."""

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium():
    """Browser for a test, which is skipped with the reason if there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with api.sync_playwright() as playwright:
        executable = next(filter(None, map(shutil.which, NAMES)), None)
        if executable is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("needs Chromium: apt-get install chromium, or playwright install chromium")
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])  # root has no sandbox
        yield browser
        browser.close()


@contextmanager
def opened(browser, path, view="", **options):
    """A page of a report on which nothing may go wrong: no error, no word on the console, no request but for the file.

    Args:
        browser: from `chromium`.
        path: of the report.
        view: what its address asks to see, such as "tab=ledger".
        **options: of the page, such as `viewport` and `color_scheme`.
    """
    page = browser.new_page(**{"viewport": {"width": 1440, "height": 900}, "reduced_motion": "reduce", **options})
    page.set_default_timeout(10_000)
    wrong = []
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
    page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: wrong.append(f"request: {request.url[:200]}") if outside(request.url) else None)
    page.goto(f"{path.as_uri()}#{view}")
    page.wait_for_selector("body[data-ready]")
    page.evaluate(HOOKS)
    yield page
    page.close()
    assert wrong == []


def outside(url):
    """Whether an address needs more than the file itself."""
    return not url.startswith(("file:", "data:", "blob:"))
