"""Every Python block and every `csd` command of README and docs runs, with a tiny model in place of
each name.

Blocks of a page share their names and their folder, as a reader's session does. What a page takes
as given (a model, prompts, tensors) is in `GIVEN`; models that blocks name are folders beside which
they run, and files that they name are beside them too, with the same keys as the real ones.
"""

import ast
import contextlib
import copy
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers.models import eagle_heads, gguf_files, packed_files
from helpers.models.gguf_vocabularies import byte_level, size
from transformers import AutoModelForSequenceClassification

import csd
from csd.cli.main import main
from csd.evaluate.code.execute import Suite, passes
from csd.models.demo import toy

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md")]
# the blocks of the page about the server run in tests/unit/serve, beside one
PAGES += sorted(p for p in (ROOT / "docs").glob("*.md") if p.stem != "serve")
PAGES += sorted(
    p for name in ("howto", "generate", "kernels") for p in (ROOT / "docs" / name).glob("*.md")
)
# text of a block -> the package that it needs
NEEDS = {
    "csd.integrations.ray": "ray",
    "csd.integrations.trl": "trl",
    "GRPOTrainer": "trl",
    "csd.integrations.lm_eval": "lm_eval",
    "import peft": "peft",
    "csd plot": "matplotlib",
}
# what other lines of a block of commands begin with: they install, or belong to other tests
OTHERS = ("git ", "python3 -m venv ", "pip ", "make ")
TEXT = ["Say 1.", "Say 2."]
MODELS = (
    "tiny",
    "a smaller model",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "demo",
)
# files of a tiny model, which read and write bytes; answers of a dozen, so that JSON may end first
GGUF_FILES = (
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "models/small.gguf",
    "models/large.gguf",
)
SETTINGS = "generation_config.json"
FILES = {
    "gsm8k.jsonl": [{"question": t, "answer": f"one #### {i}"} for i, t in enumerate(TEXT)],
    "prompts.jsonl": [{"prompt": t} for t in TEXT],
    "log.jsonl": [{"prompt": t, "completions": ["a b", "a c"]} for t in TEXT],
    "humaneval.jsonl": [
        {"prompt": "def f():\n", "test": "def check(f):\n    assert f", "entry_point": "f"}
    ]
    * 2,
}


def are_sound(*results, n=None):
    """Each result has its samples, which end for a reason of csd's and have a log-probability per
    token."""
    for out in results:
        assert len(out) and n in (None, len(out))
        for sample in out:
            assert sample.finish_reason in ("stop", "length", "cancelled")
            assert len(sample.tokens) == len(sample.logprobs)
    return True


def has_a_vote(names):
    decision = csd.vote(names["out"])
    # a vote that is certain cancels the others, and counts the samples before the first of them
    reasons = [*(sample.finish_reason for sample in names["out"]), "cancelled"]
    return are_sound(names["out"]) and len(decision.answers) == reasons.index("cancelled")


def is_explained(names):
    """A vote, and statistics of the same tokens."""
    out = names["out"]
    return has_a_vote(names) and out.stats.tokens == sum(map(len, out.tokens)) and str(out.stats)


def history_drafts(names):
    out = names["_"]
    return are_sound(*out) and out[0].stats.history_tokens == 2 and not out[1].stats.history_tokens


def prior_is_read(names):
    are_sound(*names["out"])
    learnt = names["out"][0].stats.prior_tokens
    return learnt and all(out.stats.prior_tokens == learnt for out in names["out"])


def rows_without_settings(names):
    Path("some.jsonl").write_text('{"settings": {}}\n{"problem": 0}\n')
    return names["rows"]("some.jsonl") == [{"problem": 0}]


def logits_of_the_model(names):
    """The first row is a root, the prompt's last token: its logits are the module's own."""
    model, ids = names["model"], names["ids"]
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        want = model(ids).logits[0, -1]
    # as the page's next blocks find it
    model.set_attn_implementation("csd_tree")
    torch.testing.assert_close(names["logits"][0], want, atol=1e-4, rtol=1e-4)
    return True


def is_trained(names):
    log = names["trainer"].state.log_history
    return any("csd/tau" in row for row in log)


def files_are_compared(names):
    """The last line has the accuracy of a sample and of the vote, each with its interval."""
    assert names["run"]["problems"] == 20 and len([*Path("models").glob("*.summary.json")]) == 2
    interval = r"0\.\d\d \(0\.\d\d to [01]\.\d\d\)"
    return all(re.fullmatch(interval, cell) for cell in names["cells"])


def functions_can_pass(names):
    """The tests on the page pass right functions, and no stub."""
    right = {
        "clamp": "def clamp(x, low, high):\n    return min(max(x, low), high)",
        "runs": "import itertools\ndef runs(text):\n"
        "    return [(c, len([*same])) for c, same in itertools.groupby(text)]",
    }
    assert len(Path("functions.jsonl").read_text().splitlines()) == len(right)
    for function in names["functions"]:
        suite = Suite(function["test"], function["entry_point"])
        assert passes(right[function["entry_point"]], suite)
        assert not passes(function["prompt"], suite)
    return True


def an_adapter_is_saved(names):
    log = [row for row in names["trainer"].state.log_history if "csd/logp_diff_max" in row]
    assert log and not any(row["csd/logp_diff_max"] for row in log)
    base = json.loads(Path("adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    return base == GGUF_FILES[0]


def samples_fit_the_schema(names):
    whole = [json.loads(s.text) for s in names["out"] if s.finish_reason == "stop"]
    assert whole and all([*value] == [*names["fields"]] for value in whole)
    return are_sound(names["out"], n=8)


# page and number of a block without an assertion of its own -> what holds for its names after it;
# "_" is the value of its last line
CHECKS = {
    "README.md 0": is_explained,
    "docs/draft_models.md 0": lambda names: are_sound(names["out"], n=16),
    "docs/draft_models.md 2": lambda names: are_sound(names["out"], n=16) and len(names["curve"]),
    "docs/evaluation.md 0": lambda names: has_a_vote(names) and are_sound(names["_"], n=64),
    "docs/formats.md 0": rows_without_settings,
    "docs/generate.md 0": lambda names: (
        are_sound(names["out"]) and names["_"][0] == names["out"].texts
    ),
    "docs/generate.md 1": lambda names: (
        are_sound(*names["out"], n=8)
        and len(Path("traces.jsonl").read_text().splitlines()) >= len(names["out"])
    ),
    "docs/generate/scores.md 0": lambda names: (
        [*map(len, names["_"][0])] == [*map(len, names["_"][1])]
    ),
    "docs/history.md 0": history_drafts,
    "docs/history.md 1": prior_is_read,
    "docs/integrations.md 0": lambda names: names["_"].shape[0] == 8 * len(names["prompts"]),
    "docs/integrations.md 1": logits_of_the_model,
    "docs/integrations.md 2": lambda names: names["loss"].isfinite(),
    "docs/integrations.md 3": lambda names: names["_"].rollout_func is names["rollout"],
    "docs/integrations.md 4": lambda names: callable(names["rollout"]),
    "docs/integrations.md 5": lambda names: names["_"].count() == len(TEXT),
    "docs/integrations.md 6": lambda names: are_sound(
        names["engine"].generate([5, 6], num_samples=2, max_new_tokens=2), n=2
    ),
    "docs/models.md 0": lambda names: are_sound(names["out"]) and names["_"] == ("fused", None),
    "docs/models.md 1": lambda names: are_sound(names["_"], n=8),
    "docs/packed_weights.md 0": lambda names: (
        "weights: " in repr(names["packed"]) and "weights: bfloat16" in repr(names["unpacked"])
    ),
    "docs/portable.md 0": lambda names: names["_"] == "every x86 CPU",
    "docs/prefix_cache.md 0": lambda names: are_sound(*names["out"], n=8) and len(names["_"]),
    "docs/quickstart.md 2": is_explained,
    "docs/recipes.md 2": files_are_compared,
    "docs/recipes.md 3": functions_can_pass,
    "docs/recipes.md 5": an_adapter_is_saved,
    "docs/recipes.md 6": lambda names: are_sound(*names["judged"]) and len(names["judged"]) == 2,
    "docs/recipes.md 7": samples_fit_the_schema,
    "docs/sessions.md 0": lambda names: (
        len(names["more"]) == 4
        and all(branch.text.startswith(names["session"][3].text) for branch in names["more"])
    ),
    "docs/sessions.md 1": lambda names: callable(names["play"]),
    "docs/shared_rows.md 0": lambda names: 0 < names["_"][0] < names["_"][1],
    "docs/verifiers.md 0": lambda names: ((names["_"] >= 0) & (names["_"] <= 1.0001)).all(),
    "docs/vllm.md 0": lambda names: issubclass(names["Mine"], csd.integrations.vllm.Proposer),
    "docs/howto/best_of_n.md 0": lambda names: names["best"].sample in list(names["out"]),
    "docs/howto/best_of_n.md 1": lambda names: (
        len(names["_"].tokens) == min(map(len, names["out"].tokens))
    ),
    "docs/howto/grpo.md 0": is_trained,
    "docs/howto/grpo.md 1": lambda names: names["trainer"].state.global_step > 0,
    "docs/howto/my_model.md 0": is_explained,
    "docs/howto/pass_at_k.md 1": lambda names: [*map(len, names["correct"])] == [8, 8],
    "docs/howto/ray.md 0": lambda names: (
        [len(row["texts"]) for row in names["drawn"].take_all()] == [4, 4]
    ),
    "docs/howto/report.md 1": lambda names: (
        are_sound(names["out"], n=4) and "<html" in Path("report.html").read_text()
    ),
    "docs/howto/self_consistency.md 3": lambda names: (
        has_a_vote(names) and names["decision"] == csd.vote(names["out"])
    ),
    "docs/howto/tune.md 0": lambda names: are_sound(*names["out"], n=4),
}


def blocks_of(page):
    """The language and the text of each block that runs."""
    fenced = r"^(?P<indent> *)```(?P<kind>python|py|sh)\b.*\n(?P<code>(?:.*\n)*?)(?P=indent)```"
    return [(m["kind"], m["code"]) for m in re.finditer(fenced, page.read_text(), re.MULTILINE)]


STATED = re.compile(r"^ *assert\b|\bassert_close\b", re.MULTILINE)
BLOCKS = {page.relative_to(ROOT).as_posix(): blocks_of(page) for page in PAGES}
CASES = [(page, i) for page, blocks in BLOCKS.items() for i in range(len(blocks))]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder in which the names of the documentation's models lead to tiny ones."""
    folder = tmp_path_factory.mktemp("docs")
    # a head of EAGLE-3 reads a model of four layers and more
    model, tokenizer = toy(layers=4)
    # answers of a dozen tokens
    model.generation_config.eos_token_id = [*range(1, 9)]
    for name in MODELS:
        for part in (model, tokenizer):
            part.save_pretrained(folder / name)
    config = copy.deepcopy(model.config)
    config.num_labels, config.pad_token_id = 1, 0
    reward = AutoModelForSequenceClassification.from_config(config)
    for part in (reward, tokenizer):
        part.save_pretrained(folder / "Skywork/Skywork-Reward-V2-Qwen3-0.6B")
    (folder / "examples").mkdir()
    shutil.copy(ROOT / "examples/questions.jsonl", folder / "examples")
    for name, rows in FILES.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "models").mkdir()
    keys = byte_level("<e>", pre="qwen2", eos_token_id="<e>")
    keys["tokenizer.chat_template"] = tokenizer.chat_template
    shape = packed_files.MODELS["qwen2"] | dict(max_position_embeddings=2048)
    small = gguf_files.build("qwen2", vocab_size=size(keys), **shape)
    for name in GGUF_FILES:
        packed_files.write_model(small, folder / name, keys)
        # bytes beyond ASCII
        ends = json.dumps({"eos_token_id": [*range(222, 237)]})
        (folder / name).with_name(SETTINGS).write_text(ends)
    (folder / "a head's folder").mkdir()
    eagle_heads.write(folder / "a head's folder", 1, hidden=64, vocab=len(tokenizer))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)
    csd.release()


def a_model_by_name():
    given = dict(model="tiny", prompt=TEXT[0], prompts=TEXT, ids=[5, 6], more_ids=[5, 7])
    return given | dict(completions=[[[5, 6], [7]], [[8, 9]]])


def a_loaded_model():
    model, tokenizer = toy()
    last = tokenizer(TEXT[0])["input_ids"][-1]
    return dict(
        model=model,
        tokenizer=tokenizer,
        prompt=TEXT[0],
        prompts=TEXT,
        tokens=[[last, 6], [last], [], [last, 9]],
        parents=[[-1, 0], [-1], [], [-1, 0]],
    )


def a_tool():
    async def run_tool_later(text):
        return " 4"

    return dict(model="tiny", prompt=TEXT[0], run_tool=lambda text: " 4") | dict(
        run_tool_later=run_tool_later
    )


def some_examples():
    return dict(model="tiny", prompts=[TEXT[0] * 30 + t for t in TEXT], more=" And?")


def a_module():
    return dict(model=toy()[0], prompt=[5, 6, 7])


def a_processes_group():
    """State of this process alone."""
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return dict(model=toy()[0])


def a_trainer():
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir="trained",
        num_generations=2,
        per_device_train_batch_size=2,
        report_to=[],
        bf16=False,
        use_cpu=True,
    )
    return dict(
        GRPOTrainer=GRPOTrainer,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": TEXT}),
        reward=lambda completions, **_: [float(len(c)) for c in completions],
    )


def a_dataset():
    import ray

    ray.init(num_cpus=16, include_dashboard=False)
    return dict(model="tiny", dataset=ray.data.from_items([{"prompt": t} for t in TEXT]))


def some_distributions():
    target, proposal = torch.softmax(torch.randn(2, 3, 9), -1)
    return dict(drafts=torch.randint(9, (3, 4)), target=target, proposal=proposal)


# what a page takes as given, and further, what a block that has a text in it does
GIVEN = {
    "docs/draft_models.md": a_model_by_name,
    "docs/evaluation.md": a_model_by_name,
    "docs/generate.md": a_model_by_name,
    "docs/generate/scores.md": a_model_by_name,
    "docs/history.md": a_model_by_name,
    "docs/integrations.md": a_loaded_model,
    "docs/models.md": a_module,
    "docs/prefix_cache.md": some_examples,
    "docs/sessions.md": a_tool,
    "docs/verifiers.md": some_distributions,
    "GRPOTrainer": a_trainer,
    "csd.integrations.ray.sample(dataset": a_dataset,
    "tensor_parallel": a_processes_group,
}
SESSIONS: dict[str, dict] = {}  # the names of a page


def execute(page, i):
    """Runs block i of a page; skips it where a package is missing."""
    kind, code = BLOCKS[page][i]
    for text, package in NEEDS.items():
        if text in code and find_spec(package) is None:
            return package
    # the function that runs a program in it, and what calls it
    if ("bwrap" in code or "passes(" in code) and not can_be_isolated():
        return "bubblewrap"
    if kind == "sh":
        for line in expanded(code).splitlines():
            command(line)
        return None
    names = SESSIONS[page]
    for text, given in GIVEN.items():
        if text in code:
            names |= given()
    tree, names["_"] = ast.parse(code, f"{page}, block {i}"), None
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, f"{page}, block {i}", "exec"), names)
    if last is not None:
        names["_"] = eval(compile(ast.Expression(last.value), f"{page}, block {i}", "eval"), names)
    return None


def expanded(code):
    """The commands of a block, one a line; bash expands loops and patterns of files."""
    if not re.search(r"^for |/\*\.", code, re.MULTILINE):
        return code.replace("\\\n", " ")
    written = "csd() { printf '%s ' csd \"${@@Q}\"; echo; }\n" + code
    return subprocess.run(
        ["bash", "-c", written], capture_output=True, text=True, check=True
    ).stdout


def command(line):
    """Runs a line of a block of commands, if it is csd's."""
    words, out = line.partition(" > ")[::2]
    if not words.startswith("csd "):
        assert words.startswith(OTHERS), f"{line!r} runs in no test"
        return
    if words == "csd --version":
        return
    with contextlib.ExitStack() as stack:
        if out:
            file = stack.enter_context(open(out.strip(), "w"))
            stack.enter_context(contextlib.redirect_stdout(file))
        assert main(shlex.split(words)[1:]) == 0, line
    arguments = shlex.split(words)
    written = [arguments[arguments.index("-o") + 1]] if "-o" in arguments else []
    for name in [*written, *([out.strip()] if out else [])]:
        assert Path(name).exists() and (Path(name).is_dir() or Path(name).stat().st_size), line


def can_be_isolated():
    """Returns True if there is a bubblewrap that may make a namespace."""
    path = shutil.which("bwrap")
    if path is None or shutil.which("prlimit") is None:
        return False
    return subprocess.run([path, "--unshare-all", "--ro-bind", "/", "/", "true"]).returncode == 0


@pytest.fixture(autouse=True)
def left_as_it_was():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@pytest.mark.parametrize(("page", "i"), CASES, ids=[f"{page} {i}" for page, i in CASES])
def test_a_block_runs(place, page, i):
    if page not in SESSIONS:
        # what another page's blocks have written
        for path in place.iterdir():
            if path.is_file() and path.name not in {*FILES, *GGUF_FILES, SETTINGS}:
                path.unlink()
        SESSIONS[page] = {"csd": csd, "torch": torch} | GIVEN.get(page, dict)()
        for before in range(i):
            execute(page, before)
    if package := execute(page, i):
        pytest.skip(f"{package} is not installed")
    if f"{page} {i}" in CHECKS:
        assert CHECKS[f"{page} {i}"](SESSIONS[page])


def test_the_result_of_each_block_is_checked():
    """Assertions are those that readers see, or those of CHECKS; commands must exit with 0, and
    write what they are to write."""
    without = {
        f"{page} {i}"
        for page, i in CASES
        if BLOCKS[page][i][0] != "sh" and not STATED.search(BLOCKS[page][i][1])
    }
    assert without == set(CHECKS)


def test_blocks_are_found():
    """One a page and more, and none that is written in another way."""
    assert len(CASES) > 10 and BLOCKS["README.md"]
    for page in PAGES:
        started = re.findall(
            r"^ *(?:```|~~~) *\{?\.?(?:python|py|sh|bash|console|shell)\b",
            page.read_text(),
            re.MULTILINE,
        )
        assert len(started) == len(blocks_of(page)), page
        assert page.read_text().count("```") % 2 == 0, page
