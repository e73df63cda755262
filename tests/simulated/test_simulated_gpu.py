"""What the simulated GPU finds (`simulated.py`): each a program that would fail on a real one."""

import pytest
import torch
from simulated_gpu import Gpu


def reads_too_soon():
    x = torch.zeros(3, device="cuda")
    host = torch.empty(3, pin_memory=True)
    host.copy_(x, non_blocking=True)
    return host.sum() == 0


def another_stream():
    x, stream = torch.zeros(3, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    x.fill_(2)
    with torch.cuda.stream(stream):
        y = x + 0
    torch.cuda.synchronize()
    return y.tolist() == [2, 2, 2]


def captured(work):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    return graph, found


def waits_in_a_capture():
    x = torch.zeros(3, device="cuda")
    captured(lambda: x.sum().item())


def copies_in_a_capture():
    x = torch.zeros(3, device="cuda")
    captured(lambda: x.copy_(torch.ones(3)))


def memory_that_is_gone():
    made = [torch.zeros(3, device="cuda")]
    graph, _ = captured(lambda: made.pop() + 1)
    graph.replay()


def two_devices():
    return torch.zeros(3, device="cuda") + torch.zeros(3)


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (waits_in_a_capture, "stream is capturing"), (copies_in_a_capture, "stream is capturing"),
        (memory_that_is_gone, "was given back"), (two_devices, "on the same device"),
        (reads_too_soon, None), (another_stream, None),
    ],
)  # fmt: skip
def test_what_would_fail_is_found(work, said):
    with Gpu():
        if said is None:
            assert not work()
        else:
            with pytest.raises(RuntimeError, match=said):
                work()


def test_a_copy_overwrites_only_where_it_goes():
    with Gpu():
        x, host = torch.ones(2, device="cuda"), torch.zeros(5, pin_memory=True)
        host[1:3].copy_(x, non_blocking=True)
        # until the copy is done, that has neither the old values nor the new ones
        assert host.isnan().tolist() == [False, True, True, False, False]
        torch.cuda.synchronize()
        assert host.tolist() == [0, 1, 1, 0, 0]
