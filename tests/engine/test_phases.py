"""A line on stderr about what takes long, and none about what does not."""

import pytest
import torch

from csd.state import phases
from csd.state.phases import phase


@pytest.mark.parametrize("device, line", [("cuda", True), ("cpu", False)])
def test_slow_phases_print_a_line_on_a_gpu(device, line, monkeypatch, capsys):
    times = iter([0.0, 2.5])
    monkeypatch.setattr(phases.time, "perf_counter", lambda: next(times))
    with phase("measure steps", torch.device(device)):
        pass
    assert capsys.readouterr().err == ("csd: measure steps: 2.5 s\n" if line else "")


def test_announced_phases_print_one_line_even_on_failure(capsys):
    with pytest.raises(ValueError), phase("check", torch.device("cuda"), "checking ..."):
        assert capsys.readouterr().err == "csd: checking ... "
        raise ValueError
    assert capsys.readouterr().err.endswith(" s\n")
