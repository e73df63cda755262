"""Predicted rows of `bench.gpu`, from compiled code and data sheets, before any GPU has run.

    python -m bench predictions --json bench/results/gpu_predicted.json [--compiled F]

A prediction is not a measurement. The file has the rows and names that `python -m bench.gpu`
prints, which reads the file and shows the ratio next to each figure. A launch takes the longest of
its bytes over BANDWIDTH, its products over RATE, its instructions over the issue rate of the
multiprocessors, and LEAST. Instructions are those that Triton compiles for sm_90 (`make aot`): for
attention its loops over pages, for the drafter's kernels all of them, once per level of the trees
or once, each waiting STALL cycles for the previous one. Shares of a data sheet, LEAST, STALL and
LEVELS are assumptions, and are written to the file.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.gpu.lib.roofline import step_seconds
from bench.gpu.predict import GENERATED, LEAST, PROMPT, launches
from bench.lib.common import finish, table
from bench.lib.shapes import SHAPES
from bench.micro.jobs.attention_job import shapes as attention_shapes
from csd.engine.step.static_step import SIZES
from csd.kernels.attention.triton.plan import tile_rows
from csd.models.fused.config import ModelConfig
from csd.state.kv_cache import PAGE

COMPILED = Path(__file__).parents[1] / "results" / "compiled.json"
QWEN3_30B = ModelConfig(
    family="qwen3_moe",
    vocab=151936,
    hidden=2048,
    intermediate=768,
    layers=48,
    heads=32,
    kv_heads=4,
    head_dim=128,
    context=40960,
    norm_eps=1e-6,
    rope_theta=1000000.0,
    qk_norm=True,
    experts=128,
    experts_per_token=8,
    experts_sum_to_one=True,
)
MODELS = {name: SHAPES[name] for name in ("llama-3.1-8b", "qwen2.5-7b")}
MODELS["qwen3-30b-a3b"] = QWEN3_30B
SAMPLES = (1, 4, 8, 16, 32, 64, 128, 256)
# pool sizes of a step in addition to the smallest that holds its samples
POOLS = (64, 128, 256, 512)
# cycles between two instructions of a warp, and levels that a step's slowest tree grows
# (bench/results/growth.json, two to eight nodes per sample)
STALL, LEVELS = 4, 6
# kernels of drafting in a step: growth twice, the second time resumed, and each other kernel once
GROW = ("draft_tree grow O=7", "draft_tree grow O=7 resumed")
DRAFTING = (
    "draft_tree fill N=16",
    "graph_insert observe_claim O=7",
    "graph_insert lead O=7",
    "graph_insert allocate",
    "graph_insert merge O=7",
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """NVIDIA's data sheet, with the shares of it that large copies and products usually reach."""

    bytes: float
    operations: float
    processors: int = 132
    clock: float = 1.755e9

    @property
    def bandwidth(self) -> float:
        return 0.9 * self.bytes

    @property
    def rate(self) -> float:
        return 0.8 * self.operations

    @property
    def issued(self) -> float:
        """Warp instructions per second: four per cycle and multiprocessor."""
        return 4 * self.processors * self.clock


GPUS = {"H100": Gpu(3.35e12, 989e12), "H200": Gpu(4.8e12, 989e12)}


def instructions(path: Path) -> dict[str, dict]:
    """Reads the rows of kernels compiled for sm_90 in bfloat16, by name."""
    compiled = json.loads(path.read_text())
    rows = compiled.get("rows") or compiled["after"]["rows"]
    return {r["kernel"]: r for r in rows if r["target"] == "sm_90" and r["dtype"] == "bf16"}


def attention_seconds(
    c: ModelConfig, gpu: Gpu, code: dict, samples: int, rows: int, prompt: int, generated: int
) -> float:
    """Seconds of a layer's attention: prompt pages once per tile of rows, samples' pages once."""
    small, large = (code[f"tree_attention D={c.head_dim}"]["mma loops"][i] for i in (0, 3))
    warps = code[f"tree_attention D={c.head_dim}"]["warps"]
    tiles = -(-rows // tile_rows(c.heads, c.kv_heads))
    own = rows / samples * c.heads / c.kv_heads
    each, loops = (small, 1) if own <= 16 else (large, -(-own // 64))
    issued = tiles * prompt * large + samples * loops * generated * each
    issued *= warps * c.kv_heads / PAGE
    partial = 2 * 4 * rows * c.heads * (c.head_dim + 1)
    read = 4 * (prompt + samples * generated) * c.kv_heads * c.head_dim + partial
    worked = 4 * rows * c.heads * c.head_dim * (prompt + generated)
    merge = max((partial + 2 * rows * c.heads * c.head_dim) / gpu.bandwidth, LEAST)
    return max(read / gpu.bandwidth, worked / gpu.rate, issued / gpu.issued, LEAST) + merge


def drafting_seconds(gpu: Gpu, code: dict) -> float:
    """Seconds of propose and insert within a graph, as chains of dependent instructions."""
    counts = [LEVELS / len(GROW) * code[name]["instructions"] for name in GROW]
    counts += [code[name]["instructions"] for name in DRAFTING]
    return sum(max(n * STALL / gpu.clock, LEAST) for n in counts)


def experts(c: ModelConfig, rows: int) -> Iterator[tuple[float, float]]:
    """Launches of a layer of experts besides two products, a norm and SwiGLU (experts.py)."""
    yield 2 * c.hidden * c.experts, 2 * rows * c.hidden * c.experts
    # routing, the sort by experts, and the sum of a row's experts
    yield from ((2 * rows * c.hidden, 0) for _ in range(18 + c.experts_per_token))


def step_launches(c: ModelConfig, samples: int, rows: int) -> list[tuple[float, float]]:
    """Bytes and operations of a step's launches except attention and drafting."""
    if not c.experts:
        return [x for x in launches(c, samples, rows, False, attends=False)]
    chosen = c.experts * (1 - (1 - c.experts_per_token / c.experts) ** rows)
    dense = replace(c, family="qwen3", experts=0, experts_per_token=0, experts_sum_to_one=False)
    shared = list(launches(dense, samples, rows, False, attends=False))
    # an expert's weights are read once if any row uses it, and each row multiplies by its experts
    extra = 3 * c.hidden * c.intermediate
    more = [
        (
            2 * extra * (chosen - 1) * c.layers,
            2 * rows * extra * c.layers * (c.experts_per_token - 1),
        )
    ]
    return shared + more + [x for _ in range(c.layers) for x in experts(c, rows)]


def step_row(name: str, gpu_name: str, code: dict, samples: int, rows: int) -> dict:
    c, gpu = MODELS[name], GPUS[gpu_name]
    launched = step_launches(c, samples, rows)
    attention = attention_seconds(c, gpu, code, samples, rows, PROMPT, GENERATED)
    drafting = drafting_seconds(gpu, code) if rows > pool(samples) else 0.0
    others = sum(max(b / gpu.bandwidth, f / gpu.rate, LEAST) for b, f in launched)
    row = {
        "section": "end_to_end",
        "gpu": gpu_name,
        "shape": name,
        "N": samples,
        "rows": rows,
        "launches": len(launched) + 2 * c.layers,
        "step ms": 1e3 * (others + c.layers * attention + drafting),
        "attention ms": 1e3 * c.layers * attention,
        "drafting ms": 1e3 * drafting,
    }
    if not c.experts:
        row["roofline ms"] = 1e3 * step_seconds(
            c,
            rows=rows,
            live=samples,
            prompts=[PROMPT],
            context=GENERATED,
            bandwidth=gpu.bandwidth,
            flops=gpu.rate,
        )
    return row


def pool(samples: int) -> int:
    """Number of rows of a step without drafts: the smallest pool size that holds the samples."""
    return next(size for size in SIZES if size >= samples)


def predicted(code: dict) -> list[dict]:
    rows = []
    for gpu_name, gpu in GPUS.items():
        for name in MODELS:
            for n in SAMPLES:
                sizes = sorted({pool(n), *(m for m in POOLS if m > pool(n))})
                rows += [step_row(name, gpu_name, code, n, m) for m in sizes]
        for shape in attention_shapes():
            sizes = shape.samples, shape.rows, shape.prompt, shape.committed
            seconds = attention_seconds(MODELS[shape.model], gpu, code, *sizes)
            rows.append(
                {"section": "attention", "gpu": gpu_name, "shape": str(shape), "us": 1e6 * seconds}
            )
        rows.append(
            {
                "section": "drafters",
                "gpu": gpu_name,
                "drafter": "consensus",
                "us": 1e6 * drafting_seconds(gpu, code),
            }
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compiled", type=Path, default=COMPILED, help="a result of `make aot`")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    rows = predicted(instructions(args.compiled))
    for section in ("end_to_end", "attention", "drafters"):
        print(table([r for r in rows if r["section"] == section]), end="\n\n")
    assumed = {
        "least us": LEAST * 1e6,
        "stall cycles": STALL,
        "levels": LEVELS,
        "prompt": PROMPT,
        "generated": GENERATED,
    } | {
        name: {"bandwidth": g.bandwidth, "rate": g.rate, "clock": g.clock}
        for name, g in GPUS.items()
    }
    finish({"bench": "predictions", "measured": False, "assumed": assumed, "rows": rows}, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
