"""Every Python block and every `csd` command of README and docs runs, with a tiny model in place of
each name.

Blocks of a page share their names and their folder, as a reader's session does. What a page takes
as given (a model, prompts, tensors) is in `GIVEN`; models that blocks name are folders beside which
they run, and files that they name are beside them too, with the same keys as the real ones.
"""

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

import eagle_heads
import pytest
import torch
from transformers import AutoModelForSequenceClassification

import csd
from csd.cli.main import main
from csd.models.demo import toy

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md")]
# the blocks of the page about the server run in tests/serve, beside one
PAGES += sorted(p for p in (ROOT / "docs").glob("*.md") if p.stem != "serve")
PAGES += sorted((ROOT / "docs" / "howto").glob("*.md"))
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
)
FILES = {
    "gsm8k.jsonl": [{"question": t, "answer": f"one #### {i}"} for i, t in enumerate(TEXT)],
    "prompts.jsonl": [{"prompt": t} for t in TEXT],
    "log.jsonl": [{"prompt": t, "completions": ["a b", "a c"]} for t in TEXT],
    "humaneval.jsonl": [
        {"prompt": "def f():\n", "test": "def check(f):\n    assert f", "entry_point": "f"}
    ]
    * 2,
}


def blocks_of(page):
    """The language and the text of each block that runs."""
    fenced = r"^(?P<indent> *)```(?P<kind>python|py|sh)\b.*\n(?P<code>(?:.*\n)*?)(?P=indent)```"
    return [(m["kind"], m["code"]) for m in re.finditer(fenced, page.read_text(), re.MULTILINE)]


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
    for name, rows in FILES.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
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
    return dict(
        model=model,
        tokenizer=tokenizer,
        prompt=TEXT[0],
        prompts=TEXT,
        tokens=[[5, 6], [7], [], [8, 9]],
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

    ray.init(num_cpus=2, include_dashboard=False)
    return dict(model="tiny", dataset=ray.data.from_items([{"prompt": t} for t in TEXT]))


def some_distributions():
    target, proposal = torch.softmax(torch.randn(2, 3, 9), -1)
    return dict(drafts=torch.randint(9, (3, 4)), target=target, proposal=proposal)


# what a page takes as given, and further, what a block that has a text in it does
GIVEN = {
    "docs/draft_models.md": a_model_by_name,
    "docs/evaluation.md": a_model_by_name,
    "docs/generate.md": a_model_by_name,
    "docs/history.md": a_model_by_name,
    "docs/integrations.md": a_loaded_model,
    "docs/models.md": a_module,
    "docs/prefix_cache.md": some_examples,
    "docs/sessions.md": a_tool,
    "docs/verifiers.md": some_distributions,
    "GRPOTrainer": a_trainer,
    "csd.integrations.ray": a_dataset,
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
        for line in code.replace("\\\n", " ").splitlines():
            command(line)
        return None
    names = SESSIONS[page]
    for text, given in GIVEN.items():
        if text in code:
            names |= given()
    exec(compile(code, f"{page}, block {i}", "exec"), names)
    return None


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
            if path.is_file() and path.name not in FILES:
                path.unlink()
        SESSIONS[page] = {"csd": csd, "torch": torch} | GIVEN.get(page, dict)()
        for before in range(i):
            execute(page, before)
    if package := execute(page, i):
        pytest.skip(f"{package} is not installed")


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
