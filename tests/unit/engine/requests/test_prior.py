"""A prior drafts for other prompts, learns from their answers, and changes no token."""

import threading

import pytest
import torch
from helpers.models.checkpoints import build
from helpers.models.scripted import Letters, counting, engine
from helpers.runs.engine_cases import PROMPTS, assert_same_samples
from helpers.runs.trace_file import trace_file
from helpers.targets import few

import csd
from csd.cli.main import main
from csd.engine.step.budget import AutoBudget, StepTimeTable
from csd.graph.prior import MAX_CONTEXTS
from csd.state.context_table import PRIOR_KEY
from csd.traces.traces import read_traces

OPTIONS = dict(num_samples=4, max_new_tokens=24, seed=3, temperature=0.9)
MANY = [PROMPTS[0], PROMPTS[1], PROMPTS[0][:-1], PROMPTS[1][1:], PROMPTS[0]]


@pytest.fixture(scope="module")
def model():
    made = build("llama", dtype=torch.float64)
    made.generation_config.eos_token_id = None
    return made


@pytest.fixture(scope="module")
def plain(model):
    return csd.Engine(model).generate(MANY, speculate=False, **OPTIONS)


def learnt(results):
    prior = csd.Prior(contexts=1024)
    for out in results:
        prior.add(out.prompt_ids, out.tokens)
    return prior


@few(4)
@pytest.mark.parametrize("budget", [0, 5, 40, "auto"])
@pytest.mark.parametrize("kind", ["reads", "learns", "True"])
def test_tokens_equal_those_without_a_prior(model, plain, budget, kind):
    prior = True if kind == "True" else learnt(plain)
    if kind == "learns":
        prior.learn = True
    out = csd.Engine(model, max_slots=3).generate(MANY, prior=prior, budget=budget, **OPTIONS)
    assert_same_samples(out, plain)
    if budget not in (0, "auto"):
        assert sum(o.stats.accepted["prior"] for o in out) > 0


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("static", [False, True])
def test_static_steps_and_lag_draw_the_same(model, plain, static, lag):
    e = csd.Engine(model, static=static, lag=lag, max_slots=2)
    assert_same_samples(e.generate(MANY, prior=True, budget=16, **OPTIONS), plain)


def test_a_prior_beside_history(model, plain):
    e, prior = csd.Engine(model, max_slots=3), learnt(plain)
    out = e.generate(MANY, prior=prior, history=plain, budget=16, **OPTIONS)
    assert_same_samples(out, plain)
    assert all(o.stats.history_tokens > 0 and o.stats.prior_tokens == prior.tokens for o in out)


def test_a_prompt_drafts_from_answers_to_prompts_that_ended_before_it():
    e = engine(counting(16), max_slots=1)
    prompts = [[0], [9, 3]]
    shared = e.generate(prompts, prior=True, max_new_tokens=8, budget=16)
    alone = e.generate(prompts, max_new_tokens=8, budget=16)
    assert shared[1].tokens == alone[1].tokens == [[4, 5, 6, 7, 8, 9, 10, 11]]
    assert shared[0].stats.accepted["prior"] == alone[1].stats.accepted["prior"] == 0
    assert shared[1].stats.accepted["prior"] > 0
    assert "prior" in shared[1].samples[0].sources
    assert shared[1].stats.steps < alone[1].stats.steps


def test_auto_keeps_more_nodes_where_a_prior_makes_them_likelier():
    """The likeliest paths of a sample without text of its own, with a prior and without."""
    e, prior = engine(counting(16), max_slots=1), csd.Prior(contexts=1024)
    for _ in range(8):
        prior.add([0], [[*range(1, 13)]])
    kept = []
    for given in (csd.Prior(contexts=1024), prior):
        e.generate([9, 3], prior=given, max_new_tokens=2, budget=4)
        slots = e.caches.step.slots
        slots.live[0], slots.group[0], slots.max_new[0] = True, 0, 16
        slots.generated[0], slots.context[0, :2] = 0, torch.tensor([3, 9])
        pool = e.caches.drafter.propose(slots, 17)
        costs = pool.cost[pool.depth > 0].tolist()
        kept.append(AutoBudget(StepTimeTable([1, 64], [1.0, 9.0])).select(1, costs))
        slots.live[0], slots.group[0] = False, -1
    assert kept[1] > kept[0]


def test_the_prior_of_a_call_ends_with_it():
    e = engine(counting(16), max_slots=1)
    e.generate([[0], [1]], prior=True, max_new_tokens=8, budget=16)
    out = e.generate([9, 3], prior=True, max_new_tokens=8, budget=16)
    assert out.stats.prior_tokens == out.stats.accepted["prior"] == 0
    assert e.generate([9, 3], max_new_tokens=8, budget=16).stats.accepted["prior"] == 0


def test_a_prior_learns_over_calls_and_engines_only_if_asked():
    prior = csd.Prior(contexts=1024)
    for learn, tokens in ((False, 0), (True, 8), (False, 8)):
        prior.learn = learn
        out = engine(counting(16), max_slots=1).generate([0], prior=prior, max_new_tokens=8)
        assert prior.tokens == tokens
    assert out.stats.accepted["prior"] > 0


def test_drafts_are_those_of_the_prior_as_it_was_changed():
    e, prior = engine(counting(16), max_slots=1), csd.Prior(contexts=1024)
    steps = []
    for change in (lambda: None, lambda: prior.add([0], [[*range(1, 9)]]), lambda: prior.decay(30)):
        change()
        steps.append(e.generate([0], prior=prior, max_new_tokens=8, budget=16).stats.steps)
    assert steps[0] == steps[2] > steps[1]


def test_an_answer_begins_behind_its_prompt():
    """The first token of an answer is a successor of the prompt's last ones."""
    prior = csd.Prior(contexts=1024)
    prior.add([5, 6, 7], [[8, 9]])
    table = prior.table
    used = table.entry_group == PRIOR_KEY
    contexts = {tuple(t for t in row if t >= 0) for row in table.entry_tokens[used].tolist()}
    assert contexts == {(7,), (7, 6), (8,), (8, 7)}
    assert prior.contexts == 4 and prior.tokens == 2 and not table.succ_source.any()


def test_recorded_probabilities_are_successors_too():
    prior, want = csd.Prior(contexts=1024), {}
    prior.add([5], [[8]], [[([8, 9], [0.5, 0.25])]])
    at = int((prior.table.entry_tokens[:, 0] == 5).nonzero()[0])
    for token, weight in zip(prior.table.succ_token[at], prior.table.succ_weight[at], strict=True):
        if token >= 0:
            want[int(token)] = int(weight)
    assert want == {8: (1 << 15) + (1 << 15), 9: 1 << 14}


def equal(a, b):
    """True if two priors draft alike: equal contexts, whatever their places."""

    def entries(prior):
        used = prior.table.entry_group == PRIOR_KEY
        names = ("entry_tokens", "entry_total", "succ_token", "succ_weight")
        rows = zip(*(getattr(prior.table, name)[used].tolist() for name in names), strict=True)
        return sorted(rows, key=str)

    return entries(a) == entries(b) and a.tokens == b.tokens


def test_a_file_has_the_whole_prior(plain, tmp_path):
    prior, path = learnt(plain), tmp_path / "p.csdprior"
    prior.save(path)
    loaded = csd.Prior.load(path)
    assert equal(loaded, prior) and loaded.config == prior.config and not loaded.learn
    assert csd.Prior.load(path, learn=True).learn


def test_merged_priors_are_the_prior_of_both():
    generator = torch.Generator().manual_seed(0)
    # seven tokens: no context has more successors than an entry keeps
    answers = torch.randint(7, (6, 90), generator=generator).tolist()
    both, parts = csd.Prior(contexts=1024), [csd.Prior(contexts=1024) for _ in range(2)]
    for i, answer in enumerate(answers):
        both.add([9], [answer])
        parts[i % 2].add([9], [answer])
    parts[0].merge(parts[1])
    assert equal(parts[0], both)


def test_decay_halves_weights_and_forgets_what_has_none():
    prior = csd.Prior(contexts=1024)
    prior.add([1], [[2, 3]])
    total = prior.table.entry_total.clone()
    prior.decay()
    assert torch.equal(prior.table.entry_total, total >> 1) and prior.contexts == 3
    prior.decay(30)
    assert prior.contexts == 0 and (prior.table.succ_token == -1).all()


def test_a_full_table_stays_within_its_capacity():
    prior, generator = csd.Prior(contexts=1024), torch.Generator().manual_seed(0)
    for _ in range(4):
        prior.add([1], torch.randint(5000, (2, 600), generator=generator).tolist())
    assert 900 < prior.contexts <= 1024


def test_threads_may_read_and_learn_at_once(model, plain):
    prior, errors = csd.Prior(learn=True, contexts=1024), []

    def draw():
        try:
            out = csd.Engine(model, max_slots=2).generate(MANY, prior=prior, budget=8, **OPTIONS)
            assert_same_samples(out, plain)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=draw) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert prior.tokens == 2 * sum(len(tokens) for out in plain for tokens in out.tokens)


def test_a_prior_of_another_tokenizer_is_refused():
    e = engine(counting(16), Letters())
    prior = csd.Prior(contexts=1024)
    prior.digest = "another"
    e.generate([0], prior=prior, max_new_tokens=2)  # `Letters` lists no tokens to compare

    class Listed(Letters):
        def get_vocab(self):
            return {"a": 0}

    with pytest.raises(ValueError, match="prior must be a prior of the same tokenizer"):
        e.generate([0], prior=prior, max_new_tokens=2, tokenizer=Listed())
    prior = csd.Prior(contexts=1024)
    prior.add([0], [[5000]])
    with pytest.raises(ValueError, match=r"prior must have token ids below \d+, .* got 5000"):
        e.generate([0], prior=prior, max_new_tokens=2)


def test_invalid_arguments_are_named():
    e = engine(counting(16))
    for prior, error, message in (
        (3, TypeError, "prior must be a csd.Prior, the path of its file, True or None, got 3"),
        ("missing.csdprior", OSError, "missing.csdprior"),
    ):
        with pytest.raises(error, match=message):
            e.generate([0], prior=prior)
    for drafter in ("paper", "prompt-lookup"):
        with pytest.raises(ValueError, match=f"prior needs drafter='consensus', got .*{drafter}"):
            e.generate([0], prior=True, drafter=drafter)
    with pytest.raises(ValueError, match="prior needs verifier='match'"):
        e.generate([0], prior=True, verifier="canonical", budget=4)
    for contexts, message in ((1000, "contexts must be .*1024"), (3000, "a power of two")):
        with pytest.raises(ValueError, match=message):
            csd.Prior(contexts=contexts)
    with pytest.raises(ValueError, match=str(MAX_CONTEXTS)):
        csd.Prior(contexts=2 * MAX_CONTEXTS)
    with pytest.raises(ValueError, match="samples must have token ids from 0"):
        csd.Prior().add([1], [[-2]])
    with pytest.raises(ValueError, match="prior must have learn=False for an AsyncEngine"):
        csd.AsyncEngine(e, prior=csd.Prior(learn=True))


def test_a_served_engine_reads_a_prior():
    prior = csd.Prior(contexts=1024)
    prior.add([0], [[*range(1, 9)]])
    e = engine(counting(16), max_slots=1)
    want = e.generate([0], max_new_tokens=8)
    with csd.AsyncEngine(e, prior=prior, budget=16) as served:
        out = served.submit([0], max_new_tokens=8).result()
        assert out.tokens == want.tokens and out.stats.accepted["prior"] > 0
        with pytest.raises(ValueError, match="prior applies to all requests"):
            served.submit([0], prior=prior)


@pytest.mark.parametrize("shared", [False, True])
def test_an_owners_answers_draft_for_its_own_requests_alone(shared):
    prior = csd.Prior(contexts=1024)
    if shared:
        prior.add([0], [[20, 21, 22]])
    e = engine(counting(16), max_slots=1)
    asked = dict(max_new_tokens=8)
    want = e.generate([9, 3], **asked)
    options = dict(learn_from=["a", "b"], budget=16)
    with csd.AsyncEngine(e, prior=prior if shared else None, **options) as served:

        def accepted(owner):
            out = served.submit([9, 3], owner=owner, **asked).result()
            assert out.tokens == want.tokens
            return out.stats.accepted["prior"] > 0

        served.submit([0], owner="a", **asked).result()
        drafts = {owner: accepted(owner) for owner in (None, "b", "c", "a")}
        # b has now learnt from its own request
        drafts["b again"] = accepted("b")
        assert drafts == {None: False, "b": False, "c": False, "a": True, "b again": True}
        assert {owner: p.tokens - prior.tokens for owner, p in served.priors.items()} == {
            "a": 16,
            "b": 16,
        }
        assert prior.tokens == 3 * shared
    with csd.AsyncEngine(e, prior=prior) as served:
        assert served.priors == {}
    with pytest.raises(TypeError, match="learn_from must be a list of owners, got 'a'"):
        csd.AsyncEngine(e, learn_from="a")


def damaged(tensors, about):
    """Tensors and metadata of files that are no priors, with the reason."""
    yield tensors, about | {"format": "other"}, "format must be 'csd.prior/1', got 'other'"
    yield tensors, about | {"contexts": "3000"}, "contexts must be a power of two"
    yield tensors, about | {"tokens": "-1"}, "tokens must be a whole number"
    yield tensors, about | {"vocab": "1"}, "must have token ids below 1"
    yield {k: v for k, v in tensors.items() if k != "succ_token"}, about, "tensors must be"
    for name, value in (
        ("entry_tokens", -7),
        ("succ_token", 1 << 30),
        ("succ_weight", -1),
        ("entry_total", -1),
        ("entry_total", 0),
        ("succ_weight", 1 << 29),
    ):
        yield tensors | {name: torch.full_like(tensors[name], value)}, about, "must"
    yield tensors | {"succ_weight": tensors["succ_weight"].float()}, about, "must be int32"
    yield tensors | {"succ_weight": tensors["succ_weight"][:, :3].contiguous()}, about, "int32"


def test_damaged_files_are_refused(plain, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = tmp_path / "p.csdprior"
    learnt(plain).save(path)
    with safe_open(path, "pt") as file:
        about, names = file.metadata(), list(file.keys())
        tensors = {name: file.get_tensor(name) for name in names}
    for i, (bad, metadata, reason) in enumerate(damaged(tensors, about)):
        file = tmp_path / f"{i}.csdprior"
        save_file(bad, file, metadata)
        with pytest.raises(ValueError, match=rf"{i}.csdprior' must be a file of .*{reason}"):
            csd.Prior.load(file)
    whole = path.read_bytes()
    for cut in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"must be a file of csd\.Prior\.save"):
            csd.Prior.load(path)


def test_the_command_learns_traces_and_merges_priors(toy_folder, tmp_path, capsys):
    traces = trace_file(
        tmp_path / "t.jsonl", {"prompt_ids": [5, 6, 0], "samples": [[1, 2, 3], [1, 2, 4]]}
    )
    one, two = str(tmp_path / "1.csdprior"), str(tmp_path / "2.csdprior")
    assert main(["prior", str(traces), "-o", one, "--contexts", "1024"]) == 0
    assert "contexts of 6 tokens" in capsys.readouterr().err
    assert main(["prior", one, str(traces), "-o", two, "--model", toy_folder]) == 0
    want = csd.Prior()
    for trace in [*read_traces(traces)] * 2:
        want.add(trace.prompt, trace.samples)
    assert equal(csd.Prior.load(two), want) and csd.Prior.load(two).digest is not None
    for flag in ([], ["--prior", two]):
        words = ["sample", toy_folder, "a b", "-n", "2", "--max-new-tokens", "6", "--seed", "1"]
        assert main([*words, "--json", *flag]) == 0
    csd.release()
