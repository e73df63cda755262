"""Products of a head's rows with a table's pages; each page is prefetched during the one before.

All heads of a token are adjacent in memory, so a page's heads are processed one after another.
"""

import numpy as np

from csd.cpu.attention_workspace import PAGE
from csd.cpu.compiled import loop
from csd.cpu.head_products import add_values, score_keys
from csd.cpu.lanes import fetch_early
from csd.cpu.vectors import LINE

BYTES = np.empty(0, np.uint8)


@loop
def of_head(h, heads, rows):
    """Begin and end of head h's rows; rows: begin and end in the first head, and rows per head."""
    before = (h - heads[0]) * rows[2]
    return before + rows[0], before + rows[1]


@loop
def page_of(pages, table, length, offset):
    """Rows of a page from token `offset` on, up to token `length`; empty if offset >= length."""
    if offset >= length:
        return pages[0, :0]
    within = offset % PAGE
    return pages[table[offset // PAGE], within : min(PAGE, length - offset + within)]


@loop
def _fetch(lines, h):
    """Prefetch head h's keys or values; lines: a page's bytes [tokens, K, size]."""
    count, K, size = lines.shape
    for t in range(count):
        for byte in range(0, size, LINE):
            fetch_early(lines, (t * K + h) * size + byte)


@loop
def score_pages(keys, tokens, then, heads, rows, offset, query, score, work, isa):
    """Run `score_keys` on a range of tokens: a table of pages, the first token and the end.

    keys: pages as numbers and as bytes; then: bytes of the page that is read after these, to
    prefetch; heads: begin and end; rows: as `of_head` takes them; offset: column of token 0.
    """
    table, done, last = tokens
    while done < last:
        page, follows = page_of(keys[0], table, last, done), (done // PAGE + 1) * PAGE
        lines = page_of(keys[1], table, last, follows) if follows < last else then
        for h in range(heads[0], heads[1]):
            _fetch(lines, h)
            low, high = of_head(h, heads, rows)
            score_keys(page, h, low, high, offset + done, query, score, work, isa)
        done = follows


@loop
def add_pages(values, tokens, then, heads, rows, offset, weight, sums, work, isa):
    """Run `add_values` on a range of tokens; arguments as for `score_pages`."""
    table, done, last = tokens
    while done < last:
        page, follows = page_of(values[0], table, last, done), (done // PAGE + 1) * PAGE
        lines = page_of(values[1], table, last, follows) if follows < last else then
        for h in range(heads[0], heads[1]):
            _fetch(lines, h)
            low, high = of_head(h, heads, rows)
            add_values(page, h, low, high, offset + done, weight, sums, work, isa)
        done = follows
