"""Pictures in files."""

import pytest

from fxq.errors import RenderError
from fxq.graph.view import GraphView
from fxq.picture.graph_picture import render
from tests.support.pictures import needs_dot, network, small

STARTS = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF", ".dot": b"digraph"}


@pytest.mark.one_in(3)
@needs_dot
@pytest.mark.parametrize("ending", STARTS)
@pytest.mark.parametrize("graph", [small(), network(14), GraphView(())], ids=["small", "network", "empty"])
def test_every_format(tmp_path, graph, ending):
    path = render(graph, str(tmp_path / "new folder" / f"g{ending}"))
    assert path == tmp_path / "new folder" / f"g{ending}"
    assert path.read_bytes().startswith(STARTS[ending])


@pytest.mark.parametrize("name", ["g.jpg", "g", "g.SVGZ"])
def test_other_endings_are_refused(tmp_path, name):
    with pytest.raises(RenderError, match=r"\.svg, \.png, \.pdf, \.dot"):
        render(small(), tmp_path / name)


def test_a_path_that_cannot_be_written_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RenderError, match="cannot write"):
        render(small(), tmp_path / "file" / "g.dot")
