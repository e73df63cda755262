"""Check that the batched attention gets the same bits from this machine's matrix products."""

import torch

from csd.kernels.tree_attention.batched import BEHIND, BLOCK
from csd.kernels.tree_attention.batched_work import LEAST_KEYS, LEAST_ROWS
from csd.state.kv_cache import PAGE
from csd.state.pool import MAX_DEPTH, MAX_NODES

# committed keys of the longest tail, and the nodes of a slot
LONGEST_TAIL = MAX_DEPTH + PAGE + MAX_NODES
ROWS = (1, 2, 3, 5, 8, 9, 14, 17, 31, 33, 64, 65, 100, 129)


def check_products(head_dim: int) -> None:
    """Raises ValueError if the bits of a row's products depend on other operands.

    Tested are other rows, other keys, and zeros between the row's terms.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    queries, keys = random(2, 192, head_dim), random(2, LONGEST_TAIL, head_dim + BEHIND)
    keys = keys[..., :head_dim].mT
    for count in (LEAST_KEYS, PAGE, LONGEST_TAIL):
        _same_rows(queries, keys[..., :count], f"{head_dim} numbers")
        if not torch.equal(queries @ keys[..., :count], (queries @ keys)[..., :count]):
            raise _refused(f"{head_dim} numbers", f"{count} keys", f"{LONGEST_TAIL}")
    for count in (LEAST_KEYS, BLOCK, LONGEST_TAIL, 700):
        weights, values = random(2, 192, count + PAGE)[..., PAGE:], random(2, count, head_dim)
        values = torch.cat((values, torch.ones(2, count, BEHIND)), -1)
        _same_rows(weights, values, f"{count} numbers")
        if count <= LONGEST_TAIL:
            _same_among_zeros(weights, values, generator)


def _same_rows(a: torch.Tensor, b: torch.Tensor, terms: str) -> None:
    start = a @ b
    added = torch.baddbmm(start, a, b)
    for rows in (LEAST_ROWS + n - 1 for n in ROWS):
        plain = torch.equal(torch.bmm(a[:, :rows], b), start[:, :rows])
        both = torch.baddbmm(start[:, :rows], a[:, :rows], b)
        if not (plain and torch.equal(both, added[:, :rows])):
            raise _refused(terms, f"{rows} rows", f"{a.shape[1]}")


def _same_among_zeros(a: torch.Tensor, b: torch.Tensor, generator: torch.Generator) -> None:
    """Raises ValueError unless a sum of some terms equals that with zeros for the others."""
    count = a.shape[2]
    for share in (0.3, 0.9):
        kept = torch.rand(count, generator=generator) < share
        place = kept.nonzero()[:, 0]
        few = torch.zeros_like(a), torch.zeros_like(b)
        few[0][..., : place.numel()] = a[..., place]
        few[1][:, : place.numel()] = b[:, place]
        if not torch.equal(torch.bmm(a * kept, b), torch.bmm(*few)):
            raise _refused(f"{count} numbers", "zeros between them", "zeros after them")


def _refused(terms: str, here: str, there: str) -> ValueError:
    return ValueError(
        f"exact must be False here: sums over {terms} differ in bits between {here} and {there} "
        "on this machine"
    )
