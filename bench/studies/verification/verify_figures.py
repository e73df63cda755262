"""Khisti et al.'s figures and sweeps, for `python -m bench verify --figures DIR`.

regions      their Figure 2: distributions of three letters for which K independent drafts can
             always be accepted, on a grid of the simplex.
temperature  their Figures 3 and 4: acceptance by the temperature of the drafts, the target at 1.0,
             both cut to top-p 0.95. *Same*: all drafts have that temperature. *Different*: K = 2,
             the first draft at 1.2.
truncation   acceptance by the size of the alphabet and by s, the tokens of the linear program.

Targets are SmolLM2-135M-Instruct's distributions at positions of recorded samples. Drafts are those
of the same model with its matrices rounded to 4 bits, which gives the proposals of another model
without training one.
"""

import time
from pathlib import Path

import torch

import bench
from csd.models.demo import smollm2_path
from csd.traces.traces import read_traces
from csd.verify import SCHEMES, Canonical, can_always_accept, optimal_acceptance

TRACES = Path(bench.__file__).parent / "traces/smollm2.jsonl.gz"
# fixed distributions of three letters, by title
FIXED = {
    "1/3, 1/3, 1/3": (1 / 3, 1 / 3, 1 / 3),
    "0.5, 0.3, 0.2": (0.5, 0.3, 0.2),
    "0.7, 0.2, 0.1": (0.7, 0.2, 0.1),
}
GRID = 120
REGION_DRAFTS = (2, 3, 4, 8)
TEMPERATURES = (0.6, 0.8, 1.0, 1.2, 1.6, 2.0, 2.4)
FIRST = 1.2
DRAFTS = (2, 4, 8)
TOP_P = 0.95
PLOTTED = ("bound", "canonical", "kseq", "recursive", "single")
ALPHABETS = (2, 5, 10, 20, 40, 80, 160)
TOKENS = (1, 2, 3, 5, 10, 15, 40)


def simplex(grid: int = GRID) -> torch.Tensor:
    """All distributions of three letters with multiples of 1 / grid as entries, [n, 3] float64."""
    first, second = torch.meshgrid(torch.arange(grid + 1), torch.arange(grid + 1), indexing="ij")
    inside = first + second <= grid
    a, b = first[inside], second[inside]
    return torch.stack([a, b, grid - a - b], 1).double() / grid


def fewest(probs: tuple[float, ...], of: str, grid: int = GRID) -> torch.Tensor:
    """Least of REGION_DRAFTS for which drafts can always be accepted, 0 for none: [n] int64.

    of: "target" fixes the proposal at `probs` and varies the target over the simplex; "proposal"
    fixes the target and varies the proposal.
    """
    moved = simplex(grid)
    fixed = torch.tensor(probs, dtype=torch.float64).expand_as(moved)
    q, p = (moved, fixed) if of == "target" else (fixed, moved)
    out = torch.zeros(len(moved), dtype=torch.int64)
    for k in reversed(REGION_DRAFTS):
        out[can_always_accept(q, p, k)] = k
    return out


def regions() -> list[dict]:
    """Rows with the share of the simplex where K drafts can always be accepted, for each K."""
    rows = []
    for of in ("target", "proposal"):
        for name, probs in FIXED.items():
            counts = fewest(probs, of)
            row = {"moves": of, "fixed": name}
            for k in REGION_DRAFTS:
                row[f"K={k}"] = float(((counts > 0) & (counts <= k)).double().mean())
            rows.append(row)
    return rows


def read_model() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    path = Path(smollm2_path())
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model.eval()


@torch.no_grad()
def round_matrices(model: torch.nn.Module, bits: int = 4) -> None:
    """Round every matrix of the layers in place, with one scale per row."""
    top = 2 ** (bits - 1) - 1
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "layers" in name:
            scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / top
            weight.copy_((weight / scale).round() * scale)


@torch.inference_mode()
def logits_at(model, texts: list[tuple[list[int], list[int]]], every: int) -> torch.Tensor:
    """Logits [n, V] at every `every`-th position of each (prompt, sample)."""
    parts = []
    for prompt, sample in texts:
        ids = torch.tensor([prompt + sample[:-1]])
        # only the rows that are used, since a row has logits for the whole vocabulary
        at = torch.arange(len(prompt) - 1, ids.shape[1], every)
        parts.append(model(ids, logits_to_keep=at).logits[0])
    return torch.cat(parts)


def record(problems: int, tokens: int, every: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, V] of the target and of the rounded model, at the same positions."""
    traces = list(read_traces(str(TRACES)))[:problems]
    texts = [(list(t.prompt), list(t.samples[0][:tokens])) for t in traces]
    model = read_model()
    target = logits_at(model, texts, every)
    round_matrices(model)
    return target, logits_at(model, texts, every)


def probs(logits: torch.Tensor, temperature: float, top_p: float = TOP_P) -> torch.Tensor:
    """Softmax at a temperature, cut to the fewest tokens of mass `top_p`: [n, V] float64."""
    p = (logits.double() / temperature).softmax(-1)
    values, order = p.sort(dim=-1, descending=True)
    masses = torch.where(values.cumsum(-1) - values < top_p, values, 0)
    p = torch.zeros_like(p).scatter_(1, order, masses)
    return p / p.sum(-1, keepdim=True)


def smaller(q: torch.Tensor, *p: torch.Tensor) -> list[torch.Tensor]:
    """Returns the distributions without the tokens whose probability is 0 in all of them."""
    positive = torch.stack([x.amax(0) for x in (q, *p)]).amax(0) > 0
    return [x[:, positive] for x in (q, *p)]


def temperature(target: torch.Tensor, draft: torch.Tensor, steps=TEMPERATURES) -> list[dict]:
    """Mean acceptance by draft temperature, one row per scheme and K."""
    whole, rows = probs(target, 1.0), {}
    for t in steps:
        q, p, first = smaller(whole, probs(draft, t), probs(draft, FIRST))
        for k in DRAFTS:
            acceptances = {"bound": optimal_acceptance(q, p, k)}
            acceptances |= {name: SCHEMES[name].acceptance(q, p, k) for name in PLOTTED[1:]}
            for name, x in acceptances.items():
                rows.setdefault(("same", k, name), {})[f"T={t}"] = float(x.mean())
        two = torch.stack([first, p], 1)
        for name in ("canonical", "recursive", "single"):
            x = SCHEMES[name].acceptance(q, two, 2)
            rows.setdefault(("different", 2, name), {})[f"T={t}"] = float(x.mean())
    return [dict(drafts=a, K=k, scheme=s) | row for (a, k, s), row in rows.items()]


def truncation(target: torch.Tensor, draft: torch.Tensor, at: float = FIRST) -> list[dict]:
    """Mean acceptance by alphabet at s = 5, and by s at an alphabet of 40; K = 2 and 4."""
    q, p = smaller(probs(target, 1.0), probs(draft, at))
    rows = []
    for swept, values in (("alphabet", ALPHABETS), ("s", TOKENS)):
        for value in values:
            scheme = Canonical(5, value) if swept == "alphabet" else Canonical(value, 40)
            row = {"swept": swept, "value": value}
            for k in (2, 4):
                start = time.perf_counter()
                row[f"K={k}"] = float(scheme.acceptance(q, p, k).mean())
                row[f"K={k} ms"] = 1e3 * (time.perf_counter() - start) / len(q)
            rows.append(row)
    levels = {"bound": optimal_acceptance}
    levels |= {name: SCHEMES[name].acceptance for name in ("kseq", "recursive")}
    for name, acceptance in levels.items():
        means = {f"K={k}": float(acceptance(q, p, k).mean()) for k in (2, 4)}
        rows.append({"swept": name, "value": None} | means)
    return rows


def figures(problems: int = 8, tokens: int = 64, every: int = 8) -> dict:
    """Measure all three figures at positions of the first sample of each problem."""
    start = time.perf_counter()
    torch.set_num_threads(1)
    target, draft = record(problems, tokens, every)
    result = {
        "bench": "verify --figures",
        "positions": len(target),
        "regions": regions(),
        "temperature": temperature(target, draft),
        "truncation": truncation(target, draft),
    }
    return result | {"seconds": time.perf_counter() - start}
