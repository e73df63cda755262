"""The source paper's drafter: which matches count, and what is drafted from them."""

import random

import numpy as np
import pytest

from csd.graph.host_tree import HostTree
from csd.graph.registry import make_drafter
from csd.kernels.draft.paper.suffix_match import match_ends
from csd.kernels.ops import reference
from csd.research.baselines.multi_sample_paper import Paper

pytestmark = pytest.mark.quick

OWN = [50, 51, 52, 53]


def drafted(own, others, depth=1, prompt=(1, 2), probability=0.5, **options):
    """Drafts for sample 0, whose text is `own`; others: its siblings' texts."""
    drafter = Paper(**{"tree": True, "k": 2, "shrink": True, "edits": 0} | options)
    group = drafter.open(list(prompt))
    for sample, tokens in enumerate([own, *others]):
        drafter.extend(group, sample, tokens, [probability] * len(tokens))
    tree = HostTree(8, depth)
    drafter.draft(group, 0, tree)
    return tree.token


def test_the_papers_drafter_can_be_made_stricter():
    own, siblings = [5, 6], [[5, 6, 10], [5, 6, 10], [5, 6, 10], [5, 6, 11]]
    # weights .5 P + .5 Freq: .625 of token 10, .375 of token 11
    assert drafted(own, siblings) == [10, 11]
    assert drafted(own, siblings, least=0.4) == [10]
    assert drafted(own, siblings, least=0.7) == []
    # a query that nobody else ends with is shortened, or finds nothing
    assert drafted(own, [[4, 6, 10]]) == [10]
    assert drafted(own, [[4, 6, 10]], shrink=False) == []
    # a pool of the first siblings only
    assert drafted(own, siblings, siblings=3) == [10]
    assert drafted(own, siblings, siblings=0) == []


@pytest.mark.parametrize("edits", [0, 1, 2])
def test_siblings_at_the_same_place_do_not_repeat_the_last_token(edits):
    """It ends as the sample does: nothing follows there, whatever edits are allowed."""
    siblings = [OWN, [9, 9, 52, 53, 60, 61]]
    found = drafted(OWN, siblings, depth=2, tree=False, k=4, shrink=True, edits=edits)
    assert found == [60, 61]
    # with k fixed only the window 9 9 52 53 is near, at two edits
    found = drafted(OWN, siblings, depth=2, tree=False, k=4, shrink=False, edits=edits)
    assert found == ([60, 61] if edits == 2 else [])


def test_one_substituted_match_has_one_end():
    text = np.array([7, 7, 50, 51, 99, 53, 60, 61])
    assert match_ends(text, OWN, 0).nonzero()[0].tolist() == []
    assert match_ends(text, OWN, 1).nonzero()[0].tolist() == [5]
    # also where the last token is the one that differs
    text = np.array([7, 7, 50, 51, 52, 99, 60, 61])
    assert match_ends(text, OWN, 1).nonzero()[0].tolist() == [5]


def test_windows_do_not_reach_over_gaps():
    text = np.array([50, 51, -1, 52, 53, 7, 50, 51, 52, 53])
    assert match_ends(text, OWN, 2).nonzero()[0].tolist() == [9]
    assert not match_ends(np.array([52, 53]), OWN, 3).any()


def distance(a, b):
    """Edit distance, by the whole table."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        new = [i]
        for j, y in enumerate(b, 1):
            new.append(min(row[j - 1] + (x != y), row[j] + 1, new[-1] + 1))
        row = new
    return row[-1]


@pytest.mark.parametrize("k", [1, 2, 4, 6])
@pytest.mark.parametrize("edits", [0, 1, 2, 3])
def test_a_banded_table_finds_the_windows_of_the_whole_one(k, edits):
    rng = random.Random(k)
    for _ in range(30):
        text = [rng.randrange(4) for _ in range(24)]
        query = [rng.randrange(4) for _ in range(k)]
        expected = []
        for end in range(len(text)):
            window = text[end - k + 1 : end + 1] if end >= k - 1 else []
            # the last tokens are aligned with each other
            near = window and (
                distance(query[:-1], window[:-1]) + (query[-1] != window[-1]) <= edits
            )
            expected.append(bool(near))
        assert match_ends(np.array(text), query, edits).tolist() == expected


def test_exact_and_inexact_matches_are_candidates_together():
    """The paper's set: two inexact matches outvote an exact one; ours takes the strictest only."""
    siblings = [[*OWN, 60], [50, 99, 52, 53, 70], [50, 98, 52, 53, 70]]
    assert drafted(OWN, siblings, tree=False, k=4, edits=1, shrink=False) == [70]
    assert drafted(OWN, siblings, tree=False, k=4, edits=1, shrink=True) == [60]
    assert drafted(OWN, siblings, tree=False, k=4, edits=0, shrink=False) == [60]


def test_names_are_the_literal_method_and_ours():
    for name, tree in (("paper", False), ("paper-tree", True)):
        config = make_drafter(name, reference(), "cpu").config
        assert (config.tree, config.k, config.edits, config.alpha) == (tree, 4, 1, 0.5)
    for name, tree in (("paper-shrinking", False), ("paper-shrinking-tree", True)):
        paper = make_drafter(name, reference(), "cpu")
        assert (paper.tree, paper.k, paper.edits, paper.shrink) == (tree, 4, 0, True)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_equal_tokens_of_a_layer_are_one_node(alpha):
    """Freq counts candidates through the node, whatever they said before it."""
    siblings = [[*OWN, 60, 80, 1], [*OWN, 60, 80, 2], [*OWN, 61, 80, 2], [*OWN, 60, 81, 3]]
    chain = drafted(OWN, siblings, depth=3, tree=False, k=4, shrink=False, alpha=alpha)
    # 80 is followed by 2 in two texts of three, of which one took another way there
    assert chain == ([60, 80, 2] if alpha < 1 else [60, 80, 1])
