"""The kernels of csd in a static step of a model of one layer, as they are launched, by phase."""

STEP = {
    "propose": ["grow", "grow", "fill"],
    "forward": [
        "plan_attention",
        "rms_norm",
        "rotary",
        "tree_attention",
        "merge_partials",
        "rms_norm",
        "swiglu",
        "rms_norm",
    ],
    # the end of a verification also advances the slots and writes the snapshot
    "verify": ["scan", "compact", "sample", "finish"],
    "commit": ["commit_kv"],
    "insert": ["observe_claim", "lead", "allocate", "merge"],
}
