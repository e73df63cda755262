"""Models that csd does not run are refused by a message that says what to do."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import transformers
from helpers.models import checkpoints
from torch import nn

from csd.models.fused.config import ModelConfig, properties_of
from csd.models.load import load


def config_of(family, **changes):
    return lambda: checkpoints.config(family, **changes)


def rope(kind, **more):
    return dict(rope_type=kind, rope_theta=10000.0, **more)


GPTQ = dict(quant_method="gptq", bits=4)
REFUSED = {
    "encoder-decoder": (transformers.T5Config, "'t5' is an encoder-decoder; csd runs decoders"),
    "gpt2": (transformers.GPT2Config, "model type 'gpt2' is not supported"),
    "phi": (transformers.PhiConfig, "model type 'phi' is not supported"),
    "experts": (transformers.MixtralConfig, "model type 'mixtral' is not supported"),
    "dynamic": (
        config_of("qwen2", rope_parameters=rope("dynamic", factor=2.0)),
        "rope type 'dynamic' is not supported",
    ),
    "partial-rotary": (
        config_of("llama", rope_parameters=rope("default", partial_rotary_factor=0.5)),
        "partial_rotary_factor other than 1 is not supported",
    ),
    "chunks": (
        config_of("qwen3", layer_types=["chunked_attention", "full_attention"]),
        "layer_types of 'chunked_attention' are not supported",
    ),
    "bidirectional": (
        partial(transformers.Gemma3TextConfig, use_bidirectional_attention=True),
        "use_bidirectional_attention=True is not supported",
    ),
    "activation-gemma": (
        partial(transformers.Gemma2Config, hidden_activation="gelu"),
        "hidden_activation='gelu' is not supported, only 'gelu_pytorch_tanh'",
    ),
    "quantised-dict": (
        config_of("llama", quantization_config=GPTQ),
        "quantised weights are not supported; load the model in bfloat16",
    ),
    "quantised-object": (
        config_of("llama", quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True)),
        "quantised weights are not supported; load the model in bfloat16",
    ),
    "activation": (
        config_of("llama", hidden_act="gelu"),
        "hidden_act='gelu' is not supported, only 'silu'",
    ),
    "mlp-bias": (config_of("llama", mlp_bias=True), "mlp_bias=True is not supported"),
    "bias-llama": (config_of("llama", attention_bias=True), "attention_bias=True is not supp"),
    "bias-qwen3": (config_of("qwen3", attention_bias=True), "attention_bias=True is not supp"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_refuse_a_config(make, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_transformers(make())


NAMES_THE_FAMILIES = ["encoder-decoder", "gpt2", "phi", "experts", "activation", "bias-llama"]


@pytest.mark.parametrize("case", NAMES_THE_FAMILIES)
def test_refusals_name_supported_values(case):
    message = r"Llama 2/3, Mistral, Qwen2/2\.5, Qwen3 \(dense and experts\), Qwen3\.5"
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_transformers(REFUSED[case][0]())


ACCEPTED = {
    "window-as-long-as-the-context": config_of("mistral", sliding_window=checkpoints.CONTEXT),
    "window-not-used": config_of("qwen2", use_sliding_window=False, sliding_window=64),
    "window-on-no-layer": config_of(
        "qwen3", use_sliding_window=True, sliding_window=64, max_window_layers=2
    ),
    "linear": config_of("llama", rope_parameters=rope("linear", factor=2.0)),
    "yarn": config_of(
        "qwen3", rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=128)
    ),
    "dequantised": config_of("llama", quantization_config=dict(quant_method="gguf")),
}


@pytest.mark.parametrize("make", ACCEPTED.values(), ids=ACCEPTED)
def test_accept_a_config(make):
    assert ModelConfig.from_transformers(make()).vocab == checkpoints.VOCAB


WINDOWS = {
    "mistral": (config_of("mistral", sliding_window=64), (True, True)),
    "qwen2": (
        config_of("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1),
        (False, True, True),
    ),
    "qwen3": (
        config_of("qwen3", use_sliding_window=True, sliding_window=64, max_window_layers=0),
        (True, True),
    ),
}


@pytest.mark.parametrize(("make", "local"), WINDOWS.values(), ids=WINDOWS)
def test_layers_with_a_window(make, local):
    found = ModelConfig.from_transformers(make())
    assert (found.local, found.window) == (local, 64)
    assert found.reach == (64 if all(local) else None)
    assert [bool(properties_of(found, i)) for i in range(len(local))] == list(local)


# Modules


class PeftModel(nn.Module):
    """A class of the name of peft's wrapper, which forwards to the model inside."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model
        self.peft_config = {"default": PrefixTuning()}

    def get_base_model(self):
        return self.base_model


class PrefixTuning:
    peft_type, is_prompt_learning = None, True


class BaseTunerLayer:
    pass


class LoraLinear(nn.Module, BaseTunerLayer):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base


class Linear8bit(nn.Linear):
    pass


class Packed(torch.Tensor):
    pass


def adapted(model):
    model.model.layers[0].self_attn.q_proj = LoraLinear(model.model.layers[0].self_attn.q_proj)
    return model


def other_linear(model):
    model.model.layers[1].mlp.down_proj = Linear8bit(4, 4)
    return model


def with_weight(change):
    def changed(model):
        norm = model.model.norm
        norm.weight = nn.Parameter(change(norm.weight.data), requires_grad=False)
        return model

    return changed


def without_head(model):
    return model.model


def classifier(model):
    return transformers.AutoModelForSequenceClassification.from_config(model.config)


def on_meta(model):
    model.model.layers[1].mlp.to("meta")
    return model


def plain_linear(model):
    return nn.Linear(2, 2)


REFUSED_MODULES = {
    "peft": (PeftModel, r"the adapter 'default' .* \(prompt learning\)"),
    "adapter": (
        adapted,
        "model.layers.0.self_attn.q_proj is a LoraLinear of peft; csd's fused decoder supports "
        "only the LoRA of a Linear",
    ),
    "other-linear": (
        other_linear,
        "model.layers.1.mlp.down_proj is a Linear8bit, not a plain Linear: quantised or wrapped",
    ),
    "packed": (
        with_weight(lambda w: w.as_subclass(Packed)),
        "model.norm.weight is a Packed; pass a model with plain local weights",
    ),
    "int8": (
        with_weight(lambda w: w.to(torch.int8)),
        "model.norm.weight has dtype torch.int8: quantised weights are not supported",
    ),
    "float8": (
        with_weight(lambda w: w.to(torch.float8_e4m3fn)),
        "model.norm.weight has dtype torch.float8_e4m3fn: quantised weights are not supported",
    ),
    "two-dtypes": (
        with_weight(lambda w: w.to(torch.bfloat16)),
        "more than one dtype: torch.bfloat16, torch.float32; load the model on one device and",
    ),
    "offloaded": (on_meta, "layers.1.mlp.gate_proj.weight has no data here .offloaded or not load"),
    "no-head": (without_head, "LlamaModel has no lm_head; load the model with AutoModelForCausal"),
    "classifier": (classifier, "LlamaForSequenceClassification has no lm_head"),
    "no-model": (plain_linear, "Linear is not a transformers model: it has no config"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED_MODULES.values(), ids=REFUSED_MODULES)
def test_refuse_a_module(change, message):
    model = change(checkpoints.build("llama"))
    places = [p.data_ptr() for p in model.parameters()]
    with pytest.raises((TypeError, ValueError), match=message):
        load(model)
    # a model that is refused stays as it is
    assert [p.data_ptr() for p in model.parameters()] == places


def test_refuse_a_module_of_another_type():
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11)
    with pytest.raises(ValueError, match="'gpt2' is not supported; supported are Llama 2/3"):
        load(transformers.GPT2LMHeadModel(config))


@pytest.fixture
def one_process():
    """A process group of this process alone: its mesh."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning")
def test_refuse_distributed_modules(one_process):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import distribute_module
    from torch.nn.parallel import DistributedDataParallel

    replicated = DistributedDataParallel(checkpoints.build("llama"))
    assert load(replicated).module() is replicated.module
    with pytest.raises(TypeError, match="an FSDP model has sharded weights; gather them"):
        load(fully_shard(checkpoints.build("llama"), mesh=one_process))
    with pytest.raises(TypeError, match="an FSDP model has sharded weights; gather them"):
        load(FullyShardedDataParallel(checkpoints.build("llama"), device_id=torch.device("cpu")))
    with pytest.raises(
        TypeError, match=r"embed_tokens\.weight is a DTensor; pass a model with plain"
    ):
        load(distribute_module(checkpoints.build("llama"), one_process))
