"""`csd doctor`: check every operation on this machine; with a model, print when its drafts pay.

`csd doctor --ops` prints the operations and their implementations by backend (`table`).
`csd warmup` prepares this machine for the first calls of a model.
"""

import inspect
import json
import pkgutil
import sys
import time
from argparse import Namespace, _SubParsersAction
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from typing import Any

import torch

import csd.kernels
from csd.cli.common import MODEL, add_command, add_plain_flags, stamped
from csd.doctor import SMALL, check
from csd.doctor.cases import LARGE_VOCAB
from csd.doctor.verification import shown_verification, verification
from csd.engine.engine import Engine
from csd.engine.first_call.vocabulary import vocabulary_prior
from csd.engine.generate import engine_for
from csd.engine.options.engine_arguments import WarmupOptions
from csd.engine.options.show import LOADING, add_flags, check_flags, loading
from csd.engine.step.budget import StepTimeTable
from csd.gradient.logprobs import logprobs
from csd.kernels.backends import NAMES, loops
from csd.kernels.common.cpu import compiles
from csd.kernels.common.gpu import has_bfloat16
from csd.kernels.common.operator import OPERATIONS, load_loops
from csd.kernels.ops import STEP_OPERATIONS, TextOps, exact_triton, reference, triton
from csd.models.demo import toy
from csd.models.fused.config import ModelConfig
from csd.models.fused.held import held_weights
from csd.models.load import config_of, load, usable
from csd.models.load.choose_decoder import DECODERS
from csd.models.module.decoder import ModuleDecoder
from csd.utils.arguments import check_whole, options_of
from csd.utils.device import unseen_gpu
from csd.utils.lazy import check_installed
from csd.utils.phases import showing

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# dtypes that are checked without `--dtype`
CHECKED = ["float32", "bfloat16"]
# sizes that a kernel's tiles, branches and loops depend on; limits far above those of any model
LARGEST = {"heads": 1024, "kv_heads": 1024, "head_dim": 1024, "vocab": 1 << 20}


def add(commands: _SubParsersAction) -> None:
    parser = add_command(
        commands,
        "doctor",
        "check each operation on this machine",
        ["csd doctor", "csd doctor MODEL --dtype bfloat16", "csd doctor --ops"],
        "gpu.md",
    )
    parser.add_argument("model", nargs="?", help=f"model with the sizes to check: {MODEL}")
    parser.add_argument("--device", help="device to check; by default a GPU if there is one")
    parser.add_argument(
        "--dtype", choices=DTYPES, help=f"dtype to check; by default {' and '.join(CHECKED)}"
    )
    parser.add_argument(
        "--kernels", choices=NAMES, help="backend to check; by default the one for the device"
    )
    parser.add_argument(
        "--decoder",
        choices=DECODERS,
        help="also load the model, and print which decoder runs it and what the checks of its "
        "module found",
    )
    add_plain_flags(
        parser,
        "json",
        ops="print the implementation of each operation, and check nothing",
        exact="check the operations of engines with exact=True",
        **{name: (int, f"{name} to check instead of the model's") for name in LARGEST},
    )
    parser.set_defaults(run=_doctor)
    _add_warmup(commands)


def checked_dtypes(device: torch.device) -> list[str]:
    """The dtypes that are checked by default; float16 in place of a bfloat16 that a GPU lacks."""
    return CHECKED if has_bfloat16(device) else ["float32", "float16"]


def _doctor(args: Namespace) -> int:
    if args.ops:
        print(table())
        return 0
    # with --device the user has chosen, so a GPU that is not seen is no error
    unseen = unseen_gpu() if args.device is None else None
    if unseen:
        print(f"csd: {unseen}", file=sys.stderr)
        if args.json:
            output = {"passed": False, "reports": [], "error": unseen}
            print(json.dumps(stamped("doctor", output)))
        return 1
    # checks the sizes before the device, so that their errors come first
    config = _config(args) if args.decoder is None else None
    device = usable(args.device)
    admission = _admission(args, device)
    if admission and admission["decoder"] != "fused":
        # the kernels are checked at the module's sizes, which `_admission` has set in args
        args.model = None
    config = config or _config(args)
    if args.vocab is None and args.model is None and device.type == "cuda":
        config = replace(config, vocab=LARGE_VOCAB)
    dtypes = [args.dtype] if args.dtype else checked_dtypes(device)
    how = dict(config=config, kernels=args.kernels, exact=args.exact)
    reports = []
    # a line for each operation, in a pipe and a log too
    with showing(not args.json):
        for name in dtypes:
            if not args.json:
                print(f"csd: checking the operations in {name}", file=sys.stderr, flush=True)
            reports.append(check(device, DTYPES[name], **how))
        passed = not any(report.failed for report in reports)
        costs = _costs(args.model, device, args.dtype) if passed else None
    if args.json:
        output = {"passed": passed, "reports": [asdict(r) for r in reports]}
        output |= {"admission": admission} if admission else {}
        output |= dict(zip(("steps", "verification", "weights"), costs or (), strict=False))
        print(json.dumps(stamped("doctor", output)))
    else:
        if admission:
            print("\n".join(f"{name}: {value}" for name, value in admission.items()), end="\n\n")
        print("\n\n".join(report.table() for report in reports))
        if costs:
            held = "" if costs[2] is None else f"weights: {costs[2]}\n"
            print(f"\n{held}{shown_costs(costs[0])}")
            print(shown_verification(costs[1], SLOTS, costs[0]["steady"]))
    return 0 if passed else 1


def _costs(
    model: str | None, device: torch.device, dtype: str | None
) -> tuple[dict[str, Any], dict[str, Any], str | None] | None:
    """Costs of a step and of verification, and how weights are held; None without weights, and on a
    GPU."""
    if model is None or device.type != "cpu":
        return None
    try:
        engine = Engine(model, device=device, dtype=dtype)
    except OSError:
        # a folder with a config and no weights
        return None
    with engine:
        costs = step_costs(engine.step_times.plain()), verification(engine, SLOTS)
        held = held_weights(engine.decoder)
        return *costs, None if held is None else str(held)


def _admission(args: Namespace, device: torch.device) -> dict | None:
    """Returns the decoder that runs the model, and the needs of a module's attention calls."""
    if args.decoder is None:
        return None
    if args.model is None:
        raise ValueError("--decoder needs a model, got none")
    dtype = DTYPES[args.dtype] if args.dtype else None
    # loads the module too, if it decodes; the decoder does not keep it
    loaded = load(args.model, device=device, dtype=dtype, decoder=args.decoder)
    decoder = loaded.decoder
    if not isinstance(decoder, ModuleDecoder):
        return {"decoder": "fused"}
    for name in LARGEST:
        if getattr(args, name) is None:
            setattr(args, name, getattr(decoder.config, name))
    return {
        "decoder": "module",
        "fused ruled out by": decoder.why,
        "differences": str(decoder.admission),
        "static steps": decoder.why_not_static or "nothing in a pass reads the host",
        **{call.place: str(call.spec) for call in decoder.calls},
    }


def _config(args: Namespace) -> ModelConfig:
    """Config of a small model with the sizes of the flags, or of the named model."""
    asked = {name: size for name in LARGEST if (size := getattr(args, name)) is not None}
    for name, size in asked.items():
        check_whole(name, size, 1, LARGEST[name])
    model = SMALL if args.model is None else config_of(args.model)
    sizes = {name: getattr(model, name) for name in LARGEST} | asked
    if sizes["heads"] % sizes["kv_heads"]:
        raise ValueError(f"heads must be a multiple of kv_heads, got {sizes}")
    if sizes["head_dim"] % 2:
        raise ValueError(f"head_dim must be even, got {sizes['head_dim']}")
    return replace(SMALL, **sizes)


# the weight's layout selects the product, not `kernels=` (`csd.models.fused.linear`)
PRODUCT = (
    "linear",
    "torch.nn.functional.linear",
    "kernels.layers.cpu.linear.product or oneDNN",
    "cuBLAS",
    "kernels.layers.row_linear.row_linear_triton",
)


def table() -> str:
    """A Markdown table: the operations of a step, those for other models, and fused ones.

    A cell has a function's path within csd, or "reference" if a backend runs the reference.
    """
    backends = {"reference": reference(), "cpu": loops() if compiles() else None}
    backends |= {"triton": triton(), "triton, exact": exact_triton()}
    rows = [["operation", *backends], ["---"] * (1 + len(backends))]
    for name in STEP_OPERATIONS:
        run = [None if ops is None else getattr(ops, name) for ops in backends.values()]
        rows.append([name, *_cells(run)])
    for name in TextOps._fields:
        run = [ops and ops.texts and getattr(ops.texts, name) for ops in backends.values()]
        rows.append([f"{name} (texts)", *_cells(run)])
    rows.append(list(PRODUCT))
    for module in pkgutil.walk_packages(csd.kernels.__path__, "csd.kernels."):
        if compiles() or not {"cpu", "cpu_ops", "numba"} & set(module.name.split(".")):
            import_module(module.name)
    load_loops()
    for name, operation in sorted(OPERATIONS.items()):
        if name not in STEP_OPERATIONS:
            run = [operation.reference, operation.loop, operation.triton]
            rows.append([name, *_cells(run), ""])
    fused: dict[str, list[str]] = {}
    for i, ops in enumerate(backends.values()):
        for name, op in (ops.fused if ops else {}).items():
            cells = fused.setdefault(f"{name} (fused)", [""] * len(backends))
            cells[i] = f"{_path(op.fn)}: {', '.join(x.__name__ for x in op.replaces)}"
    rows += [[name, *cells] for name, cells in fused.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(functions: list[Callable | None]) -> list[str]:
    first, cells = functions[0], []
    for i, function in enumerate(functions):
        same = i > 0 and function is first
        cells.append("reference" if same else "" if function is None else _path(function))
    return cells


def _path(function: Any) -> str:
    function = inspect.unwrap(function)
    # the function of a partial
    function = getattr(function, "func", function)
    return f"{function.__module__}.{function.__qualname__}".removeprefix("csd.")


# slots of the table's first part, as `csd.generate` with eight samples has
SLOTS = 8


def step_costs(table: StepTimeTable) -> dict[str, Any]:
    """Rows, their milliseconds, and the acceptance needed with SLOTS samples in flight.

    A step over L slots commits one token per slot without drafts. With d drafted tokens, of which a
    share a is accepted, it commits 1 + a d / L tokens per slot and takes r times as long. So drafts
    pay from the acceptance a = (r - 1) L / d on.

    An acceptance of more than 1 is not attainable. It is None for steps without drafts.
    """
    base = table(SLOTS)
    rows = []
    for size in sorted({*table.sizes, SLOTS}):
        needed = None
        if size > SLOTS:
            needed = round((table(size) / base - 1) * SLOTS / (size - SLOTS), 3)
        milliseconds = round(1000 * table(size), 2)
        rows.append({"rows": size, "milliseconds": milliseconds, "acceptance_needed": needed})
    return {"slots": SLOTS, "steady": table.steady, "settled": table.settled, "rows": rows}


def shown_costs(costs: dict[str, Any]) -> str:
    """The table as text."""
    loaded = "" if costs["steady"] else ", timed while other work ran (? marks what is uncertain)"
    lines = [
        f"steps of this model, with {costs['slots']} samples in flight{loaded}:",
        "  rows  milliseconds  drafts pay where this share of them is accepted",
    ]
    for row in costs["rows"]:
        needed = row["acceptance_needed"]
        if needed is None:
            words = "(no drafts)" if row["rows"] == costs["slots"] else ""
        else:
            words = f"{needed:.0%}" if needed <= 1 else "never"
            words += "" if costs["steady"] else " ?"
        lines.append(f"{row['rows']:6}  {row['milliseconds']:12.2f}  {words}".rstrip())
    disturbed = "" if costs["steady"] else "on an idle machine drafts may pay earlier; "
    final = costs["steady"] or costs["settled"]
    then = "these times are kept" if final else "the next process repeats it"
    lines.append(f"{disturbed}{then}; one above that of more rows is lowered to it")
    return "\n".join(lines)


SIZE_FLAGS = tuple(options_of(WarmupOptions))
MODEL_FLAGS = (*LOADING, "decoder")


def _add_warmup(commands: _SubParsersAction) -> None:
    parser = add_command(
        commands,
        "warmup",
        "compile, check and time in advance, so that a model's first calls do not wait",
        [
            "csd warmup MODEL",
            "csd warmup MODEL -n 32 --prompt-tokens 2048",
            "csd warmup MODEL --lora --train",
            "csd warmup MODEL --prior own.csdprior",
        ],
        "gpu.md",
    )
    parser.add_argument("model", help=MODEL)
    parser.add_argument(
        "--prior",
        metavar="FILE",
        help="also write a prior without any text, of the model's likeliest tokens behind each "
        "token of its vocabulary, which takes one pass over it",
    )
    add_plain_flags(
        parser,
        lora="also compile what a model with LoRA adapters runs",
        train="also compile what csd.logprobs and its gradient run",
    )
    add_flags(parser, SIZE_FLAGS, WarmupOptions)
    add_flags(parser, MODEL_FLAGS)
    parser.set_defaults(run=_warmup)


def _warmup(args: Namespace) -> int:
    """Fill the caches on disk for later processes: kernels or loops, step times, self-check."""
    check_flags(args, SIZE_FLAGS, WarmupOptions)
    check_flags(args, MODEL_FLAGS)
    if args.lora:
        check_installed("peft", "lora", "csd warmup --lora")
    start = time.perf_counter()
    engine = engine_for(args.model, **loading(args), decoder=args.decoder)
    loaded = time.perf_counter()
    sizes: Any = {name: getattr(args, name) for name in SIZE_FLAGS}
    engine.warmup(**sizes)
    done = time.perf_counter()
    print(
        f"loaded and checked in {loaded - start:.1f} s, warmed up in another "
        f"{done - loaded:.1f} s; {len(engine.captured)} graphs captured"
    )
    start = time.perf_counter()
    compile_more(engine, args.lora, args.train)
    if args.lora or args.train:
        print(f"kernels of LoRA and training in another {time.perf_counter() - start:.1f} s")
    done = time.perf_counter()
    if args.prior is not None:
        prior = vocabulary_prior(engine)
        prior.save(args.prior)
        print(f"{prior.contexts} contexts in {time.perf_counter() - done:.1f} s, in {args.prior}")
    return 0


# in addition to those of a model's generation config, with which `Engine.warmup` draws
FILTERS: dict[str, Any] = dict(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.1)


def compile_more(engine: Engine, lora: bool, train: bool) -> None:
    """Compile what draws with filters, with LoRA and training run in the engine's dtype.

    Loops depend on dtypes and not on sizes, so a model of random weights stands for the engine's.
    """
    prompt, models = [5, 6, 7], [toy()[0]]
    if lora:
        import peft

        config = peft.LoraConfig(r=8, target_modules="all-linear")
        models.append(peft.get_peft_model(toy()[0], config))
    for model in models:
        model.to(engine.device, engine.dtype).eval()
        with Engine(model, max_slots=2) as small:
            small.generate(prompt, num_samples=2, max_new_tokens=4, seed=0, **FILTERS)
        if train:
            out = logprobs(model, prompt, [[8, 9], [8, 10]])
            torch.stack([x.sum() for x in out.logprobs]).sum().backward()
