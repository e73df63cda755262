"""Views of results: one line per sample, HTML for a notebook, a table, a page."""

import html
from collections.abc import Callable, Iterator
from os import PathLike, fspath
from typing import Any

from csd.models.text.context import TextContext
from csd.models.text.streamed import TextStream
from csd.utils.files import WholeFile
from csd.utils.lazy import check_installed

# background colours of tokens in a text, by the source of the draft
COLOURS = {
    "sampled": "#ececec",
    "own": "#8ecae6",
    "sibling": "#f4a259",
    "prompt": "#b8a1e3",
    "history": "#9bd18b",
    "model": "#e58fb1",
    "prior": "#d9c45b",
}
# characters of a text that a line shows
_SHOWN = 72
# at most one function, which makes the page of a run; a package that imports this one sets it
_pages: list[Callable[[Any], str]] = []


def use_page(make: Callable[[Any], str]) -> None:
    """Set the function that makes the page of a `Samples`."""
    _pages[:] = [make]


def line(sample: Any) -> str:
    """A sample in one line, with its text shortened; without a text, its token ids."""
    has_text = sample.text is not None
    text = " ".join(sample.text.split()) if has_text else ", ".join(map(str, sample.tokens))
    cut = text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
    content = repr(cut) if has_text else f"[{cut}]"
    return f"{sample.index}: {_tokens(len(sample.tokens))}, {sample.finish_reason}: {content}"


def lines(out: Any) -> str:
    """The samples of a prompt, one per line, after a line of totals."""
    count = "1 sample" if len(out) == 1 else f"{len(out)} samples"
    head = f"{count}, {_tokens(out.stats.tokens)}, seed {out.seed}"
    failed = [f"  error: {out.error}"] if out.error else []
    return "\n".join([head, *(f"  {line(sample)}" for sample in out), *failed])


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count:,} tokens"


def page_part(out: Any) -> str:
    """HTML of the samples, in which drafted tokens have the colour of their source."""
    seen = {source for sample in out for source in sample.sources if source}
    legend = "".join(
        f'<span style="background:{COLOURS[s]}99;padding:0 .4em;margin-right:.6em">{s}</span>'
        for s in COLOURS
        if s in seen
    )
    note = f"<p>drafted from {legend}</p>"
    if not legend:
        note = "<p>no colours: no token was drafted and accepted</p>"
    parts = [
        '<div style="padding:.3em .6em;border:1px solid #8888;border-radius:4px;max-height:14em;'
        'overflow:auto">'
        f"<b>{sample.index}</b> {_tokens(len(sample.tokens))}, {sample.finish_reason}"
        f'<div style="white-space:pre-wrap;text-align:left">{"".join(_runs(out, sample))}</div>'
        "</div>"
        for sample in out
    ]
    error = f"<p>{html.escape(out.error)}</p>" if out.error else ""
    # as many columns as fit
    columns = (
        "display:grid;gap:.4em;grid-template-columns:repeat(auto-fill,minmax(min(24em,100%),1fr))"
    )
    boxes = f'<div style="{columns}">{"".join(parts)}</div>'
    stats = html.escape(str(out.stats)).replace("\n", "<br>")
    return f"<div><p>{stats}</p>{error}{note}{boxes}</div>"


def _runs(out: Any, sample: Any) -> Iterator[str]:
    """Yields HTML of a sample's text, one part per run of tokens with the same source."""
    if out.tokenizer is None or len(sample.sources) != len(sample.tokens):
        yield html.escape(sample.text or "")
        return
    start, shown = 0, 0
    sources, stream = sample.sources, TextStream(out.tokenizer, prompt=out.prompt_ids)
    for token in sample.tokens:
        stream.push(token)
    whole = TextContext(out.tokenizer, out.prompt_ids).text(sample.tokens)
    for i in range(1, len(sources) + 1):
        if i < len(sources) and sources[i] == sources[start]:
            continue
        # a character belongs to the last of its tokens
        end = len(whole) if i == len(sources) else stream.ends[i - 1]
        new = html.escape(whole[shown:end])
        if new:
            source, shown = sources[start], end
            yield f'<span style="background:{COLOURS[source]}99">{new}</span>' if source else new
        start = i


def frame(out: Any) -> Any:
    """DataFrame with one row per sample, for `Samples.to_pandas`."""
    check_installed("pandas", "notebook", "to_pandas")
    import pandas

    return pandas.DataFrame(
        [
            {
                "index": s.index,
                "text": s.text,
                "tokens": len(s.tokens),
                "finish_reason": s.finish_reason,
                "stop_reason": s.stop_reason,
                "logprob": sum(s.logprobs),
                "drafted": sum(map(bool, s.sources)) / max(len(s.sources), 1),
            }
            for s in out
        ]
    )


def write_report(out: Any, path: str | PathLike[str]) -> None:
    """Write the page of `Samples.report` to `path`."""
    if out.tokenizer is None:
        raise ValueError("a report needs the samples' tokenizer: call generate with tokenizer=")
    with WholeFile(fspath(path), alone=False) as file:
        file.write([_pages[0](out).encode()])
