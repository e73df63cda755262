"""Every drafter in the engine: the samples stay what they are."""

import json

import pytest
from helpers.models.scripted import PrefixSum, counting, engine
from helpers.targets import few

import csd
from csd.research.baselines.prompt_lookup import PromptLookup

pytestmark = pytest.mark.quick

NAMES = (
    "prompt-lookup",
    "paper",
    "paper-tree",
    "paper-shrinking",
    "paper-shrinking-tree",
    "recycling",
)


def prompt():
    return [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1]


@pytest.fixture(scope="module")
def plain():
    model = PrefixSum(sharpness=8.0)
    options = dict(num_samples=5, max_new_tokens=40, seed=3)
    asked = [prompt(), [7, 7]]
    expected = [r.tokens for r in csd.generate(engine(model), asked, speculate=False, **options)]
    return model, asked, options, expected


@few(4)
@pytest.mark.parametrize("budget", [4, 16, 64])
@pytest.mark.parametrize("name", NAMES)
def test_a_drafter_changes_no_sample(plain, name, budget):
    model, asked, options, expected = plain
    found = csd.generate(engine(model, max_slots=3), asked, drafter=name, budget=budget, **options)
    assert [r.tokens for r in found] == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_drafter_is_accepted_where_text_repeats(name):
    """A cycle: whoever looks at what was said drafts it."""
    model = counting(6)
    out = csd.generate(
        engine(model),
        [0, 1, 2, 3, 4, 5, 0],
        num_samples=2,
        max_new_tokens=48,
        drafter=name,
        budget=16,
    )
    assert out.tokens == [[(i + 1) % 6 for i in range(48)]] * 2
    assert out.stats.tokens_per_step > 1.3


def test_rest_drafts_from_a_datastore(tmp_path):
    path = tmp_path / "store.jsonl"
    path.write_text(json.dumps({"samples": [[i % 6 for i in range(60)]]}) + "\n")
    model = counting(6)
    out = csd.generate(engine(model), [0], max_new_tokens=24, drafter=f"rest:{path}", budget=16)
    assert out.tokens == [[(i + 1) % 6 for i in range(24)]]
    assert out.stats.tokens_per_step > 2


def test_measuring_the_cost_leaves_the_drafter_alone():
    """One drafter for all calls: the second call's prompt goes where the first one's went."""
    made = []

    class Watched(PromptLookup):
        def __init__(self):
            super().__init__()
            made.append([])
            self.prompts = made[-1]

        def open(self, prompt):
            self.prompts.append(prompt)
            return super().open(prompt)

    def make(ops, device):
        return Watched()

    e = engine(PrefixSum(), static=False)
    for asked in ([1, 2], [3]):
        csd.generate(e, asked, max_new_tokens=3, drafter=make, budget="auto")
    assert made == [[[1, 2], [3]]]


def test_suffix_needs_its_package():
    try:
        import arctic_inference  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="arctic"):
            csd.generate(engine(PrefixSum()), [1], max_new_tokens=2, drafter="suffix")
