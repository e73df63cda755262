"""The plan of attention's work: kernel against reference, and every key in it once."""

from types import SimpleNamespace

import pytest
import torch
from helpers.kernels.attention_cases import random_pool
from helpers.targets import pairs

from csd.kernels.attention.layout import ROWS, TreeLayout, Work
from csd.kernels.attention.triton.plan import (
    empty_work,
    plan_attention,
    plan_attention_ref,
    plan_attention_triton,
    tile_rows,
)
from csd.kernels.common import gpu

pytestmark = pytest.mark.compiled

CASES = {
    "one-row": dict(trees=[{0: 1}], prompt=[0], committed=[0]),
    "no-rows": dict(trees=[{}], prompt=[5], committed=[9], padding=3),
    "no-prompt": dict(trees=[{0: 5, 1: 3}], prompt=[0], committed=[70, 1]),
    "long-prompt": dict(trees=[{0: 40, 1: 30}], prompt=[4000], committed=[64, 63]),
    "ragged": dict(
        trees=[{3: 40, 1: 2}, {}, {0: 3, 4: 1, 5: 64}, {2: 1}],
        prompt=[130, 5, 400, 0],
        committed=[17, 129, 8, 0, 64, 700],
        padding=3,
    ),
    "many-groups": dict(
        trees=[{s: 1 + s % 3} for s in range(70)],
        prompt=[64 * (g % 4) for g in range(70)],
        committed=[50 * (s % 5) for s in range(70)],
    ),
}


def layout(trees, prompt, committed, padding=0):
    """A layout with the fields that the plan reads."""
    pool = random_pool(trees, slots=len(committed), padding=padding)
    return TreeLayout(
        prompt_pages=None,
        slot_pages=None,
        ancestors=None,
        prompt_len=torch.tensor(prompt, dtype=torch.int32),
        slot_len=torch.tensor(committed, dtype=torch.int32),
        slot=pool.slot,
        slot_start=pool.slot_start,
        slot_nodes=pool.slot_nodes,
        group_start=pool.group_start,
    )


@pairs
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("heads", [(8, 8), (28, 4)], ids=str)
@pytest.mark.parametrize("programs", [1, 7, 33])
def test_plan_attention_triton(name, heads, programs):
    places = layout(**CASES[name])
    want = plan_attention_ref(places, heads=heads[0], kv_heads=heads[1], programs=programs)
    out = Work(*(torch.full_like(x, -7) for x in want[:3]))
    got = plan_attention_triton(
        places, heads=heads[0], kv_heads=heads[1], programs=programs, out=out
    )
    read = want.segment >= 0
    assert torch.equal(got.segment[read], want.segment[read])
    assert torch.equal(got.program, want.program)
    assert torch.equal(got.merge, want.merge)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("programs", [1, 5, 33])
def test_plan_attention_covers_every_key_once(name, programs):
    """Walked as the kernel walks it: every (row, unit) once, partials apart, shares equal."""
    H, K = 14, 2
    places = layout(**CASES[name])
    work = plan_attention_ref(places, heads=H, kv_heads=K, programs=programs)
    G, M, each = len(places.prompt_len), len(places.slot), H // K
    seen, partials, shares = {}, {}, []
    for first, last in work.program.tolist():
        shares.append(0)
        for w in range(first, last):
            row, rows, source, low, high, base = work.segment[w].tolist()
            assert 0 < rows <= tile_rows(H, K) and low < high
            shares[-1] += high - low
            for m in range(row, row + rows):
                part = int(source >= G)
                for u in range(low, high):
                    assert (m, part, u) not in seen
                    seen[m, part, u] = source
                for j in range(each):
                    at = base + (m - row) * each + j
                    assert at not in partials, "two segments write one row of the partials"
                    partials[at] = (m, part, j)
    want = {}
    for m, s in enumerate(places.slot.tolist()):
        if s < 0:
            continue
        g = int((places.group_start[1:] <= m).sum())
        for u in range(-(-int(places.prompt_len[g]) // 64)):
            want[m, 0, u] = g
        for u in range(-(-int(places.slot_len[s]) // 64) + 1):
            want[m, 1, u] = G + s
    assert seen == want
    total = sum(shares)
    assert max(shares, default=0) == -(-total // programs)
    bound = 2 * M * each + programs * tile_rows(H, K) * each
    assert all(0 <= at < bound for at in partials)
    for m in range(M):
        places = [
            (int(work.merge[m, 2 * part]) + i * tile_rows(H, K) * each + j, (m, part, j))
            for part in (0, 1)
            for i in range(int(work.merge[m, 2 * part + 1]))
            for j in range(each)
        ]
        assert all(partials.pop(at) == owner for at, owner in places)
    assert not partials


def test_plan_attention_op():
    places = layout(**CASES["ragged"])
    args = [getattr(places, name) for name in ROWS.names]
    torch.library.opcheck(torch.ops.csd.plan_attention.default, (*args, 28, 4, 5, None))
    want = plan_attention_ref(places, 28, 4, 4)
    got = plan_attention(places, heads=28, kv_heads=4, programs=4)
    assert all(torch.equal(a, b) for a, b in zip(got[:3], want[:3], strict=True))


def test_plan_attention_errors():
    places = layout(**CASES["ragged"])
    with pytest.raises(ValueError, match=r"heads must be 1 to 64 times kv_heads, got 7 and 2"):
        plan_attention(places, heads=7, kv_heads=2)
    with pytest.raises(ValueError, match=r"group_start must have shape \(5,\), got \(6,\)"):
        bad = places._replace(group_start=torch.zeros(6, dtype=torch.int32))
        plan_attention(bad, heads=4, kv_heads=2)
    with pytest.raises(ValueError, match=r"must be torch\.int32, got torch\.int64"):
        plan_attention(places._replace(slot=places.slot.long()), heads=4, kv_heads=2)


def test_empty_work_is_large_enough():
    work = empty_work(rows=5, slots=9, groups=9, heads=4, kv_heads=4, programs=3, device="cpu")
    assert [x.shape for x in work[:3]] == [(13, 6), (3, 2), (5, 4)]


@pytest.mark.parametrize(
    "capability,hip,each",
    [((9, 0), None, 2), ((8, 0), None, 2), ((8, 9), None, 2), ((12, 0), None, 2), ((9, 4), "6", 1)],
)
def test_a_multiprocessor_gets_as_many_programs_as_fit(monkeypatch, capability, hip, each):
    for function in (gpu._chip_of, gpu.programs_of):
        function.cache_clear()
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    chip = SimpleNamespace(multi_processor_count=66)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    try:
        assert gpu.programs_of(torch.device("cuda", 0)) == each * 66
    finally:
        for function in (gpu._chip_of, gpu.programs_of):
            function.cache_clear()
