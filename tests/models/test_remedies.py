"""Remedies that errors of csd/models name: each is carried out, and csd runs after it."""

import ast
import re
from pathlib import Path

import pytest
import torch
import transformers
from families import build

import csd
from csd.models.load import load
from csd.models.module.decoder import ModuleDecoder

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPT = [(7 * i + 3) % 61 for i in range(12)]
ROOT = Path(csd.__file__).parents[1]
REMEDY = re.compile(
    r"[;:,] (or )?(pass|load|set|use|save|gather|update|remove|rename|keep|install|write|run)\b"
)


def runs(model, **more):
    engine = csd.Engine(model, kernels="reference", **more)
    assert len(engine.generate(PROMPT, max_new_tokens=2).tokens[0]) == 2


def headless(name):
    model = build(name, torch.float32)
    return (
        lambda: csd.Engine(model.model, decoder="fused" if name == "llama" else "module"),
        lambda: runs(model),
    )


def two_dtypes():
    model = build("llama", torch.float32)
    model.model.layers[0].mlp.up_proj.to(torch.bfloat16)
    return lambda: csd.Engine(model, decoder="fused"), lambda: runs(model.to(torch.float32))


def deleted():
    def dropped():
        decoder = ModuleDecoder(build("gemma", torch.float32))
        return decoder.model

    def kept():
        model = build("gemma", torch.float32)
        assert ModuleDecoder(model).model is model

    return dropped, kept


def without_tokenizer():
    model = build("llama", torch.float32)
    return lambda: csd.Engine(model).generate("a text"), lambda: runs(model)


def without_data():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(build("llama").config)
    return lambda: csd.Engine(model), lambda: runs(build("llama", torch.float32))


def longrope():
    config = build("phi3 longrope").config
    small = dict(config.rope_parameters) | dict(factor=1.0)
    return (
        lambda: csd.Engine(build("phi3 longrope", torch.float32), decoder="module"),
        lambda: runs(
            build(
                "phi3 longrope", torch.float32, max_position_embeddings=32, rope_parameters=small
            ),
            decoder="module",
        ),
    )


def prompt_learning():
    peft = pytest.importorskip("peft")
    given = dict(task_type="CAUSAL_LM")
    prompt = peft.PromptTuningConfig(num_virtual_tokens=3, **given)
    lora = peft.LoraConfig(target_modules=["q_proj"], **given)
    return (
        lambda: csd.Engine(peft.get_peft_model(build("llama", torch.float32), prompt)),
        lambda: runs(peft.get_peft_model(build("llama", torch.float32), lora)),
    )


def quantised():
    config = build("llama").config
    config.quantization_config = dict(quant_method="gptq", bits=4)
    model = build("llama", torch.float32)
    model.config = config
    return lambda: load(model), lambda: runs(build("llama", torch.bfloat16))


# words of the message -> what raises it, and what carries out its remedy
EXECUTED = {
    "has no lm_head; load the model with AutoModelForCausalLM": lambda: headless("llama"),
    "must return logits of shape (1, ": lambda: headless("gemma"),
    "the weights have more than one ": two_dtypes,
    "the model of this decoder has been deleted: keep a reference to it": deleted,
    "there is no tokenizer: pass tokenizer= or token ids": without_tokenizer,
    "has no data here (offloaded or not loaded); load the whole model": without_data,
    " rotates by rope type 'longrope', ": longrope,
    "(prompt learning), which csd does not support: use LoRA": prompt_learning,
    "quantised weights are not supported; load the model in bfloat16": quantised,
}
# words of a message -> the test of another file that carries out its remedy
ELSEWHERE = {
    "has an adapter in addition to its base model": (
        "tests/integrations/test_adapter_folder.py",
        "test_a_folder_with_a_model_too_is_refused_and_peft_loads_it",
    ),
    "weights that fit nothing in a ": (
        "tests/integrations/test_adapter_folder.py",
        "test_keys_that_fit_nothing_are_refused_until_they_are_renamed",
    ),
    "does not compute with; update peft": (
        "tests/integrations/test_adapter_folder.py",
        "test_every_field_of_the_config_is_read_or_refused_by_name",
    ),
    "must name its base model": (
        "tests/integrations/test_lora.py",
        "test_tokens_are_those_of_the_adapter_that_is_active",
    ),
    " tokens, the base model ": (
        "tests/integrations/test_adapter_folder.py",
        "test_rows_that_would_be_random_are_refused",
    ),
}
# words of a message -> why its remedy is not carried out
NOT_HERE = {
    "if it was written by a later version": "it needs another version of peft",
    "an FSDP model has sharded weights": "it needs several processes",
    "is a shard of DeepSpeed ZeRO-3": "it needs DeepSpeed",
    " is a DTensor; pass a model with plain local weights": "it needs several processes",
    "; pass a model with plain local weights": "it needs another package's tensors",
    "the weights are on more than one device": "it needs a second device",
    "not a plain Linear: quantised or wrapped": "it needs another package's layers",
    "tokenizer.ggml.pre=": "it needs the original model",
    "has matrices of different vocabularies": "peft writes no such file",
}


@pytest.mark.parametrize("words", EXECUTED)
def test_csd_runs_after_the_remedy(words):
    fails, remedy = EXECUTED[words]()
    with pytest.raises((RuntimeError, TypeError, ValueError)) as refused:
        fails()
    # in an f-string a value may stand between the words
    assert words.strip() in str(refused.value)
    remedy()
    csd.release()


def remedies():
    """Text of each error of csd/models that names a remedy, without its values."""
    for path in sorted((ROOT / "csd" / "models").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and node.exc is not None:
                parts = [x.value for x in ast.walk(node.exc) if isinstance(x, ast.Constant)]
                text = "".join(part for part in parts if isinstance(part, str))
                if REMEDY.search(text):
                    yield f"{path.name}:{node.lineno}", text


def test_every_remedy_is_carried_out_or_listed_with_the_reason():
    known = [*EXECUTED, *ELSEWHERE, *NOT_HERE]
    texts = dict(remedies())
    unknown = {at: text for at, text in texts.items() if not any(k in text for k in known)}
    assert not unknown
    assert not [words for words in known if not any(words in text for text in texts.values())]
    for path, name in ELSEWHERE.values():
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
