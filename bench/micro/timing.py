"""Microseconds of GPU calls from CUDA-graph replays, and the memory's copy bandwidth."""

import gc
import statistics

import torch

# bytes of distinct buffers that a measurement uses: several times the largest L2 cache
DISTINCT = 256 * 1024 * 1024


def copies_for(footprint: int) -> int:
    """Number of sets of buffers of `footprint` bytes that together reach DISTINCT."""
    return max(1, -(-DISTINCT // max(footprint, 1)))


def replayed(calls: list, replays: int = 30) -> tuple[float, float, float]:
    """Median, 20% and 80% quantile of the microseconds of one of `calls`.

    All calls, each on its own buffers, are captured into one graph; a replay's time is divided by
    their number.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # compiles, and runs the initialisation of first calls
        for call in [*calls, calls[0]]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # a kernel that is garbage-collected during capture unloads its module, which aborts the capture
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    finally:
        gc.enable()
    events = []
    for _ in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        events.append((start, end))
    # only after all are queued, since otherwise the launch of a graph would count as its time
    torch.cuda.synchronize()
    # the first replays warm up clocks and page tables
    micros = [start.elapsed_time(end) * 1e3 / len(calls) for start, end in events[3:]]
    low, *_, high = statistics.quantiles(micros, n=5)
    return statistics.median(micros), low, high


def copy_bandwidth(device, size: int = 1 << 30) -> float:
    """Bytes per second of a large copy, reads and writes counted."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    micros, _, _ = replayed([lambda: target.copy_(source)], replays=20)
    return 2 * size / micros * 1e6
