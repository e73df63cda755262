"""GRPO with earlier epochs' completions as drafts: what they save, and that they change nothing.

    python examples/grpo/grpo_history.py [--epochs 3] [--plot F.svg] [--json F]

needs `pip install 'trl>=1.16'`. Trains a model three times at each of two learning rates, with
the completions of 0, 1 and 2 earlier epochs in `Rollout(history=...)`. Completions and losses are
the same in all three, in float32 up to ties, and it stops where they are not; tau and the seconds
of the rollouts differ, by epoch. The model is a small random one, which history cannot help; name
another with --model, a folder, a hub name or a GGUF file.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from csd.integrations.trl import Rollout
from csd.models.demo import toy

PROMPTS = [
    "Write vowels: ",
    "Sing: ",
    "Say it with vowels only. ",
    "aeiou",
    "Hum a tune: ",
    "Once upon a time ",
    "Count: one, two, ",
    "The answer is ",
]


class Measured(Rollout):
    """Notes of each call its seconds, tokens and steps, and what it drew."""

    def __init__(self, history: int):
        # a fixed number of drafted tokens, so that tau measures the history's worth
        super().__init__(history=history, budget=64)
        self.calls: list[dict] = []

    def __call__(self, prompts: list, trainer: Any) -> dict[str, list]:
        start = time.perf_counter()
        out = super().__call__(prompts, trainer)
        self.calls.append(
            {
                "seconds": time.perf_counter() - start,
                "tokens": self.tokens,
                "sample_steps": self.sample_steps,
                "completions": out["completion_ids"],
            }
        )
        return out


def train(
    name: str | None, history: int, learning_rate: float, epochs: int, tokens: int, prompts: int
) -> tuple[list[dict], list[float], list]:
    """Figures of each epoch, the losses, and the completions."""
    if name is None:
        model, tokenizer = toy()
    else:
        source: dict[str, Any] = {"pretrained_model_name_or_path": name}
        if name.endswith(".gguf"):
            source = {
                "pretrained_model_name_or_path": str(Path(name).parent),
                "gguf_file": Path(name).name,
            }
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        # the weights of a GGUF file are float32 by now, which the trainer does not see
        model.is_quantized = False
        tokenizer = AutoTokenizer.from_pretrained(**source)
    rollout = Measured(history)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=vowels,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            num_train_epochs=epochs,
            num_generations=4,
            per_device_train_batch_size=8,
            max_completion_length=tokens,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            shuffle_dataset=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            bf16=False,
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS[:prompts]}),
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    calls, each = rollout.calls, len(rollout.calls) // epochs
    rows = []
    for epoch in range(epochs):
        part = calls[epoch * each : (epoch + 1) * each]
        drawn, steps = (sum(c[k] for c in part) for k in ("tokens", "sample_steps"))
        seconds = sum(c["seconds"] for c in part)
        rows.append({"epoch": epoch + 1, "tau": drawn / steps, "rollout_seconds": seconds})
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return rows, losses, [c["completions"] for c in calls]


def vowels(completions: list[str], **_: object) -> list[float]:
    """Reward: the share of vowels."""
    return [sum(c in "aeiouAEIOU" for c in text) / max(len(text), 1) for text in completions]


def main(
    epochs: int = 3,
    tokens: int = 32,
    rates: tuple[float, ...] = (1e-4, 1e-3),
    histories: tuple[int, ...] = (0, 1, 2),
    model: str | None = None,
    prompts: int = len(PROMPTS),
    plot: str | None = None,
    json_path: str | None = None,
) -> list[dict]:
    records: list[dict] = []
    for rate in rates:
        first: tuple | None = None
        for history in histories:
            rows, losses, completions = train(model, history, rate, epochs, tokens, prompts)
            if first is None:
                first = losses, completions
            for what, here, there in zip(
                ("losses", "completions"), (losses, completions), first, strict=True
            ):
                if here != there:
                    changed = sum(a != b for a, b in zip(here, there, strict=True))
                    raise RuntimeError(
                        f"history={history} changed the {what} of {changed} of {len(here)} calls"
                    )
            records += [{"learning_rate": rate, "history": history, **row} for row in rows]
            for row in rows:
                print(
                    f"learning rate {rate:g}, history {history}, epoch {row['epoch']}: "
                    f"tau {row['tau']:.2f}, rollouts {row['rollout_seconds']:.1f} s"
                )
    print("completions and losses are the same with every history")
    if json_path:
        Path(json_path).write_text(json.dumps(records) + "\n")
    if plot:
        draw(records, plot)
    return records


def draw(records: list[dict], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # the same file for the same figures
    matplotlib.rcParams["svg.hashsalt"] = "csd"
    fig, axes = plt.subplots(1, 2, figsize=(9.4, 4.2))
    for ax, key, label in zip(
        axes,
        ("tau", "rollout_seconds"),
        ("tokens per sample and step", "seconds of rollouts"),
        strict=True,
    ):
        for n, rate in enumerate(sorted({r["learning_rate"] for r in records})):
            for history in sorted({r["history"] for r in records}):
                line = [r for r in records if (r["learning_rate"], r["history"]) == (rate, history)]
                ax.plot(
                    [r["epoch"] for r in line],
                    [r[key] for r in line],
                    "-:"[n % 2],
                    color=f"C{history}",
                    marker="o",
                    label=f"history {history}, rate {rate:g}",
                )
        ax.set(xlabel="epoch", ylabel=label, ylim=(0, 1.08 * max(r[key] for r in records)))
        ax.set_xticks(sorted({r["epoch"] for r in records}))
        ax.grid(alpha=0.3)
    fig.legend(*axes[0].get_legend_handles_labels(), ncols=3, loc="lower center")
    fig.tight_layout(rect=(0, 0.14, 1, 1))
    fig.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="of a completion at most")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 1e-3])
    parser.add_argument("--model")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="the first so many")
    parser.add_argument("--plot")
    parser.add_argument("--json", dest="json_path")
    main(**vars(parser.parse_args()))
