"""First things that a newcomer sees: names, an engine's repr, notices and refusals."""

import re
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
import transformers

import csd
from csd.models.demo import toy
from csd.models.load.choose_decoder import warn_caller
from csd.models.refuse import _has_attention


def test_dir_has_the_names_for_users_alone():
    names = dir(csd)
    assert set(names) == set(csd.__all__)
    modules = {name for name in names if isinstance(getattr(csd, name), types.ModuleType)}
    # packages with names of their own for users
    assert modules == {"baselines", "integrations", "kernels", "verify"}
    assert {"trl", "ray", "vllm", "lm_eval"} <= set(dir(csd.integrations))


def test_repr_of_an_engine():
    model, tokenizer = toy()
    with csd.Engine(model, tokenizer=tokenizer, max_slots=4) as engine:
        text = repr(engine)
    assert re.fullmatch(
        r"<csd.Engine of qwen3 in float32 on cpu, fused decoder \(weights: float32, [\d.]+ MB a "
        r"step\), up to 4 samples at once>",
        text,
    )


def test_what_users_hold_has_a_repr_of_its_own(tmp_path):
    from csd.engine.session import Session
    from csd.serve.session import AsyncSession

    classes = {x for x in (getattr(csd, name) for name in csd.__all__) if isinstance(x, type)}
    assert {csd.History, csd.TreeCache, csd.PackedTree, csd.AsyncEngine} <= classes
    for kind in classes | {Session, AsyncSession}:
        assert kind.__repr__ is not object.__repr__, kind
    with csd.History(path=tmp_path / "h.jsonl") as history:
        history.add([1, 2], [[3, 4, 5], [6]])
        words = f"1 prompts, 6 of 4,000,000 tokens in {tmp_path / 'h.jsonl'}"
        assert repr(history) == f"<csd.History of {words}>"
    assert repr(history) == f"<csd.History of {words}, closed>"
    assert repr(csd.History(tokens=50)) == "<csd.History of 0 prompts, 0 of 50 tokens>"
    packed = csd.PackedTree([[1, 2], [3]], [[[4, 5], [4, 6]], [[7]]])
    rows = len(packed.token)
    assert repr(packed) == f"<csd.PackedTree of 3 completions of 2 prompts in {rows} rows on cpu>"
    model, tokenizer = toy()
    ids = tokenizer("a b", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        past = model(ids[:, :-1]).past_key_values
    cache = csd.TreeCache([past], samples=[2], max_new_tokens=8, ids=ids)
    assert repr(cache) == (
        "<csd.TreeCache of 1 prompts and 2 slots, with [0, 0] of up to 8 tokens>"
    )
    with csd.AsyncEngine(model, max_tokens=64) as service:
        text = repr(service)
        session = service.session([1, 2], num_samples=2, seed=0)
        assert repr(session).startswith("<csd.AsyncSession of 2 branches, 2 live, 0 waiting; 0 ")
    assert text == f"<csd.AsyncEngine of {service.engine!r}, up to 64 tokens a request, 0 waiting>"
    assert repr(service).endswith("0 waiting, closed>")


def test_the_module_decoders_notice_points_to_the_caller():
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        csd.Engine(model).release()
    (notice,) = [w for w in found if "by its transformers module" in str(w.message)]
    assert Path(notice.filename) == Path(__file__)
    text = str(notice.message)
    assert "same tokens, slower" in text and "'gpt2' is not supported" in text
    assert "supported are" not in text


def test_a_warning_of_csds_own_entry_points_has_a_line():
    with pytest.warns(UserWarning, match="hello") as found:
        warn_caller("hello")
    assert Path(found[0].filename) == Path(__file__)


def test_models_without_attention_are_refused_for_that():
    config = transformers.Mamba2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_heads=4, head_dim=16, state_size=8
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises((TypeError, ValueError), match="'mamba2' has no attention"):
        csd.Engine(model)
    assert _has_attention(sys.modules[transformers.GPT2Model.__module__].__name__)


def test_demo_is_a_model_by_name(monkeypatch, tmp_path):
    from csd.models import load

    monkeypatch.chdir(tmp_path)
    toys = toy()
    for part in toys:
        part.save_pretrained(tmp_path / "elsewhere")
    monkeypatch.setattr(load, "smollm2_path", lambda: str(tmp_path / "elsewhere"))
    loaded = load.load("demo", device="cpu")
    assert loaded.config.family == "qwen3"
    # `csd doctor demo` and `csd prior` read these alone
    assert load.config_of("demo").vocab == loaded.config.vocab
    assert load.tokenizer_of("demo").vocab_size == loaded.tokenizer.vocab_size
    # a folder of that name is the user's
    (tmp_path / "demo").mkdir()
    with pytest.raises((OSError, ValueError)):
        load.load("demo", device="cpu")


def test_a_tree_cache_that_holds_the_root_is_refused():
    model, tokenizer = toy()
    ids = tokenizer("a b", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        whole, right = (model(x).past_key_values for x in (ids, ids[:, :-1]))
    sizes = dict(samples=[2], max_new_tokens=8, ids=ids)
    with pytest.raises(ValueError, match="all but the last of its 3 tokens, got one of 3"):
        csd.TreeCache([whole], **sizes)
    cache = csd.TreeCache([right], **sizes)
    last = int(ids[0, -1])
    with pytest.raises(ValueError, match=f"slot 1 must be its prompt's last token, {last}"):
        cache.tree([[last], [last + 1]], [[-1], [-1]])
    cache.tree([[last], []], [[-1], []])
    with pytest.raises(ValueError, match="ids must have one list per prompt"):
        csd.TreeCache([right], samples=[2], max_new_tokens=8, ids=[[1], [2]])
