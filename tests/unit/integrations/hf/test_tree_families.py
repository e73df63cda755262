"""`csd_tree` in families of transformers: the logits of plain passes, or a clear error."""

import pytest
import torch
import transformers

import csd

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
OWN_HEAD = dict(head_dim=8)
PLAIN = (
    "llama",
    "qwen2",
    "granite",
    "smollm3",
    "olmo2",
    "olmo",
    "cohere",
    "stablelm",
    "nemotron",
    "phi",
    "phi3",
    "exaone4",
    "diffllama",
    "doge",
    "arcee",
    "apertus",
    "gpt_neox",
    "opt",
    "lfm2",
)
WITH_HEADS = ("qwen3", "glm", "helium", "gemma", "gemma2", "ernie4_5", "seed_oss")
FAMILIES: dict[str, dict] = {
    **{family: {} for family in PLAIN},
    **{family: OWN_HEAD for family in WITH_HEADS},
    "mistral": dict(sliding_window=None),
    "starcoder2": dict(sliding_window=None),
    "mixtral": dict(num_local_experts=4, sliding_window=None),
    "qwen3_moe": OWN_HEAD | EXPERTS,
    "falcon_h1": dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8),
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4),
    "minimax": EXPERTS | dict(num_local_experts=4),
    "hrm_text": {},
    "falcon": {},
    "bart": dict(d_model=32, decoder_layers=2, decoder_attention_heads=4),
    "bert": {},
}
PROMPT, CHAIN = [3, 7, 9, 11, 5], [8, 13, 21]


def build(family: str):
    torch.manual_seed(0)
    try:
        config = transformers.AutoConfig.for_model(family, **SIZES | FAMILIES[family])
        # grouped products have no float64
        config._experts_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    except Exception as error:
        pytest.skip(f"a tiny {family} cannot be built: {type(error).__name__}: {error}")
    return model.eval()


@torch.no_grad()
def tree_logits(model) -> torch.Tensor:
    """Logits of a root and two children, the first of which has a child."""
    past = model(torch.tensor([PROMPT[:-1]]), use_cache=True).past_key_values
    cache = csd.TreeCache([past], samples=[1], max_new_tokens=8)
    tree = cache.tree([[PROMPT[-1], *CHAIN]], [[-1, 0, 0, 1]])
    logits = model(**tree.inputs).logits[0]
    cache.commit(tree, tree.accepted(logits.argmax(-1)))
    return logits


@torch.no_grad()
def plain_logits(model) -> torch.Tensor:
    ends = [[], [CHAIN[0]], [CHAIN[1]], [CHAIN[0], CHAIN[2]]]
    return torch.stack(
        [model(torch.tensor([PROMPT + end]), use_cache=False).logits[0, -1] for end in ends]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_its_own_logits_or_is_refused(family):
    model = build(family)
    want = plain_logits(model)
    try:
        model.set_attn_implementation("csd_tree")
        got = tree_logits(model)
    except (ValueError, TypeError, RuntimeError) as error:
        assert len(str(error)) > 20
        assert family not in ("llama", "mistral", "qwen2", "qwen3", "granite", "mixtral")
        return
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "family, message",
    {
        "nemotron": "drops the argument$",
        "stablelm": "drops the argument$",
        "falcon_h1": "DynamicLayer",
        "diffllama": "call attention once in each",
        "doge": "make their own masks",
        "minimax": "a MiniMaxCache",
        "hrm_text": "call attention once in each",
        "falcon": "drops the argument tree",
        "bart": "does not take them",
        "bert": "a NoneType",
    }.items(),
)
def test_families_that_were_wrong_are_refused_by_name(family, message):
    model = build(family)
    model.set_attn_implementation("csd_tree")
    with pytest.raises((ValueError, RuntimeError), match=message):
        tree_logits(model)
