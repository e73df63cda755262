"""csd inside other libraries; each module is imported on first access."""

from typing import TYPE_CHECKING

from csd.utils.lazy import submodules

if TYPE_CHECKING:
    from csd.integrations import lm_eval, ray, tensor_parallel, trl, vllm

    __all__ = ["lm_eval", "ray", "tensor_parallel", "trl", "vllm"]
else:
    __getattr__ = submodules(__name__)


def __dir__() -> list[str]:
    return ["lm_eval", "ray", "tensor_parallel", "trl", "vllm"]
