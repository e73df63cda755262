"""A table of what each constant of the automatic budget buys, on simulated machines.

    python tools/budget_constants.py

Each row changes one constant and gives tokens per second relative to the constant as it is: the
mean over all scenarios and the worst one's. A scenario is a load (steady, noisy, drifting) and
drafts (copying, agreeing, marginal, diverging, and agreeing for the middle half of a call).
"""

import math
from statistics import mean
from unittest import mock

from simulated_steps import Machine, strong, table

from csd.engine.step.budget import AutoBudget, AutoPool

STEPS, SEEDS = 200, 3

# live slots; probabilities of a chain's nodes; the share of it that comes true
DRAFTS = {
    "copying": (8, [0.9, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3], lambda step: 1.0),
    "agreeing": (8, strong(0), lambda step: 0.6),
    "marginal": (8, strong(0), lambda step: 0.45),
    "diverging": (8, [0.3, 0.15], lambda step: 0.3),
    "changing": (8, strong(0), lambda step: 1.0 if STEPS / 4 <= step < STEPS * 3 / 4 else 0.05),
    "one sample": (1, [0.5, 0.3, 0.2, 0.1], lambda step: 0.6),
}
# deviation of a step's logarithm; factor of its time
LOADS = {
    "steady": (0.03, lambda step: 1.0),
    "noisy": (0.3, lambda step: 1.0),
    "drifting": (0.1, lambda step: 1 + 0.5 * math.sin(step / 40)),
}
CONSTANTS = {
    "auto.EXPLORE": (0.005, 0.02),
    "auto.CREDIT": (0.5, 2.0),
    "auto.COOLDOWN": (8, 32),
    "estimator.OUTLIER": (1.2, 10.0),
    "estimator.RECENT": (4, 16),
    "fixed.PER_SLOT": (8, 64),
    "fixed.MOST": (64, 256),
}


def seconds(rows: int) -> float:
    """Seconds of a step: each row takes 1% of one, and beyond 16 another 2%."""
    return 1 + 0.01 * rows + 0.02 * max(rows - 16, 0)


def rates() -> dict[tuple[str, str, str], float]:
    """Tokens per second of each scenario, relative to steps without drafts."""
    by_setting = {}
    for drafts, (live, chain, true) in DRAFTS.items():
        for load, (noise, factor) in LOADS.items():
            for kind in ("eager", "static"):
                gains = []
                for seed in range(SEEDS):
                    machine = Machine(
                        seconds,
                        lambda step, chain=chain: chain,
                        true,
                        factor,
                        propose=0.04,
                        live=live,
                        noise=noise,
                        seed=seed,
                    )
                    # the time measured at the start is half of it, right, or twice as much
                    cost = table(seconds, (0.5, 1.0, 2.0)[seed % 3])
                    auto = AutoBudget(cost)
                    if kind == "static":
                        auto = AutoPool(cost, [16, 32, 64, 128])
                    plain = machine.run(None, STEPS).rate()
                    gains.append(machine.run(auto, STEPS).rate() / plain)
                by_setting[drafts, load, kind] = mean(gains)
    return by_setting


def main() -> None:
    base = rates()
    print("| drafts | " + " | ".join(LOADS) + " |\n|---|" + "---|" * len(LOADS))
    for drafts in DRAFTS:
        cells = (
            f"{base[drafts, load, 'eager']:.2f}, {base[drafts, load, 'static']:.2f}"
            for load in LOADS
        )
        print(f"| {drafts} | " + " | ".join(cells) + " |")
    print("\n| constant | value | mean | worst |\n|---|---|---|---|")
    for name, values in CONSTANTS.items():
        for value in values:
            with mock.patch(f"csd.engine.step.budget.{name}", value):
                ratios = {key: rate / base[key] for key, rate in rates().items()}
            worst = min(ratios, key=ratios.get)
            print(
                f"| `{name}` | {value} | {mean(ratios.values()):.3f} | {ratios[worst]:.3f}, "
                f"{' '.join(worst)} |"
            )


if __name__ == "__main__":
    main()
