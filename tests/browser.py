"""Chromium for the tests of the report page: the system's, or the one that Playwright has installed."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium():
    """A browser; the test is skipped, with the reason, where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with api.sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, NAMES)), None)
        if found is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("needs Chromium: apt-get install chromium, or playwright install chromium")
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])  # root has no sandbox
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
    yield page
    page.close()
    assert wrong == []


def outside(url):
    """Whether an address needs more than the file itself."""
    return not url.startswith(("file:", "data:", "blob:"))
