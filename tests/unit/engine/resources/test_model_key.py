"""Numbers that a pass reads may change between calls: tokens are a fresh engine's, or refused."""

import contextlib
import copy
import threading
from itertools import pairwise, product

import pytest
import torch
from helpers.models import lora_models
from helpers.models.families import build, longrope
from helpers.targets import few, slow

import csd
from csd.engine.resources.weights import model_key
from csd.models.attributes import Attributes

pytestmark = pytest.mark.filterwarnings("ignore")
CONTEXT = dict(max_position_embeddings=256)
PROMPT = [(7 * i + 3) % 61 for i in range(90)]
ASKED = dict(num_samples=2, max_new_tokens=4, seed=5, budget=2, temperature=0.8, end_token_ids=[])
CHUNK = dict(prefill_chunk=64, max_slots=2)
FUSED = ("llama", "qwen2", "qwen3", "qwen3_moe", "smollm3", "granite", "phi3")
FUSED += ("mistral", "olmo2", "olmo3", "gemma2", "gemma3_text", "qwen3_5_text")


def values(run) -> tuple:
    """Tokens and log-probabilities of a run, or the kind of its refusal."""
    try:
        out = run()
    except (RuntimeError, TypeError, ValueError) as error:
        return type(error).__name__, None
    return out.tokens, out.logprobs, out.raw_logprobs


def fresh(model, decoder):
    """Values of an engine of a copy, which keeps nothing of other calls."""

    def run():
        other = copy.deepcopy(model)
        with csd.Engine(other, decoder=decoder, prefix_cache=False, **CHUNK) as engine:
            return engine.generate(PROMPT, **ASKED)

    return values(run)


def other_value(value):
    """Another plausible value of a number, a flag or a tensor; None if there is none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 1.5 + 0.01
    if torch.is_tensor(value) and value.is_floating_point():
        return value * 1.25
    return None


@contextlib.contextmanager
def changed(holder, name):
    """An attribute of a module or a config, or an entry of one of its dictionaries, is another."""
    *parts, last = name.split(".")
    for part in parts:
        holder = holder[part] if isinstance(holder, dict) else getattr(holder, part)
    held = holder if isinstance(holder, dict) else vars(holder)
    if last not in held:
        held = next(d for d in (holder._parameters, holder._buffers) if last in d)
    value = held[last]
    made = other_value(value)
    held[last] = torch.nn.Parameter(made) if isinstance(value, torch.nn.Parameter) else made
    try:
        yield
    finally:
        held[last] = value


def attributes(model):
    """One module with each attribute of a kind of module, and the attribute's name."""
    skipped = {*vars(torch.nn.Module()), "generation_config", "config"}
    found = {}
    for module in model.modules():
        held = vars(module)
        named = {n: x for n, x in held.items() if n not in skipped}
        named |= {f"{n}.{k}": x[k] for n, x in named.items() if isinstance(x, dict) for k in x}
        named |= held["_buffers"]
        for name, value in named.items():
            if other_value(value) is not None:
                # the last one: that of a full layer where layers differ
                found[type(module).__name__, name] = module
    for name, value in vars(model.config).items():
        parts = {f"{name}.{k}": x for k, x in value.items()} if isinstance(value, dict) else {}
        for full, x in ({name: value} | parts).items():
            if other_value(x) is not None and not name.startswith("_") and "id" not in full:
                found["config", full] = model.config
    return found


def check_each(model, decoder, chosen):
    """Each attribute in turn is changed and restored; returns those that changed the values."""
    effective = []
    with csd.Engine(model, decoder=decoder, **CHUNK) as engine:

        def drawn():
            return values(lambda: engine.generate(PROMPT, **ASKED))

        before = drawn()
        assert engine.generate(PROMPT, **ASKED).stats.cached_tokens == 64
        for (kind, name), holder in chosen:
            with changed(holder, name):
                want = fresh(model, decoder)
                got, again = drawn(), drawn()
                assert got == again == want, (kind, name)
                if want != before:
                    effective.append((kind, name))
            assert drawn() == before, (kind, name)
    return effective


SOME = ("variance_epsilon", "eps", "scaling", "inv_freq", "attention_scaling", "embed_scale")
EACH = [
    pytest.param(*case, marks=() if case == ("gemma2", "auto") else slow, id="-".join(case))
    for case in [*product(FUSED, ("auto", "module")), ("phi3 longrope", "auto")]
]


def built(family):
    """A model whose context holds a page."""
    return build(family, **CONTEXT, **(longrope(256) if "longrope" in family else {}))


@pytest.mark.parametrize(("family", "decoder"), EACH)
def test_an_attribute_that_is_changed_between_calls(family, decoder):
    model = built(family)
    each = attributes(model)
    chosen = [(place, holder) for place, holder in each.items() if place[1] in SOME]
    assert check_each(model, decoder, chosen)


@slow
@pytest.mark.parametrize("decoder", ["auto", "module"])
@pytest.mark.parametrize("family", FUSED)
def test_every_attribute_that_is_changed_between_calls(family, decoder):
    model = built(family)
    check_each(model, decoder, attributes(model).items())


def lora_layers(model):
    return [m for m in model.modules() if hasattr(m, "lora_A")]


def set_scale(model):
    for layer in lora_layers(model):
        layer.set_scale("default", 3.0)


def scaling_of_one(model):
    lora_layers(model)[1].scaling["default"] = 5.0


def scale_layer(model):
    for layer in lora_layers(model):
        layer.scale_layer(2.0)


def unscale_layer(model):
    for layer in lora_layers(model):
        layer.unscale_layer()


# contexts that would end, and restore a scale, without a reference
OPEN = []


def rescaled(model):
    from peft.helpers import rescale_adapter_scale

    OPEN.append(rescale_adapter_scale(model, 0.5))
    OPEN[-1].__enter__()


def other_adapter(model):
    model.set_adapter("other")


def without_adapters(model):
    model.base_model.disable_adapter_layers()


def with_adapters(model):
    model.base_model.enable_adapter_layers()
    model.set_adapter("default")


def merged(model):
    model.merge_adapter()


def unmerged(model):
    model.unmerge_adapter()


def permuted_adapter(model):
    weight = lora_layers(model)[0].lora_A["default"].weight
    weight.data.copy_(weight.data.flip(1))


def permuted_weight(model):
    weight = lora_layers(model)[2].get_base_layer().weight
    weight.data.copy_(weight.data.roll(1, 0))


# changes in turn
CHANGES = {
    "set_scale": [set_scale],
    "scaling of one": [scaling_of_one],
    "scale_layer": [scale_layer, unscale_layer],
    "rescaled": [rescaled],
    "permuted": [permuted_adapter, permuted_weight],
    "switched": [other_adapter, without_adapters, with_adapters],
    "merged": [merged, unmerged],
}


def turn(engine, texts, session=None):
    """Tokens of a turn of two branches, of which each has a text behind the prompt."""
    if session is None:
        session = engine.session(PROMPT, num_samples=2, seed=5)
        for branch, text in zip(session.branches, texts, strict=True):
            branch.append(text)
    return [s.tokens for s in session.sample(max_new_tokens=3, end_token_ids=[], budget=2)]


KINDS = {
    "fused": ("auto", {}),
    "module": ("module", {}),
    "dora": ("auto", dict(use_dora=True)),
    "rslora": ("auto", dict(use_rslora=True)),
}


@few(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_adapters_between_calls_and_turns(name, kind):
    decoder, more = KINDS[kind]
    model = lora_models.adapted(**more)
    asked = {name: x for name, x in ASKED.items() if name != "budget"}
    with (
        csd.Engine(model, decoder=decoder, **CHUNK) as engine,
        csd.AsyncEngine(model, budget=2, decoder=decoder, max_tokens=100, **CHUNK) as service,
    ):
        before = engine.generate(PROMPT, **ASKED).logprobs
        service.submit(PROMPT, owner="a", **asked).result(60)
        for change in CHANGES[name]:
            session = engine.session(PROMPT, num_samples=2, seed=5)
            turn(engine, None, session)
            change(model)
            other = copy.deepcopy(model)
            with csd.Engine(other, decoder=decoder, prefix_cache=False, **CHUNK) as plain:
                want = plain.generate(PROMPT, **ASKED)
                texts = [branch.tokens for branch in session]
                assert turn(engine, None, session) == turn(plain, texts)
                scored = csd.score(plain, PROMPT, want.tokens).logprobs
            out = engine.generate(PROMPT, **ASKED)
            assert (out.tokens, out.logprobs) == (want.tokens, want.logprobs)
            # the last adapters of a list are back, or the same but merged
            assert change not in CHANGES[name][:1] or change is merged or out.logprobs != before
            assert csd.score(engine, PROMPT, want.tokens).logprobs == scored
            found = csd.logprobs(model, PROMPT, want.tokens).logprobs
            for x, y in zip(found, scored, strict=True):
                assert x.tolist() == pytest.approx(y)
            served = service.submit(PROMPT, owner="a", **asked).result(60)
            assert (served.tokens, served.logprobs) == (want.tokens, want.logprobs)


@pytest.mark.parametrize("change", [set_scale, "eps"])
def test_a_request_after_a_change_waits_for_those_in_flight(change):
    model = lora_models.adapted()
    options = dict(seed=5, temperature=0.8, end_token_ids=[])
    with csd.AsyncEngine(model, budget=2, **CHUNK) as service:
        began, done = threading.Event(), threading.Event()

        def hold(prefix):
            began.set()
            assert done.wait(60)
            return False

        short = dict(num_samples=2, max_new_tokens=4, owner="a")
        first = service.submit(PROMPT, **short, **options).result(60)
        held = service.submit(PROMPT[:5], num_samples=1, max_new_tokens=9, until=hold, **options)
        assert began.wait(60)
        if change == "eps":
            for module in model.modules():
                if hasattr(module, "variance_epsilon"):
                    module.variance_epsilon = 0.5
        else:
            change(model)
        later = service.submit(PROMPT, **short, **options)
        done.set()
        held.result(60)
        found = later.result(60)
    assert (later.weights, held.weights) == (1, 0)
    want = csd.Engine(model, prefix_cache=False, **CHUNK).generate(PROMPT, **ASKED)
    assert found.tokens == want.tokens and found.logprobs == want.logprobs != first.logprobs


def test_a_recorded_step_depends_on_the_scales():
    model = lora_models.adapted()
    decoder = csd.Engine(model, decoder="module").decoder
    keys = [decoder.graph_key]
    for change in (lambda model: None, set_scale, scaling_of_one, other_adapter):
        change(model)
        decoder.begin_call()
        keys.append(decoder.graph_key)
    assert keys[0] == keys[1]
    assert all(a != b for a, b in pairwise(keys[1:]))


def test_what_a_pass_itself_counts_is_no_change():
    model = build("llama", **CONTEXT)
    own = type(model.model.layers[0].mlp)

    class Counting(own):
        def forward(self, x):
            self.passes += 1
            return own.forward(self, x)

    model.model.layers[0].mlp.passes = 0
    model.model.layers[0].mlp.__class__ = Counting
    with csd.Engine(model, decoder="module", **CHUNK) as engine:
        decoder = engine.decoder
        cached = [engine.generate(PROMPT, **ASKED).stats.cached_tokens for _ in range(3)]
        assert cached == [0, 64, 64] and engine.decoder is decoder
    assert model.model.layers[0].mlp.passes > 3


def key_of(tensors):
    model = torch.nn.Module()
    model.config = None
    for i, x in enumerate(tensors):
        model.register_buffer(f"x{i}", x)
    return model_key(model, None).sums


ORDERS = {
    "rows": lambda x: x.roll(1, 0),
    "columns": lambda x: x.flip(1),
    "signs": lambda x: -x,
    "halves": lambda x: torch.cat([x[len(x) // 2 :], x[: len(x) // 2]]),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(2, 1), (7, 3), (32, 32), (64, 2048), (33, 1025)])
def test_sums_see_the_order_of_numbers(order, dtype, shape):
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(shape, generator=generator) * 40).to(dtype)
    other = ORDERS[order](x.clone()).contiguous()
    assert key_of([x]) == key_of([x.clone()])
    assert (key_of([other]) == key_of([x])) == torch.equal(x, other)
    assert key_of([x, other]) != key_of([other, x]) or torch.equal(x, other)


def test_attributes_are_plain_values_and_tensors():
    module = torch.nn.Linear(2, 2)
    module.table, module.scales = {"a": [1, {2.5}], "b": torch.ones(2)}, [torch.ones(1)]
    before = Attributes.of([module])
    assert len(before.tensors) == 4
    for change in (
        lambda: module.table["a"].append(2),
        lambda: module.table["a"][1].add(3),
        lambda: module.table.update(c=None),
        lambda: setattr(module, "flag", True),
        lambda: setattr(module, "in_features", 3),
    ):
        change()
        after = Attributes.of([module])
        assert after.values != before.values
        before = after
    module.training = False
    assert Attributes.of([module]).values == before.values
    # neither a circle nor a vocabulary makes it long
    module.table["itself"], module.vocabulary = module.table, dict.fromkeys(range(100_000))
    assert len(str(Attributes.of([module]).values)) < 2000
