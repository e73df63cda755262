"""`csd eval` on data sets: names, folders, worked examples, and programs that are tested."""

import json
from types import SimpleNamespace

import pytest

import csd
from csd.cli.main import main
from csd.evaluate.problems import data_sets
from csd.evaluate.problems.tasks import TASKS

QUESTIONS = [{"question": f"What is {i} + 1?", "answer": f"Add. #### {i + 1}"} for i in range(6)]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory, toy_folder):
    """A folder with the toy model, and a data set with a train and a test split."""
    folder = tmp_path_factory.mktemp("sets")
    (folder / "toy").symlink_to(toy_folder)
    write(folder / "sums" / "train.jsonl", QUESTIONS[:3])
    write(folder / "sums" / "test.jsonl", QUESTIONS[3:])
    yield folder
    csd.release()


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)


def command(place, problems, out, *more) -> list[str]:
    given = ["eval", str(problems), "--model", str(place / "toy"), "-n", "2", "--quiet"]
    return [*given, "--max-new-tokens", "8", "--budget", "4", "-o", str(place / out), *more]


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(path) -> list[list[str]]:
    return [row["texts"] for row in lines(path)[1:]]


def without_network(monkeypatch):
    def refused(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: SimpleNamespace(head=refused))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def test_a_folder_and_a_file_of_its_rows_have_equal_samples(place):
    task = ("--task", "gsm8k")
    assert main(command(place, place / "sums", "folder.jsonl", *task)) == 0
    assert main(command(place, place / "sums" / "test.jsonl", "file.jsonl", *task)) == 0
    assert texts(place / "folder.jsonl") == texts(place / "file.jsonl")
    assert [row["answer"] for row in lines(place / "folder.jsonl")[1:]] == ["4", "5", "6"]


def test_a_name_is_the_hubs_data_set(place, monkeypatch):
    import datasets

    asked, drawn = [], []

    def load(path, config=None, *, split):
        asked.append((path, config, split))
        return datasets.Dataset.from_list(QUESTIONS[:3] if split == "train" else QUESTIONS[3:])

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = data_sets.Source.of("gsm8k", None)
    problems, digest = source.read(source.shots(1))
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert problems[0].prompt == (
        "Question: What is 0 + 1?\nAnswer: Add. #### 1\n\nQuestion: What is 3 + 1?\nAnswer:"
    )
    monkeypatch.setattr(csd.Engine, "prepare", spy(csd.Engine.prepare, drawn))
    assert main(command(place, "gsm8k", "name.jsonl", "--shots", "1")) == 0
    assert drawn[-1]["stop"] == list(TASKS["gsm8k"].stop)
    settings = lines(place / "name.jsonl")[0]["settings"]
    assert settings["problems_sha256"] == digest and settings["task"] == "gsm8k"
    # other examples are other prompts
    assert main(command(place, "gsm8k", "name.jsonl", "--shots", "2")) == 2


def spy(method, calls):
    def called(self, prompt, **options):
        calls.append(options)
        return method(self, prompt, **options)

    return called


def test_worked_examples_of_a_split_and_of_a_file_are_the_same_prompt(place, tmp_path):
    source = data_sets.Source.of(str(place / "sums"), "gsm8k")
    text = tmp_path / "examples.txt"
    text.write_text(source.shots(2))
    given = command(place, place / "sums", "shots.jsonl", "--task", "gsm8k")
    assert main([*given, "--shots", "2"]) == 0
    given[given.index("-o") + 1] = str(place / "prompt.jsonl")
    # both are one example text too many
    assert main([*given, "--shots", "2", "--prompt-file", str(text)]) == 2
    assert main([*given, "--prompt-file", str(text)]) == 0
    assert lines(place / "shots.jsonl")[0] == lines(place / "prompt.jsonl")[0]
    assert texts(place / "shots.jsonl") == texts(place / "prompt.jsonl")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "must be a file, a folder or one of gsm8k, math500, humaneval"),
        (["gsm8k", "--task", "math"], "task of gsm8k must be 'gsm8k', got 'math'"),
        (["math500", "--shots", "4"], "shots needs a data set with worked examples"),
        (["sums", "--task", "gsm8k", "--shots", "9"], "shots must be at most 3"),
        (["sums", "--task", "gsm8k", "--shots", "0"], "shots must be at least 1, got 0"),
        (["sums", "--task", "gsm8k", "--run-code"], "run_code needs problems with tests"),
        (["humaneval"], "give --run-code"),
        (["humaneval", "--run-code", "--until-decided"], "until_decided needs problems with"),
        (["sums", "--task", "gsm8k", "--batch", "0"], "batch must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_by_name(
    place, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(place)
    problems, *more = arguments
    assert main(command(place, problems, "refused.jsonl", *more)) == 2
    assert message in capsys.readouterr().err


def test_without_datasets_the_package_is_named(place, monkeypatch, capsys):
    monkeypatch.setattr("csd.utils.lazy.find_spec", lambda name: None)
    assert main(command(place, "gsm8k", "refused.jsonl")) == 2
    assert "csd eval gsm8k needs datasets: pip install" in capsys.readouterr().err


def test_all_that_a_run_lacks_is_named_at_once(place, monkeypatch, capsys):
    monkeypatch.setattr("csd.utils.lazy.find_spec", lambda name: None)
    without_network(monkeypatch)
    assert main(command(place, "humaneval", "refused.jsonl", "--until-decided")) == 2
    error = capsys.readouterr().err
    needed = ["give --run-code", "until_decided needs", "needs datasets: pip install"]
    for lacking in (*needed, "cannot be reached (no network)", "--task humaneval"):
        assert lacking in error
    assert len(error.splitlines()) == 1


def test_rows_of_the_hub_without_a_network(place, monkeypatch, capsys):
    without_network(monkeypatch)
    before = datasets_offline()
    assert main(command(place, "gsm8k", "refused.jsonl")) == 2
    error = capsys.readouterr().err
    for part in ("openai/gsm8k is not in the cache", "(no network)", "--task gsm8k"):
        assert part in error
    assert datasets_offline() == before


def datasets_offline():
    import datasets

    return datasets.config.HF_HUB_OFFLINE


def test_a_folder_without_the_split_names_those_it_has(tmp_path):
    write(tmp_path / "train.jsonl", QUESTIONS)
    write(tmp_path / "validation.jsonl", QUESTIONS)
    with pytest.raises(ValueError, match="must have a split 'test', got 'train', 'validation'"):
        data_sets.rows_of(str(tmp_path), "test", "gsm8k")
    (tmp_path / "validation.jsonl").unlink()
    assert data_sets.rows_of(str(tmp_path), "test", "gsm8k") == QUESTIONS


def test_a_saved_data_set(tmp_path):
    import datasets

    datasets.DatasetDict({"test": datasets.Dataset.from_list(QUESTIONS)}).save_to_disk(
        str(tmp_path / "saved")
    )
    assert data_sets.rows_of(str(tmp_path / "saved"), "test", "gsm8k") == QUESTIONS


CODE = [
    # what the toy writes is part of the comment
    {"prompt": "def one():\n    return 1\n#", "test": "def check(f):\n    assert f() == 1\n"},
    {"prompt": "def one():\n    return 2\n#", "test": "def check(f):\n    assert f() == 1\n"},
]


def test_pass_at_k_counts_programs_that_pass(place, capsys):
    write(place / "code.jsonl", [row | {"entry_point": "one"} for row in CODE])
    given = command(place, place / "code.jsonl", "code.out.jsonl", "--task", "humaneval")
    more = ("--run-code", "--plain", "--limited-vote")
    assert main([*given, *more]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = lines(place / "code.out.jsonl")[1:]
    assert [row["answers"] for row in rows] == [["passed"] * 2, ["failed"] * 2]
    assert [row["correct"] for row in rows] == [[True] * 2, [False] * 2]
    assert [at["pass_at_k"]["value"] for at in figures["by_k"]] == [0.5, 0.5]
    assert all(at["maj_at_k"] is None for at in figures["by_k"])
    # the page and the plot have pass@k, and no vote
    page = place / "code.html"
    assert main(["report", str(place / "code.out.jsonl"), "-o", str(page)]) == 0
    plot = ["plot", str(place / "code.out.jsonl"), "-o", str(place / "code.svg")]
    assert main([*plot, "--y", "maj"]) == 2
    assert "give --y pass" in capsys.readouterr().err
    assert main([*plot, "--y", "pass"]) == 0
    assert "pass@2 50.0%" in page.read_text() and "of the vote" not in page.read_text()


def test_worked_examples_are_read_once(place, monkeypatch, tmp_path):
    from csd.evaluate import evaluation

    outs, row = [], evaluation._row
    monkeypatch.setattr(
        evaluation,
        "_row",
        lambda problem, task, out, *more: outs.append(out) or row(problem, task, out, *more),
    )
    text = tmp_path / "examples.txt"
    text.write_text("Question: What is 1 + 1?\nAnswer: 2\n\n" * 24)
    given = command(place, place / "sums", "cached.jsonl", "--task", "gsm8k", "--batch", "1")
    assert main([*given, "--prompt-file", str(text)]) == 0
    first, *others = [out.stats.cached_tokens for out in outs]
    # a byte is a token; the toy's decoder in float32 keeps whole chunks of 512 tokens
    assert (first, others) == (0, [512] * 2)


@pytest.mark.parametrize("batch", ["auto", "1", "2"])
def test_batches_do_not_change_the_samples(place, batch):
    given = command(place, place / "sums", f"batch{batch}.jsonl", "--task", "gsm8k")
    assert main([*given, "--batch", batch]) == 0
    assert main(command(place, place / "sums", "auto.jsonl", "--task", "gsm8k")) == 0
    assert texts(place / f"batch{batch}.jsonl") == texts(place / "auto.jsonl")


def test_a_batch_fills_the_slots_that_fit(place, monkeypatch):
    from csd.engine.generate import engine_for
    from csd.engine.resources import caches
    from csd.evaluate import evaluation

    engine = engine_for(str(place / "toy"))
    options = dict(max_new_tokens=8, seed=0)
    assert evaluation._batch(engine, "a b c", 4, options) == engine.max_slots // 4
    assert evaluation._batch(engine, "a b c", 3, options) == engine.max_slots // 3
    assert evaluation._batch(engine, "a b c", 1000, options) == 1
    sizes = [2**i for i in range(16, 30)]
    batches = []
    for size in sizes:
        monkeypatch.setattr(caches, "free_bytes", lambda device, size=size: size)
        try:
            batches.append(evaluation._batch(engine, "a b c", 4, options))
        except MemoryError:
            batches.append(0)
    assert batches == sorted(batches) and len(set(batches)) > 2
