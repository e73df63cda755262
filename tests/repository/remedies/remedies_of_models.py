"""Remedies of csd/models: each error with the call that raises it, and its remedy."""

import pytest
import torch
import transformers
from helpers.models.families import build

import csd
from csd.models.load import load
from csd.models.module.decoder import ModuleDecoder

PROMPT = [(7 * i + 3) % 61 for i in range(12)]


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


def dropout():
    model = build("llama", torch.float32, attention_dropout=0.1).train()

    def fails():
        csd.logprobs(model, PROMPT, [[1, 2]])

    def remedy():
        assert csd.logprobs(model.eval(), PROMPT, [[1, 2]]).exact

    return fails, remedy


# words of the message -> the call that raises it, and the calls that carry out its remedy
EXECUTED = {
    " in training mode, with which no sample was drawn: set it to 0": lambda folder: dropout(),
    "has no lm_head; load the model with AutoModelForCausalLM": lambda folder: headless("llama"),
    "must return logits of shape (1, ": lambda folder: headless("gemma"),
    "the weights have more than one ": lambda folder: two_dtypes(),
    "the model of this decoder has been deleted: keep a reference to it": lambda folder: deleted(),
    "there is no tokenizer: pass tokenizer= or token ids": lambda folder: without_tokenizer(),
    "has no data here (offloaded or not loaded); load the whole model": lambda folder: (
        without_data()
    ),
    " rotates by rope type 'longrope', ": lambda folder: longrope(),
    "(prompt learning), which csd does not support: use LoRA": lambda folder: prompt_learning(),
    "quantised weights are not supported; load the model in bfloat16": lambda folder: quantised(),
}
