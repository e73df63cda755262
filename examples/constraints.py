"""Constraints of samples: JSON with Best-of-N, a budget of thought, an audit of a file.

All of it with drafts, and all of it the samples that plain sampling under the same constraints
draws. JSON needs llguidance: pip install 'llguidance>=1.0'.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import csd
from csd.engine.generate import engine_for
from csd.evaluate.audit import TIES, audit, summary
from csd.models.demo import smollm2_path
from csd.traces.traces import read_traces

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"type": "string", "maxLength": 20},
        "large": {"type": "boolean"},
    },
    "required": ["city", "country", "large"],
    "additionalProperties": False,
}


def best_json(model: Any, tokenizer: Any, samples: int) -> dict:
    """The likeliest of many objects, all of which fit the schema."""
    out = csd.generate(
        model,
        "A city as JSON: ",
        tokenizer=tokenizer,
        num_samples=samples,
        max_new_tokens=96,
        json_schema=SCHEMA,
        temperature=0.7,
        seed=0,
    )
    whole = [s for s in out if s.finish_reason == "stop"]
    print(
        f"{len(whole)} of {samples} objects are whole, {out.stats.tokens_per_step:.2f} tokens a "
        "step"
    )
    best = csd.best_of(whole or out)
    print(f"the likeliest: {best.sample.text}\n")
    return json.loads(best.sample.text or "null") if whole else {}


def short_thought(model: Any, tokenizer: Any, samples: int) -> csd.Samples:
    """A thought of 12 tokens at most: this model has no tags of its own, so they are given."""
    out = csd.generate(
        model,
        "Is 91 a prime? (",
        tokenizer=tokenizer,
        num_samples=samples,
        max_new_tokens=40,
        max_thinking_tokens=12,
        thinking_tags=("(", ")"),
        temperature=0.8,
        seed=0,
    )
    print(f"{out.stats.thoughts_cut} of {samples} thoughts were cut; the first: {out.texts[0]!r}\n")
    return out


def audited(model: Any, tokenizer: Any, samples: int) -> dict:
    """Samples are recorded, one token is exchanged, and the audit finds it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.jsonl"
        csd.generate(
            model,
            "Once upon a time",
            tokenizer=tokenizer,
            num_samples=samples,
            max_new_tokens=30,
            temperature=0.8,
            seed=0,
            record=str(path),
        )
        (trace,) = read_traces(path)
    engine = engine_for(model)
    tie = TIES[engine.dtype]
    honest = summary([s for audits in audit(engine, [trace]) for s in audits], tie)
    trace.samples[0][7] += 1
    (audits,) = audit(engine, [trace])
    tampered = summary(audits, tie)
    print(f"as recorded: {honest['different']} of {honest['tokens']} tokens differ")
    first = audits[0].different(tie)[0]
    print(f"tampered: {tampered['different']} differ, first at position {first}")
    return {"honest": honest, "tampered": tampered}


def main(model: Any, tokenizer: Any = None, samples: int = 8, grammar: bool = True) -> dict:
    report: dict[str, Any] = {}
    if grammar:
        report["json"] = best_json(model, tokenizer, samples)
    report["thought"] = short_thought(model, tokenizer, samples)
    report["audit"] = audited(model, tokenizer, samples)
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder, hub name or GGUF file; SmolLM2-135M if left out")
    parser.add_argument("--samples", type=int, default=8)
    args = parser.parse_args()
    main(args.model or smollm2_path(), samples=args.samples)
