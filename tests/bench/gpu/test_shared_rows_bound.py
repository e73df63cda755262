"""The bound of a step with a row for each sample and for each text."""

import pytest

from bench.gpu import shared_rows_bound
from bench.gpu.lib.roofline import parameters
from bench.lib.shapes import SHAPES

pytestmark = pytest.mark.bench
SHAPE, RATES = "llama-3.1-8b", dict(bandwidth=1e12, flops=1e15)


def test_equal_bounds_where_all_texts_are_different():
    for row in shared_rows_bound.rows(SHAPE, 1.0, prompts=[300], **RATES):
        assert row["own rows ms"] == row["shared rows ms"] and row["saved"] == "0%"


def test_the_weights_bound_few_rows_and_the_products_many():
    weights = 2e3 * parameters(SHAPES[SHAPE]) / RATES["bandwidth"]
    found = shared_rows_bound.rows(SHAPE, 0.25, prompts=[300], **RATES)
    few = [row for row in found if row["N"] * (1 + row["drafts"]) < 100]
    assert few and all(row["shared rows ms"] > weights for row in few)
    # 256 samples with 4 drafts have more rows than the bytes of the weights pay for
    many = [row for row in found if row["N"] == 256 and row["drafts"]]
    products = 2e3 * parameters(SHAPES[SHAPE]) * 256 * 5 / RATES["flops"]
    assert all(row["own rows ms"] > products > weights for row in many)


def test_the_command_prints_a_row_for_each_case(capsys):
    shared_rows_bound.main([SHAPE, "--texts", "0.5"])
    assert len(capsys.readouterr().out.splitlines()) == 1 + 12
    with pytest.raises(SystemExit):
        shared_rows_bound.main(["no-shape"])
    assert "SHAPE must be one of" in capsys.readouterr().err
