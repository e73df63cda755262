"""One model over two devices: PyTorch's tensor parallel plan, and csd's drafts decided on rank 0.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py [--model FOLDER]

For models that do not fit on one GPU; on CPU it shows that it works. Every rank makes the same
calls and gets the same samples. The model's heads and feed-forward width must be divisible by the
number of ranks.
"""

import argparse

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import csd
from csd.integrations.tensor_parallel import ParallelEngine
from csd.models.demo import toy


def main(model: str | None = None, num_samples: int = 8, max_new_tokens: int = 48) -> csd.Samples:
    cuda = torch.cuda.is_available()
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(dist.get_node_local_rank())
    if model is None:
        module, tokenizer = toy()
    else:
        module = AutoModelForCausalLM.from_pretrained(model)
        tokenizer = AutoTokenizer.from_pretrained(model)

    with ParallelEngine(module, tokenizer=tokenizer) as engine:
        out = csd.generate(
            engine,
            "The three primary colours are",
            num_samples=num_samples,
            max_new_tokens=max_new_tokens,
            temperature=0.7,
            seed=0,
        )
    if dist.get_rank() == 0:
        print(*out.texts, sep="\n---\n")
        print(f"\n{out.stats.tokens_per_step:.2f} tokens per step, {dist.get_world_size()} ranks")
    if alone:
        dist.destroy_process_group()
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or hub name; a toy if left out")
    parser.add_argument("--num-samples", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    main(**vars(parser.parse_args()))
