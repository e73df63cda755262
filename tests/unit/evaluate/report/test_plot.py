"""The picture of `csd plot`: its title, its points, and its legend beside the curves."""

import pytest

from csd.evaluate.plot import Point, draw, title


@pytest.mark.parametrize("names", [["results.jsonl"], ["a", "b", "c"], ["results_" * 6, "b" * 50]])
def test_the_legend_is_outside_the_axes(tmp_path, monkeypatch, names):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    made = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: made.append(self))
    # a curve that fills the axes
    points = [Point(2**i, 100.0 * 2**i, i % 2, 0.0, 1.0) for i in range(6)]
    draw(dict.fromkeys(names, points), tmp_path / "curve.png", "tokens", "maj")
    (figure,) = made
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    assert [t.get_text() for t in figure.axes[0].texts] == [
        "k = 1",
        "2",
        "4",
        "8",
        "16",
        "32",
    ] * len(names)
    found = legend.get_window_extent()
    above = figure.axes[0].title.get_window_extent()
    assert not found.overlaps(above) and above.x0 >= 0 and above.x1 <= figure.bbox.width
    assert not found.overlaps(figure.axes[0].get_window_extent())
    assert found.x0 >= 0 and found.x1 <= figure.bbox.width and found.y1 <= figure.bbox.height


def test_costs_at_the_ticks_are_rounded(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    made = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: made.append(self))
    costs = [0.4567, 7.4876, 14.97, 29.95, 1021.6]
    points = [Point(2**i, cost, 0.5, 0.4, 0.6) for i, cost in enumerate(costs)]
    draw({"a": points}, tmp_path / "curve.png", "seconds", "maj")
    (figure,) = made
    figure.draw_without_rendering()
    ticks = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    assert ticks == ["0.46", "7.5", "15", "30", "1,022"]


def test_the_title_is_the_result():
    rising = [Point(1, 10.0, 0.25, 0.1, 0.4), Point(4, 40.0, 0.5, 0.3, 0.7)]
    flat = [point._replace(value=0.25) for point in rising]
    expected = "a vote of 4 is right in 50.0% of the problems, one sample in 25.0%"
    assert title({"a": rising}, "maj") == expected
    assert title({"a": rising}, "pass") == "pass@4 50.0%, pass@1 25.0%"
    assert title({"a": rising[:1]}, "maj") == "a vote of 1 is right in 25.0% of the problems"
    assert title({"b": flat, "a": rising}, "maj") == "vote of 4: highest 50.0%, a"
    assert title({"b": flat, "a": rising}, "pass") == "pass@4: highest 50.0%, a"
    assert title({"a": []}, "maj") == ""
