"""The kernels of csd in a static step of a model of one layer, as they are launched, by phase."""

STEP = {
    "propose": ["grow", "fill"],
    "forward": ["plan_attention", "rms_norm", "rotary", "tree_attention", "merge_partials",
                "rms_norm", "swiglu", "rms_norm"],
    "verify": ["scan", "compact", "sample", "descend"],
    "commit": ["commit_kv", "advance_slots"],
    "insert": ["observe", "claim", "lead", "allocate", "merge"],
    "report": ["snapshot"],
}  # fmt: skip
