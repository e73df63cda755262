"""Log-probabilities with the bits of sampling, and their gradients: `csd.logprobs`.

`logprobs.py` reads the arguments. A pass computes each prompt once and the trie of its completions
(`rows.py`), by the engine's exact operations (`fused.py`, `operations.py`, `attention.py`), and
scores tokens in chunks of rows (`head.py`). Modules that the fused decoder does not run compute
their own layers (`policy.py`, which keeps what a model's calls share).

The bits are the sampler's, because the forward is the engine's. `Decoder.layer` runs unchanged over
the backend's operations (`fused.py`). Completions attend as nodes of a tree, whose bits in an exact
engine are those of committed tokens (`attention.py`). `Scoring.values` calls `token_logprobs`, the
sampler's loop or kernel with given tokens (`head.py`). The backward has other operations.
"""
