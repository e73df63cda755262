"""`python -m bench grpo`: figures of every step on both sides, a file that goes on, a picture."""

import json
import runpy
from types import SimpleNamespace

import pytest

from bench.e2e.grpo import __main__ as bench
from csd.models.demo import toy

pytestmark = [pytest.mark.bench, pytest.mark.filterwarnings("ignore")]

SETTINGS = dict(steps=2, prompts=2, samples=4, tokens=6, beta=0.1, learning_rate=1e-2)


@pytest.mark.parametrize("side", bench.SIDES)
def test_every_step_has_its_figures(side):
    pytest.importorskip("trl")
    from bench.e2e.grpo.run import run

    made = run(side, 0, SETTINGS, model=toy(), problems=8)
    assert made["final"] == {"problems": 8, "reward": 0.0, "solved": 0.0}
    steps = made["steps"]
    assert all(len(values) == SETTINGS["steps"] for values in steps.values()), steps.keys()
    parts = zip(steps["seconds"], steps["rollout_seconds"], steps["train_seconds"], strict=True)
    assert all(whole >= a + b - 2e-3 and min(a, b) > 0 for whole, a, b in parts)
    assert all(8 <= tokens <= 48 for tokens in steps["tokens"])
    assert all(memory > 50 for memory in steps["memory_mb"])
    # the sampler's log-probabilities are those of the tokens that the trainer computes them for
    assert max(steps["difference"]) < 1e-4 and steps["outside_clip"] == [0.0, 0.0]
    assert ("tau" in steps) == (side == "csd")
    if side == "csd":
        assert steps["difference"] == [0.0, 0.0]
    # a new adapter is the base model
    assert steps["kl"][0] < 1e-6


@pytest.mark.parametrize("side", ["csd", "trl"])
def test_an_adapter_over_a_packed_file(side):
    pytest.importorskip("trl")
    from bench.e2e.grpo.run import run

    settings = SETTINGS | dict(steps=1, prompts=1, tokens=3, packed="demo")
    made = run(side, 0, settings, problems=0)["steps"]
    assert made["grad_norm"][0] > 0 and (made["difference"] == [0.0]) == (side == "csd")


def test_final_problems_are_not_those_of_training():
    pytest.importorskip("trl")
    from bench.e2e.grpo.run import EXAMPLE, final

    example = runpy.run_path(str(EXAMPLE))
    seen = []
    example["in_place"] = lambda texts, right: seen.append(right) or [0.5] * len(right)
    example["solved"] = lambda texts, right: [float(0 < len(x) < 4) for x in texts]
    model, tokenizer = toy()
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(unwrap_model=lambda module: module),
        model=model,
        processing_class=tokenizer,
        max_completion_length=3,
    )
    made = final(example, trainer, 5, 4)
    assert made == {"problems": 4, "reward": 0.5, "solved": 1.0}
    assert made == final(example, trainer, 5, 4)
    trained = {row["right"] for row in example["problems"](5)}
    assert len(set(seen[0])) == 4 and not trained & set(seen[0]) and seen[0] == seen[1]


def fake(side, seed, settings, problems):
    """A run whose reward rises, by csd in half the seconds."""
    steps = settings["steps"]
    seconds = [2.0 if side == "trl" else 1.0] * steps
    each = dict.fromkeys(("clip_fraction", "outside_clip", "difference", "solved"), [0.0] * steps)
    each |= {"reward": [(i + seed) / steps for i in range(steps)], "seconds": seconds}
    each |= {"cpu_seconds": seconds, "rollout_seconds": [0.5] * steps}
    each |= {"train_seconds": [0.25] * steps, "tokens": [9] * steps, "memory_mb": [500.0] * steps}
    return {"side": side, "seed": seed, "final": {"reward": 0.5, "solved": 0.25}, "steps": each}


def test_a_file_goes_on_where_it_ends(tmp_path, monkeypatch, capsys):
    calls = []

    def counted(side, seed, settings, problems):
        if settings["steps"] > 1:
            calls.append((side, seed))
        return fake(side, seed, settings, problems)

    monkeypatch.setattr(bench, "alone", counted)
    path, plot = tmp_path / "grpo.json", tmp_path / "grpo.svg"
    options = ["--json", str(path), "--steps", "10"]
    bench.main([*options, "--seeds", "0"])
    bench.main([*options, "--seeds", "0", "1"])
    assert calls == [("csd", 0), ("trl", 0), ("csd", 1), ("trl", 1)]
    result = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    csd, trl = result["rows"]
    assert (csd["seeds"], csd["steps"], csd["tokens"]) == (2, 20, 180)
    assert (csd["s / step"], csd["rest s"], trl["s / step"]) == (1.0, 0.25, 2.0)
    assert (csd["by csd's s"], trl["by csd's s"]) == (1.0, 2.0)
    assert csd["first reward"] == pytest.approx(0.4) and csd["last reward"] == pytest.approx(0.6)
    assert csd["last reward by seed"] == "0.55 0.65"
    assert csd["final reward by seed"] == "0.50 0.50"
    # the mean reward of step i is (i + 0.5) / 10, which the last step's mean of 3 does not lower
    assert (csd["minutes to 0.7"], trl["minutes to 0.7"]) == (8 / 60, 16 / 60)
    with pytest.raises(SystemExit, match="name another file"):
        bench.main(["--json", str(path), "--steps", "12"])
    pytest.importorskip("matplotlib")
    bench.main(["--json", str(path), "--plot", str(plot)])
    first = plot.read_bytes()
    bench.main(["--json", str(path), "--plot", str(plot)])
    assert plot.read_bytes() == first
    title = "GRPO, 2 seeds: TRL alone takes\n2.0 times csd's seconds a step"
    assert bench.picture.title(result) == title


def test_rewards_of_files_are_compared(tmp_path, capsys):
    assert bench.chance([1.0, 2.0], [3.0, 4.0]) == 2 / 6
    assert bench.chance([1.0, 4.0], [2.0, 3.0]) == 1.0
    assert bench.chance([1.0, 2.0, 3.0], [9.0, 8.0, 7.0]) == 2 / 20
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, sides in zip(paths, (("csd", "trl"), ("csd",)), strict=True):
        seed = 2 * len(sides) - 2
        runs = [fake(side, seed, {"steps": 40}, 0) for side in sides]
        path.write_text(json.dumps({"runs": runs}))
    bench.main(["--compare", *map(str, paths)])
    _, middle, last = capsys.readouterr().out.splitlines()
    # of step i 0.025 (i + seed)
    assert middle.split()[-4:] == ["0.588", "0.637", "0.637", "1"]
    assert last.split()[-4:] == ["0.887", "0.938", "0.938", "1"]
