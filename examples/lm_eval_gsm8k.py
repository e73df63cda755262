"""The harness's GSM8K self-consistency task through csd, from a local file.

needs `pip install accelerate 'lm-eval>=0.4.13'`. The task is the harness's own: 8 worked
examples, 64 samples of a problem at temperature 0.2, majority over 64 and 8; only the place of its
data is changed, so that nothing is downloaded. On the command line, with the network:

    python -m csd.integrations.lm_eval run --model csd --model_args pretrained=FOLDER \
        --tasks gsm8k_cot_self_consistency
"""

import argparse
import json
import logging
import tempfile
from pathlib import Path

import lm_eval
from lm_eval import simple_evaluate

import csd.integrations.lm_eval  # noqa: F401  registers the model type

TASK = "gsm8k-cot-self-consistency.yaml"


def main(
    problems: str, model: str, limit: int | None = None, gen_kwargs: str | None = None
) -> dict:
    task = {
        "include": str(Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / TASK),
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(Path(problems).resolve())}},
    }
    # a line about what csd drew
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("csd").setLevel(logging.INFO)
    # the harness reads tasks from YAML files, and JSON is YAML
    file = Path(tempfile.mkdtemp()) / "gsm8k_local.yaml"
    file.write_text(json.dumps(task))
    results = simple_evaluate(
        model="csd",
        model_args={"pretrained": model, "device": "cpu", "dtype": "float32"},
        tasks=[str(file)],
        limit=limit,
        gen_kwargs=gen_kwargs,
        bootstrap_iters=0,
    )
    for name, value in results["results"]["gsm8k_cot_self_consistency"].items():
        if name.startswith("exact_match,"):
            print(f"{name}: {value:.3f}")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", help="JSON lines with the fields `question` and `answer`")
    parser.add_argument("model", help="a model's folder")
    parser.add_argument("--limit", type=int, help="problems to run")
    parser.add_argument("--gen-kwargs", help="overrides, such as max_gen_toks=128")
    main(**vars(parser.parse_args()))
