"""Views of an operator: ids of requests, the access log, and histograms of durations."""

import logging
import random
import re
import time

import pytest
from helpers.runs.served import call, chat, opened

from csd.serve.histogram import BOUNDS, Histogram

pytest.importorskip("starlette")

PATHS = [
    ("/health", None, 200),
    ("/v1/chat/completions", chat(), 200),
    ("/v1/chat/completions", chat(stream=True), 200),
    ("/v1/chat/completions", chat(n=0), 400),
    ("/none\x1b]0;x\x07".replace("\x1b", "%1b").replace("\x07", "%07"), None, 404),
]


@pytest.mark.parametrize(("path", "body", "status"), PATHS)
@pytest.mark.parametrize("given", [None, "job-17/a", "a b", "x" * 500, 'a"\x7f'])
def test_a_request_has_an_id_and_a_line(port, caplog, path, body, status, given):
    headers = () if given is None else (("X-Request-Id", given),)
    with caplog.at_level(logging.INFO, logger="csd.access"):
        response = opened(port, path, body, headers=headers)
        response.read()
        assert response.status == status
        # a response ends before its line is written
        for _ in range(500):
            if any(response.headers["X-Request-Id"] in r.getMessage() for r in caplog.records):
                break
            time.sleep(0.01)
    name = response.headers["X-Request-Id"]
    assert name == given if given == "job-17/a" else re.fullmatch("[0-9a-f]{32}", name)
    lines = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    (line,) = lines
    assert re.fullmatch(rf"127\.0\.0\.1 (GET|POST) \S+ {status} \d+\.\d{{3}} s {name}", line), line
    assert "\x1b" not in line


def test_a_browser_that_is_refused_has_a_line_too(port, caplog):
    with caplog.at_level(logging.INFO, logger="csd.access"):
        response = opened(port, "/health", headers=(("Origin", "https://example.com"),))
        assert response.status == 403 and response.headers["X-Request-Id"]
        for _ in range(500):
            if caplog.records:
                break
            time.sleep(0.01)
    assert any(" 403 " in record.getMessage() for record in caplog.records)


def metric(port, name):
    text = call(port, "/metrics")[1]
    return {
        line.partition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith(name)
    }


def test_times_of_tokens_are_counted(port):
    first, each = "csd_time_to_first_token_seconds", "csd_time_per_output_token_seconds"
    before = metric(port, first)[f"{first}_count"], metric(port, each)[f"{each}_count"]
    bodies = [
        chat(n=3, max_tokens=8, ignore_eos=True),
        chat(max_tokens=8, ignore_eos=True, stream=True),
        # one token has a first, and none behind it
        chat(max_tokens=1),
    ]
    for body in bodies:
        assert opened(port, "/v1/chat/completions", body).read()
    found = metric(port, first)
    assert found[f"{first}_count"] == before[0] + 3
    assert metric(port, each)[f"{each}_count"] == before[1] + 2
    assert found[f'{first}_bucket{{le="+Inf"}}'] == found[f"{first}_count"]
    assert 0 < found[f"{first}_sum"] < 600


def test_a_histogram_counts_up_to_each_bound():
    histogram, own = Histogram(), random.Random(0)
    values = [*BOUNDS, *(own.random() * 10 ** own.randrange(-4, 4) for _ in range(500))]
    for value in values:
        histogram.add(value)
    found = dict(histogram.cumulative())
    assert found.pop("+Inf") == len(values)
    assert found == {str(bound): sum(v <= bound for v in values) for bound in BOUNDS}
    assert histogram.sum == pytest.approx(sum(values))


def test_flags_have_vllms_names():
    from csd.cli.main import make_parser

    parser = make_parser()[0]
    names = ["--max-num-seqs", "3", "--max-model-len", "99", "--gpu-memory-utilization", "0.5"]
    args = parser.parse_args(["serve", "m", *names])
    assert (args.max_slots, args.max_tokens, args.memory) == (3, 99, 0.5)
