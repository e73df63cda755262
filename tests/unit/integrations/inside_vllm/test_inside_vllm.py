"""The proposer inside vLLM's CPU build: `make test-vllm`."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

# not "vllm", which this folder would be where tests/ is on the path
pytest.importorskip("vllm.version", reason="make test-vllm installs it")

# the engine in this process
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

DRAFTED = 8
SAMPLES = 8
CSD = {"model": "csd.integrations.vllm.Proposer", "num_speculative_tokens": DRAFTED}
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTED, "prompt_lookup_max": 4}
SUFFIX = {"method": "suffix", "num_speculative_tokens": DRAFTED}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """SmolLM2-135M-Instruct as a folder that vLLM loads."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from csd.models.demo import smollm2_path

    gguf = Path(smollm2_path())
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    folder = tmp_path_factory.mktemp("smollm2")
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # its weights are no longer GGUF's; transformers would not write them for what they were
    loaded.hf_quantizer = None
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    loaded.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def temperature_of_issue_55005(monkeypatch):
    """vLLM's issue 55005 (0.32.0, CPU only): drafts are verified with temperatures, top_k and top_p
    of memory that nobody has written. The rows of a step have those of their request."""
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        count = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
        return torch.where(x == replace_from, replace_to, x).repeat_interleave(count)

    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expand)


def prompts():
    path = Path(__file__).parents[4] / "bench/traces/prompts.jsonl"
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()[:2]]


def draw(model, speculative, temperature):
    """Token ids of SAMPLES samples of each prompt, and (steps, drafted, accepted) of all rows."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=2 * SAMPLES,
        enforce_eager=True,
        speculative_config=speculative,
        disable_log_stats=False,
        seed=0,
    )
    # vLLM takes no n > 1 for greedy requests
    n = SAMPLES if temperature else 1
    params = SamplingParams(n=n, temperature=temperature, max_tokens=64)
    chats = [[{"role": "user", "content": text}] for text in prompts()] * (SAMPLES // n)
    outputs = llm.chat(chats, params, use_tqdm=False)
    ids = [list(sample.token_ids) for output in outputs for sample in output.outputs]
    values = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    llm.llm_engine.engine_core.shutdown()
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return ids, [values.get(f"vllm:spec_decode_{name}", 0) for name in names]


def test_greedy_samples_are_those_without_drafts(model):
    plain, _ = draw(model, None, 0)
    drafted, (_, proposed, accepted) = draw(model, CSD, 0)
    assert drafted == plain
    assert 0 < accepted <= proposed


def test_acceptance_beside_ngram_and_suffix(model, temperature_of_issue_55005):
    """Printed, of the same prompts; their samples differ, since a seed's do with drafts."""
    others = {"csd": CSD, "ngram": NGRAM}
    if find_spec("arctic_inference"):
        others["suffix"] = SUFFIX
    accepted = {}
    for name, speculative in others.items():
        ids, (steps, proposed, taken) = draw(model, speculative, 0.7)
        accepted[name] = taken / sum(map(len, ids))
        print(
            f"\n{name}: {sum(map(len, ids))} tokens, {steps} drafts of {proposed} tokens, "
            f"{taken} accepted, {accepted[name]:.3f} of the tokens"
        )
    assert accepted["csd"] > accepted["ngram"]
