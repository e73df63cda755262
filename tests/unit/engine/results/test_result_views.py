"""Views of results: printed, in a notebook, as a table, as a page."""

import copy
import pickle
import re
from dataclasses import replace
from html import unescape

import pytest
from helpers.models.scripted import Letters, PrefixSum, engine

import csd
from csd.engine.results.stats import Stats
from csd.models.demo import toy


def drawn(**options):
    usual = dict(num_samples=3, max_new_tokens=30, seed=1, temperature=0.5, budget=12)
    e = engine(PrefixSum(sharpness=4.0))
    return csd.generate(e, [1, 2], tokenizer=Letters(), **usual | options)


def test_a_line_a_sample():
    out = drawn()
    shown = repr(out)
    head, *rest = shown.splitlines()
    assert head == f"3 samples, {out.stats.tokens} tokens, seed 1"
    assert len(rest) == 3
    for sample, line in zip(out, rest, strict=True):
        assert line.startswith(f"  {sample.index}: {len(sample.tokens)} tokens, length: '")
        assert repr(sample) == f"Sample({line.strip()})"
    assert len(shown) < 400 and str(out) == shown


def test_long_texts_and_errors_keep_to_their_lines():
    long = csd.Sample(0, "a\nb " * 400, [1], [-1.0], [-1.0], "stop")
    assert len(repr(long)) < 130 and "\n" not in repr(long)
    failed = csd.Samples([], 3, [], Stats(), error="too long")
    assert repr(failed).splitlines() == ["0 samples, 0 tokens, seed 3", "  error: too long"]
    without_text = csd.Sample(2, None, [1, 2], [], [], "cancelled")
    assert repr(without_text) == "Sample(2: 2 tokens, cancelled: [1, 2])"


def test_stats_are_a_line_of_each_kind():
    stats = Stats(
        tokens=3912,
        sample_steps=1956,
        nodes_proposed=4000,
        nodes_accepted=1956,
        accepted={"own": 0, "sibling": 1900, "prompt": 56},
        seconds={"compile": 61.0, "measure": 2.0, "forward": 30.0, "verify": 10.0},
    )
    assert str(stats) == (
        "3,912 tokens in 40.0 s of sampling: 98 per second, 2.00 per step of a sample\n"
        "1,956 of 4,000 drafted tokens accepted (sibling 1,900, prompt 56)\n"
        "before that, compiling or loading code took 61.0 s and timing steps took 2.0 s"
    )
    assert stats.sampling_seconds == 40 and stats.tokens_per_second == pytest.approx(97.8)
    shared = replace(stats, call_tokens=8000)
    assert shared.tokens_per_second == 200
    assert str(shared).startswith(
        "3,912 tokens of a call that drew 8,000 in 40.0 s of sampling: 200 per second, 2.00"
    )
    plain = Stats(tokens=3, sample_steps=3, seconds={"forward": 1.0, "compile": 0.01})
    assert str(plain).endswith("1.00 per step of a sample\nnothing was drafted")
    shared = replace(plain, rows=2)
    assert "\n2 rows of the model in place of 3: equal texts share them\n" in str(shared)
    assert "0 tokens" in str(Stats())


def test_html_has_every_text_and_the_colours_of_the_sources():
    out = drawn()
    shown = out._repr_html_()
    plain = unescape(re.sub(r"<[^>]+>", "", shown))
    assert all(sample.text in plain for sample in out)
    for source in ("own", "sibling"):
        marked = re.findall(
            rf'<span style="background:{csd.engine.results.views.COLOURS[source]}99">(.*?)</span>',
            shown,
        )
        letters = sum(len(unescape(text)) for text in marked)
        assert letters == sum(s.sources.count(source) for s in out) > 0


@pytest.mark.parametrize("options", [{"speculate": False}, {"max_new_tokens": 1}], ids=str)
def test_html_without_a_colour_names_the_reason(options):
    shown = drawn(**options)._repr_html_()
    assert "<p>no colours: no token was drafted and accepted</p>" in shown
    assert "drafted from" not in shown and "no colours" not in drawn()._repr_html_()


def test_html_of_half_characters_and_markup():
    """Bytes of a character are in different tokens; a text may be markup itself."""

    class Bytes:
        def decode(self, ids, skip_special_tokens=True):
            return bytes(ids).decode("utf-8", "replace")

    tokenizer, text = Bytes(), "<b>é&é</b> ü"
    ids = list(text.encode())
    sources = [("", "sibling")[i % 2] for i in range(len(ids))]
    sample = csd.Sample(0, text, ids, [], [], "stop", sources=sources)
    out = csd.Samples([sample], 0, [1], Stats(), tokenizer=tokenizer)
    shown = out._repr_html_()
    assert "<b>é" not in shown
    assert text in unescape(re.sub(r"<[^>]+>", "", shown))
    without = csd.Samples([sample], 0, [1], Stats())
    assert "&lt;b&gt;" in without._repr_html_()


def test_copies_leave_the_tokenizer_behind():
    out = drawn()
    assert out.tokenizer is not None
    for other in (pickle.loads(pickle.dumps(out)), copy.deepcopy(out)):
        assert other == out and other.tokenizer is None


def test_a_row_a_sample():
    pytest.importorskip("pandas", reason="pandas is not installed")
    out = drawn()
    table = out.to_pandas()
    assert table["text"].tolist() == out.texts
    assert table["tokens"].tolist() == [len(t) for t in out.tokens]
    assert table["logprob"].tolist() == [sum(x) for x in out.logprobs]
    shares = [sum(map(bool, s.sources)) / len(s.sources) for s in out]
    assert table["drafted"].tolist() == shares


def test_without_pandas_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("csd.utils.lazy.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs pandas: pip install pandas"):
        drawn().to_pandas()


def test_a_report_from_python(tmp_path):
    model, tokenizer = toy()
    e = csd.Engine(model, tokenizer=tokenizer)
    out = csd.generate(e, "a b", num_samples=2, max_new_tokens=12, seed=0, drafts=True, budget=8)
    path = tmp_path / "run.html"
    out.report(path)
    assert "2 samples of one prompt" in path.read_text() and '"drafts": [[' in path.read_text()
    with pytest.raises(ValueError, match="tokenizer"):
        pickle.loads(pickle.dumps(out)).report(path)
