"""Fetch the JavaScript libraries of the report page into fxq/report/page/vendor/, unchanged, and check them.

`fxq/report/page/vendor/versions.json` says for each: version, source, licence, and the sha256 of every file that is
kept. To update one: change its version and source there, run with --update, and look at the page.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).resolve().parents[2] / "fxq" / "report" / "page" / "vendor"
VERSIONS = VENDOR / "versions.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare the files that are there with their sha256")
    parser.add_argument("--update", action="store_true", help="write the sha256 of what was fetched to versions.json")
    arguments = parser.parse_args()
    libraries = json.loads(VERSIONS.read_text())
    for library in libraries:
        contents = local(library) if arguments.check else fetched(library)
        for name, about in library["files"].items():
            checksum = hashlib.sha256(contents[name]).hexdigest()
            if arguments.update:
                about["sha256"] = checksum
            elif checksum != about["sha256"]:
                sys.exit(f"{name} of {library['name']} {library['version']}: sha256 {checksum}, not {about['sha256']}")
            if not arguments.check:
                (VENDOR / name).write_bytes(contents[name])
    if arguments.update:
        VERSIONS.write_text(json.dumps(libraries, indent=2) + "\n")


def local(library: dict[str, Any]) -> dict[str, bytes]:
    """The files of a library as they are here."""
    return {name: (VENDOR / name).read_bytes() for name in library["files"]}


def fetched(library: dict[str, Any]) -> dict[str, bytes]:
    """The files of a library out of its npm package; `member` is a file's path in there."""
    with urllib.request.urlopen(library["source"], timeout=60) as answer:
        archive = io.BytesIO(answer.read())
    contents = {}
    with tarfile.open(fileobj=archive) as package:
        for name, about in library["files"].items():
            member = package.extractfile(about["member"])
            if member is None:
                sys.exit(f"{library['source']} has no file {about['member']}")
            contents[name] = member.read()
    return contents


if __name__ == "__main__":
    main()
