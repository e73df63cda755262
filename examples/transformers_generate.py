"""csd inside `transformers`: eight samples each of three prompts, in one call of `generate`.

    model.generate(..., custom_generate=csd.hf_generate)

Assisted generation, the speculation that `transformers` itself offers, refuses batches of more than
one sequence, a top complaint of its users; csd verifies the drafts of the whole batch at once.
Prompts may have different lengths: rows are unpadded by `attention_mask`.
"""

import argparse
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import csd
from csd.models.demo import smollm2_path

QUESTIONS = [
    "What is 17 + 26? Work it out step by step.",
    "Tom has 3 boxes of 12 pens and gives away 7 pens. How many pens are left? Think step by step.",
    "Name three colours.",
]


def load(name: str) -> tuple[Any, Any]:
    options = {}
    if name.endswith(".gguf"):
        name, _, options["gguf_file"] = name.rpartition("/")
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    return AutoModelForCausalLM.from_pretrained(name, **options), tokenizer


def main(model: Any, tokenizer: Any, samples: int = 8, tokens: int = 64) -> torch.Tensor:
    tokenizer.padding_side = "left"
    chats = [[{"role": "user", "content": q}] for q in QUESTIONS]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    options = dict(do_sample=True, temperature=0.7, max_new_tokens=tokens)

    try:
        model.generate(**inputs, **options, assistant_model=model)
    except ValueError as error:
        print(f"assisted generation: {error}\n")

    torch.manual_seed(0)
    start = time.perf_counter()
    out = model.generate(
        **inputs, **options, num_return_sequences=samples, custom_generate=csd.hf_generate
    )
    seconds = time.perf_counter() - start

    width = inputs["input_ids"].shape[1]
    texts = tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
    for i, question in enumerate(QUESTIONS):
        print(f"--- {question}")
        for text in texts[i * samples : i * samples + 2]:
            print(f"    {' '.join(text.split())[:120]}")
    print(f"\n{len(texts)} samples in {seconds:.1f} s, as one batch")
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder, hub name or GGUF file; SmolLM2-135M if left out")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    model, tokenizer = load(args.model or smollm2_path())
    main(model, tokenizer, args.samples, args.tokens)
