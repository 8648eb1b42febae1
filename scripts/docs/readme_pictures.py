"""Redraw the README's pictures from those that `./scripts/quickstart` draws. Needs playwright and Chromium."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
DEMO, PICTURES = ROOT / "build" / "demo", ROOT / ".readme"
DRAWN = {"digits-fuse-diff.svg": "digits/*-fuse.diff.svg", "fsrcnn-lowered.svg": "fsrcnn/*-cleanup.svg"}
SIZE = {"width": 1440, "height": 900}


def main() -> None:
    if not (DEMO / "fsrcnn" / "report.html").exists():
        sys.exit("build/demo holds no report: run ./scripts/quickstart first.")
    for name, pattern in DRAWN.items():
        shutil.copy(next(DEMO.glob(pattern)), PICTURES / name)
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        shoot(page, "digits", "#tab=graph&pass=lower&mode=graph&node=block1_conv2_add_relu", "report-graph.png")
        shoot(page, "digits", "#tab=quality", "report-quality.png")
        browser.close()


def shoot(page: Page, network: str, place: str, name: str) -> None:
    """Take a picture of a place in the report of one network."""
    page.goto((DEMO / network / "report.html").as_uri() + place)
    page.reload()  # another place in the same page is no other page
    page.wait_for_timeout(1500)  # the view moves there
    page.screenshot(path=PICTURES / name)


if __name__ == "__main__":
    main()
