"""vLLM on the same device, shape and prompt, in its own environment: `--vllm PYTHON`.

Weights are random (`load_format="dummy"`), since the time of a step does not depend on them. A
random model repeats tokens, which its n-gram drafts exploit: their row shows their cost, not their
gain.
"""

import json
import subprocess
from pathlib import Path

import torch

from bench.gpu.lib.section import Section
from bench.gpu.lib.workload import RECORDED_VOCAB, shapes
from csd.models.fused.config import ModelConfig

# in another folder, since `import vllm` would import this file from its own
SCRIPT = Path(__file__).parents[1] / "others" / "time_vllm.py"
SAMPLES = (16, 64)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}


def run(section: Section) -> None:
    """Add one row per number of samples, plain and drafted; each kind in a separate process."""
    if section.vllm is None:
        section.skip("vLLM: --vllm PYTHON names an interpreter with vLLM (pip install vllm)")
        return
    folder = section.out / "vllm"
    folder.mkdir(exist_ok=True)
    name, config = next(iter(shapes(section).items()))
    (folder / "config.json").write_text(json.dumps(llama_config(config, section.dtype)))
    prompt, new = (1024, 128) if section.cuda else (32, 4)
    for drafts in (None, NGRAM):
        if section.left <= 0:
            section.cut_off(f"vLLM, drafts={drafts and drafts['method']}")
            continue
        job = dict(
            model=str(folder),
            prompt=prompt,
            new=new,
            samples=SAMPLES,
            vocab=RECORDED_VOCAB,
            speculative=drafts,
        )
        rows, error = measured(section, job)
        for row in rows:
            section.add(shape=name, drafts=drafts and drafts["method"], **row)
        if error:
            # an error of another library is a result
            section.add(shape=name, drafts=drafts and drafts["method"], note=error)


def measured(section: Section, job: dict) -> tuple[list[dict], str | None]:
    """Rows that vLLM's process printed, and the error that ended it, or None."""
    path = section.out / "vllm.log"
    with path.open("ab") as log:
        process = subprocess.Popen(
            [section.vllm, str(SCRIPT), json.dumps(job)], stdout=subprocess.PIPE, stderr=log
        )
        try:
            printed, _ = process.communicate(timeout=max(section.left, 1))
        except subprocess.TimeoutExpired:
            process.kill()
            printed, _ = process.communicate()
            section.cut_off(f"vLLM, drafts={job['speculative']}")
        log.write(printed)
    # other output is skipped
    lines = [line for line in printed.splitlines() if line.startswith(b'{"vllm":')]
    code = process.returncode
    failed = code > 0 or (code < 0 and section.left > 0)
    return list(map(json.loads, lines)), f"code {code}, see {path.name}" if failed else None


def llama_config(c: ModelConfig, dtype: torch.dtype) -> dict:
    """Content of config.json for a Llama of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab,
        "hidden_size": c.hidden,
        "intermediate_size": c.intermediate,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": min(c.context, 8192),
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
