"""Published drafters, for comparison; `drafter=` takes them by these names.

    prompt-lookup           the continuation of the latest match in the sample's own text
    suffix, suffix-tree     SuffixDecoding (arXiv 2411.04975)
    rest:PATH               REST (arXiv 2311.08252), over a datastore file
    recycling               token recycling (arXiv 2408.08696)
    paper-shrinking(-tree)  the source paper's (arXiv 2503.05330), with exact matches that shrink

They run on the host and take neither history nor `share`. Each drafts one tree per sample of a
prompt, in the same pool as the consensus graph.
"""

from functools import partial

from csd.graph.baselines.multi_sample_paper import Paper
from csd.graph.baselines.prompt_lookup import PromptLookup
from csd.graph.baselines.recycling import Recycling
from csd.graph.baselines.rest import Rest
from csd.graph.baselines.suffix import Suffix
from csd.graph.drafter_registry import register


def _shrinking(ops: object, device: object, tree: bool) -> Paper:
    # exact matches, also of fewer tokens: they commit more
    return Paper(tree=tree, edits=0, shrink=True)


def _suffix_tree(ops: object, device: object) -> Suffix:
    # with the settings that were best on recorded samples
    return Suffix(True, factor=4, offset=4, least=0)


register("prompt-lookup", lambda ops, device: PromptLookup())
register("paper-shrinking", partial(_shrinking, tree=False))
register("paper-shrinking-tree", partial(_shrinking, tree=True))
register("rest:PATH", lambda ops, device, path: Rest(path))
register("recycling", lambda ops, device: Recycling())
register("suffix", lambda ops, device: Suffix())
register("suffix-tree", _suffix_tree)
