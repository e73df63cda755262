"""HTML page of a results file of `csd eval`: a table of accuracy and cost, and each answer.

`csd plot` draws the curve.
"""

import html
from collections import Counter
from importlib.resources import files
from itertools import compress
from pathlib import PurePath
from string import Template

from csd.evaluate.evaluation import ALONE, summary
from csd.evaluate.report.page import facts_list
from csd.evaluate.vote import Vote

# settings of a run that the page shows
_FACTS = ("model", "task", "temperature", "top_p", "max_new_tokens", "seed")


def eval_page(settings: dict, rows: list[dict]) -> str:
    """HTML of a run. settings, rows: the first line of a results file, and the other lines."""
    until = Vote() if settings.get("until_decided") else None
    figures = summary(rows, settings["num_samples"], until)
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
    here = files("csd.evaluate.report")
    return Template((here / "eval.html").read_text("utf-8")).substitute(
        style=(here / "report.css").read_text("utf-8"),
        headline=f"{_count(len(rows))}, {settings['num_samples']} samples each: "
        f"{_accuracy(figures)}, {figures['tokens_per_second']:.0f} tokens per second, "
        f"{figures['seconds']:.1f} s",
        lead=lead + ".",
        facts=facts_list(facts),
        table=_table(figures["by_k"], len(rows)),
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
    note = (
        f"In brackets the 95% interval over {_count(problems)}. "
        f"Seconds: the run's, in proportion to the tokens. {ALONE}"
    )
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
