"""Published drafters, for comparison; `drafter=` takes them by these names.

    prompt-lookup           the continuation of the latest match in the sample's own text
    suffix, suffix-tree     SuffixDecoding (arXiv 2411.04975)
    rest:PATH               REST (arXiv 2311.08252), over a datastore file
    recycling               token recycling (arXiv 2408.08696)
    paper-shrinking(-tree)  the source paper's (arXiv 2503.05330), with exact matches that shrink

They run on the host and take neither history nor `share`. Each drafts one tree per sample of a
prompt, in the same pool as the consensus graph. `csd/research/__init__.py` registers them.
"""

from csd.utils.lazy import submodules

__getattr__ = submodules(__name__)
