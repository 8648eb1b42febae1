"""Pictures as Graphviz text, and drawn by dot."""

import subprocess

import pytest

from fxq.errors import RenderError
from fxq.picture import dot as dot_module
from fxq.picture import writing
from fxq.picture.graph_picture import render
from tests.support.pictures import needs_dot, network, small

pytestmark = pytest.mark.any_cpu


def test_without_dot_svg_says_how_to_install_it_and_dot_text_works(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RenderError, match=r"apt install graphviz.*brew install graphviz.*\.dot"):
        render(small(), tmp_path / "g.svg")
    assert not (tmp_path / "g.svg").exists()
    assert "conv2d_relu" in render(small(), tmp_path / "g.dot").read_text()


@needs_dot
def test_dot_text_is_good_dot(tmp_path):
    path = render(network(3), tmp_path / "g.dot")
    subprocess.run(["dot", "-Tsvg", str(path), "-o", str(tmp_path / "g.svg")], check=True, timeout=60)
    assert ">layer0.2<" in (tmp_path / "g.svg").read_text()


@needs_dot
def test_modules_are_clusters_of_the_svg(tmp_path):
    svg = render(network(4), tmp_path / "g.svg").read_text()
    assert all(f">layer0.{i}<" in svg for i in range(4))


@needs_dot
def test_where_dot_fails_with_frames_it_draws_without(tmp_path, monkeypatch):
    def run(text, form):
        if "layer0.3<" in text:
            raise RenderError("dot failed: assertion")
        return dot_module.run(text, form)

    monkeypatch.setattr(writing, "run", run)
    svg = render(network(8), tmp_path / "g.svg").read_text()
    assert ">layer0.3<" not in svg and "layer0_3_conv1" in svg


@needs_dot
@pytest.mark.parametrize("crashes", [1, 2, 3])
def test_dot_runs_again_with_other_distances_if_it_crashes(crashes, monkeypatch):
    import graphviz

    pipe, texts = graphviz.pipe, []

    def crashing(engine, form, text, **options):
        texts.append(text)
        if len(texts) <= crashes:
            raise graphviz.CalledProcessError(-11, ["dot"], stderr=b"")
        return pipe(engine, form, text, **options)

    monkeypatch.setattr(graphviz, "pipe", crashing)
    if crashes == 3:
        with pytest.raises(RenderError, match="dot crashed with signal 11"):
            dot_module.run("digraph { a -> b }", "svg")
    else:
        assert b"<svg" in dot_module.run("digraph { a -> b }", "svg")
    assert len(set(texts)) == len(texts) == min(crashes + 1, 3)


@needs_dot
def test_errors_of_dot_are_told_at_once():
    with pytest.raises(RenderError, match=r"dot failed: .*syntax error"):
        dot_module.run("digraph { a -> }", "svg")
