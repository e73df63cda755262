"""csd's GRPOTrainer with a GGUF file for its model."""

import json
from pathlib import Path

import pytest
import torch
from helpers.examples_main import main_of
from helpers.models.packed_files import write_model
from helpers.targets import slow
from safetensors.torch import load_file

import csd
from csd.kernels.layers.quantized import Quantized, has_loop, unrounded

pytest.importorskip("trl")
pytest.importorskip("gguf")
peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not has_loop(), reason="no loop of quantised weights here"),
]
PROMPT = [9, 4, 30, 30, 7]
SAMPLED = dict(num_samples=3, seed=1, max_new_tokens=20, end_token_ids=[], budget=12)


@pytest.fixture(scope="module")
def example():
    return main_of("grpo/grpo_lora.py").__globals__


@pytest.fixture(scope="module")
def file(example, tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "toy.gguf"
    return write_model(example["toy_llama"]()[0], path)


@pytest.fixture
def trainer(example, file, tmp_path):
    """A function that makes a trainer of the file. config: of GRPOConfig."""
    from datasets import Dataset
    from trl import GRPOConfig

    from csd.integrations.trl import GRPOTrainer

    def make(lora=True, **config):
        settings = dict(
            output_dir=str(tmp_path),
            max_steps=2,
            num_generations=4,
            per_device_train_batch_size=8,
            max_completion_length=12,
            learning_rate=1e-2,
            logging_steps=1,
            save_steps=2,
            report_to=[],
            bf16=False,
            use_cpu=True,
            disable_tqdm=True,
        )
        return GRPOTrainer(
            file,
            example["vowels"],
            GRPOConfig(**settings | config),
            Dataset.from_dict({"prompt": example["PROMPTS"]}),
            processing_class=example["toy_llama"]()[1],
            peft_config=peft.LoraConfig(r=4, target_modules="all-linear") if lora else None,
        )

    return make


def test_an_adapter_is_trained_beside_packed_weights_and_loaded_again(trainer, file, tmp_path):
    made = trainer(temperature=0.7, top_p=0.9)
    made.train()
    log = [row for row in made.state.log_history if "loss" in row]
    assert [row["csd/logp_diff_max"] for row in log] == [0.0, 0.0]
    assert all(row["grad_norm"] > 0 for row in log)
    folder = tmp_path / "checkpoint-2"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == file
    assert all("lora_" in name for name in load_file(folder / "adapter_model.safetensors"))
    model = made.accelerator.unwrap_model(made.model)
    assert isinstance(model.get_base_model().lm_head.weight, Quantized)
    drawn = csd.generate(model, PROMPT, **SAMPLED)
    again = csd.generate(str(folder), PROMPT, **SAMPLED)
    assert again.tokens == drawn.tokens and again.logprobs == drawn.logprobs
    assert csd.generate(file, PROMPT, **SAMPLED).tokens != drawn.tokens
    # the module's own pass; a rounded number of its rows may be another integer
    with unrounded(), csd.Engine(str(folder), decoder="module") as engine:
        found = csd.score(engine, PROMPT, drawn.tokens)
        want = csd.logprobs(model, PROMPT, drawn.tokens)
    for x, y in zip(found.raw_logprobs, want.raw_logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(x), y.detach(), rtol=0, atol=1e-3)


def test_a_dtype_unpacks_the_weights_and_trains_them(trainer):
    made = trainer(lora=False, max_steps=1, model_init_kwargs=dict(dtype="float32"))
    before = made.model.lm_head.weight.detach().clone()
    made.train()
    assert type(made.model.lm_head.weight) is torch.nn.Parameter
    assert not torch.equal(made.model.lm_head.weight, before)


def test_what_would_not_be_trained_is_refused(trainer):
    with pytest.raises(ValueError, match=r"peft_config must be given for a GGUF file .* got None"):
        trainer(lora=False)
    with pytest.raises(ValueError, match=r"model_init_kwargs .* GGUF file, got \['revision'\]"):
        trainer(model_init_kwargs=dict(revision="main"))


@slow
def test_processes_train_beside_the_same_packed_weights(file, tmp_path, torchrun):
    done = torchrun(Path(__file__).with_name("grpo_packed_rank.py"), tmp_path, file)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"{r}.json").read_text()) for r in range(2)]
    assert [r["logged"] for r in ranks] == [[0.0, 0.0]] * 2
    assert ranks[0]["weights"] == ranks[1]["weights"]
