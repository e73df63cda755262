"""How much memory the caches may take, and how many slots fit into it."""

import os

import torch


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def slots_that_fit(
    *, wanted: int, groups: int, slot_pages: int, prompt_pages: int, page_bytes: int, room: int
) -> int:
    """The most slots, at most `wanted`, whose pages fit into `room` bytes.

    Each group in flight has at least one slot, and its prompt is stored once. Raises MemoryError
    with the numbers when not even one slot fits.
    """
    pages = room // page_bytes
    slots = wanted
    while slots and slots * slot_pages + min(slots, groups) * prompt_pages > pages:
        slots -= 1
    if slots:
        return slots
    need = (slot_pages + prompt_pages) * page_bytes
    raise MemoryError(
        f"one sample needs {need / 2**20:.0f} MiB of keys and values ({prompt_pages} pages of 64 "
        f"tokens for the prompt, {slot_pages} for new ones), {room / 2**20:.0f} MiB may be taken: "
        "lower max_new_tokens, shorten the prompt, or raise the engine's memory"
    )
