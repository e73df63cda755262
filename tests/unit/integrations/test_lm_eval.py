"""The harness's own self-consistency task runs with the model type `csd`, offline."""

import json

import pytest
from helpers.examples_main import main_of

import csd

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_self_consistency_task(toy_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    problems = tmp_path / "problems.jsonl"
    rows = [{"question": f"What is {i} + {i}?", "answer": f"#### {2 * i}"} for i in (3, 4)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    groups = []
    run = csd.Engine.run

    def watched(self, requests, settings):
        groups.extend((r.seed, r.prompt, r.params, len(r.samples)) for r in requests)
        return run(self, requests, settings)

    monkeypatch.setattr(csd.Engine, "run", watched)
    found = main_of("lm_eval_gsm8k.py")(str(problems), toy_folder, gen_kwargs="max_gen_toks=8")

    name = "gsm8k_cot_self_consistency"
    assert {"exact_match,score-first", "exact_match,maj@64", "exact_match,maj@8"} <= set(
        found["results"][name]
    )
    # 64 repeats of a problem are one group, at the task's own temperature
    assert [g[3] for g in groups] == [64, 64]
    assert all(g[2].temperature == 0.2 and g[2].max_new_tokens == 8 for g in groups)
    samples = {s["doc_id"]: s for s in found["samples"][name] if s["filter"] == "maj@64"}
    monkeypatch.setattr(csd.Engine, "run", run)
    for i, (seed, prompt, _, _) in enumerate(groups):
        expected = csd.generate(
            toy_folder,
            prompt,
            num_samples=64,
            temperature=0.2,
            max_new_tokens=8,
            seed=seed,
            stop=["Q:", "\n\n"],
        )
        assert samples[i]["resps"] == [expected.texts]
        assert rows[i]["question"] in samples[i]["arguments"][0][0]


def request(context, **asked):
    from lm_eval.api.instance import Instance

    return Instance("generate_until", {}, (context, asked), 0)


@pytest.fixture(scope="module")
def model(toy_folder):
    from csd.integrations.lm_eval import CSDLM

    return CSDLM(toy_folder, device="cpu", dtype="float32", seed=3)


def test_requests_in_any_order_keep_their_texts(model):
    hot = dict(do_sample=True, temperature=1.0, max_gen_toks=12)
    a, b, greedy = request("one", **hot), request("two", **hot), request("one", max_gen_toks=12)
    apart = model.generate_until([a, a, b, greedy])
    mixed = model.generate_until([b, a, greedy, a])
    assert mixed == [apart[2], apart[0], apart[3], apart[1]]
    assert apart[0] != apart[1]


def test_stop_strings_end_a_text(model):
    asked = dict(do_sample=True, temperature=1.0, max_gen_toks=60)
    plain = model.generate_until([request("abc", **asked)])[0]
    stop = plain[4]
    assert model.generate_until([request("abc", until=[stop], **asked)])[0] == plain.split(stop)[0]


def test_a_thought_is_cut_as_hf_cuts_it(model, toy_folder):
    """think_end_token: a text, a token id, an id as the command line has it, and one not drawn."""
    from lm_eval.models.huggingface import HFLM

    peer = HFLM(toy_folder, device="cpu", dtype="float32", batch_size=1)
    asked = dict(max_gen_toks=24, until=["\n\n\n"])
    plain = model.generate_until([request("abc", **asked)])[0]
    drawn = model.tok_encode(plain)
    rare = next(i for i in range(90) if i not in drawn)
    cut = set()
    for end in (plain[8], drawn[8], drawn[0], drawn[-1], rare):
        for until in ([], [plain[-2]]):
            model.think_end_token = peer.think_end_token = end
            both = [
                each.generate_until([request("abc", **asked | dict(until=until))])
                for each in (model, peer)
            ]
            assert both[0] == both[1]
            cut.add(both[0][0])
    model.think_end_token = None
    assert len(cut) > 2
    made = type(model)(toy_folder, device="cpu", dtype="float32", think_end_token=str(drawn[8]))
    assert made.generate_until([request("abc", **asked)])[0] != plain


def test_a_long_context_keeps_its_end(model):
    asked = dict(max_gen_toks=5)
    room = model.csd.config.context - 5
    long = "x" * 30 + "y" * room
    got = model.generate_until([request(long, **asked), request("y" * room, **asked)])
    assert got[0] == got[1]


@pytest.mark.parametrize(
    ("name", "off", "asking"),
    [
        ("num_beams", (1, None), 3),
        ("num_return_sequences", (1, None), 2),
        ("use_cache", (True, False, None), None),
        ("early_stopping", (False, None), True),
        ("length_penalty", (1, 1.0, None), 0.8),
        ("diversity_penalty", (0, 0.0, None), 0.5),
        ("no_repeat_ngram_size", (0, None), 3),
        ("bad_words_ids", ([], None), [[5]]),
        ("suppress_tokens", ([], None), [5]),
        ("begin_suppress_tokens", ([], None), [5]),
        ("guidance_scale", (1, None), 2.0),
        ("renormalize_logits", (False, None), True),
        ("min_length", (0, None), 4),
        ("constraints", (None,), ["a"]),
    ],
)
def test_an_argument_that_asks_for_nothing_is_accepted(model, name, off, asking):
    asked = dict(do_sample=True, temperature=1.0, max_gen_toks=6)
    plain = model.generate_until([request("a", **asked)])
    for value in off:
        assert model.generate_until([request("a", **asked, **{name: value})]) == plain
    if asking is not None:
        with pytest.raises(ValueError, match=f"csd does not serve {name}="):
            model.generate_until([request("a", **asked, **{name: asking})])


def test_unsupported_arguments_are_refused(model):
    with pytest.raises(ValueError, match="csd does not serve num_beams=3"):
        model.generate_until([request("a", num_beams=3)])
    assert model.generate_until([]) == []


def test_history_holds_previous_runs_samples(toy_folder, tmp_path, monkeypatch):
    """From the harness's own model arguments; a file serves the next run, and changes no text."""
    from lm_eval.api.registry import get_model

    # registers the type
    import csd.integrations.lm_eval

    engine_run, results = csd.Engine.run, []

    def watched(self, requests, settings):
        yield from engine_run(self, requests, settings)
        results.append([request.result() for request in requests])

    monkeypatch.setattr(csd.Engine, "run", watched)
    path = tmp_path / "history.jsonl"
    hot = dict(do_sample=True, temperature=0.8, max_gen_toks=24)
    asked = [request("one", **hot), request("one", **hot), request("two", **hot)]

    def texts(**options):
        arguments = dict(pretrained=toy_folder, seed=3, budget=24, dtype="float32", **options)
        pairs = ",".join(f"{name}={value}" for name, value in arguments.items())
        model = get_model("csd").create_from_arg_string(pairs, {"device": "cpu"})
        found = model.generate_until(asked)
        if model.history is not None:
            model.history.close()
        return found

    plain = texts()
    assert texts(history=path) == plain
    assert texts(history=path) == plain
    none, first, second = ([out.stats for out in outs] for outs in results)
    for a, b, c in zip(none, first, second, strict=True):
        assert a.history_tokens == b.history_tokens == 0
        assert c.history_tokens == b.tokens and c.accepted["history"] > 0
        assert c.sample_steps < b.sample_steps == a.sample_steps
    # two additions of each prompt
    assert len(path.read_text().splitlines()) == 4
    path.write_text('{"prompt_ids": []}\n')
    with pytest.raises(ValueError, match=f"{path}, line 1: the trace must have 'samples'"):
        texts(history=path)


def test_requests_draft_for_each_other_on_request(toy_folder, monkeypatch):
    from lm_eval.api.registry import get_model

    # registers the type
    import csd.integrations.lm_eval

    engine_run, stats = csd.Engine.run, []

    def watched(self, requests, settings):
        yield from engine_run(self, requests, settings)
        stats.append([request.progress.stats for request in requests])

    monkeypatch.setattr(csd.Engine, "run", watched)
    hot = dict(do_sample=True, temperature=0.8, max_gen_toks=24)
    asked = [request(context, **hot) for context in ("one", "one", "two", "three", "four")]

    def texts(**options):
        arguments = dict(pretrained=toy_folder, seed=3, budget=24, dtype="float32", max_slots=2)
        pairs = ",".join(f"{name}={value}" for name, value in (arguments | options).items())
        model = get_model("csd").create_from_arg_string(pairs, {"device": "cpu"})
        return model.generate_until(asked)

    assert texts(prior=True) == texts()
    learnt, alone = ([s.accepted["prior"] for s in call] for call in stats)
    assert alone == [0] * 4 and sum(learnt) > 0
    with pytest.raises(OSError, match="task"):
        texts(prior="task")
