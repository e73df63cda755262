"""bfloat16 on a GPU without its arithmetic is refused by name, before any weight is read."""

import pytest
import torch

import csd
from csd.cli.doctor import checked_dtypes
from csd.doctor import SMALL
from csd.kernels.backends import choose
from csd.kernels.common.gpu import has_bfloat16

CUDA = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch):
    """gpu(capability): a GPU of that compute capability, with no kernel."""

    def make(capability, hip=None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
        monkeypatch.setattr(torch.version, "hip", hip)

    return make


@pytest.mark.parametrize(
    ("capability", "hip", "has"),
    [
        ((7, 0), None, False),
        ((7, 5), None, False),
        ((8, 0), None, True),
        ((12, 0), None, True),
        # AMD counts in another way
        ((7, 5), "6.4", True),
    ],
)
def test_the_capability_decides(gpu, capability, hip, has):
    gpu(capability, hip)
    assert has_bfloat16(CUDA) == has
    assert has_bfloat16(torch.device("cpu"))


@pytest.mark.parametrize("kernels", [None, "triton"])
def test_the_error_names_device_dtype_and_remedy(gpu, kernels):
    gpu((7, 5))
    with pytest.raises(ValueError, match="dtype must be float16 or float32 on Tesla T4") as error:
        choose(kernels, CUDA, torch.bfloat16)
    for part in ("compute capability 7.5", "got bfloat16", "8.0", "dtype=torch.float16"):
        assert part in str(error.value)
    for dtype in (torch.float16, torch.float32):
        assert choose(kernels, CUDA, dtype).name == "triton"
    # PyTorch's own operations have it everywhere
    assert choose("reference", CUDA, torch.bfloat16).name == "reference"


@pytest.mark.parametrize(
    ("capability", "checked"),
    [((7, 5), ["float32", "float16"]), ((9, 0), ["float32", "bfloat16"])],
)
def test_doctor_checks_dtypes_that_the_gpu_has(gpu, capability, checked):
    gpu(capability)
    assert checked_dtypes(CUDA) == checked


def test_a_model_is_refused_before_its_weights_are_read(gpu, monkeypatch):
    gpu((7, 5))

    def load(model, *, before, **options):
        # as soon as the config is read
        before(CUDA, torch.bfloat16, SMALL)
        pytest.fail("the weights are read")

    monkeypatch.setattr("csd.engine.resources.model.load", load)
    for kernels in (None, "triton"):
        with pytest.raises(ValueError, match=r"dtype=torch\.float16"):
            csd.Engine("folder", device="cuda", kernels=kernels)
