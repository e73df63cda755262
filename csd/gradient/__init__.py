"""Log-probabilities with the bits of sampling, and their gradients: `csd.logprobs`.

A pass computes each prompt once and the trie of its completions (`rows.py`), by the engine's exact
operations (`fused.py`, `attention.py`), and scores tokens in chunks of rows (`head.py`). Modules
that the fused decoder does not run compute their own layers (`module.py`).
"""
