"""Folders and hub repositories of peft adapters: used as peft's own loader does, or refused."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from helpers.models import packed_files
from helpers.models.families import build
from helpers.oracles import oracle
from helpers.oracles.plain_gradients import chances
from helpers.targets import few
from safetensors.torch import load_file, save_file

import csd
from csd.kernels.layers.quantized import has_loop, unrounded
from csd.models.load import config_of, load, tokenizer_of
from csd.models.load.adapter import adapter_of

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("released")]

PROMPT = [(7 * i + 3) % 61 for i in range(20)]
Q = dict(target_modules=["q_proj"])


def lora(**more):
    given = dict(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM") | more
    return peft.LoraConfig(**given)


def other(kind, **more):
    return getattr(peft, kind)(**Q | dict(task_type="CAUSAL_LM") | more)


KINDS = {
    "plain": lambda: lora(),
    "rslora": lambda: lora(use_rslora=True),
    "dora": lambda: lora(use_dora=True),
    "rank pattern": lambda: lora(rank_pattern={"q_proj": 2}),
    "alpha pattern": lambda: lora(alpha_pattern={"q_proj": 3}),
    "layers": lambda: lora(layers_to_transform=[1], **Q),
    "excluded": lambda: lora(exclude_modules=["q_proj"]),
    "bias": lambda: lora(bias="all"),
    "bias of the lora": lambda: lora(lora_bias=True),
    "modules to save": lambda: lora(modules_to_save=["embed_tokens", "lm_head"], **Q),
    "norm to save": lambda: lora(modules_to_save=["norm"], **Q),
    "embedding": lambda: lora(target_modules=["embed_tokens", "q_proj", "lm_head"]),
    "tokens": lambda: lora(trainable_token_indices=[1, 5], **Q),
    "parameters": lambda: lora(target_parameters=["mlp.experts.gate_up_proj"], **Q),
    "pissa": lambda: lora(init_lora_weights="pissa"),
    "replicated layers": lambda: lora(layer_replication=[(0, 2), (1, 3)], **Q),
    "no task": lambda: lora(task_type=None, **Q),
    "ia3": lambda: other("IA3Config", feedforward_modules=[]),
    "vera": lambda: other("VeraConfig", r=4),
    "vblora": lambda: other("VBLoRAConfig", r=4, num_vectors=16, vector_length=8),
    "loha": lambda: other("LoHaConfig", r=4),
    "adalora": lambda: other("AdaLoraConfig", init_r=4, total_step=10),
    "oft": lambda: other("OFTConfig", oft_block_size=4),
    "norms": lambda: other("LNTuningConfig", target_modules=["input_layernorm"]),
    "tokens alone": lambda: other(
        "TrainableTokensConfig", token_indices=[1, 5], target_modules=["embed_tokens"]
    ),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders of base models by family, each written once."""
    root = tmp_path_factory.mktemp("bases")

    def base(name="llama", **changes):
        folder = root / re.sub(r"\W", "-", f"{name}{changes}")
        if not folder.exists():
            build(name, torch.float32, **changes).save_pretrained(folder)
        return str(folder)

    return base


def write(base, config, folder, tokens=None, **saving):
    """An adapter with random weights for the model in `base`; tokens: rows after a resize."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    if tokens is not None:
        model.resize_token_embeddings(tokens)
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder, **saving)
    return str(folder)


def by_peft(folder, dtype=torch.float64):
    return peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def loop(model):
    return oracle.generate(model, PROMPT, seed=4, sample=0, max_new_tokens=6, temperature=0.7)[0]


def drawn(folder, dtype=torch.float64, **more):
    out = csd.generate(
        folder,
        PROMPT,
        seed=4,
        max_new_tokens=6,
        temperature=0.7,
        budget=4,
        dtype=dtype,
        end_token_ids=[],
        **more,
    )
    return out.tokens[0]


def changed(folder, **fields):
    path = Path(folder, "adapter_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def renamed(folder, name):
    """Rename the keys of an adapter's weights by a function; None drops a key."""
    path = Path(folder, "adapter_model.safetensors")
    named = {name(key): value for key, value in load_file(path).items()}
    named.pop(None, None)
    save_file(named, path, metadata={"format": "pt"})


@few(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_draws_what_pefts_own_loader_makes_of_it(kind, bases, tmp_path):
    base = bases("qwen3_moe" if kind == "parameters" else "llama")
    folder = write(base, KINDS[kind](), tmp_path)
    # which these kinds do not run in
    dtype = torch.float32 if kind in ("parameters", "pissa") else torch.float64
    model = by_peft(folder, dtype)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype).eval()
    ids = torch.tensor([PROMPT])
    assert (model(ids).logits - plain(ids).logits).abs().max() > 1e-3
    assert drawn(folder, dtype) == loop(model)


# kinds over a packed GGUF file -> whether its weights stay packed
ON_PACKED = {
    "plain": True,
    "rank pattern": True,
    "layers": True,
    "no task": True,
    "dora": False,
    "pissa": False,
    "modules to save": False,
    "embedding": False,
    "parameters": False,
    "ia3": False,
}


@few(4)
@pytest.mark.skipif(not has_loop(), reason="no loop of quantised weights here")
@pytest.mark.parametrize("kind", ON_PACKED)
def test_a_packed_base_stays_packed_beside_a_plain_lora(kind, tmp_path):
    base = packed_files.write("qwen3moe" if kind == "parameters" else "llama", tmp_path)
    plain, completions = csd.gguf_module(base, dtype=torch.float32), [[5, 6, 7, 8, 9, 10]]
    without = chances(plain, PROMPT, completions)[0].detach()
    torch.manual_seed(0)
    model = peft.get_peft_model(plain, KINDS[kind]())
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder := str(tmp_path / "adapter"))
    # the file's numbers again, of which pissa's start subtracts
    again = csd.gguf_module(base, dtype=torch.float32)
    want = chances(peft.PeftModel.from_pretrained(again, folder).eval(), PROMPT, completions)[0]
    with unrounded(), csd.Engine(folder, decoder="module") as engine:
        found = torch.tensor(csd.score(engine, PROMPT, completions).raw_logprobs[0])
    stays = ON_PACKED[kind]
    assert adapter_of(folder).leaves_base is stays
    error, effect = ((found - x.detach()).abs().mean() for x in (want, without))
    assert error < (1e-4 if stays else 0.2) * effect


RENAMED = {
    "language_model in front": lambda key: key.replace(".model.model.", ".model.language_model."),
    "a compiled model's": lambda key: key.replace(".model.model.", ".model._orig_mod.model."),
    "one layer renamed": lambda key: key.replace("layers.1.self_attn.q_proj", "layers.1.attn.q"),
    "a layer too many": lambda key: key.replace("layers.2.", "layers.7."),
    "of another module": lambda key: key.replace("q_proj", "qkv_proj"),
}


@pytest.mark.parametrize("kind", RENAMED)
def test_keys_that_fit_nothing_are_refused_until_they_are_renamed(kind, bases, tmp_path):
    folder = write(bases(), lora(), tmp_path)
    want, own = drawn(folder), {}
    csd.release()

    def rename(key):
        own[RENAMED[kind](key)] = key
        return RENAMED[kind](key)

    renamed(folder, rename)
    first = sorted(new for new, key in own.items() if new != key)[0]
    message = "weights that fit nothing in a LlamaForCausalLM: "
    with pytest.raises(ValueError, match=message) as refused:
        csd.Engine(folder)
    # with the adapter's name, as peft has it
    assert first.rpartition(".lora_")[0] in str(refused.value)
    assert "rename these keys" in str(refused.value)
    renamed(folder, own.__getitem__)
    assert drawn(folder) == want


@pytest.mark.parametrize("config", [lora, KINDS["norm to save"]], ids=["lora", "saved"])
def test_keys_that_are_missing_are_refused_by_name(config, bases, tmp_path):
    folder = write(bases(), config(), tmp_path)
    keys = sorted(load_file(tmp_path / "adapter_model.safetensors"))
    lost = next((key for key in keys if key.endswith("norm.weight")), keys[5])
    renamed(folder, lambda key: None if key == lost else key)
    name = lost.removeprefix("base_model.model.").removesuffix(".weight")
    with pytest.raises(ValueError, match=f"lacks the weights .*{re.escape(name)}"):
        csd.Engine(folder)


def test_every_field_of_the_config_is_read_or_refused_by_name(bases, tmp_path):
    folder = write(bases(), lora(), tmp_path)
    want = drawn(folder)
    csd.release()
    for field, value, message in (
        ("use_later_lora", True, "has use_later_lora=True, which peft"),
        ("runtime_config", {"ephemeral_gpu_offload": True}, "has runtime_config="),
        ("task_type", "SEQ_CLS", "task_type in .* must be 'CAUSAL_LM' or null, got 'SEQ_CLS'"),
        ("peft_type", "LATER", "peft_type in .* must be a kind of adapter .* got 'LATER'"),
        ("revision", "v2", "revision must be null in .* which is a local path, got 'v2'"),
        ("alora_invocation_tokens", [3], "is an aLoRA"),
    ):
        before = json.loads((tmp_path / "adapter_config.json").read_text())
        changed(folder, **{field: value})
        with pytest.raises(ValueError, match=message):
            csd.Engine(folder)
        # the remedy: without the field, or with the value that the message states
        (tmp_path / "adapter_config.json").write_text(json.dumps(before))
        assert drawn(folder) == want
        csd.release()
    # what a later version of peft writes for a kind that is not used
    changed(folder, use_later_lora=None, other_pattern={}, revision="main")
    assert drawn(folder) == want


def test_prompt_learning_is_refused_as_such(bases, tmp_path):
    made = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="prompt learning"):
        csd.Engine(write(bases(), made, tmp_path))


def test_a_folder_with_a_model_too_is_refused_and_peft_loads_it(bases, tmp_path):
    folder = write(bases(), lora(), tmp_path)
    want = drawn(folder)
    csd.release()
    shutil.copy(Path(bases(), "config.json"), tmp_path)
    with pytest.raises(ValueError, match="load it with peft") as refused:
        csd.Engine(folder)
    assert "peft.AutoPeftModelForCausalLM, and pass the model" in str(refused.value)
    out = csd.generate(
        by_peft(folder),
        PROMPT,
        seed=4,
        max_new_tokens=6,
        temperature=0.7,
        budget=4,
        end_token_ids=[],
    )
    assert out.tokens[0] == want
    Path(folder, "config.json").unlink()
    Path(folder, "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no weights"):
        csd.Engine(folder)


# added tokens

ADDED = 3
TRAINED = dict(trainable_token_indices=[61, 62, 63])


def tokenizer(added):
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(61)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0")
    made.add_tokens([f"<new{i}>" for i in range(added)])
    return made


@pytest.mark.parametrize(
    ("tied", "config", "saving"),
    [
        (False, dict(modules_to_save=["embed_tokens", "lm_head"]), {}),
        (True, dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True), {}),
        (False, {}, dict(save_embedding_layers=True)),
        (True, {}, dict(save_embedding_layers=True)),
        (True, TRAINED, dict(save_embedding_layers=False)),
    ],
    ids=["saved", "saved, tied", "layers", "layers, tied", "trained rows"],
)
def test_added_tokens_get_their_rows(tied, config, saving, bases, tmp_path):
    base = bases(tie_word_embeddings=tied)
    folder = write(base, lora(**Q | config), tmp_path, tokens=61 + ADDED, **saving)
    tokenizer(ADDED).save_pretrained(folder)
    model = by_peft(folder)
    assert model.get_input_embeddings().weight.shape[0] == 64
    engine = csd.Engine(folder, dtype=torch.float64)
    assert engine.config.vocab == 64
    assert len(engine.tokenizer) == len(tokenizer_of(folder)) == 64
    prompt = [*PROMPT, 62, 63]
    out = engine.generate(
        prompt, seed=4, max_new_tokens=6, temperature=0.7, budget=4, end_token_ids=[]
    )
    want = oracle.generate(model, prompt, seed=4, sample=0, max_new_tokens=6, temperature=0.7)
    assert out.tokens[0] == want[0]


def test_rows_padded_beyond_the_tokenizer_are_those_of_the_file(bases, tmp_path):
    config = lora(modules_to_save=["embed_tokens", "lm_head"], **Q)
    folder = write(bases(tie_word_embeddings=False), config, tmp_path, tokens=80)
    tokenizer(ADDED).save_pretrained(folder)
    assert csd.Engine(folder).config.vocab == 80


@pytest.mark.parametrize(
    ("config", "matrix"),
    [
        ({}, "model.embed_tokens"),
        (TRAINED, "lm_head"),
    ],
)
def test_rows_that_would_be_random_are_refused(config, matrix, bases, tmp_path):
    base = bases(tie_word_embeddings=False)
    given = lora(**Q | config)
    folder = write(base, given, tmp_path, tokens=64, save_embedding_layers=False)
    tokenizer(ADDED).save_pretrained(folder)
    message = f"61 rows in {matrix}, and the adapter no weights for the rows 61 to 63"
    with pytest.raises(ValueError, match=message) as refused:
        csd.Engine(folder)
    assert "save_embedding_layers=True" in str(refused.value)
    if not config:
        assert "pass the base model's tokenizer with tokenizer=" in str(refused.value)
        assert csd.Engine(folder, tokenizer=tokenizer(0)).config.vocab == 61
    write(base, given, tmp_path, tokens=64, save_embedding_layers=True)
    assert csd.Engine(folder).config.vocab == 64


# names of the hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A machine without network: writes a folder into the hub's cache under a name."""
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(folder, name, **commits):
        place = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        for revision, commit in (commits or {"main": "a" * 40}).items():
            shutil.copytree(folder, place / "snapshots" / commit)
            (place / "refs").mkdir(exist_ok=True)
            (place / "refs" / revision).write_text(commit)

    return put


def test_an_adapter_by_its_hub_name(hub, bases, tmp_path):
    base = bases()
    folder = write(base, lora(), tmp_path / "adapter")
    want, plain = drawn(folder), drawn(base)
    changed(folder, base_model_name_or_path="some/base")
    hub(base, "some/base")
    hub(folder, "some/adapter")
    assert drawn("some/adapter") == want != plain
    assert config_of("some/adapter").vocab == 61
    with pytest.raises(ValueError, match="'some/adapter' is neither a local model folder"):
        load("some/adapter", revision="other")


def test_revisions_of_an_adapter_and_of_its_base(hub, bases, tmp_path):
    old, new = bases(), str(tmp_path / "new")
    build("llama", torch.float32, seed=1).save_pretrained(new)
    folder = write(old, lora(), tmp_path / "adapter")
    want = drawn(folder)
    other = write(new, lora(), tmp_path / "second")
    hub(new, "some/base")
    hub(old, "some/base", v1="b" * 40)
    changed(folder, base_model_name_or_path="some/base", revision="v1")
    changed(other, base_model_name_or_path="some/base")
    hub(folder, "some/adapter", first="c" * 40)
    hub(other, "some/adapter")
    assert drawn("some/adapter", revision="first") == want
    assert drawn("some/adapter") != want
    with pytest.raises(ValueError, match="revision must be None for a local path"):
        load(folder, revision="first")
