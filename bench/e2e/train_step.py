"""Training half of a GRPO step, csd against TRL: seconds, memory, agreement with the sampler.

    python -m bench train_step [--cases 500x8x100 ..] [--shape S] [--json F] [--plot F.svg]

**Half.** The loss of TRL's GRPOTrainer and its backward over one group, by csd's trainer and by
TRL's own, in turn over one model. A case is PROMPTxSAMPLESxTOKENS: a prompt of that many tokens and
samples of that many. All tokens are random: samples share no rows, which a model's own would, and
the model finds most of their tokens unlikely. Seconds are processor seconds of one thread (of the
wall with --wall), the median of --repeat; memory is the rise of the resident set to its peak; a
ratio is the median of the turns' ratios. TRL computes --trl-samples samples at a time where all do
not fit into the memory, and adds up their gradients; csd computes all at once.

**Agreement.** GRPO of csd's trainer on worked problems, with drafts. Before each update the
log-probabilities of the completions are computed by both trainers' own functions with the weights
that drew them; the largest difference from the rollout's is recorded.
"""

import argparse
import ctypes
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.lib.common import finish, merged, table
from bench.lib.resident import reset_peak, resident
from bench.lib.shapes import SHAPES
from csd.models.demo import smollm2_path

WORKED = Path(__file__).parents[1] / "prompts" / "worked.jsonl"


def loaded(
    dtype: torch.dtype, layers: int | None = None, shape: str | None = None
) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer; layers: the first so many.

    shape: of random weights in place of the model's.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _, file = str(smollm2_path()).rpartition("/")
    source: dict[str, Any] = dict(pretrained_model_name_or_path=folder, gguf_file=file)
    if shape == "qwen2.5-0.5b":
        return _qwen(dtype, layers), AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype)
    # the weights of a GGUF file are dequantised by now, which the trainer does not see
    model.is_quantized = False
    if layers is not None:
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
    return model, AutoTokenizer.from_pretrained(**source)


def _qwen(dtype: torch.dtype, layers: int | None) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    c = SHAPES["qwen2.5-0.5b"]
    sizes = dict(vocab_size=c.vocab, hidden_size=c.hidden, intermediate_size=c.intermediate)
    sizes |= dict(num_attention_heads=c.heads, num_key_value_heads=c.kv_heads)
    sizes |= dict(num_hidden_layers=layers or c.layers, tie_word_embeddings=True)
    rope = {"rope_type": "default", "rope_theta": c.rope_theta}
    torch.manual_seed(0)
    config: Any = Qwen2Config(**sizes, rope_parameters=rope)
    return Qwen2ForCausalLM(config).to(dtype)


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))


def trainer_of(kind: str, model: Any, tokenizer: Any, prompts: list[str], **config: Any) -> Any:
    """A GRPO trainer, "csd" or "trl", of a model; both may share it."""
    import trl
    from datasets import Dataset
    from transformers import PrinterCallback

    from csd.integrations.trl import GRPOTrainer, Rollout

    settings: dict[str, Any] = dict(
        output_dir=tempfile.mkdtemp(),
        num_generations=8,
        per_device_train_batch_size=8,
        logging_steps=1,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    made = (GRPOTrainer if kind == "csd" else trl.GRPOTrainer)(
        model=model,
        reward_funcs=_digits,
        args=trl.GRPOConfig(**settings | config),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        rollout_func=Rollout(exact=True),
    )
    made.remove_callback(PrinterCallback)
    # set by `train`, which the halves do without
    made.current_gradient_accumulation_steps = 1
    return made


def _digits(completions: list[str], **_: Any) -> list[float]:
    """Reward: the share of digits, which differs within a group of a small model."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def batch_of(prompt: int, samples: int, tokens: int, vocab: int) -> dict[str, Any]:
    """Inputs of a trainer's loss: one group of random tokens."""
    generator = torch.Generator().manual_seed(0)

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(10, vocab, shape, generator=generator)

    return {
        "prompt_ids": ids(1, prompt).expand(samples, -1),
        "prompt_mask": torch.ones(samples, prompt, dtype=torch.long),
        "completion_ids": ids(samples, tokens),
        "completion_mask": torch.ones(samples, tokens, dtype=torch.long),
        "advantages": torch.randn(samples, generator=generator),
        "num_items_in_batch": torch.tensor(samples * tokens),
    }


def half(trainer: Any, batch: dict[str, Any], wall: bool, samples: int) -> dict[str, float]:
    """Seconds of a loss and its backward, the rise to the peak in MB, and the gradient's norm.

    samples: of a pass.
    """
    clock = time.perf_counter if wall else time.process_time
    trainer.model.zero_grad(set_to_none=True)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    reset_peak()
    before, start = resident(), clock()
    for at in range(0, len(batch["advantages"]), samples):
        part = {k: x[at : at + samples] if x.dim() else x for k, x in batch.items()}
        trainer._compute_loss(trainer.model, part).backward()
    seconds = clock() - start
    grads = [p.grad.float().norm() for p in trainer.model.parameters() if p.grad is not None]
    return {
        "seconds": seconds,
        "memory_mb": (resident(peak=True) - before) / 1e6,
        "gradient": float(torch.stack(grads).norm()),
    }


def halves(args: argparse.Namespace, dtype: torch.dtype) -> list[dict]:
    rows = []
    for adapters in args.weights:
        model, tokenizer = loaded(dtype, args.layers, args.shape)
        model = adapted(model) if adapters == "lora" else model
        model.train()
        common = model, tokenizer, ["a"]
        sides = {kind: trainer_of(kind, *common) for kind in ("csd", "trl")}
        for trainer in sides.values():
            # compiles the loops
            half(trainer, batch_of(4, 2, 2, 1000), args.wall, 2)
        for case in args.cases:
            prompt, samples, tokens = map(int, case.split("x"))
            batch = batch_of(prompt, samples, tokens, model.config.vocab_size)
            passes = {"csd": samples, "trl": min(samples, args.trl_samples or samples)}
            by_side: dict[str, list[dict]] = {kind: [] for kind in sides}
            for _ in range(args.repeat):
                for kind, trainer in sides.items():
                    by_side[kind].append(half(trainer, batch, args.wall, passes[kind]))
                    print(adapters, case, kind, by_side[kind][-1], flush=True)
            row: dict[str, Any] = {"shape": args.shape or "smollm2-135m", "layers": args.layers}
            row |= {"weights": adapters, "dtype": str(dtype).removeprefix("torch."), "case": case}
            row |= {"trl_samples": passes["trl"], "tokens": "random"}
            for name in ("seconds", "memory_mb"):
                of = {k: _median([x[name] for x in runs]) for k, runs in by_side.items()}
                row |= {f"csd_{name}": of["csd"], f"trl_{name}": of["trl"]}
                turns = zip(by_side["trl"], by_side["csd"], strict=True)
                ratio = _median([trl[name] / own[name] for trl, own in turns])
                row[f"{name.partition('_')[0]}_ratio"] = ratio
            row["rows"] = prompt + samples * (tokens - 1)
            row["rows_without_sharing"] = samples * (prompt + tokens)
            norms = [runs[0]["gradient"] for runs in by_side.values()]
            row["gradients_differ"] = abs(norms[0] - norms[1]) / norms[1]
            row["repeat"], row["wall"] = args.repeat, args.wall
            rows.append(row)
    return rows


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def agreement(
    steps: int, tokens: int, dtype: torch.dtype, layers: int | None, minutes: float
) -> list[dict]:
    """Largest difference of the trainer's log-probabilities from the rollout's, by step."""
    import trl

    prompts = [json.loads(line)["prompt"] for line in WORKED.read_text().splitlines()]
    model, tokenizer = loaded(dtype, layers)
    config = dict(max_steps=steps, max_completion_length=tokens, learning_rate=1e-5)
    trainer = trainer_of("csd", model, tokenizer, prompts, **config)
    own = trl.GRPOTrainer._get_per_token_logps_and_entropies
    compute, end = trainer._compute_loss, time.monotonic() + 60 * minutes
    differences: list[dict] = []

    def watched(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad():
            stock = own(trainer, model, ids, mask, inputs["completion_ids"].shape[1])[0]
        difference = (stock - inputs["sampling_per_token_logps"]).abs() * inputs["completion_mask"]
        loss = compute(model, inputs)
        log = trainer._metrics["train"]
        row = {
            "step": len(differences) + 1,
            "csd": log["csd/logp_diff_max"][-1],
            "trl": float(difference.max()),
            "tau": log["csd/tau"][-1],
        }
        differences.append(row)
        print(row, flush=True)
        trainer.control.should_training_stop |= time.monotonic() > end
        return loss

    trainer._compute_loss = watched
    trainer.train()
    return differences


def draw(rows: list[dict], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # the same file for the same figures
    matplotlib.rcParams["svg.hashsalt"] = "csd"
    fig, ax = plt.subplots(figsize=(7.2, 3.2))
    steps = [row["step"] for row in rows]
    ax.plot(steps, [row["trl"] for row in rows], color="C1", label="TRL's own forward")
    ax.plot(steps, [row["csd"] for row in rows], color="C0", label="csd: 0.0 in every step")
    ax.set_yscale("symlog", linthresh=1e-4)
    ax.set(
        xlabel="step of GRPO",
        ylabel="largest difference",
        title="log-probability of a token: trainer against sampler",
        ylim=(-5e-5, None),
    )
    ax.grid(alpha=0.3)
    ax.legend()
    fig.tight_layout()
    fig.savefig(path, metadata={"Date": None})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=["500x8x100", "100x8x400"])
    parser.add_argument("--weights", nargs="*", default=["full", "lora"])
    parser.add_argument("--shape", choices=["qwen2.5-0.5b"], help="random weights of this shape")
    parser.add_argument("--trl-samples", type=int, help="samples of a pass of TRL's, default all")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--layers", type=int, help="of the model, by default all 30")
    parser.add_argument("--wall", action="store_true", help="seconds of the wall, all threads")
    parser.add_argument("--steps", type=int, default=200, help="of GRPO, 0 for none")
    parser.add_argument("--tokens", type=int, default=48, help="of a completion at most")
    parser.add_argument("--minutes", type=float, default=600.0, help="of GRPO at most")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights")
    parser.add_argument("--json", help="an existing file keeps the rows that are not run")
    parser.add_argument("--plot")
    args = parser.parse_args(argv)
    if not args.wall:
        torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    result: dict[str, Any] = {"bench": "train_step"}
    if args.json and Path(args.json).exists():
        result |= json.loads(Path(args.json).read_text())
    if args.cases and args.weights:
        fields = ("shape", "layers", "weights", "dtype", "case")
        rows = merged(result.get("halves", []), halves(args, dtype), fields)
        result["halves"] = rows
        print(table(rows))
    if args.steps:
        result["agreement"] = agreement(args.steps, args.tokens, dtype, args.layers, args.minutes)
        result["grpo"] = {"dtype": args.dtype, "tokens": args.tokens, "layers": args.layers}
    if args.plot:
        draw(result["agreement"], args.plot)
    finish(result, args.json)


if __name__ == "__main__":
    main()
