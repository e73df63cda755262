"""Arguments that are not what a function takes: an error that names the argument."""

import os

import pytest
import torch
from helpers.models.scripted import Letters, PrefixSum, engine

import csd
from csd.engine.results.result import Sample
from csd.models.demo import toy

PROMPT = [1, 2, 3]


def sample(logprobs=(-1.0,), index=0):
    return Sample(index, "the answer is 7", [1] * len(logprobs), list(logprobs), [], "stop")


@pytest.fixture(scope="module")
def target():
    return engine(PrefixSum(sharpness=8.0), Letters(), max_slots=4)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        (PROMPT, dict(tokenizer=5), TypeError, "tokenizer must be a tokenizer of .*, got 5"),
        (PROMPT, dict(tokenizer=object()), TypeError, "tokenizer must be"),
        (
            torch.ones(2, 3).long(),
            dict(attention_mask=[[1] * 3] * 2),
            TypeError,
            "attention_mask must be a 2-D tensor, got a list",
        ),
        (torch.ones(2, 3), dict(attention_mask=torch.ones(2, 3)), TypeError, "got dtype torch.flo"),
        (
            PROMPT,
            dict(until=lambda prefix: torch.ones(2)),
            TypeError,
            "until must return True or False, got a Tensor",
        ),
        (PROMPT, dict(record="/no/such/folder/t.jsonl"), OSError, "record must be a file in a wri"),
        (PROMPT, dict(record="/"), OSError, "record must be a file"),
        (PROMPT, dict(record=5), TypeError, "record must be a path, got 5"),
        ("\ud800", {}, ValueError, "prompt must be a string"),
    ],
)
def test_generate(target, prompt, options, error, message):
    options = dict(max_new_tokens=4, seed=0, num_samples=2) | options
    with pytest.raises(error, match=message):
        csd.generate(target, prompt, **options)
    # and the engine goes on
    assert len(csd.generate(target, PROMPT, max_new_tokens=4, seed=0).tokens[0]) == 4


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"content": "a"}], r"prompt must have '\[0\].role'"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], r"a string as '\[1\].content'"),
        ([{"role": "user", "content": 5}], r"\[0\].content', got 5"),
        # its template joins texts
        ([{"role": "user", "content": ["a"]}], "prompt does not fit the chat template"),
    ],
)
def test_messages(toy_folder, messages, message):
    with pytest.raises(ValueError, match=message):
        csd.generate(toy_folder, messages, max_new_tokens=2)
    csd.release()


def test_a_tokenizer_that_panics(target):
    class PanicException(BaseException):
        """Rust's exception in Python, which is no Exception."""

    class Panics(Letters):
        def __call__(self, text, add_special_tokens=True):
            raise PanicException("out of range")

    with pytest.raises(ValueError, match="prompt makes the tokenizer panic: out of range"):
        csd.generate(target, "ab", tokenizer=Panics(), max_new_tokens=2)


def test_apply_kernels(target):
    for model in (None, target):
        for function in (csd.apply_kernels, csd.remove_kernels):
            with pytest.raises(TypeError, match="model must be a model of transformers, got"):
                function(model)


def test_samples_without_tokens():
    with pytest.raises(ValueError, match="sample 0 has no tokens"):
        csd.best_of([sample(())])
    with pytest.raises(ValueError, match="sample 0 has no tokens"):
        csd.vote([sample(())], weight="probability")


@pytest.mark.parametrize("weight", [float("inf"), float("nan"), -1, 10**400])
def test_weights_that_are_none(weight):
    with pytest.raises(ValueError, match="weight must return a finite number of at least 0"):
        csd.vote([sample()], weight=lambda s: weight)


def test_invalid_vote_weights_are_refused():
    for logprob in (800.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="sample 0 must have a finite mean log-probability"):
            csd.vote([sample([logprob])], weight="probability")
    with pytest.raises(TypeError, match="weight must return a number, got 'a' for sample 0"):
        csd.vote([sample()], weight=lambda s: "a")
    with pytest.raises(TypeError, match="score must return a number"):
        csd.best_of([sample()], score=lambda s: torch.ones(2))


def test_a_tree_cache_counts_before_it_takes():
    past = [(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8))]
    for samples, new in (([10**12], 4), ([1], 10**15)):
        with pytest.raises(MemoryError, match="are free: use fewer samples or tokens"):
            csd.TreeCache([past], samples, new)
    for samples, new in ((["a"], 4), ([1], 2.5), ([True], 4)):
        with pytest.raises(TypeError, match="must be a whole number"):
            csd.TreeCache([past], samples, new)


def test_triton_on_a_cpu_without_the_interpreter(monkeypatch):
    from triton.runtime.jit import JITFunction

    if "CSD_PTX" in os.environ:
        pytest.skip("CSD_PTX runs what is compiled on the CPU")
    # as it is where triton is imported without TRITON_INTERPRET
    from csd.kernels.common import triton as kernels

    monkeypatch.setattr(kernels, "philox_word", JITFunction(kernels.philox_word.fn))
    with pytest.raises(ValueError, match="must be 'reference' or 'cpu' on a CPU, got 'triton'"):
        csd.Engine(toy()[0], kernels="triton")
