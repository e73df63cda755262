"""SuffixDecoding of the package arctic-inference, for comparison."""

from typing import Any

from csd.graph.host_tree import HostTree
from csd.research.baselines.host_drafter import HostDrafter
from csd.state.pool import OWN, SIBLING


def _cache_class() -> Any:
    try:
        from arctic_inference.suffix_decoding import SuffixDecodingCache
    except ImportError as error:
        raise ImportError(
            "drafter 'suffix' needs the package arctic-inference (pip install arctic-inference)"
        ) from error
    return SuffixDecodingCache


class Suffix(HostDrafter):
    """Drafts with the package's cache.

    tree, factor, offset, least: use_tree_spec, max_spec_factor, max_spec_offset, min_token_prob.
    """

    def __init__(
        self, tree: bool = False, factor: float = 1.0, offset: float = 0.0, least: float = 0.1
    ):
        super().__init__()
        self._cache_class = _cache_class()
        self.tree, self.factor, self.offset, self.least = tree, factor, offset, least

    def open(self, prompt: list[int]) -> tuple[list[int], Any, dict[int, list[int]]]:
        return prompt, self._cache_class(), {}

    def _text(self, group: Any, sample: int) -> list[int]:
        prompt, cache, texts = group
        if sample not in texts:
            cache.start_request(sample, prompt)
            texts[sample] = list(prompt)
        return texts[sample]

    def extend(self, group: Any, sample: int, tokens: list[int], probs: list[float]) -> None:
        self._text(group, sample).extend(tokens)
        group[1].add_active_response(sample, tokens)

    def draft(self, group: Any, sample: int, tree: HostTree) -> None:
        text, cache = self._text(group, sample), group[1]
        draft = cache.speculate(
            sample,
            text[-cache.max_tree_depth :],
            max_spec_tokens=tree.nodes,
            max_spec_factor=self.factor,
            max_spec_offset=self.offset,
            min_token_prob=self.least,
            use_tree_spec=self.tree,
        )
        node: list[int] = []
        for token, parent, chance in zip(draft.token_ids, draft.parents, draft.probs, strict=True):
            above = node[parent] if parent >= 0 else -1
            # a node whose parent did not fit does not either
            fits = parent < 0 or above >= 0
            source = SIBLING if len(group[2]) > 1 else OWN
            node.append(tree.add(above, token, chance, source) if fits else -1)
