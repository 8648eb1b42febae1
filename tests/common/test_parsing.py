"""Parsing of Python code in several threads."""

import ast
import inspect
import threading

import pytest

from fxq.common.parsing import call_parser
from tests.support import opcases


def test_a_disturbed_call_is_repeated():
    """CPython's parser fails if another thread's call changes its count of recursions."""
    failures = iter([SystemError("AST constructor recursion depth mismatch"), None])

    def parse(source):
        if (error := next(failures)) is not None:
            raise error
        return ast.parse(source)

    assert ast.unparse(call_parser(parse, "a = 1")) == "a = 1"


def test_errors_of_the_code_are_raised():
    with pytest.raises(SyntaxError):
        call_parser(ast.parse, "a =")

    def broken(source):
        raise SystemError("always")

    with pytest.raises(SystemError, match="always"):
        call_parser(broken, "a")


def test_calls_in_several_threads():
    source, trees = inspect.getsource(opcases) * 4, []
    threads = [threading.Thread(target=lambda: trees.append(call_parser(ast.parse, source))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(trees) == 4
