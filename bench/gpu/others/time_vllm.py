"""Times vLLM: python time_vllm.py JOB, in an environment that has vLLM and need not have csd.

Prints one JSON object per row, mixed with vLLM's own output.
"""

import json
import random
import sys
import time


def main(job: dict) -> None:
    import vllm

    made = time.perf_counter()
    engine = vllm.LLM(
        model=job["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=job["prompt"] + job["new"],
        speculative_config=job["speculative"],
        disable_log_stats=False,
    )
    made = time.perf_counter() - made
    ids = random.Random(0).choices(range(job["vocab"]), k=job["prompt"])
    for samples in job["samples"]:
        asked = vllm.SamplingParams(
            n=samples,
            temperature=0.7,
            max_tokens=job["new"],
            ignore_eos=True,
            detokenize=False,
            seed=1,
        )

        def draw(asked=asked) -> float:
            start = time.perf_counter()
            outs = engine.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)
            took = time.perf_counter() - start
            lengths = [len(out.token_ids) for out in outs[0].outputs]
            if lengths != [job["new"]] * asked.n:
                raise RuntimeError(f"{asked.n} answers of {job['new']} tokens, got {lengths}")
            return took

        first = draw()
        seconds = sorted(draw() for _ in range(3))[1]
        row = {
            "vllm": vllm.__version__,
            "N": samples,
            "prompt": job["prompt"],
            "new_tokens": job["new"],
            "engine_seconds": made,
            "first_seconds": first,
            "seconds": seconds,
            "tokens_per_second": samples * job["new"] / seconds,
            "counters": counters(engine),
        }
        print(json.dumps(row), flush=True)


def counters(engine) -> dict:
    """vLLM's counters of drafts so far, if it has any."""
    try:
        metrics = engine.get_metrics()
    except Exception:
        return {}
    return {m.name: m.value for m in metrics if "spec_decode" in m.name and hasattr(m, "value")}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
