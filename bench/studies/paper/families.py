"""Model families: those that run live, those that are replayed, refused or unknown."""

import torch
import transformers

import csd
from bench.studies.paper.box import Box
from bench.studies.paper.measure import figures, replayed

SAMPLES, NODES, PROBLEMS = 8, 16, 12
# tiny checkpoints with random weights: they test a family's computation, not its text
TINY = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
}
NEEDED = [
    "tau of the source paper's models (Llama-3-8B, Qwen2.5-7B-Instruct) on GSM8K and MATH",
    "probabilities of Qwen2.5-Math: its trace has none, so no soft edges and no coupled noise",
    "code models and long reasoning, where samples of thousands of tokens repeat more",
    "accuracy: a model of 135M parameters answers too few problems to show a loss of votes",
]


def run(box: Box) -> None:
    for family, options in box.while_time("families", TINY.items()):
        tau, same = mechanics(family, options, 16 if box.quick else 40)
        box.add(family=family, how="tiny, live, float64", tau=tau, equal_to_plain=same)
    box.add(family="t5", how="refused", message=refusal())
    for name, traces in box.further(PROBLEMS):
        n = min(SAMPLES, *(len(t.samples) for t in traces))
        for drafter in ("consensus", "prompt-lookup", "trie-prompt", "paper-shrinking-tree"):
            measured = figures(replayed(traces, drafter, n, NODES))
            box.add(
                family=name, how=f"replay, {drafter}", problems=len(traces), samples=n, **measured
            )
    box.notes += [f"needs other weights: {what}" for what in NEEDED]


def mechanics(family: str, options: dict, tokens: int) -> tuple[float, float]:
    """tau of a model with random weights, and the share of samples equal to plain sampling's."""
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=None,
        **options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        for name, weight in model.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(weight, std=0.3)
    engine = csd.Engine(model.eval(), max_slots=SAMPLES)
    draw = dict(
        num_samples=SAMPLES, max_new_tokens=tokens, seed=0, temperature=0.3, ignore_eos=True
    )
    fast = csd.generate(engine, [5, 6, 7, 5, 6], budget=4 * SAMPLES, **draw)
    plain = csd.generate(engine, [5, 6, 7, 5, 6], speculate=False, **draw)
    same = sum(a == b for a, b in zip(fast.tokens, plain.tokens, strict=True))
    return fast.stats.tokens_per_step, same / SAMPLES


def refusal() -> str:
    """Text of the error that csd raises for an encoder-decoder model."""
    config = transformers.T5Config(
        vocab_size=97, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    try:
        csd.Engine(transformers.T5ForConditionalGeneration(config))
    except ValueError as error:
        return str(error)
    raise RuntimeError("an encoder-decoder was taken")
