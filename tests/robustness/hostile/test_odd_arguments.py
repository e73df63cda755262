"""Every argument with values of every kind: each is served, or an error names the argument."""

import numpy as np
import pytest
import torch
from helpers.models.scripted import Letters, PrefixSum, engine
from helpers.runs.odd_values import ODD, shown
from helpers.targets import few
from transformers import GenerationConfig

import csd
from csd.engine.options import GenerateOptions
from csd.engine.options.params import SamplingParams
from csd.engine.requests.request import Request
from csd.models.demo import toy
from csd.state.filters import FILTERS
from csd.utils.arguments import options_of

USUAL = dict(max_new_tokens=3, seed=0, num_samples=2)
# of each prompt as many objects are made, and a file at each path
LEFT_OUT = {
    "num_samples": lambda v: isinstance(v, int) and 99 < v <= 1 << 20,
    "record": lambda v: isinstance(v, str),
}


def check(name, run, values=ODD, also=()):
    """`run` of each value ends, or its error has one of the names; returns what is served."""
    wrong, served = [], []
    for value in values:
        try:
            run(value)
            served.append(value)
        except (TypeError, ValueError, MemoryError) as error:
            if not any(n in str(error) for n in (name, *also)):
                wrong.append(f"{shown(value)}: without a name: {error}")
        except OSError as error:
            # of paths
            if name not in ("record", "path", "prior"):
                wrong.append(f"{shown(value)}: {error!r}")
        except Exception as error:
            wrong.append(f"{shown(value)}: {error!r:.200}")
    assert not wrong, "\n".join([name, *wrong])
    return served


@pytest.fixture(scope="module")
def small():
    return engine(PrefixSum(sharpness=4.0, context=64), Letters(), max_slots=4)


@few(12)
@pytest.mark.parametrize("name", options_of(GenerateOptions))
def test_generate(name, small, capsys):
    left_out = LEFT_OUT.get(name, lambda value: False)
    values = [value for value in ODD if not left_out(value)]
    served = check(name, lambda value: csd.generate(small, [1, 2], **USUAL | {name: value}), values)
    assert len(served) < len(values) / 2
    assert len(csd.generate(small, [1, 2], **USUAL).tokens[1]) == 3


@pytest.mark.parametrize("name", ["device", "dtype", "quantization", "revision"])
def test_generate_with_a_module(name):
    model = toy()[0]
    check(name, lambda value: csd.generate(model, [1, 2], **USUAL | {name: value}))


@pytest.mark.parametrize("name", ["device", "dtype", "quantization", "revision"])
def test_generate_with_a_folder(name, toy_folder):
    values = [v for v in ODD if not isinstance(v, torch.dtype | str) and v is not None]
    assert not check(name, lambda v: csd.generate(toy_folder, [1, 2], **USUAL | {name: v}), values)
    for value in ("", "gpu", "meta", "cpu:99999999999999999999", "cuda:99"):
        with pytest.raises(ValueError, match=r"device .* cannot be used here"):
            csd.generate(toy_folder, [1, 2], device=value, **USUAL)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "top_k"])
def test_numbers_of_numpy_are_those_of_python(name, small):
    value = 3 if name == "top_k" else 0.5
    options = USUAL | dict(max_new_tokens=20)
    expected = csd.generate(small, [1, 2], **options | {name: value})
    for same in (np.float32(value), np.float64(value)) if value < 1 else (np.int32(3), np.uint8(3)):
        assert csd.generate(small, [1, 2], **options | {name: same}).tokens == expected.tokens


@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
def test_seeds_of_64_bits(seed, small):
    assert csd.generate(small, [1, 2], **USUAL | dict(seed=seed)).seed == seed
    with pytest.raises(ValueError, match="seed must be at"):
        csd.generate(small, [1, 2], **USUAL | dict(seed=seed + (1 if seed > 0 else -1)))


def test_indices_of_samples_end_at_32_bits(small):
    last = 2**31 - 1
    out = csd.generate(small, [1, 2], first_sample=last - 1, **USUAL)
    assert [sample.index for sample in out] == [last - 1, last]
    for prompt in ([1, 2], [[3], [1, 2]]):
        with pytest.raises(ValueError, match="first_sample must leave room"):
            csd.generate(small, prompt, first_sample=last, **USUAL)
    with pytest.raises(ValueError, match=r"first_sample must leave room .* of prompt 1"):
        csd.generate(small, [[1], [1]], first_sample=last - 2, **USUAL)
    with pytest.raises(ValueError, match="num_samples must be at most 1048576, got 1000000000"):
        csd.generate(small, [1, 2], num_samples=10**9)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def drawing(request):
    return csd.Engine(toy()[0].to(request.param), exact=False)


@few(5)
@pytest.mark.parametrize("temperature", [1e-15, 1e-8, 1e15])
@pytest.mark.parametrize("penalty", [1e-15, 1.0, 1e15])
def test_the_steepest_and_flattest_laws_are_drawn(temperature, penalty, drawing):
    made, options = (
        drawing,
        dict(
            temperature=temperature,
            repetition_penalty=penalty,
            num_samples=3,
            seed=0,
            budget=6,
            max_new_tokens=6,
            min_new_tokens=3,
        ),
    )
    out = made.generate([1, 2, 3], **options)
    assert out.tokens == made.generate([1, 2, 3], speculate=False, **options).tokens
    assert all(np.isfinite(sample.logprobs).all() for sample in out)
    if temperature < 1e-9 and penalty == 1:
        greedy = made.generate([1, 2, 3], **options | dict(temperature=0))
        assert out.tokens == greedy.tokens


@pytest.mark.parametrize("name", [*FILTERS, "eos_token_id", "stop_strings"])
def test_a_generation_config_s_values_are_named_as_its_own(name):
    config = GenerationConfig()
    made = engine(PrefixSum(context=64), Letters(), generation_config=config)

    def run(value):
        setattr(config, name, value)
        made.generate([1, 2], **USUAL)

    check(f"{name} of the model's generation config", run)
    if name == "top_k":
        with pytest.raises(ValueError, match="top_k of the model's generation config must be at l"):
            run(-1)


ENGINE = (
    "max_slots",
    "memory",
    "prefill_chunk",
    "device",
    "dtype",
    "revision",
    "drafter",
    "kernels",
    "static",
    "lag",
    "together",
    "self_check",
    "exact",
)


@few(3)
@pytest.mark.parametrize("name", ENGINE)
def test_engine(name):
    def run(value):
        made = engine(PrefixSum(context=64), **{name: value})
        made.generate([1, 2], max_new_tokens=2, num_samples=2, seed=0)

    served = check(name, run)
    assert len(served) < len(ODD) / 2


def test_the_tokenizer_of_an_engine():
    model = toy()[0]
    served = check("tokenizer", lambda value: csd.Engine(model, tokenizer=value))
    assert served == [None]


@pytest.mark.parametrize("name", ["extract", "confidence"])
def test_vote(name, small):
    until = lambda value: csd.Vote(**{name: value})  # noqa: E731
    served = check(name, until, [v for v in ODD if not callable(v)])
    for value in served:
        csd.generate(small, [1, 2], until=until(value), **USUAL)


@pytest.mark.parametrize("name", ["samples", "tokens", "epochs", "top"])
def test_history(name, small):
    def run(value):
        history = csd.History(**{name: value})
        for _ in range(3):
            csd.generate(small, [1, 2], history=history, **USUAL)

    assert check(name, run)


def test_the_path_of_a_history(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check("path", lambda value: csd.History(path=value).close())


@pytest.mark.parametrize("name", ["k", "depth", "temperature", "graph", "layers"])
def test_draft_model(name):
    model = toy()[0]

    def run(value):
        drafter = csd.DraftModel(model, **{name: value})
        csd.generate(model, [1, 2], drafter=drafter, **USUAL)

    served = check(name, run)
    assert served and len(served) < len(ODD) / 2
    csd.release()


@pytest.mark.parametrize("name", ["k", "depth", "temperature", "graph"])
def test_eagle(name):
    check(name, lambda value: csd.Eagle("none", **{name: value}))


def test_figures():
    sample = csd.Sample(0, "the answer is 7", [1], [-1.0], [], "stop")
    check("samples", lambda value: csd.vote(value), also=["sample"])
    check("samples", lambda value: csd.best_of(value), also=["sample"])
    no_functions = [v for v in ODD if not callable(v)]
    check("weight", lambda value: csd.vote([sample], weight=value), no_functions)
    check("score", lambda value: csd.best_of([sample], value), no_functions)
    check("extract", lambda value: csd.vote([sample], value), no_functions)
    check("k", lambda value: csd.pass_at_k([True, False], value))
    check("correct", lambda value: csd.pass_at_k(value, 1), also=["k must lie between"])


@pytest.mark.parametrize(
    "prompt",
    [torch.zeros(n, m).long() for n, m in ((0, 0), (0, 5), (2, 0))],
    ids=lambda x: str(tuple(x.shape)),
)
def test_tensors_without_a_prompt(prompt, small):
    with pytest.raises(ValueError, match="prompt"):
        csd.generate(small, prompt, attention_mask=torch.ones_like(prompt), **USUAL)


def test_prompts(small):
    # others are texts that this tokenizer has no tokens for
    values = [v for v in ODD if not (isinstance(v, str) and {*v} - {*Letters.alphabet})]
    check("prompt", lambda value: csd.generate(small, value, **USUAL), values)
    check("prompt", lambda value: csd.generate(small, [[1], value], **USUAL), values)
    check("prompt", lambda value: csd.generate(small, [1, value], **USUAL))
    check(
        "model",
        lambda value: csd.generate(value, [1], **USUAL),
        [v for v in ODD if not isinstance(v, str)],
    )


def test_a_request_counts_its_indices():
    with pytest.raises(ValueError, match="first_sample"):
        Request.of(0, [1], SamplingParams(), range(2**31, 2**31 + 1), 0)


def test_token_ids_of_numpy(small):
    expected = csd.generate(small, [1, 2], **USUAL).tokens
    assert csd.generate(small, [*np.array([1, 2])], **USUAL).tokens == expected
    assert csd.generate(small, [1, 2], stop_token_ids=np.array([31]), **USUAL).prompt_ids == [1, 2]
