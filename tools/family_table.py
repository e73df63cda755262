"""The tables of docs/models.md: which decoder runs a family of transformers, and GGUF files.

    PYTHONPATH=.:tests python tools/family_table.py [NAME ..] [--write]
    PYTHONPATH=.:tests python tools/family_table.py --files [--write]

From the tiny random models of tests/helpers/models/families.py, each loaded in float32: the fused
decoder where it takes it, else the module, admitted or refused. The table of files is that of
`csd.models.load.gguf.architectures`, and made at once. --write puts a table into docs/models.md.
"""

import argparse
import re
import warnings
from pathlib import Path

import torch
import transformers
from helpers.models.families import MODULES, REFUSED, build

from csd.models.load.choose_decoder import module_decoder, rules_out_fused
from csd.models.load.gguf.architectures import ARCHITECTURES
from csd.models.redirect import CONVOLUTION, CORES

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
CONVOLVED = "short convolutions"
MARKS = "<!-- families -->", "<!-- end of families -->"
FILES = "<!-- files -->", "<!-- end of files -->"


def row(name: str) -> list[str]:
    """Family, fused, module, and what its attention needs or what rules it out."""
    try:
        model = build(name, torch.float32)
    except Exception as error:
        return [name, "", "", f"no tiny model could be built: {brief(error)}"]
    fused = "yes" if rules_out_fused(model) is None else ""
    try:
        decoder = module_decoder(model)
    except (TypeError, ValueError) as error:
        return [name, fused, "", f"refused: {brief(error)}"]
    return [name, fused, "yes", needs(decoder)]


def needs(decoder) -> str:
    """The needs of a module's attention beyond one size and a scale."""
    properties = []
    specs = [call.spec for call in decoder.calls]
    for what, has in (
        ("window", lambda s: s.window is not None),
        ("chunk", lambda s: s.chunk is not None),
        ("cap", lambda s: s.softcap is not None),
        ("sinks", lambda s: s.sinks),
        ("values of another size", lambda s: s.value_dim != s.head_dim),
        ("keys of an earlier layer", lambda s: s.shares is not None),
    ):
        count = sum(map(has, specs))
        if count:
            properties.append(what if count == len(specs) else f"{what} ({count} of {len(specs)})")
    if len({(s.heads, s.kv_heads, s.head_dim) for s in specs}) > 1:
        properties.append("heads that differ by layer")
    layers = decoder.base.config.get_text_config().num_hidden_layers
    mixers = [call.function for call in decoder.mixers]
    # a core is named in place of the convolutions in front of it
    for name, what in CORES.items() if set(mixers) & set(CORES) else ((CONVOLUTION, CONVOLVED),):
        if name in mixers:
            properties.append(f"{what} ({mixers.count(name)} of {layers} layers)")
    each = len(specs) / layers
    if each > 1:
        properties.append(f"{each:.3g} calls a layer")
    return ", ".join(properties)


def brief(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).split("; ")[0][:160].replace("|", "/")


def table(names: list[str]) -> str:
    lines = ["| family | fused | module | attention, or the reason |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(row(name)) + " |" for name in names]
    return "\n".join(lines)


def table_of_files() -> str:
    """GGUF architectures, their families, and what csd reads of a file beyond Llama's keys."""
    lines = ["| `general.architecture` | family | keys beside Llama's |", "|---|---|---|"]
    for name, kind in ARCHITECTURES.items():
        families = ", ".join(kind.families)
        # those that change a model; others must have a value that changes nothing
        keys = ", ".join(f"`{key}`" for key in sorted({*kind.keys, *kind.read}))
        lines.append(f"| {name} | {families} | {keys} |")
    return "\n".join(lines)


def write(marks: tuple[str, str], text: str) -> None:
    """Replace what is between two marks of docs/models.md."""
    before, rest = PAGE.read_text().split(marks[0])
    PAGE.write_text(f"{before}{marks[0]}\n{text}\n{marks[1]}{rest.split(marks[1])[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--files", action="store_true", help="the table of GGUF files alone")
    args = parser.parse_args()
    if args.files:
        print(table_of_files())
        if args.write:
            write(FILES, table_of_files())
        return
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    made = table(args.names or [*MODULES, *REFUSED])
    print(made)
    if args.write:
        note = f"With transformers {transformers.__version__}, by `tools/family_table.py`:"
        write(MARKS, f"{note}\n\n{made}")


if __name__ == "__main__":
    main()
