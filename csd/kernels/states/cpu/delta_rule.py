"""`csd.kernels.tree_delta_rule` and `csd.kernels.tree_ssm` as a loop over slots and key heads.

`slot_head` computes a slot's rows for one key head and its value heads. The formula's sums are
matrix products with the same terms in the same order for every row:

    y_j = D(j) S^T x_j + sum over i of D(i, j) (k_i . x_j) u_i,    x_j = k_j or q_j

D(i, j) is the product of the decays after token i, multiplied from row j backwards, so that the
bits of a term depend on the text between i and j alone. A term is added with one rounding, whether
its token is in the slot's tail or a node. Terms of other paths are not added, and terms that a
row's state contains already are zeros.
"""

from collections import namedtuple

import numpy as np
import torch

from csd.kernels.attention.cpu.pages import add_terms
from csd.kernels.numba.jit import loop
from csd.kernels.numba.lanes import BLOCK, WIDTH, add_multiple, block, lanes, put, transpose
from csd.kernels.numba.tensors import LIKE, memory, require
from csd.kernels.numba.threads import by_threads, share
from csd.kernels.numba.tiles import ISA
from csd.kernels.states.cpu.advance import add_chunk, head_of_tail, reads_states
from csd.kernels.states.paths import DEPTHS
from csd.state.recurrent import CHUNK, TAIL

# addresses
Operands = namedtuple(
    "Operands",
    "q value strength node_key node_decay node_update state key update decay out",
)
# arrays
Layout = namedtuple("Layout", "base slot position path slot_start slot_nodes")


@loop
def _whole_blocks(count):
    """`count` rounded up to a multiple of BLOCK."""
    return -(-count // BLOCK) * BLOCK


@loop
def _turned(x, offset, stride, count, Dk, tile, to, wide):
    """tile[d wide + to + i] = x[offset + i stride + d] for i < count, in whole blocks; d < Dk."""
    whole = Dk // BLOCK * BLOCK
    for j in range(0, count, BLOCK):
        for d in range(0, whole, BLOCK):
            transpose(
                x, offset + j * stride + d, stride, count - 1 - j, tile, d * wide + to + j, wide
            )
    for j in range(count):
        for d in range(whole, Dk):
            tile[d * wide + to + j] = x[offset + j * stride + d]


@loop
def _of_blocks(numbers, count, stride, size, spare):
    """Rows of `size` numbers, padded to whole blocks; returns a flat array and its stride.

    No copy is made if BLOCK divides `size`; else the rows are copied to `spare`.
    """
    if size % BLOCK == 0:
        return numbers, stride
    wide = _whole_blocks(size)
    for t in range(count):
        for j in range(size):
            spare[t * wide + j] = numbers[t * stride + j]
    return spare, wide


@loop
def _add_node(y, to, c, u, offset, wide):
    """y[to : to + wide] += c u[offset : offset + wide], whole blocks, with one rounding each."""
    whole = wide // WIDTH * WIDTH
    for i in range(0, whole, WIDTH):
        put(add_multiple(lanes(y, to + i), c, lanes(u, offset + i)), y, to + i)
    for i in range(whole, wide, BLOCK):
        put(add_multiple(block(y, to + i), c, block(u, offset + i)), y, to + i)


@loop
def slot_head(
    shape,  # H, Hk, Dk, Dv
    s,
    g,
    operands,  # `Operands`
    layout,  # `Layout`
    solve,
    like,
    isa,
):
    """Write the outputs of slot s's rows for key head g, and with `solve` their updates."""
    H, Hk, Dk, Dv = shape
    q, value, strength, node_key, node_decay, node_update, state, key, update, decay, out = operands
    position, path = layout.position, layout.path
    # number and first of the slot's rows, and position of its stored state
    nodes, start, base = layout.slot_nodes[s], layout.slot_start[s], layout.base[s]
    size, each, kinds = like.itemsize, H // Hk, 2 if solve else 1
    # clamped: a wrong base must not move writes beyond the tail
    tail = max(0, min(position[start] - base, TAIL))
    wide, columns = _whole_blocks(Dv), TAIL + _whole_blocks(nodes)
    rows = kinds * nodes
    # rows that read the stored state come before those that read the next one; keys, then queries
    first, depth = np.empty(nodes, np.int64), np.empty(nodes, np.int64)
    at_k, at_q = np.empty(nodes, np.int64), np.empty(nodes, np.int64)
    near = 0
    for j in range(nodes):
        first[j] = max((position[start + j] - DEPTHS) // CHUNK * CHUNK, base)
        near += first[j] == base
        depth[j] = -1
        for d in range(DEPTHS):
            depth[j] += path[start + j, d] >= 0
    taken = np.zeros(2, np.int64)
    for j in range(nodes):
        far = first[j] > base
        at_k[j] = taken[1] + kinds * near if far else taken[0]
        at_q[j] = at_k[j] + (kinds - 1) * (nodes - near if far else near)
        taken[1 if far else 0] += 1
    x = np.empty((rows, Dk), like.dtype)
    for j in range(nodes):
        offset = ((start + j) * Hk + g) * Dk * size
        x[at_q[j]] = memory(q + offset, Dk, like)
        if solve:
            x[at_k[j]] = memory(node_key + offset, Dk, like)
    # the keys of the tail and of the nodes as columns
    tile = np.zeros(Dk * columns, like.dtype)
    tails, _, _ = head_of_tail(shape, s, g, g * each, key, update, decay, like)
    for b in range(2):
        if tail > b * CHUNK:
            index = (base + b * CHUNK) % TAIL
            _turned(tails, index * Hk * Dk, Hk * Dk, CHUNK, Dk, tile, b * CHUNK, columns)
    of_nodes = memory(node_key + (start * Hk + g) * Dk * size, nodes * Hk * Dk - g * Dk, like)
    _turned(of_nodes, 0, Hk * Dk, nodes, Dk, tile, TAIL, columns)
    score = np.zeros((rows, columns), like.dtype)
    add_terms(x, 0, rows, 0, Dk, tile, columns, columns, score, 0, isa)
    # workspace for rows that are not whole blocks
    spare = np.zeros(max(Dk, CHUNK) * wide if Dv % BLOCK else 0, like.dtype)
    y, u = np.empty((rows, wide), like.dtype), np.zeros(nodes * wide, like.dtype)
    sums = y.reshape(-1)
    weight = np.zeros((rows, TAIL), like.dtype)
    above, whole = np.empty((nodes, DEPTHS), like.dtype), np.empty(rows, like.dtype)
    later = np.zeros(Dk * wide if near < nodes else 0, like.dtype)
    for h in range(g * each, (g + 1) * each):
        tails, updates, decays = head_of_tail(shape, s, g, h, key, update, decay, like)
        flat = memory(state + (s * H + h) * Dk * Dv * size, Dk * Dv, like)
        if near < nodes:
            gaps = Hk * Dk, H * Dv, H
            add_chunk((Dk, Dv), flat, later, wide, base % TAIL, tails, updates, decays, gaps)
        weight[:] = 0
        for j in range(nodes):
            product = memory(node_decay + ((start + j) * H + h) * size, 1, like)[0]
            for d in range(depth[j] - 1, -1, -1):
                up = path[start + j, d]
                above[j, d] = product
                product *= memory(node_decay + (up * H + h) * size, 1, like)[0]
            for p in range(base + tail - 1, first[j] - 1, -1):
                weight[at_q[j], p - base] = product * score[at_q[j], p - base]
                if solve:
                    weight[at_k[j], p - base] = product * score[at_k[j], p - base]
                product *= decays[p % TAIL * H]
            whole[at_q[j]] = product
            if solve:
                whole[at_k[j]] = product
        y[:] = 0
        # products with the stored state, the next one, and both chunks of the tail; they share one
        # call, since a product is much of the compiled code
        for part in range(4):
            low, high, terms, column = 0, rows, Dk, 0
            source, numbers, stride = x, flat, Dv
            if part == 0:
                high = kinds * near
            elif part == 1:
                low, numbers, stride = kinds * near, later, wide
            else:
                column = (part - 2) * CHUNK
                terms, source, stride = min(CHUNK, tail - column), weight, H * Dv
                numbers = updates[(base + column) % TAIL * H * Dv :]
            if part == 2:
                for r in range(rows):
                    row, factor = sums[r * wide : (r + 1) * wide], whole[r]
                    for i in range(wide):
                        row[i] *= factor
            if low < high and terms > 0:
                if part != 1:
                    numbers, stride = _of_blocks(numbers, terms, stride, Dv, spare)
                add_terms(source, low, high, column, terms, numbers, stride, wide, y, 0, isa)
        for j in range(nodes):
            of_row = ((start + j) * H + h) * size
            own = memory(node_update + of_row * Dv, Dv, like)
            if solve:
                for d in range(depth[j]):
                    up = path[start + j, d] - start
                    c = above[j, d] * score[at_k[j], TAIL + up]
                    _add_node(sums, at_k[j] * wide, c, u, up * wide, wide)
                b, v = memory(strength + of_row, 1, like)[0], memory(value + of_row * Dv, Dv, like)
                read = sums[at_k[j] * wide : at_k[j] * wide + Dv]
                for i in range(Dv):
                    own[i] = b * (v[i] - read[i])
            stored, gives = u[j * wide : j * wide + Dv], at_q[j] * wide
            for i in range(Dv):
                stored[i] = own[i]
            for d in range(depth[j]):
                up = path[start + j, d] - start
                c = above[j, d] * score[at_q[j], TAIL + up]
                _add_node(sums, gives, c, u, up * wide, wide)
            _add_node(sums, gives, score[at_q[j], TAIL + j], u, j * wide, wide)
            result, read = memory(out + of_row * Dv, Dv, like), sums[gives : gives + Dv]
            for i in range(Dv):
                result[i] = read[i]


@by_threads
def _tree_states(
    part,
    parts,
    shape,  # S, H, Hk, Dk, Dv
    operands,  # `Operands`
    layout,  # `Layout`
    solve,
    like,
    isa,
):
    """Write the outputs and, with `solve` (the delta rule), node_update.

    Slots and key heads run in parallel.
    """
    S, H, Hk, Dk, Dv = shape
    first, last = share((S + 1) * Hk, part, parts)
    for task in range(first, last):
        s, g = task // Hk, task % Hk
        if s == S:
            # padding rows, for the value heads of key head g
            each, size = H // Hk, like.itemsize
            for m in range(layout.slot.shape[0]):
                if layout.slot[m] < 0:
                    offset, count = (m * H + g * each) * Dv * size, each * Dv
                    memory(operands.out + offset, count, like)[:] = 0
                    if solve:
                        memory(operands.node_update + offset, count, like)[:] = 0
        elif layout.slot_nodes[s] > 0:
            slot_head((H, Hk, Dk, Dv), s, g, operands, layout, solve, like, isa)


def _run(
    q: torch.Tensor,
    value: torch.Tensor | None,
    strength: torch.Tensor | None,
    tensors: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Outputs [M, H, Dv]; with `value` and `strength` it solves for and writes node_update."""
    floats, layout = tensors[:7], Layout(*(x.numpy() for x in tensors[7:]))
    node_update, state = floats[2:4]
    S, H, Dk, Dv = state.shape
    out = torch.empty_like(node_update)
    operands = q, value, strength, *floats, out
    M = layout.slot.shape[0]
    _tree_states(
        H * (S * Dk * Dv + 4 * M * Dk * Dv),
        (S, H, q.shape[1], Dk, Dv),
        Operands(*(0 if x is None else x.data_ptr() for x in operands)),
        layout,
        value is not None,
        LIKE[state.dtype],
        ISA["fma"],
    )
    return out


def tree_delta_rule(
    q: torch.Tensor, value: torch.Tensor, strength: torch.Tensor, *nodes_and_states: torch.Tensor
) -> torch.Tensor:
    """Outputs [M, H, Dv] of the gated delta rule; writes node_update. See `tree_delta_rule_ref`.

    Raises TypeError for tensors that loops do not read.
    """
    tensors = q, value, strength, *nodes_and_states[:7]
    require(reads_states(*tensors), "tree_delta_rule", *tensors)
    return _run(q, value, strength, nodes_and_states)


def tree_ssm(q: torch.Tensor, *nodes_and_states: torch.Tensor) -> torch.Tensor:
    """Outputs [M, H, Dv] of the state space model, as `tree_ssm_ref`.

    Raises TypeError for tensors that loops do not read.
    """
    tensors = q, *nodes_and_states[:7]
    require(reads_states(*tensors), "tree_ssm", *tensors)
    return _run(q, None, None, nodes_and_states)
