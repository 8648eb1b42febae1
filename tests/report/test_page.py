"""The page as a file: its parts are all inside, and nothing that the data says can break out of it."""

import hashlib
import json
import re
import shutil
import subprocess

import pytest

from fxq.report.page import HERE, SCRIPTS, STYLES, page

pytestmark = pytest.mark.any_cpu

EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)//$title"


def data_of(text):
    return re.search(r'<script type="application/json" id="fxq-data">(.*?)</script>', text, re.DOTALL).group(1)


def test_what_the_data_says_stays_data():
    text = page({"title": EVIL, "kind": "model", "nodes": [EVIL]})
    assert "<" not in data_of(text)
    assert json.loads(data_of(text)) == {"title": EVIL, "kind": "model", "nodes": [EVIL]}
    assert EVIL not in text
    assert "<title>&lt;img src=x onerror=alert(1)&gt;" in text


def test_the_page_needs_no_other_file():
    text = page({"title": "t"})
    assert "default-src 'none'" in text
    assert not re.search(r"<(script|img|iframe)[^>]+\bsrc=|<link[^>]+href=\"(?!data:)|@import", text)
    for script in SCRIPTS:
        assert (HERE / script).read_text(encoding="utf-8") in text


def test_an_infinite_number_is_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        page({"title": "t", "sqnr": float("inf")})


def test_every_script_and_style_is_listed():
    assert sorted(SCRIPTS) == sorted(path.name for path in HERE.glob("*.js"))
    assert sorted(STYLES) == sorted(path.name for path in HERE.glob("*.css"))


def test_libraries_are_what_versions_json_says():
    files = {}
    for library in json.loads((HERE / "vendor" / "versions.json").read_text()):
        assert library["version"] in library["source"]
        files |= {name: about["sha256"] for name, about in library["files"].items()}
    vendored = {path.name: path for path in (HERE / "vendor").iterdir() if path.name != "versions.json"}
    assert files == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in vendored.items()}


@pytest.mark.skipif(shutil.which("node") is None, reason="node, which checks the scripts' syntax, is not installed")
def test_scripts_parse_together(tmp_path):
    """Joined as the page joins them: two of them must not declare one name."""
    script = re.search(r'<script>\n("use strict";.*)</script>', page({"title": "t"}), re.DOTALL).group(1)
    (tmp_path / "page.js").write_text(script, encoding="utf-8")
    subprocess.run(["node", "--check", tmp_path / "page.js"], check=True)
