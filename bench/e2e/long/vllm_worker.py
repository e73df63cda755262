"""vLLM's side, run by the Python of an environment with vLLM's CPU build; does not import csd.

    python vllm_worker.py JOB

JOB is JSON: model (a folder), dtype, length (most tokens of a sequence), samples (most at once),
ends, settings (of `SamplingParams`), ngram (drafted tokens, 0 for none). Writes one line of JSON
when the model is loaded, and one for each line of JSON on standard input: prompts (token ids of
each), n, limit, ignore_eos; clear, which empties the prefix cache first; and settings, null for the
job's.
"""

import json
import os
import sys
import time


def main(arguments: list[str]) -> None:
    job = json.loads(arguments[0])
    # vLLM also writes to standard output, so answers get a copy of it and 1 becomes standard error
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # run the engine in this process: a separate engine process would wait in a busy loop
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    import vllm

    drafts = None
    if job["ngram"]:
        drafts = {
            "method": "ngram",
            "num_speculative_tokens": job["ngram"],
            "prompt_lookup_max": 4,
        }
        expand_by_request()
    llm = vllm.LLM(
        job["model"],
        dtype=job["dtype"],
        max_model_len=job["length"],
        max_num_seqs=job["samples"],
        speculative_config=drafts,
        seed=0,
    )

    def answer(**fields) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    answer(version=vllm.__version__)
    for line in sys.stdin:
        call = json.loads(line)
        if call["clear"]:
            llm.reset_prefix_cache()
        params = vllm.SamplingParams(
            n=call["n"],
            max_tokens=call["limit"],
            stop_token_ids=None if call["ignore_eos"] else job["ends"],
            ignore_eos=call["ignore_eos"],
            detokenize=False,
            **(call["settings"] or job["settings"]),
        )
        prompts = [{"prompt_token_ids": ids} for ids in call["prompts"]]
        start, spent = time.perf_counter(), time.process_time()
        outs = llm.generate(prompts, params, use_tqdm=False)
        answer(
            seconds=time.perf_counter() - start,
            processor=time.process_time() - spent,
            samples=[[list(x.token_ids) for x in out.outputs] for out in outs],
        )


def expand_by_request() -> None:
    """Patch vLLM so that each drafted token gets its request's temperature.

    On a CPU, vLLM 0.32.0 reads uninitialised memory there.
    """
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        count = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
        return torch.where(x == replace_from, replace_to, x).repeat_interleave(count)

    rejection_sampler.expand_batch_to_tokens = expand


if __name__ == "__main__":
    main(sys.argv[1:])
