"""Change the logits of every row of the pool by its slot's rules, before any filter.

At row m, with x the logits [V], y the tokens of prompt and sample up to and including the row's own
(committed ones, then those on its path in the draft tree), and c the counts of the sample's tokens:

    x += bias                                    logit_bias; -inf at what is banned anywhere
    x = -inf  at the last token of a banned sequence whose others end y
              at tokens that would complete an n-gram of y once more
              at end tokens before `min_new` tokens
    x = x * r where x < 0, else x / r            repetition penalty, at tokens of y
    x -= frequency * c,  x -= presence * (c > 0)

`forced_tokens` returns the only token that a row may draw once the budget of thought is spent. All
changes depend only on the prompt and the tokens before a row, so its sample does not depend on what
was drafted.

PyTorch on every device, with fixed shapes and no read on the host, so that a captured step can
include it. Rows are changed in blocks, so that temporary memory stays small.
"""
