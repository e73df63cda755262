"""Ray Data with one engine an actor: rows keep their samples, and an actor may die."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from helpers.checks.precision import within_eager
from helpers.examples_main import main_of

import csd
from csd.models.demo import toy

ray = pytest.importorskip("ray")
pq = pytest.importorskip("pyarrow.parquet")
ROOT = Path(__file__).parents[3]
SAMPLING = dict(num_samples=3, seed=5, temperature=0.8, max_new_tokens=10)


@pytest.fixture(scope="module")
def cluster():
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
    ray.init(
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}},
    )
    yield
    ray.shutdown()


def dying(folder_of_marks):
    """A Sampler that notes its process in each batch; the first to see row 3 is killed there."""
    from csd.integrations.ray import Sampler

    class Dying(Sampler):
        def __call__(self, table):
            out = super().__call__(table)
            Path(folder_of_marks, f"{os.getpid()}-{id(table)}").touch()
            mark = Path(folder_of_marks, "killed")
            if 3 in table["row"].to_pylist() and not mark.exists():
                mark.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
            return out

    return Dying


@torch.no_grad()
def exact_logprobs(toy, prompt, tokens, temperature):
    """Log-probabilities of the tokens drawn behind a prompt, in float64."""
    model, tokenizer = toy
    ids = tokenizer(prompt)["input_ids"]
    logits = model.double()(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
    return (logits / temperature).log_softmax(-1)[torch.arange(len(tokens)), tokens]


def test_two_actors_and_one_is_killed(cluster, toy_folder, tmp_path, monkeypatch, capsys):
    """The example as it stands, but for an actor that is killed when its first work is done."""
    from csd.integrations import ray as integration

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(integration, "Sampler", dying(str(tmp_path)))
    prompts = ["one", "Two?", "one", "four and more", "5 + 5", "six", "7", "the eighth"]
    rows = [{"row": i, "prompt": p, "first_sample": 0} for i, p in enumerate(prompts)]
    rows[2]["first_sample"] = 3
    problems, answers = tmp_path / "problems.jsonl", tmp_path / "answers"
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    main = main_of("ray_data.py")
    main(str(problems), str(answers), toy_folder, num_samples=3, max_new_tokens=10, batch_size=2)
    assert capsys.readouterr().out.count("'one': ") == 2

    found = pq.read_table(answers).to_pylist()
    assert sorted(r["row"] for r in found) == list(range(8))
    killed = (tmp_path / "killed").read_text()
    workers = {p.name.split("-")[0] for p in tmp_path.glob("*-*")}
    assert killed in workers and len(workers) >= 2  # the killed actor and who drew its rows again
    model = toy()
    for row in found:
        expected = csd.generate(
            toy_folder,
            row["prompt"],
            first_sample=row["first_sample"],
            num_samples=3,
            max_new_tokens=10,
            temperature=0.7,
            seed=0,
        )
        assert [list(t) for t in row["tokens"]] == expected.tokens
        assert list(row["texts"]) == expected.texts
        assert list(row["finish_reasons"]) == expected.finish_reasons
        exact = torch.cat([exact_logprobs(model, row["prompt"], t, 0.7) for t in expected.tokens])
        found = (
            torch.tensor([x for s in r for x in s], dtype=torch.float64)
            for r in (row["logprobs"], expected.logprobs)
        )
        within_eager(*found, exact, model[0].config.intermediate_size, torch.float32)


def test_the_example_leaves_a_cpu_to_read_with(monkeypatch):
    """With as many actors as CPUs, Ray would wait for ever to read the problems."""
    asked = []

    def init(**options):
        asked.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    main = main_of("ray_data.py")
    with pytest.raises(KeyboardInterrupt):
        main("problems.jsonl", "answers", "model", actors=2)
    assert asked[0]["num_cpus"] > 2


def test_unknown_options_are_refused_before_anything_starts(toy_folder):
    from csd.integrations.ray import Sampler, sample

    for call in (sample, Sampler):
        args = (None, toy_folder) if call is sample else (toy_folder,)
        with pytest.raises(TypeError, match="unknown argument 'temprature'"):
            call(*args, num_samples=2, seed=0, temprature=1.0)
        with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
            call(*args, num_samples=0, seed=0)
        with pytest.raises(TypeError, match="budget must be 'auto' or a whole number, got 'big'"):
            call(*args, num_samples=2, seed=0, budget="big")


def test_rows_do_not_depend_on_the_rows_beside_them(toy_folder):
    """Equal prompts in one batch draw what they would draw alone."""
    import pyarrow as pa

    from csd.integrations.ray import Sampler

    sampler = Sampler(toy_folder, **SAMPLING)
    alone = sampler(pa.table({"prompt": ["abc"]})).to_pylist()
    together = sampler(pa.table({"prompt": ["abc", "x" * 50, "abc"]})).to_pylist()
    assert together[0]["tokens"] == together[2]["tokens"] == alone[0]["tokens"]
    chat = pa.table({"prompt": [[{"role": "user", "content": "hi"}]]})
    ids = pa.table({"prompt": [sampler.engine.tokenizer("user: hi\nassistant: ")["input_ids"]]})
    assert sampler(chat).to_pylist()[0]["tokens"] == sampler(ids).to_pylist()[0]["tokens"]


def test_a_row_that_cannot_be_served_names_itself_or_gets_its_reason(toy_folder):
    import pyarrow as pa

    from csd.integrations.ray import Sampler

    sampler = Sampler(toy_folder, **SAMPLING)
    table = pa.table({"prompt": ["abc", "x" * sampler.engine.config.context, "x"]})
    with pytest.raises(ValueError, match="prompt 1"):
        sampler(table)
    found = Sampler(toy_folder, on_error="return", **SAMPLING)(table).to_pylist()
    assert [r["error"] is None for r in found] == [True, False, True]
    assert "prompt 1" in found[1]["error"] and found[1]["tokens"] == []
    alone = sampler(table.take([0, 2])).to_pylist()
    assert [found[i]["tokens"] for i in (0, 2)] == [r["tokens"] for r in alone]
    with pytest.raises(ValueError, match="on_error must be 'raise' or 'return', got 'skip'"):
        Sampler(toy_folder, on_error="skip", **SAMPLING)


def histories(rows):
    """Columns of past samples for rows of the prompts "abc", "Two?", "abc"."""
    ids, texts = [r["tokens"] for r in rows], [r["texts"] for r in rows]
    return {
        "own": [ids[0], ids[1], None],
        "texts": [texts[0], texts[1], []],
        "foreign": [ids[1], ids[0], None],
    }


@pytest.mark.parametrize("kind", ["own", "texts", "foreign"])
def test_a_column_of_history_drafts_for_its_row_alone(toy_folder, monkeypatch, kind):
    import pyarrow as pa

    from csd.integrations.ray import Sampler

    sampler = Sampler(toy_folder, budget=24, **SAMPLING)
    draw, results = sampler.draw, []
    monkeypatch.setattr(sampler, "draw", lambda *a: results.append(draw(*a)) or results[-1])
    table = pa.table({"prompt": ["abc", "Two?", "abc"]})
    plain = sampler(table).to_pylist()
    column = pa.array(histories(plain)[kind])
    with_history = sampler(table.append_column("history", column)).to_pylist()
    for name in ("tokens", "texts", "finish_reasons"):
        assert [row[name] for row in with_history] == [row[name] for row in plain]
    (a, b, c), (a_alone, b_alone, _) = results[1], results[0]
    assert [r.stats.accepted["history"] for r in results[0]] == [0, 0, 0]
    assert a.stats.history_tokens > 0 and b.stats.history_tokens > 0
    # the third row has the first one's prompt, and none of its history
    assert c.stats.history_tokens == c.stats.accepted["history"] == 0
    if kind != "foreign":
        assert a.stats.accepted["history"] > 0 and b.stats.accepted["history"] > 0
        assert a.stats.sample_steps < a_alone.stats.sample_steps
        assert b.stats.sample_steps < b_alone.stats.sample_steps


def test_bad_history_names_its_row(toy_folder):
    import pyarrow as pa

    from csd.integrations.ray import Sampler

    sampler = Sampler(toy_folder, **SAMPLING)
    table = pa.table({"prompt": ["a", "b"], "history": [[[1]], [[1], [5000]]]})
    with pytest.raises(ValueError, match=r"history\[1\]\[1\] has token id 5000, outside"):
        sampler(table)
    table = pa.table({"prompt": ["a", "b"], "history": [1, 2]})
    with pytest.raises(TypeError, match=r"history\[0\] must be a csd.History or a list"):
        sampler(table)


def test_rows_of_a_batch_draft_for_each_other_on_request(toy_folder, monkeypatch):
    import pyarrow as pa

    from csd.integrations.ray import Sampler

    options = dict(SAMPLING, engine={"max_slots": 3}, budget=24)
    table = pa.table({"prompt": ["abc", "Two?", "abc", "four", "5 + 5"]})
    found, results = [], []
    added, add = [], csd.Prior.add
    monkeypatch.setattr(csd.Prior, "add", lambda *args: added.append(args) or add(*args))
    for prior in (None, True):
        sampler = Sampler(toy_folder, prior=prior, **options)
        draw = sampler.draw
        monkeypatch.setattr(
            sampler, "draw", lambda *a, draw=draw: results.append(draw(*a)) or results[-1]
        )
        found.append(sampler(table).to_pylist())
    for name in ("tokens", "texts", "finish_reasons"):
        assert [row[name] for row in found[1]] == [row[name] for row in found[0]]
    assert [r.stats.accepted["prior"] for r in results[0]] == [0] * 5
    assert added
    with pytest.raises(OSError, match="batch"):
        Sampler(toy_folder, prior="batch", **options)
    sampler = Sampler(toy_folder, prior=True, drafter="prompt-lookup", **options)
    with pytest.raises(ValueError, match="prior needs drafter='consensus'"):
        sampler(table)
    # the verifiers that draw their drafts, whose tokens would depend on it, are not served at all
    with pytest.raises(TypeError, match="unknown argument 'verifier'"):
        Sampler(toy_folder, prior=True, verifier="recursive", **options)


def test_actors_read_the_column(cluster, toy_folder):
    """The column comes in the form of Ray's own blocks."""
    from csd.integrations.ray import sample

    rows = [{"row": i, "prompt": p} for i, p in enumerate(["abc", "Two?", "abc"])]
    options = dict(batch_size=2, budget=24, **SAMPLING)

    def drawn(rows):
        found = sample(ray.data.from_items(rows), toy_folder, **options).take_all()
        return sorted(found, key=lambda row: row["row"])

    plain = drawn(rows)
    earlier = [[[int(t) for t in s] for s in row["tokens"]] for row in plain]
    with_history = drawn([row | {"history": earlier[row["row"]]} for row in rows])
    for a, b in zip(plain, with_history, strict=True):
        assert [list(t) for t in a["tokens"]] == [list(t) for t in b["tokens"]]


@pytest.mark.parametrize(
    "free, actors, num_cpus, num_gpus, message",
    [
        ({"CPU": 3.0}, 2, 1, 0, None),
        (
            {"CPU": 2.0},
            2,
            1,
            0,
            "2 actors of 1 CPUs and one that reads the dataset need 3 free CPUs",
        ),
        ({"CPU": 1.0}, 8, 0, 0, None),
        ({"CPU": 0.0}, 1, 0, 0, "need 1 free CPUs in Ray, but only 0 are free"),
        ({"CPU": 9.0, "GPU": 1.0}, 2, 1, 1, "2 actors of 1 GPUs need 2 free GPUs"),
    ],
)
def test_what_ray_would_wait_for_is_an_error(free, actors, num_cpus, num_gpus, message):
    from csd.integrations.ray import check_room

    if message is None:
        check_room(free, actors, num_cpus, num_gpus)
        return
    with pytest.raises(RuntimeError, match=message):
        check_room(free, actors, num_cpus, num_gpus)


def test_a_call_without_free_cores_raises(cluster, toy_folder):
    import csd.integrations.ray

    rows = ray.data.from_items([{"prompt": "a"}])
    with pytest.raises(RuntimeError, match="9 actors of 1 CPUs"):
        csd.integrations.ray.sample(rows, toy_folder, num_samples=1, actors=9)
