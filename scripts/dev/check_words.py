"""Lint for the wording of fxq: names, docstrings, comments, messages and documents use standard terms.

`python scripts/dev/check_words.py [PATH ...]` prints one line per finding, with what to write instead, and exits with 1
if there are any. `--summary` counts the findings per rule and folder. Places where a listed word is the right one stand
in `ALLOWED`, each with its reason.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("fxq", "passes", "patterns", "scripts", "tests")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")

OPENINGS: dict[str, str] = {
    r"The same\b": "name the thing that is documented",
    r"As (above|before|in)\b": "say it here, or refer to the function by name",
    r"Those\b": "name the things",
    r"That of\b": "name the thing",
    r"What\b": "open with the noun: 'Dtypes that the layer accepts', not 'What the layer accepts'",
    r"(Nobody|Somebody|Who)\b": "name the code that does it",
}
"""Regular expressions of how no docstring opens, with what to do instead."""

PHRASES: dict[str, str] = {
    r"without a word": "silently",
    r"for nothing": "say what is wasted or gains nothing",
    r"gives? up a bit|gave up a bit": "has 7 bits (reduce_range)",
    r"(nobody|somebody|whom)": "name the code, the caller or the user",
    r"so it is with": "the same applies to",
    r"is so,? too": "say it of both",
    r"way out|ways out": "remedy",
    r"in front of": "before",
    r"behind": "after",
    r"measured (range|ranges|grid|grids|scale|scales|layer|layers)": "dynamic",
    r"(its|the|their|of|a|no|one) fates?": "precision",
    r"narrow(er|ed|ing)? (grids?|activations?|weights?|ranges?|bits?)": "reduce_range (7 bits)",
    r"once more or again|anew each": "say when it is repeated",
    r"all the same,|as it were": "leave it out",
    r"stands? (in|for) no": "say what is missing",
}
"""Regular expressions of phrases that stand in no text of the project, with what to write instead."""

NAMES: dict[str, str] = {
    name: "say what the variable holds (scales, kernels, seen_kinds, example, ...)"
    for name in ("found", "made", "known", "given", "several", "what", "one", "other", "each")
}
"""Names that no local variable and no argument has on its own. `other` is the second operand of a binary operator."""

CONSTANTS: dict[str, str] = {
    r"_?MOST(_.*)?": "MAX_ with noun and unit: MAX_CACHED_KINDS, MAX_SAMPLE_BYTES",
    r"_?LEAST(_.*)?": "MIN_ with noun and unit: MIN_GRAPH_SQNR_DB",
    r"_?(FLOAT|FEW|MANY|LONG|SHORT|NEAR|FAR|ENOUGH|LARGE|SMALL|WORTH|CLOSE|SAME|ALIKE)": "a noun with its unit",
}
"""Regular expressions of module constants that do not say what they are."""

ALLOWED: dict[tuple[str, str], str] = {
    ("scripts/dev/check_words.py", ""): "lists the words",
    ("fxq/quant/spec.py", "FLOAT"): "public name, fxq.FLOAT: the config that keeps a layer in float",
}
"""(path, word): why the word is right there. An empty word allows the whole file."""


@dataclass(frozen=True)
class Finding:
    """One place that breaks a rule."""

    path: str
    line: int
    rule: str
    word: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.word!r}: {self.remedy}"


def check_text(path: str, text: str, first_line: int, rule: str) -> Iterator[Finding]:
    """Findings of `PHRASES` in a piece of text that begins at `first_line` of a file."""
    for number, line in enumerate(text.split("\n"), first_line):
        for pattern, remedy in PHRASES.items():
            for match in re.finditer(rf"\b(?:{pattern})\b", line, re.IGNORECASE):
                yield Finding(path, number, rule, match.group(0), remedy)


def check_docstrings(path: str, tree: ast.AST) -> Iterator[Finding]:
    """Findings of `OPENINGS` in the docstrings of a module, its classes, functions and constants."""
    for node in ast.walk(tree):
        for body in (getattr(node, "body", None),):
            if not isinstance(body, list):
                continue
            for statement in body:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    text = statement.value.value
                    if not isinstance(text, str):
                        continue
                    for pattern, remedy in OPENINGS.items():
                        if match := re.match(pattern, text.strip()):
                            yield Finding(path, statement.lineno, "docstring opens with", match.group(0), remedy)


def check_names(path: str, tree: ast.AST) -> Iterator[Finding]:
    """Findings of `NAMES` among variables and arguments, of `CONSTANTS`, and of `PHRASES` in names of functions."""
    for node in ast.walk(tree):
        name = line = None
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield from check_text(path, node.name.replace("_", " "), node.lineno, "function name")
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name, line = node.id, node.lineno
        elif isinstance(node, ast.arg):
            name, line = node.arg, node.lineno
        if name is None or line is None:
            continue
        if name in NAMES and not (name == "other" and isinstance(node, ast.arg)):
            yield Finding(path, line, "name", name, NAMES[name])
        for pattern, remedy in CONSTANTS.items():
            if re.fullmatch(pattern, name):
                yield Finding(path, line, "constant", name, remedy)


def check_python(path: str, source: str) -> Iterator[Finding]:
    """Findings in a Python file: its names, docstrings, comments and strings."""
    tree = ast.parse(source)
    yield from check_names(path, tree)
    yield from check_docstrings(path, tree)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)):
            yield from check_text(path, token.string, token.start[0], "phrase")


def check_document(path: str, source: str) -> Iterator[Finding]:
    """Findings in a Markdown file, code blocks left out."""
    prose = re.sub(r"```.*?```", lambda block: "\n" * block.group(0).count("\n"), source, flags=re.DOTALL)
    yield from check_text(path, prose, 1, "phrase")


def is_allowed(finding: Finding) -> bool:
    """Whether `ALLOWED` lists the finding's file and word, or the whole file."""
    return (finding.path, finding.word) in ALLOWED or (finding.path, "") in ALLOWED


def sources(arguments: list[str]) -> Iterator[Path]:
    """The files to check: those named, and all Python and Markdown files of folders that are named."""
    for argument in arguments or [*FOLDERS, *DOCUMENTS]:
        place = ROOT / argument
        yield from [place] if place.is_file() else sorted(p for p in place.rglob("*") if p.suffix in (".py", ".md"))


def check(arguments: list[str]) -> list[Finding]:
    """All findings that are not allowed, in the order of files and lines."""
    findings: list[Finding] = []
    for file in sources(arguments):
        path = file.relative_to(ROOT).as_posix()
        checker = check_python if file.suffix == ".py" else check_document
        findings += [f for f in checker(path, file.read_text(encoding="utf-8")) if not is_allowed(f)]
    return sorted(findings, key=lambda f: (f.path, f.line))


def main() -> int:
    """Print the findings; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("paths", nargs="*", help="files or folders; default: all of the project")
    parser.add_argument("--summary", action="store_true", help="count findings per rule and folder")
    options = parser.parse_args()
    findings = check(options.paths)
    if options.summary:
        for (folder, rule), count in sorted(Counter((f.path.split("/")[0], f.rule) for f in findings).items()):
            print(f"{folder:12} {rule:24} {count}")
    else:
        for finding in findings:
            print(finding)
    print(f"{len(findings)} findings, {len(ALLOWED)} places allowed")
    return int(bool(findings))


if __name__ == "__main__":
    raise SystemExit(main())
