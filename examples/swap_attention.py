"""csd's tree attention in a stock `transformers` model: greedy drafts for four samples, verified.

    python examples/swap_attention.py

The model is a tiny random Llama, so that this runs in a second on a CPU. Yours needs the one line
`model.set_attn_implementation("csd_tree")`; a call without `tree=` is sdpa as before.
"""

import torch
import transformers

import csd


def tiny_llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def draft(text: list[int]) -> tuple[list[int], list[int]]:
    """A tree behind the last token: what has followed it in the text so far, at most twice."""
    tokens, parents = [text[-1]], [-1]
    places = [i for i in range(len(text) - 1) if text[i] == text[-1]]
    for first in {text[i + 1]: i + 1 for i in places[-2:]}.values():
        parent = 0
        for token in text[first : first + 3]:
            tokens.append(token)
            parents.append(parent)
            parent = len(tokens) - 1
    return tokens, parents


@torch.no_grad()
def main() -> tuple[list[list[int]], list[list[int]]]:
    model = tiny_llama()
    model.set_attn_implementation("csd_tree")

    # two prompts, with three samples and one; what follows a prompt starts out different
    prompts = [[3, 14, 15, 9, 26, 5], [2, 7, 18]]
    texts = [[*prompts[0], first] for first in (10, 20, 30)] + [[*prompts[1], 40]]
    prefill = [model(torch.tensor([p])).past_key_values for p in prompts]
    cache = csd.TreeCache(prefill, samples=[3, 1], max_new_tokens=64)

    starts, steps = [list(text) for text in texts], 0
    while min(map(len, texts)) < 40:
        trees = [draft(text) for text in texts]
        tree = cache.tree([t for t, _ in trees], [p for _, p in trees])
        sample = model(**tree.inputs).logits[0].argmax(-1)  # [M], every row of every tree
        paths = tree.accepted(sample)
        for text, path, first in zip(texts, paths, tree.slot_start.tolist(), strict=True):
            text += sample[[first + j for j in path]].tolist()
        cache.commit(tree, paths)
        steps += 1

    new = [len(t) - len(s) for t, s in zip(texts, starts, strict=True)]
    plain = [
        model.generate(torch.tensor([s]), max_new_tokens=n, do_sample=False, pad_token_id=0)[
            0
        ].tolist()
        for s, n in zip(starts, new, strict=True)
    ]
    print(f"{sum(new)} tokens of {len(texts)} samples in {steps} forward passes")
    print(f"equal to plain decoding: {sum(a == b for a, b in zip(texts, plain, strict=True))} of 4")
    return texts, plain


if __name__ == "__main__":
    main()
