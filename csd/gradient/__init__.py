"""Log-probabilities with the bits of sampling, and their gradients: `csd.logprobs`.

`logprobs.py` reads the arguments. A pass computes each prompt once and the trie of its completions
(`rows.py`), by the engine's exact operations (`fused.py`, `operations.py`, `attention.py`), and
scores tokens in chunks of rows (`head.py`). Modules that the fused decoder does not run compute
their own layers (`policy.py`, which keeps what a model's calls share).
"""
