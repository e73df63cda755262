"""`csd.logprobs`: the bits of sampling, and gradients."""

import itertools

import pytest
import torch
from helpers.models.families import build
from helpers.oracles.plain_gradients import chances, gradients, weighted, within_plain
from helpers.targets import few

import csd

# the families of the fused decoder, by what differs in their forward
FUSED = (
    "llama",
    "qwen2",
    "qwen3",
    "smollm3",
    "granite",
    "qwen3_moe",
    "phi3",
    "phi3 partial",
    "mistral",
    "qwen2 window",
    "olmo2",
    "olmo3 yarn",
    "gemma2",
    "gemma3_text",
)
PROMPT = [(7 * i + 3) % 61 for i in range(20)]
OTHER = [5, 9, 5, 5]
MODELS = 6  # with different weights
SAMPLED = dict(num_samples=3, seed=4, max_new_tokens=30, end_token_ids=[], budget=12)
ASKED = {
    "plain": dict(),
    "filters": dict(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01),
    "greedy": dict(temperature=0),
    "penalty": dict(temperature=0.9, repetition_penalty=1.3, top_p=0.95),
    "typical": dict(temperature=1.2, typical_p=0.7),
    "constraints": dict(
        temperature=0.8,
        suppress_tokens=[3],
        no_repeat_ngram_size=2,
        presence_penalty=0.5,
        frequency_penalty=0.1,
        logit_bias={9: 1.0},
        bad_words=[[4, 7], [11]],
    ),
}


# norms have float32 statistics in every dtype, whose rounding passes through three layers
NORMS = 64 * torch.finfo(torch.float32).eps


def listed(values):
    return [x.tolist() for x in values]


@few(4)
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_values_have_the_bits_of_an_exact_engines_samples(name, dtype, asked):
    model = build(name, dtype)
    with csd.Engine(model, exact=True, prefill_chunk=8) as engine:
        drawn = engine.generate([PROMPT, OTHER], **SAMPLED, **asked)
        out = csd.logprobs(engine, [PROMPT, OTHER], [r.tokens for r in drawn], **asked)
    assert out.exact and out.why is None
    assert [listed(own) for own in out.raw_logprobs] == [r.raw_logprobs for r in drawn]
    assert [listed(own) for own in out.logprobs] == [r.logprobs for r in drawn]


@few(3)
@pytest.mark.parametrize("length", [64, 65, 66, 75, 129, 140])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3_text", "olmo3 yarn", *FUSED[:1]])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(name, dtype, length):
    """Prompts around pages and windows, read in chunks of every kind."""
    model = build(name, dtype, max_position_embeddings=256)
    prompt = [(7 * i + 3) % 61 for i in range(length)]
    options = SAMPLED | dict(num_samples=2, max_new_tokens=12)
    drawn = []
    for chunk in (512, 100, 64, 7):
        with csd.Engine(model, exact=True, prefill_chunk=chunk) as engine:
            drawn.append(engine.generate(prompt, **options))
            for source in (model, engine):
                out = csd.logprobs(source, prompt, drawn[0].tokens)
                assert out.exact, out.why
                assert listed(out.logprobs) == drawn[0].logprobs
    assert all(x.tokens == drawn[0].tokens for x in drawn)
    assert all(x.logprobs == drawn[0].logprobs for x in drawn)


@pytest.mark.parametrize("values_of", [csd.logprobs, csd.score])
@pytest.mark.parametrize(
    "ends", [dict(), dict(end_token_ids=[4, 9]), dict(stop_token_ids=[7]), dict(ignore_eos=True)]
)
def test_min_new_tokens_bans_the_end_tokens_of_sampling(values_of, ends):
    model = build("llama", torch.float32)
    model.generation_config.eos_token_id = [*range(20, 32)]
    options = dict(min_new_tokens=8, **ends)
    with csd.Engine(model, exact=True) as engine:
        drawn = engine.generate(PROMPT, num_samples=4, seed=0, max_new_tokens=12, **options)
        out = values_of(engine, PROMPT, drawn.tokens, **options)
        assert [torch.as_tensor(x).tolist() for x in out.logprobs] == drawn.logprobs
        # shorter completions than the minimum, as a stop string makes them
        short = [tokens[:3] for tokens in drawn.tokens]
        out = values_of(engine, PROMPT, short, **options)
        assert [torch.as_tensor(x).tolist() for x in out.logprobs] == [
            x[:3] for x in drawn.logprobs
        ]


def test_an_engine_whose_samples_have_other_bits_is_named():
    # the kernels are interpreted
    model = build("llama", torch.float32, num_hidden_layers=1)
    with csd.Engine(model, exact=False) as engine:
        out = csd.logprobs(engine, PROMPT, [[1, 2]])
        assert not out.exact and "not exact" in out.why
    del engine
    with csd.Engine(model, exact=True, kernels="triton") as engine:
        out = csd.logprobs(model, PROMPT, [[1, 2]])
        assert not out.exact and "kernels='triton'" in out.why
        assert csd.logprobs(engine, PROMPT, [[1, 2]]).exact


@few(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_gradients_err_as_those_of_a_plain_forward_of_each_sample(name, dtype):
    model = build(name, dtype)
    drawn = csd.generate(model, PROMPT, **SAMPLED).tokens
    # a common prefix
    drawn += [drawn[0][:9] + drawn[1][:5]]

    within_plain(
        [build(name, dtype, seed) for seed in range(MODELS)],
        lambda m: csd.logprobs(m, PROMPT, drawn).raw_logprobs,
        lambda m: chances(m, PROMPT, drawn),
    )


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_gradients_of_filtered_values_and_entropies_in_float64(name):
    model = build(name)
    asked = dict(temperature=0.7, top_p=0.8, repetition_penalty=1.4, logit_bias={9: 1.0})
    drawn = csd.generate(model, PROMPT, **SAMPLED, **asked).tokens

    def by_formula():
        found = []
        for tokens in drawn:
            ids = PROMPT + tokens
            z = model(torch.tensor([ids])).logits[0, len(PROMPT) - 1 : -1]
            bias = torch.zeros(z.shape[1], dtype=z.dtype)
            bias[9] = 1
            seen = torch.stack(
                [
                    torch.zeros(z.shape[1], dtype=torch.bool).index_fill(
                        0, torch.tensor(ids[: len(PROMPT) + i]), True
                    )
                    for i in range(len(tokens))
                ]
            )
            x = z + bias
            x = torch.where(seen, torch.where(x < 0, x * 1.4, x / 1.4), x) / 0.7
            ascending, order = x.softmax(-1).sort(stable=True)
            cut = (ascending.cumsum(-1) <= 0.2).scatter(1, order, ascending.cumsum(-1) <= 0.2)
            kept = torch.zeros_like(cut).scatter(1, order, ascending.cumsum(-1) > 0.2)
            x = x.masked_fill(~kept, -torch.inf)
            chosen = torch.arange(len(tokens)), tokens
            log_p = z.log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            found.append(torch.stack([x.log_softmax(-1)[chosen], log_p[chosen], entropy]))
        return found

    out = csd.logprobs(model, PROMPT, drawn, entropy=True, **asked)
    values = [
        torch.stack(x) for x in zip(out.logprobs, out.raw_logprobs, out.entropies, strict=True)
    ]
    want = by_formula()
    for x, y in zip(values, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=NORMS)
    found, exact = gradients(model, weighted(values)), gradients(model, weighted(want))
    for part, grad in exact.items():
        assert (found[part] - grad).abs().max() <= NORMS * grad.abs().max(), part


@pytest.mark.parametrize(
    "rules",
    [
        dict(),
        dict(presence_penalty=0.5, frequency_penalty=0.1),
        dict(repetition_penalty=1.3, frequency_penalty=0.1, logit_bias={9: 1.0}),
        dict(suppress_tokens=[7], no_repeat_ngram_size=3),
    ],
    ids=str,
)
def test_gradients_are_finite_differences(rules):
    model = build("llama", num_hidden_layers=1)
    completions = [[3, 4, 5], [3, 4, 9, 4], [8]]

    def loss():
        return weighted(csd.logprobs(model, OTHER, completions, temperature=0.8, **rules).logprobs)

    def slope(weight, direction, step):
        with torch.no_grad():
            weight += step * direction
            more = float(loss())
            weight -= 2 * step * direction
            less = float(loss())
            weight += step * direction
        return (more - less) / (2 * step)

    found, size = gradients(model, loss()), abs(float(loss().detach()))
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        direction = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        step = 1e-3
        near, far = slope(weight, direction, step), slope(weight, direction, 2 * step)
        # the error of the nearer slope is a third of their difference; a norm's float32 statistics
        # round the loss
        limit = abs(near - far) + NORMS * size / step
        assert abs(float((found[name] * direction).sum()) - near) <= limit, name
        assert limit < 0.1 * found[name].norm()


@pytest.mark.parametrize("checkpoint", [False, True])
def test_two_runs_have_equal_bits_and_recomputed_layers_too(checkpoint):
    model = build("llama", torch.bfloat16)
    drawn = csd.generate(model, PROMPT, **SAMPLED).tokens
    runs = []
    for again in (False, checkpoint):
        out = csd.logprobs(model, PROMPT, drawn, checkpoint=again)
        runs.append((listed(out.logprobs), gradients(model, weighted(out.logprobs))))
    (values, found), (others, again) = runs
    assert values == others
    assert all(torch.equal(found[name], again[name]) for name in found)


def test_prompts_and_common_prefixes_are_computed_once():
    model = build("llama", torch.float32)
    completions = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2], [6], [1, 2, 3, 4], [1, 9, 3]]
    out = csd.logprobs(model, PROMPT, completions)
    # the trie of all but the last tokens: 1, 1 2, 1 2 3, 1 9
    assert out.rows == len(PROMPT) + 4
    assert out.unshared_rows == sum(len(PROMPT) + len(x) for x in completions)
    for tokens, value in zip(completions, out.logprobs, strict=True):
        alone = csd.logprobs(model, PROMPT, [tokens])
        assert torch.equal(alone.logprobs[0], value)
    # equal prompts of a batch are one
    twice = csd.logprobs(model, [PROMPT, PROMPT], [completions[:3], completions[3:]])
    assert twice.rows == out.rows
    assert listed(twice.logprobs[0] + twice.logprobs[1]) == listed(out.logprobs)


def test_padded_completions():
    model = build("llama", torch.float32)
    completions, prompts = [[1, 2, 3], [1, 5], [7, 7, 7, 7]], [PROMPT, OTHER, PROMPT]
    ids, mask = torch.zeros(2, 4, 5, dtype=torch.long)
    for i, tokens in enumerate(completions):
        ids[i, : len(tokens)] = torch.tensor(tokens)
        mask[i, : len(tokens)] = 1
    # a row without tokens, as of a completion that is left out
    out = csd.logprobs(model, [*prompts, OTHER], ids, mask=mask, entropy=True)
    want = csd.logprobs(model, prompts, [[x] for x in completions], entropy=True)
    for name in ("logprobs", "raw_logprobs", "entropies"):
        padded, lists = getattr(out, name), getattr(want, name)
        assert padded.shape == ids.shape
        assert not padded[mask == 0].any()
        for row, own, tokens in zip(padded, lists, completions, strict=False):
            assert torch.equal(row[: len(tokens)], own[0])
    one = csd.logprobs(model, PROMPT, ids[:1], mask=mask[:1])
    assert torch.equal(one.logprobs[0], out.logprobs[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "olmo"])  # fused, and by its module
def test_any_rows_of_a_batch_may_have_no_tokens(name):
    """Values and gradients are those of the other rows; without any, both are 0."""
    model, prompts = build(name, torch.float32), [PROMPT, OTHER, PROMPT]
    ids = torch.tensor([[1, 2, 3], [1, 5, 4], [1, 2, 7]])
    fields = ("logprobs", "raw_logprobs", "entropies")
    for has in itertools.product((False, True), repeat=3):
        mask = torch.tensor(has)[:, None].expand(3, 3).long()
        out = csd.logprobs(model, prompts, ids, mask=mask, entropy=True)
        found = [getattr(out, field) for field in fields]
        assert all(x.shape == ids.shape and x.dtype == torch.float32 for x in found)
        assert not any(x[mask == 0].any() for x in found)
        grads = gradients(model, weighted(found))
        if not any(has):
            assert out.rows == 0 and not any(x.any() for x in grads.values())
            continue
        chosen = [i for i in range(3) if has[i]]
        few_rows = csd.logprobs(model, [prompts[i] for i in chosen], ids[chosen], entropy=True)
        own = [getattr(few_rows, field) for field in fields]
        assert all(torch.equal(x[chosen], y) for x, y in zip(found, own, strict=True))
        spread = [torch.zeros(3, 3).index_copy(0, torch.tensor(chosen), x) for x in own]
        wanted = gradients(model, weighted(spread))
        assert all(torch.equal(grads[weight], x) for weight, x in wanted.items())


def test_no_logits_of_all_rows(monkeypatch):
    """The largest tensor of a pass is far below [rows, vocabulary]."""
    import csd.gradient.head as head

    monkeypatch.setattr(head, "NUMBERS", 1 << 16)
    model = build("llama", torch.float32, vocab_size=4096)
    completions = [[(i * j) % 61 for i in range(1, 90)] for j in range(1, 5)]
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            for x in found if isinstance(found, tuple | list) else [found]:
                largest = max(largest, x.numel() if torch.is_tensor(x) else 0)
            return found

    with Largest():
        out = csd.logprobs(model, PROMPT, completions, temperature=0.7, top_p=0.9, entropy=True)
        gradients(model, weighted(out.logprobs) + weighted(out.entropies))
    assert largest < out.rows * 4096 / 2


def test_what_cannot_be_served_is_refused():
    model = build("llama", torch.float32)
    with pytest.raises(TypeError, match="parameters"):
        csd.logprobs("a/folder", PROMPT, [[1]])
    with pytest.raises(ValueError, match="padding"):
        csd.logprobs(model, PROMPT, torch.ones(1, 3).long(), mask=torch.tensor([[0, 1, 1]]))
    with pytest.raises(ValueError, match="a row for each"):
        csd.logprobs(model, [PROMPT, OTHER], torch.ones(3, 3).long())
    with pytest.raises(TypeError, match="logits_processor"):
        csd.logprobs(model, PROMPT, [[1]], logits_processor=lambda ids, x: x)
    trained = build("llama", torch.float32, attention_dropout=0.1)
    assert csd.logprobs(trained, PROMPT, [[1]]).exact
    with pytest.raises(ValueError, match=r"dropout 0\.1 in training mode"):
        csd.logprobs(trained.train(), PROMPT, [[1]])
    trained = build("llama", torch.float32)
    trained.model.layers[0].mlp.jitter_noise = 0.01
    assert csd.logprobs(trained, PROMPT, [[1]]).exact
    with pytest.raises(ValueError, match=r"mlp has jitter_noise 0\.01 in training mode"):
        csd.logprobs(trained.train(), PROMPT, [[1]])
    recurrent = build("qwen3_5_text", torch.float32)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="layers with a state"):
            csd.logprobs(recurrent, PROMPT, [[1]])


def test_autocast_changes_no_bits():
    model = build("llama", torch.float32)
    want = csd.logprobs(model, PROMPT, [[1, 2, 3]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = csd.logprobs(model, PROMPT, [[1, 2, 3]])
    assert listed(out.logprobs) == listed(want.logprobs)


@pytest.mark.filterwarnings("ignore:csd runs this")
@pytest.mark.parametrize("name", ["gemma", "cohere2", "gpt_neox", "gpt_oss", "gemma4_text"])
def test_a_module_computes_the_shared_prompt_once(name):
    model = build(name)
    drawn = csd.generate(model, PROMPT, **SAMPLED).tokens
    out = csd.logprobs(model, PROMPT, drawn)
    assert not out.exact and "module" in out.why
    want = chances(model, PROMPT, drawn)
    for x, y in zip(out.logprobs, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=NORMS)
    found, exact = gradients(model, weighted(out.logprobs)), gradients(model, weighted(want))
    for part, grad in exact.items():
        assert (found[part] - grad).abs().max() <= NORMS * grad.abs().max().clamp(min=1), part
    assert out.rows < out.unshared_rows
