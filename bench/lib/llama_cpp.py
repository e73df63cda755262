"""llama.cpp on the file that csd runs: N sequences in one batch, the prompt's cells shared.

`pip install llama-cpp-python` builds it for this CPU. A GGUF file is rewritten with its matrices in
the dtype that csd runs, so both sides multiply the same numbers.
"""

import ctypes
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.lib.settings import PLAIN

# most rows of a batch
BATCH = 512


def copy_in(path: str, dtype: torch.dtype, to: str | Path) -> Path:
    """Copy the GGUF file at `path` with its matrices in bfloat16, float16 or float32."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    kind = {
        torch.bfloat16: GGMLQuantizationType.BF16,
        torch.float16: GGMLQuantizationType.F16,
        torch.float32: GGMLQuantizationType.F32,
    }[dtype]
    reader = GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(to, architecture)
    for name, field in reader.fields.items():
        # the writer adds these itself
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        value, inner = field.contents(), None
        if field.types[0] == GGUFValueType.ARRAY:
            inner = field.types[-1]
        writer.add_key_value(name, value, field.types[0], inner)
    for tensor in reader.tensors:
        data = dequantize(tensor.data, tensor.tensor_type)
        # llama.cpp stores vectors in float32
        own = kind if data.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(data, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(to)


class LlamaCpp:
    """Draws samples of one prompt, each with its own seeded sampler."""

    def __init__(
        self,
        path: str | Path,
        max_sequences: int,
        cells: int = 8192,
        settings: dict[str, Any] = PLAIN,
    ):
        """max_sequences: samples drawn at once; cells: cache cells of all sequences together."""
        import llama_cpp as lib

        self.lib, self.settings = lib, settings
        quiet = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(quiet, ctypes.c_void_p(0))
        self._quiet = quiet
        lib.llama_backend_init()
        model_params = lib.llama_model_default_params()
        # without mmap, weights may be repacked to the layout in which the CPU multiplies them
        model_params.use_mmap = False
        self.model = lib.llama_model_load_from_file(str(path).encode(), model_params)
        params = lib.llama_context_default_params()
        threads = torch.get_num_threads()
        # one more sequence holds what the next prompt may begin with
        params.n_ctx, params.n_batch, params.n_seq_max = cells, BATCH, max_sequences + 1
        params.n_threads = params.n_threads_batch = threads
        # one cache for all sequences, since otherwise the prompt's cells would be copied
        with suppress(AttributeError):
            params.kv_unified = True
        self.context = lib.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp made no context for {path}")
        self.batch = lib.llama_batch_init(BATCH, 0, 1)
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.clear()

    def draw(self, prompt: list[int], n: int, tokens: int, seed: int) -> float:
        """Returns tokens per second; samples stop at their end token."""
        start = time.perf_counter()
        drawn = sum(map(len, self.samples(prompt, n, tokens, seed)))
        return drawn / (time.perf_counter() - start)

    def samples(
        self,
        prompt: list[int],
        n: int,
        tokens: int,
        seed: int,
        times: list[float] | None = None,
    ) -> list[list[int]]:
        """Returns the tokens of n samples, each with its end token if it has one.

        times: gets the time at which each step's tokens are known; samples then go on behind their
        end tokens.
        """
        self.clear()
        (drawn,) = self.call([prompt], n, tokens, seed, ignore_eos=times is not None, times=times)
        return drawn

    def clear(self) -> None:
        """Empty the cache."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        self.held: list[int] = []

    def call(
        self,
        prompts: list[list[int]],
        n: int,
        tokens: int,
        seed: int,
        *,
        ignore_eos: bool = False,
        settings: dict[str, Any] | None = None,
        times: list[float] | None = None,
    ) -> list[list[list[int]]]:
        """Returns the tokens of n samples of each prompt, all drawn at once.

        A prompt's beginning that the first prompt or the call before has is not read again:
        sequence 0 holds the tokens of `held`, the samples have the sequences from 1 on.
        """
        lib, vocab = self.lib, self.lib.llama_vocab_n_tokens(self.vocab)
        memory = lib.llama_get_memory(self.context)
        live: dict[int, tuple[int, int]] = {}  # sequence -> row of its logits, position
        drawn: dict[int, list[int]] = {}
        samplers = {}
        for k, prompt in enumerate(prompts):
            common = _common(self.held, prompt[:-1])
            first = 1 + k * n
            if k == 0:
                lib.llama_memory_seq_rm(memory, 0, common, -1)
                self._read(prompt, common, 0)
                self.held = list(prompt)
                lib.llama_memory_seq_cp(memory, 0, first, -1, -1)
            else:
                lib.llama_memory_seq_cp(memory, 0, first, 0, common)
                self._read(prompt, common, first)
            for s in range(first, first + n):
                if s > first:
                    lib.llama_memory_seq_cp(memory, first, s, -1, -1)
                length = len(prompt) + tokens
                samplers[s] = sampler(
                    lib, vocab, settings or self.settings, seed * n + s, prompt, length
                )
                # all samples of a prompt draw their first token from the logits of its last row,
                # which the next prompt's batch replaces
                drawn[s] = [lib.llama_sampler_sample(samplers[s], self.context, -1)]
                live[s] = -1, len(prompt)
        for _ in range(tokens - 1):
            if times is not None:
                times.append(time.perf_counter())
            ended = [] if ignore_eos else [s for s in live if self.ends(drawn[s][-1])]
            for s in ended:
                del live[s]
            if not live:
                break
            self._decode([(drawn[s][-1], at, s) for s, (_, at) in live.items()], every=True)
            for row, (s, (_, at)) in enumerate([*live.items()]):
                drawn[s].append(lib.llama_sampler_sample(samplers[s], self.context, row))
                live[s] = row, at + 1
        if times is not None:
            times.append(time.perf_counter())
        if len(drawn) == 1:
            # a chat goes on from its answer, whose last token has not been read
            lib.llama_memory_seq_rm(memory, 0, -1, -1)
            lib.llama_memory_seq_cp(memory, 1, 0, -1, -1)
            self.held += drawn[1][:-1]
        for s, chain in samplers.items():
            lib.llama_memory_seq_rm(memory, s, -1, -1)
            lib.llama_sampler_free(chain)
        return [[drawn[1 + k * n + i] for i in range(n)] for k in range(len(prompts))]

    def _read(self, prompt: list[int], begin: int, sequence: int) -> None:
        """Read a prompt from its token `begin` on, with the logits of its last row."""
        rows = [(t, begin + i, sequence) for i, t in enumerate(prompt[begin:])]
        for i in range(0, len(rows), BATCH):
            self._decode(rows[i : i + BATCH])

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits [len(ids), V] after each token of a text of at most BATCH tokens."""
        lib = self.lib
        self.clear()
        self._decode([(t, i, 0) for i, t in enumerate(ids)], every=True)
        size = len(ids) * lib.llama_vocab_n_tokens(self.vocab)
        found = np.ctypeslib.as_array(lib.llama_get_logits(self.context), (size,))
        return torch.from_numpy(found.copy()).view(len(ids), -1)

    def ends(self, token: int) -> bool:
        """True if a token ends a sample."""
        return bool(self.lib.llama_vocab_is_eog(self.vocab, token))

    def _decode(self, rows: list[tuple[int, int, int]], every: bool = False) -> None:
        """Decode rows of (token, position, sequence), with logits of the last or of every row."""
        if len(rows) > BATCH:
            raise ValueError(f"at most {BATCH} rows go into a batch, got {len(rows)}")
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = every or i == len(rows) - 1
        status = self.lib.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")


def sampler(
    lib: Any, vocab: int, settings: dict[str, Any], seed: int, prompt: list[int], longest: int
) -> Any:
    """A chain of llama.cpp's samplers with the settings, in the order of transformers' filters.

    longest: most tokens of the prompt and a sample. The penalty counts the prompt's tokens too.
    """
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    penalty, min_p = settings["repetition_penalty"], settings["min_p"]
    links = []
    if penalty != 1:
        links.append(lib.llama_sampler_init_penalties(vocab, longest, penalty, 0.0, 0.0))
    links.append(lib.llama_sampler_init_temp(settings["temperature"]))
    if settings["top_k"]:
        links.append(lib.llama_sampler_init_top_k(settings["top_k"]))
    if settings["top_p"] < 1:
        links.append(lib.llama_sampler_init_top_p(settings["top_p"], 1))
    if min_p:
        links.append(lib.llama_sampler_init_min_p(min_p, 1))
    for link in [*links, lib.llama_sampler_init_dist(seed)]:
        lib.llama_sampler_chain_add(chain, link)
    if penalty != 1:
        for token in prompt:
            lib.llama_sampler_accept(chain, token)
    return chain


def _common(a: list[int], b: list[int]) -> int:
    """Number of tokens that both begin with."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
