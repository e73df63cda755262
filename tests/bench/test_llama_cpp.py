"""llama.cpp in benchmarks: the file that it is given, and its samples where it is installed."""

import importlib.util

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

from bench.lib.llama_cpp import LlamaCpp, copy_in
from bench.lib.models import ids_of
from bench.lib.settings import PLAIN
from csd.models.demo import smollm2_path

pytestmark = pytest.mark.bench

FILTERS = {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.1}


@pytest.fixture
def given(tmp_path):
    writer = GGUFWriter(tmp_path / "given.gguf", "llama")
    writer.add_context_length(77)
    writer.add_token_list(["a", "bc"])
    writer.add_file_type(7)
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(3, 64)).astype(np.float32)
    eight = GGMLQuantizationType.Q8_0
    writer.add_tensor("matrix", quantize(matrix, eight), raw_dtype=eight)
    writer.add_tensor("vector", rng.normal(size=5).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "given.gguf"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_copy_has_the_matrices_in_the_dtype_and_all_else_as_it_was(given, tmp_path, dtype):
    read, copy = (GGUFReader(p) for p in (given, copy_in(given, dtype, tmp_path / "copy.gguf")))
    assert copy.fields["llama.context_length"].contents() == 77
    assert copy.fields["tokenizer.ggml.tokens"].contents() == ["a", "bc"]
    # of the matrices, which are others now
    assert "general.file_type" not in copy.fields
    old, new = ({t.name: t for t in r.tensors} for r in (read, copy))
    assert new["vector"].tensor_type == GGMLQuantizationType.F32
    assert np.array_equal(new["vector"].data, old["vector"].data)
    values = torch.from_numpy(dequantize(old["matrix"].data, old["matrix"].tensor_type).copy())
    found = dequantize(new["matrix"].data, new["matrix"].tensor_type)
    assert np.array_equal(found, values.to(dtype).float().numpy())


@pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)
@pytest.mark.parametrize("more", [{}, FILTERS], ids=["plain", "filters"])
def test_llama_cpp_draws_a_token_of_each_sample_a_step(tmp_path, more):
    from csd.models.load import load

    tokenizer = load(smollm2_path(), dtype=torch.float32).tokenizer
    path = copy_in(smollm2_path(), torch.float32, tmp_path / "model.gguf")
    llama = LlamaCpp(path, 3, settings=PLAIN | more)
    batches = []
    decode = llama._decode
    llama._decode = lambda rows, every=False: (batches.append(rows), decode(rows, every))[1]
    assert llama.draw(ids_of(tokenizer, "Count to fifty."), 3, 8, seed=0) > 0
    # the prompt once, then a token of each sample that has not ended
    assert {sequence for _, _, sequence in batches[0]} == {0}
    lengths = [len(rows) for rows in batches[1:]]
    assert lengths[0] == 3 and lengths == sorted(lengths, reverse=True)
    drawn = [[t for rows in batches[1:] for t, _, s in rows if s == i] for i in range(3)]
    assert len(set(map(tuple, drawn))) > 1
