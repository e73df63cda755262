"""llama.cpp's reading of a GGUF file, where llama-cpp-python is installed."""

import ctypes

import numpy as np
import pytest
import torch


class LlamaCppModel:
    """Logits and end tokens of a file; keys, values and products in float32."""

    def __init__(self, path):
        """Raises ValueError for a file that llama.cpp refuses."""
        self.lib = lib = pytest.importorskip("llama_cpp")
        self._quiet = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(
            str(path).encode(), lib.llama_model_default_params()
        )
        if not self.model:
            raise ValueError(f"llama.cpp refuses {path}")
        self.vocab = lib.llama_model_get_vocab(self.model)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n, V] of a prompt of n tokens."""
        lib, n = self.lib, len(tokens)
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = n
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = 0
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context = lib.llama_init_from_model(self.model, params)
        assert context
        batch = lib.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i, token in enumerate(tokens.tolist()):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        assert lib.llama_decode(context, batch) == 0
        V = lib.llama_vocab_n_tokens(self.vocab)
        rows = [np.array(lib.llama_get_logits_ith(context, i)[:V]) for i in range(n)]
        lib.llama_batch_free(batch)
        lib.llama_free(context)
        return torch.from_numpy(np.stack(rows))

    def ends(self) -> list[int]:
        V = self.lib.llama_vocab_n_tokens(self.vocab)
        return [i for i in range(V) if self.lib.llama_vocab_is_eog(self.vocab, i)]

    def tokens(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a prompt, with those that the file adds; special tokens are parsed."""
        data, room = text.encode(), 8 * len(text) + 16
        found = (self.lib.llama_token * room)()
        n = self.lib.llama_tokenize(self.vocab, data, len(data), found, room, True, special)
        assert n >= 0
        return list(found[:n])
