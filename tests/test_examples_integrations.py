"""The pages of examples/ that no other test runs do as they stand, only shorter."""

import runpy
from pathlib import Path

from csd.models.demo import toy

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, *args, **options):
    return runpy.run_path(str(EXAMPLES / name))["main"](*args, **options)


def test_transformers_generate(capsys):
    out = run("transformers_generate.py", *toy(), samples=2, tokens=4)
    assert out.shape[0] == 6
    printed = capsys.readouterr().out
    assert "assisted generation: " in printed and "6 samples in" in printed


def test_demo(tmp_path, capsys):
    for part in toy():
        part.save_pretrained(tmp_path)
    run("demo.py", str(tmp_path), tokens=12)
    assert "Samples equal token by token to plain sampling: 8 of 8" in capsys.readouterr().out
