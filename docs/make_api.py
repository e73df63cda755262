"""Write docs/api.md from the docstrings: python docs/make_api.py"""

import inspect
import os
import pathlib
import re
import sys

os.environ.setdefault("TRITON_INTERPRET", "1")

HEAD = """# API

Made from the docstrings by `python docs/make_api.py`. The command line is `csd --help`.
"""
# kernels that other models can use, each a file of csd/kernels
KERNELS = (
    "rms_norm", "rotary", "swiglu", "plan_attention", "tree_attention", "merge_partials",
    "commit_kv", "observe", "graph_insert", "draft_tree", "verify", "advance_slots", "snapshot",
)  # fmt: skip
FILES = {
    "plan_attention": "attention_plan", "commit_kv": "commit", "advance_slots": "advance",
}  # fmt: skip


def entry(name: str, thing) -> str:
    text = inspect.getdoc(thing) or ""
    # a dataclass without a docstring of its own shows its fields, which the signature has
    if text.startswith(f"{thing.__name__}("):
        text = ""
    parts = [f"### {name}", f"```python\n{thing.__name__}{signature(thing)}\n```"]
    if text:
        parts.append(f"```text\n{text}\n```")
    if inspect.isclass(thing):
        for key, member in vars(thing).items():
            function = member.fget if isinstance(member, property) else member
            if key.startswith("_") or not callable(function) or not inspect.getdoc(function):
                continue
            first = inspect.getdoc(function).partition("\n\n")[0].replace("\n", " ")
            call = "" if isinstance(member, property) else "()"
            parts.append(f"- `{key}{call}`: {first}")
    return "\n\n".join(parts)


def signature(thing) -> str:
    text = str(inspect.signature(thing)).replace("torch.Tensor", "Tensor")
    # a default that is a function goes by its name
    return re.sub(r"<function (\S+) at 0x[0-9a-f]+>", r"\1", text)


def page() -> str:
    import csd

    names = [n for n in csd.__all__ if callable(getattr(csd, n))]
    parts = [HEAD, "## csd", *(entry(f"csd.{n}", getattr(csd, n)) for n in names)]
    parts.append("## csd.kernels")
    for name in KERNELS:
        module = f"csd.kernels.{FILES.get(name, name)}"
        __import__(module)
        thing = getattr(sys.modules[module], name)
        head = (inspect.getdoc(sys.modules[module]) or "").partition("\n")[0]
        parts.append(entry(f"{module}.{name}", thing) + f"\n\n{head}")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    pathlib.Path(__file__).with_name("api.md").write_text(page())
