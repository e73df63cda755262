"""Drafters that others have published, for comparison: `drafter=` takes them by these names.

    prompt-lookup           the continuation of the latest match in the sample's own text
    suffix, suffix-tree     SuffixDecoding (arXiv 2411.04975)
    rest:PATH               REST (arXiv 2311.08252), over a datastore file
    recycling               token recycling (arXiv 2408.08696)
    paper-shrinking(-tree)  the source paper's (arXiv 2503.05330), with exact matches that shrink

They live on the host and take neither history nor `share`. All draft for the samples of a prompt,
one tree for each, in the pool that the consensus graph fills.
"""

from functools import partial

from csd.baselines.paper import Paper
from csd.baselines.prompt_lookup import PromptLookup
from csd.baselines.recycling import Recycling
from csd.baselines.rest import Rest
from csd.baselines.suffix import Suffix
from csd.graph.registry import register


def _shrinking(ops: object, device: object, tree: bool) -> Paper:
    # exact matches of fewer tokens, which commit more
    return Paper(tree=tree, edits=0, shrink=True)


def _suffix_tree(ops: object, device: object) -> Suffix:
    # with what made it best on recorded samples
    return Suffix(True, factor=4, offset=4, least=0)


register("prompt-lookup", lambda ops, device: PromptLookup())
register("paper-shrinking", partial(_shrinking, tree=False))
register("paper-shrinking-tree", partial(_shrinking, tree=True))
register("rest:PATH", lambda ops, device, path: Rest(path))
register("recycling", lambda ops, device: Recycling())
register("suffix", lambda ops, device: Suffix())
register("suffix-tree", _suffix_tree)
