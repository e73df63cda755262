"""The picture of `csd plot`: its legend is beside the curves, not over them."""

import pytest

from csd.evaluate.plot import draw


@pytest.mark.parametrize("names", [["results.jsonl"], ["a", "b", "c"], ["results_" * 6, "b" * 50]])
def test_the_legend_is_outside_the_axes(tmp_path, monkeypatch, names):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    made = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: made.append(self))
    # a curve that fills the axes
    points = [(2.0**i, i % 2, 0.0, 1.0) for i in range(6)]
    draw(dict.fromkeys(names, points), tmp_path / "curve.png", "tokens", "maj")
    (figure,) = made
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    found = legend.get_window_extent()
    assert not found.overlaps(figure.axes[0].get_window_extent())
    assert found.x0 >= 0 and found.x1 <= figure.bbox.width and found.y1 <= figure.bbox.height
