"""`csd doctor`: check every operation on this machine."""

import json
from argparse import Namespace, _SubParsersAction
from dataclasses import asdict, replace

import torch

from csd.backends import NAMES
from csd.cli.operations import table
from csd.engine.self_check import SMALL, check
from csd.models.load import usable
from csd.schema.arguments import check_whole

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# what a kernel's tiles and branches depend on
SIZES = ("heads", "kv_heads", "head_dim")
# of any model's by far
LARGEST_SIZE = 1024


def add(commands: _SubParsersAction) -> None:
    parser = commands.add_parser("doctor", help="check each operation on this machine")
    parser.add_argument("--device", help="by default a GPU if there is one")
    parser.add_argument("--dtype", choices=DTYPES, help="both float32 and bfloat16 when not given")
    parser.add_argument("--kernels", choices=NAMES)
    parser.add_argument("--ops", action="store_true",
                        help="print what implements each operation, and check nothing")  # fmt: skip
    for name in SIZES:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=getattr(SMALL, name), help="of the model")
    parser.add_argument("--exact", action="store_true", help="as engines with exact=True run")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.set_defaults(run=_doctor)


def _doctor(args: Namespace) -> int:
    if args.ops:
        print(table())
        return 0
    sizes = {name: getattr(args, name) for name in SIZES}
    for name, value in sizes.items():
        check_whole(name, value, 1, LARGEST_SIZE)
    if args.heads % args.kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, got {sizes}")
    if args.head_dim % 2:
        raise ValueError(f"head_dim must be even, got {args.head_dim}")
    device = None if args.device is None else usable(args.device)
    config = replace(SMALL, **sizes)
    dtypes = [args.dtype] if args.dtype else ["float32", "bfloat16"]
    how = dict(config=config, kernels=args.kernels, exact=args.exact)
    reports = [check(device, DTYPES[d], **how) for d in dtypes]
    passed = not any(report.failed for report in reports)
    if args.json:
        print(json.dumps({"passed": passed, "reports": [asdict(r) for r in reports]}))
    else:
        print("\n\n".join(report.table() for report in reports))
    return 0 if passed else 1
