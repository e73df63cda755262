"""Remedies of calls, of files and of results: each error with the call that raises it."""

from contextlib import closing
from functools import partial
from unittest.mock import patch

import pytest
import torch
import transformers
from helpers.models import checkpoints, scripted
from helpers.models.scripted import Letters, PrefixSum
from helpers.models.text_tokenizers import tokenizer_of

import csd
from csd.evaluate.evaluation import Results
from csd.evaluate.import_logs import traces_of
from csd.evaluate.vote import vote
from csd.research.training.run import Folder
from csd.research.verify.canonical import Canonical
from csd.utils import files as own_files

VOCAB = 400  # at least that of each tokenizer here
# whose programs need no compilation
engine = partial(scripted.engine, kernels="reference")


def draws(model, prompt=(1, 2), **options):
    out = csd.generate(model, list(prompt), **dict(max_new_tokens=2) | options)
    assert len(out.tokens[0]) >= 1
    return out


def with_tokenizer(prompt=(1, 2), other=None, tokenizer=None, **options):
    """A call that needs a tokenizer; other: the options that need none."""
    bare = engine(PrefixSum(vocab=VOCAB if tokenizer else 32))

    def remedy():
        draws(bare, prompt, tokenizer=tokenizer or Letters(), **options)
        if other:
            draws(bare, prompt, **other)

    return lambda: draws(bare, prompt, **options), remedy


def grammar():
    pytest.importorskip("llguidance")
    return with_tokenizer(regex="[a-z ]+", tokenizer=tokenizer_of("byte level"))


def options(wrong, *right, **made):
    model = engine(PrefixSum(**made), Letters())
    return lambda: draws(model, **wrong), lambda: [draws(model, **one) for one in right]


class Pairs(Letters):
    """A token has two characters, so that a word joins with a character before it."""

    def __call__(self, text, add_special_tokens=True):
        return {
            "input_ids": [sum(map(ord, text[i : i + 2])) % VOCAB for i in range(0, len(text), 2)]
        }

    def decode(self, tokens, skip_special_tokens=True):
        return "".join(chr(0x4E00 + token) for token in tokens)


def joined_bad_word():
    model = engine(PrefixSum(vocab=VOCAB))

    def call(word):
        draws(model, bad_words=[word], tokenizer=Pairs())

    return lambda: call("ab"), lambda: call(Pairs()("ab")["input_ids"])


def unsupported_config():
    model = checkpoints.build("llama")
    model.generation_config.num_beams = 4

    def call():
        draws(csd.Engine(model, kernels="reference"))

    def remedy():
        model.generation_config.num_beams = None
        call()

    return call, remedy


def other_config():
    model = checkpoints.build("llama")
    greedy = transformers.GenerationConfig(do_sample=True, top_k=1)

    def call(**options):
        made = csd.Engine(model, kernels="reference")
        return draws(made, ignore_eos=True, **options).tokens

    def remedy():
        single = call(top_k=1)
        model.generation_config = greedy
        assert call() == single

    return lambda: call(generation_config=greedy), remedy


def too_much_memory():
    free = 300_000
    large = (
        dict(length=3500),
        dict(prompt=3500),
        dict(prompt=1000, prefill_chunk=4096),
        dict(memory=0.3),
    )

    def call(prompt=300, length=100, prefill_chunk=512, memory=1.0):
        model = engine(PrefixSum(), memory=memory, prefill_chunk=prefill_chunk)
        with patch("csd.engine.resources.caches.free_bytes", lambda device: free):
            draws(model, [1] * prompt, max_new_tokens=length)

    def remedy():
        for one in large:
            with pytest.raises(MemoryError):
                call(**one)
        # each of them is lower or shorter, and the memory is raised
        call()

    return lambda: call(**large[0]), remedy


def report(folder):
    model, path = engine(PrefixSum()), folder / "report.html"

    def remedy():
        draws(model, tokenizer=Letters()).report(path)
        assert path.stat().st_size

    return lambda: draws(model).report(path), remedy


def joined_log():
    tokenizer = tokenizer_of("metaspace")
    row = dict(prompt="The bri", completions=["dge is old"])
    ids = tokenizer("dge is old", add_special_tokens=False)["input_ids"]
    right = row | dict(completions=[dict(token_ids=ids)])

    def read(row):
        (trace,) = traces_of([(1, row)], tokenizer)
        return trace

    def remedy():
        assert read(right).samples[0][: len(ids)] == ids

    return lambda: read(row), remedy


def score():
    model = engine(PrefixSum())

    def call(**options):
        return csd.score(model, [1, 2], ["ab"], **options)

    def remedy():
        assert call(tokenizer=Letters())[0].tokens == [0, 1]

    return call, remedy


def decision():
    model = engine(PrefixSum(), Letters())
    out = draws(model, num_samples=3)

    def remedy():
        assert vote(out).answer is None and not vote(out).tied
        draws(model, until=csd.Vote())

    return lambda: bool(vote(out)), remedy


def without_text():
    model = engine(PrefixSum())
    return (
        lambda: vote(draws(model), limited=True),
        lambda: vote(draws(model, tokenizer=Letters()), limited=True),
    )


def other_prior():
    one, other = tokenizer_of("byte level"), tokenizer_of("word piece")
    model = engine(PrefixSum(vocab=VOCAB))

    def call(tokenizer):
        prior = csd.Prior(contexts=1024, learn=True)
        draws(model, prior=prior, tokenizer=tokenizer)
        draws(model, prior=prior, tokenizer=one)

    return lambda: call(other), lambda: call(one)


def results(folder):
    path = folder / "results.jsonl"

    def call(name, **settings):
        results = Results(folder / name, settings)
        results.close()

    def foreign():
        path.write_text('{"prompt": "mine"}\n')
        call(path.name)

    def remedy():
        call("other.jsonl", seed=1)
        path.unlink()
        call(path.name)

    return foreign, remedy


def training(folder):
    def state(name, **settings):
        with closing(Folder(folder / name)) as run:
            state = run.state(settings)
            run.save(dict(settings=settings))
            return state

    def changed():
        state("head", seed=0)
        return state("head", seed=1)

    def remedy():
        assert state("other", seed=1) is None
        (folder / "head" / "training.pt").unlink()
        assert state("head", seed=1) is None

    return changed, remedy


def of_another_user(folder):
    """The folder's owner is replaced where its status is read."""
    path = folder / "csd"
    path.mkdir(mode=0o700)
    real, inode = own_files.os.stat, path.stat().st_ino

    def of_another(path, **options):
        status = real(path, **options)
        strange = status.st_ino == inode
        return type(status)([4321 if i == 4 and strange else x for i, x in enumerate(status)])

    def call():
        with patch.object(own_files.os, "stat", of_another):
            own_files.own_folder(path)

    def remedy():
        # the file system may give a new folder the number of the removed one
        path.rename(folder / "removed")
        call()

    return call, remedy


def canonical():
    q = torch.full((1, 300), 1 / 300)

    def call(alphabet):
        Canonical(tokens=None, alphabet=alphabet).choose(q, q, q)

    return lambda: call(None), lambda: call(4)


# words of the message -> the call that raises it, and the calls that carry out its remedy
EXECUTED = {
    "stop strings need a tokenizer: pass tokenizer= or stop_token_ids": lambda folder: (
        with_tokenizer(stop="a", other=dict(stop_token_ids=[0]))
    ),
    ") needs a tokenizer, got None: pass tokenizer=": lambda folder: with_tokenizer(
        until=csd.Vote()
    ),
    " needs a tokenizer: pass tokenizer=": lambda folder: grammar(),
    " given as strings need a tokenizer: pass tokenizer= or token ids": lambda folder: (
        with_tokenizer(bad_words=["ab"], other=dict(bad_words=[[0, 1]]))
    ),
    " is text, but there is no tokenizer: pass tokenizer=": lambda folder: with_tokenizer(
        history=["ab"]
    ),
    "bad_words must be strings that the tokenizer separates": lambda folder: joined_bad_word(),
    ": write [[": lambda folder: options(dict(bad_words=[5]), dict(bad_words=[[5]])),
    "which csd does not implement; set model.generation_config.": (
        lambda folder: unsupported_config()
    ),
    "the model's generation config applies: set model.generation_config, or": (
        lambda folder: other_config()
    ),
    "pass its fields as arguments, such as temperature and top_p": lambda folder: options(
        dict(sampling_params=dict(temperature=0.5)), dict(temperature=0.5, top_p=0.9)
    ),
    ": shorten it, or pass truncate_prompt": lambda folder: options(
        dict(prompt=[1] * 64, max_new_tokens=None),
        dict(prompt=[1] * 60, max_new_tokens=None),
        dict(prompt=[1] * 64, max_new_tokens=None, truncate_prompt=20),
        context=64,
    ),
    ": pass thinking_tags=('<think>', '</think>')": lambda folder: options(
        dict(max_thinking_tokens=2, tokenizer=tokenizer_of("byte level")),
        dict(
            max_thinking_tokens=2,
            tokenizer=tokenizer_of("byte level"),
            thinking_tags=("<think>", "</think>"),
        ),
        vocab=VOCAB,
    ),
    "lower max_new_tokens, shorten the prompt, lower the engine's": lambda folder: (
        too_much_memory()
    ),
    "a report needs the samples' tokenizer: call generate with tokenizer=": report,
    "completions that the tokenizer separates from the prompt": lambda folder: joined_log(),
    "completions that are strings need a tokenizer: pass tokenizer=": lambda folder: score(),
    "neither true nor false: read .answer, or .tied": lambda folder: decision(),
    " has no text: call generate with tokenizer=": lambda folder: without_text(),
    "must be a prior of the same tokenizer": lambda folder: other_prior(),
    "; choose another -o": results,
    "; choose another folder, or remove it": training,
    ": remove it": of_another_user,
    ": set a smaller alphabet": lambda folder: canonical(),
}
