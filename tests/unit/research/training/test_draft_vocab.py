"""The vocabulary of an EAGLE-3 head, and the files that have it."""

import torch
from helpers.models.checkpoints import VOCAB, build
from safetensors.torch import load

from csd.models.fused.fuse import fuse
from csd.research.training.eagle3 import Eagle3Head
from csd.research.training.target import Target
from csd.research.training.texts import Text, draft_tokens, maps

CPU = torch.device("cpu")
TOKENS = torch.arange(3, 83, 2)


def test_the_vocabulary_is_the_samples_most_frequent_tokens():
    texts = [Text([9, 9, 9, 9, 4, 6, 6], 4), Text([9, 6, 2, 2, 4], 1), Text([1, 3], 1)]
    # 6 three times, 2 and 4 twice, 3 once; the prompts' 9 and 1 are not counted
    assert draft_tokens(texts, 12, 3, CPU).tolist() == [2, 4, 6]
    assert draft_tokens(texts, 12, 2, CPU).tolist() == [2, 6]
    # tokens of no sample follow by number
    assert draft_tokens(texts, 12, 6, CPU).tolist() == [0, 1, 2, 3, 4, 6]
    assert draft_tokens(texts, 12, None, CPU) is None and draft_tokens(texts, 12, 12, CPU) is None
    assert len(draft_tokens(texts, 40_000, None, CPU)) == 32_000
    found = maps(torch.tensor([2, 4, 6]), 12)
    assert found["d2t"].tolist() == [2, 3, 4] and found["d2t"].dtype == torch.int64
    assert found["t2d"].nonzero().flatten().tolist() == [2, 4, 6]


def test_the_files_have_the_published_names():
    target = Target(fuse(build("llama", num_hidden_layers=4)))
    layer = (
        "hidden_norm",
        "input_layernorm",
        "post_attention_layernorm",
        "mlp.down_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "self_attn.k_proj",
        "self_attn.o_proj",
        "self_attn.q_proj",
        "self_attn.v_proj",
    )
    names = {f"midlayer.{x}.weight" for x in layer}
    names |= {"fc.weight", "lm_head.weight", "norm.weight"}
    whole = load(Eagle3Head(target, None, torch.bfloat16, 0).published()[1])
    assert {*whole} == names and whole["lm_head.weight"].shape == (VOCAB, 40)
    assert {x.dtype for x in whole.values()} == {torch.bfloat16}
    reduced = load(Eagle3Head(target, TOKENS, torch.float32, 0).published()[1])
    assert {*reduced} == names | {"d2t", "t2d"}
    assert reduced["fc.weight"].shape == (40, 120) and reduced["lm_head.weight"].shape == (40, 40)
    assert (reduced["d2t"] + torch.arange(40)).equal(TOKENS)
