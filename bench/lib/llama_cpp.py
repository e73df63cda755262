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
        params.n_ctx, params.n_batch, params.n_seq_max = cells, BATCH, max_sequences
        params.n_threads = params.n_threads_batch = threads
        # one cache for all sequences, since otherwise the prompt's cells would be copied
        with suppress(AttributeError):
            params.kv_unified = True
        self.context = lib.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp made no context for {path}")
        self.batch = lib.llama_batch_init(BATCH, 0, 1)
        self.vocab = lib.llama_model_get_vocab(self.model)

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
        lib, context = self.lib, self.context
        memory = lib.llama_get_memory(context)
        lib.llama_memory_clear(memory, True)
        rows = [(t, i, 0) for i, t in enumerate(prompt)]
        chunks = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
        for chunk in chunks:
            self._decode(chunk)
        for s in range(1, n):
            lib.llama_memory_seq_cp(memory, 0, s, -1, -1)
        longest, vocab = len(prompt) + tokens, lib.llama_vocab_n_tokens(self.vocab)
        samplers = [
            sampler(lib, vocab, self.settings, seed * n + s, prompt, longest) for s in range(n)
        ]
        # all samples draw their first token from the logits of the prompt's last row
        last, position = {s: len(chunks[-1]) - 1 for s in range(n)}, len(prompt)
        sequences: list[list[int]] = [[] for _ in range(n)]
        for _ in range(tokens):
            following = []
            for s, row in last.items():
                token = lib.llama_sampler_sample(samplers[s], context, row)
                sequences[s].append(token)
                if times is not None or not self.ends(token):
                    following.append((token, position, s))
            if times is not None:
                times.append(time.perf_counter())
            if not following:
                break
            self._decode(following, every=True)
            last = {s: row for row, (_, _, s) in enumerate(following)}
            position += 1
        for chain in samplers:
            lib.llama_sampler_free(chain)
        return sequences

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits [len(ids), V] after each token of a text of at most BATCH tokens."""
        lib = self.lib
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
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
