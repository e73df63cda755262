"""HTML page of a results file of `csd eval`: accuracy by cost, and the answers per problem."""

import html
from collections import Counter
from importlib.resources import files
from itertools import compress
from pathlib import PurePath
from string import Template

from csd.evaluate.evaluation import ALONE, summary
from csd.evaluate.plot import Point
from csd.evaluate.vote import Vote

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>csd eval</title>
<style>$style</style>
</head>
<body>
<h1>$headline</h1>
<p class="lead">$lead</p>
<dl>$facts</dl>
<div class="pair table">
<section><h2>$accuracy by tokens per problem</h2>
<div class="scroll">$curve</div><p class="note">$band</p></section>
<section><h2>By the number of samples</h2><div class="scroll">$table</div></section>
</div>
<h2>The problems</h2>
<p class="note">Each answer with the number of samples that gave it; right answers are green.
A click shows the texts.</p>
<div class="problems">$problems</div>
</body>
</html>
""")
# settings of a run that the page shows
_FACTS = ("model", "task", "temperature", "top_p", "max_new_tokens", "seed")


def eval_page(settings: dict, rows: list[dict]) -> str:
    """HTML of a run. settings, rows: the first line of a results file, and the other lines."""
    until = Vote() if settings.get("until_decided") else None
    figures = summary(rows, settings["num_samples"], until)
    by_k = figures["by_k"]
    tested = by_k[-1]["maj_at_k"] is None
    figure = "pass_at_k" if tested else "maj_at_k"
    facts = {name: settings[name] for name in _FACTS if settings.get(name) is not None}
    if "model" in facts:
        facts["model"] = PurePath(str(facts["model"])).name
    receipt = rows[0].get("receipt") if rows else None
    if receipt is not None:
        facts["exact on"] = receipt["exact_on"] or "no machine"
        facts["weights"] = (receipt["model"] or "of a module")[:16]
        facts["cpu"] = receipt["cpu"]
    lead = (
        f"{figures['tokens']:,} tokens in {figures['seconds']:.1f} s, {figures['tau']:.2f} tokens "
        f"per step of a sample; {figures['answered']:.1%} of the samples have an answer"
    )
    if figures["limited"]:
        lead += f", and {figures['limited']} were cut at max_new_tokens"
    return _PAGE.substitute(
        style=(files("csd.evaluate.report") / "report.css").read_text("utf-8"),
        headline=f"{_count(len(rows))}, {settings['num_samples']} samples each: "
        f"{_accuracy(figures)}, {figures['tokens_per_second']:.0f} tokens per second, "
        f"{figures['seconds']:.1f} s",
        lead=lead + ".",
        facts="".join(
            f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(str(v))}</dd></div>"
            for k, v in facts.items()
        ),
        accuracy="pass@k" if tested else "Accuracy of the vote",
        curve=_curve([Point(row["k"], row["tokens"] / len(rows), *row[figure]) for row in by_k]),
        band=f"The band is the 95% interval over {_count(len(rows))}; with more it is narrower.",
        table=_table(by_k, len(rows)),
        problems="".join(map(_problem, rows)),
    )


def _count(problems: int) -> str:
    return "1 problem" if problems == 1 else f"{problems} problems"


def _accuracy(figures: dict) -> str:
    """Accuracy of the vote and of one sample, or that no sample has an answer to grade."""
    by_k, drawn, cut = figures["by_k"], figures["samples_drawn"], figures["limited"]
    if figures["answered"] and by_k[-1]["maj_at_k"] is None:
        first, last = by_k[0], by_k[-1]
        if first is last:
            return f"pass@1 {first['pass_at_k'][0]:.1%}"
        return f"pass@{last['k']} {last['pass_at_k'][0]:.1%}, pass@1 {first['pass_at_k'][0]:.1%}"
    if figures["answered"]:
        return f"vote {by_k[-1]['maj_at_k'][0]:.1%}, one sample {by_k[0]['maj_at_k'][0]:.1%}"
    if cut == drawn:
        return f"no answers (all {drawn} samples were cut at the limit)"
    return f"no answers ({cut} of {drawn} samples were cut at the limit)" if cut else "no answers"


def _curve(points: list[Point]) -> str:
    """SVG of a curve through points, whose cost is tokens, spaced evenly in x."""
    width, height, left, right, bottom, top = 560, 260, 56, 32, 34, 12
    step = (width - left - right) / max(1, len(points) - 1)

    def place(i: int, value: float) -> tuple[float, float]:
        return left + i * step, top + (height - top - bottom) * (1 - value)

    def point(i: int, value: float) -> str:
        return "{:.1f},{:.1f}".format(*place(i, value))

    band = [point(i, p.low) for i, p in enumerate(points)]
    band += [point(i, points[i].high) for i in reversed(range(len(points)))]
    names = ""
    for i, p in enumerate(points):
        x, y = place(i, p.value)
        # above the point, or below it at the upper edge
        beside = y + (20 if y < top + 24 else -10)
        side = "start" if i == 0 else "end" if i == len(points) - 1 else "middle"
        names += f'<text x="{x:.1f}" y="{beside:.1f}" text-anchor="{side}">k = {p.k}</text>'
        names += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
    marks = "".join(
        f'<text class="soft" x="{left + i * step:.1f}" y="{height - 12}" text-anchor="middle">'
        f"{p.cost:,.0f}</text>"
        for i, p in enumerate(points)
    )
    lines = "".join(
        f'<line class="axis" x1="{left}" x2="{width - right}" y1="{y}" y2="{y}"/>'
        f'<text class="soft" x="{left - 6}" y="{y + 4}" text-anchor="end">{share:.0%}</text>'
        for share in (0.0, 0.5, 1.0)
        for y in (top + (height - top - bottom) * (1 - share),)
    )
    line = " ".join(point(i, p.value) for i, p in enumerate(points))
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img">{lines}'
        f'<polygon points="{" ".join(band)}" style="fill:var(--voted);opacity:.2"/>'
        f'<polyline points="{line}" style="fill:none;stroke:var(--voted);stroke-width:2"/>'
        f'<g style="fill:var(--voted)">{names}</g>{marks}</svg>'
    )


def _table(by_k: list[dict], problems: int) -> str:
    def shown(value: tuple | None) -> str:
        return "" if value is None else "{:.1%} <i>({:.1%} to {:.1%})</i>".format(*value)

    rows = "".join(
        f"<tr><td>{row['k']}</td><td>{shown(row['maj_at_k'])}</td>"
        f"<td>{shown(row['pass_at_k'])}</td><td>{row['tokens'] / problems:,.0f}</td>"
        f"<td>{row['seconds'] / problems:,.1f}</td></tr>"
        for row in by_k
    )
    names = ("k", "maj@k", "pass@k", "tokens<br>per problem", "seconds<br>per problem")
    head = "".join(f"<th>{name}</th>" for name in names)
    note = f"Seconds: the run's, in proportion to the tokens. {ALONE}"
    return f'<table><tr>{head}</tr>{rows}</table><p class="note">{note}</p>'


def _problem(row: dict) -> str:
    """HTML of a problem's answers, with its texts folded."""
    votes = Counter(answer for answer in row["answers"] if answer is not None)
    right = {*compress(row["answers"], row["correct"])}
    answers = ", ".join(
        f'<span class="{"right" if answer in right else ""}">{html.escape(answer)} ({count})</span>'
        for answer, count in votes.most_common()
    )
    silent = len(row["answers"]) - votes.total()
    solved = any(row["correct"]) if row.get("tested") else row["vote_correct"]
    mark = '<b class="right">right</b>' if solved else '<b class="wrong">wrong</b>'
    texts = "".join(f"<pre>{html.escape(text or '')}</pre>" for text in row["texts"])
    question = " ".join(row.get("question", "").split())
    asked = f'<span class="question">{html.escape(question)}</span>' if question else ""
    return (
        f"<details><summary>{row['problem']}: {mark}; the answer is {html.escape(row['answer'])}; "
        f"{answers or 'no answer'}{f'; {silent} without an answer' if silent and answers else ''}"
        f"{asked}</summary>{texts}</details>"
    )
