"""`csd record MODEL PROMPTS -o TRACES` and `csd replay TRACES`."""

import json
import sys
from argparse import Namespace, _SubParsersAction
from pathlib import Path

from csd.cost import CostModel
from csd.prompts import as_message, has_chat


def add(commands: _SubParsersAction) -> None:
    record = commands.add_parser("record", help="draw samples and write them as a trace file")
    record.add_argument("model", help="a local folder, a hub name or a GGUF file")
    record.add_argument("prompts", help="JSONL; prompt (a string or messages), or question or "
                        "problem")  # fmt: skip
    record.add_argument("-o", "--out", required=True, help="trace file; must not exist")
    record.add_argument("-n", "--num-samples", type=int, default=16)
    record.add_argument("--limit", type=int, help="the first so many prompts")
    record.add_argument("--max-new-tokens", type=int, default=256)
    record.add_argument("--temperature", type=float, default=0.7)
    record.add_argument("--seed", type=int, default=0)
    record.add_argument("--plain", action="store_true", help="do not use the chat template")
    record.add_argument("--device")
    record.set_defaults(run=_record)

    replay = commands.add_parser("replay", help="what csd would gain on recorded samples")
    replay.add_argument("traces", nargs="+")
    replay.add_argument("-n", "--num-samples", type=int, help="of each prompt; all by default")
    replay.add_argument("--nodes", type=int, nargs="+", default=[0, 2, 4, 8, 16],
                        help="drafted tokens a sample and step")  # fmt: skip
    replay.add_argument("--drafter", default="consensus")
    replay.add_argument("--limit", type=int, help="the first so many prompts of each file")
    replay.add_argument("--cost", help='JSON file {"rows": [..], "seconds": [..]}: a step\'s time '
                        "by its rows on your machine")  # fmt: skip
    replay.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    replay.set_defaults(run=_replay)


def prompts_of(path: str, chat: bool, limit: int | None = None) -> list:
    """Prompts of a JSONL file, strings as a user's message where `chat`."""
    found = []
    lines = Path(path).read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = json.loads(line)
        names = [n for n in ("prompt", "question", "problem") if n in row]
        if not names:
            raise ValueError(f"{path}, line {number}: must have prompt, question or problem, got "
                             f"{sorted(row)}")  # fmt: skip
        found.append(as_message(row[names[0]], chat))
    return found[:limit]


def _record(args: Namespace) -> int:
    from csd import generate
    from csd.kept_engines import engine_for

    if Path(args.out).exists():
        raise ValueError(f"out must be a new file, got {args.out!r}")
    engine = engine_for(args.model, device=args.device)
    chat = has_chat(engine.tokenizer) and not args.plain
    asked = prompts_of(args.prompts, chat, args.limit)
    results = generate(
        engine,
        asked,
        num_samples=args.num_samples,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        record=args.out,
    )
    tokens = sum(len(t) for out in results for t in out.tokens)
    print(f"{len(results)} prompts, {tokens} tokens, in {args.out}", file=sys.stderr)
    return 0


def _replay(args: Namespace) -> int:
    from csd.gain import ROWS, SECONDS, gain
    from csd.traces import read_traces

    if args.num_samples is not None and args.num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {args.num_samples}")
    if min(args.nodes) < 0:
        raise ValueError(f"nodes must be at least 0, got {min(args.nodes)}")
    cost = CostModel(ROWS, SECONDS)
    if args.cost:
        table = json.loads(Path(args.cost).read_text())
        cost = CostModel(table["rows"], table["seconds"])
    traces = [t for path in args.traces for t in list(read_traces(path))[: args.limit]]
    if not traces:
        raise ValueError(f"traces must hold at least one prompt, got {args.traces}")
    rows = [gain(traces, nodes, cost, args.num_samples, args.drafter) for nodes in args.nodes]
    found = {"prompts": len(traces), "drafter": args.drafter, "rows": rows}
    if args.json:
        print(json.dumps(found))
        return 0
    print("nodes  used    tau  expected speed-up")
    for row in rows:
        print(f"{row['nodes']:5} {row['nodes_used']:5.1f} {row['tau']:6.2f} {row['speedup']:10.2f}")
    where = args.cost or "SmolLM2-135M on 2 CPU cores; pass --cost for your machine"
    print(f"{len(traces)} prompts; a step's time: {where}; the drafter's own time is not in it")
    return 0
