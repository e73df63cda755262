"""Views of records: the fields of each record in every form in which backends read them."""

import pickle

import numpy as np
import pytest
import torch

from csd.kernels.attention import TreeLayout
from csd.kernels.attention.layout import LAYOUT
from csd.kernels.verify.views import ADVANCED
from csd.state.context_table import GraphConfig, Table
from csd.state.pool import Pool
from csd.state.record import View, declared
from csd.state.slots import Slots
from csd.state.texts import SlotTexts
from csd.state.verdict import Verdict, empty_verdict

RECORDS = {
    Slots: Slots.empty(3, 70, 5, 4),
    Pool: Pool.empty(6, 3, 2, 4),
    Table: Table.empty(GraphConfig(capacity=32)),
    Verdict: empty_verdict(6, 3, torch.device("cpu")),
    SlotTexts: SlotTexts.empty(3, 5, 2),
}


@pytest.mark.parametrize("kind", RECORDS, ids=lambda k: k.__name__)
def test_all_forms_have_the_same_fields_and_memory(kind):
    record, view = RECORDS[kind], View(kind)
    tensors, arrays = view(record), view.arrays(record)
    addresses = view.addresses(record, torch.float32)
    assert view.names == tensors._fields == arrays._fields == addresses._fields
    assert view.names == tuple(declared(kind))
    for name, x in tensors._asdict().items():
        assert x is getattr(record, name)
        assert getattr(addresses, name) == x.data_ptr()
        assert np.shares_memory(getattr(arrays, name), x.numpy()) or not x.numel()
    view.check(record, {}, torch.device("cpu"))


def test_addresses_are_only_of_what_was_declared():
    view, slots = View(Slots, "live generated"), Slots.empty(4, 70, 5, 4)
    assert view.addresses(slots) is not None
    for bad in (slots.generated.long(), torch.zeros(8, dtype=torch.int32)[::2]):
        slots.generated = bad
        assert view.addresses(slots) is None
    with pytest.raises(ValueError, match=r"slots\.generated must be contiguous, got strides"):
        view.check(slots, {}, torch.device("cpu"))


def test_written_fields_come_first_and_are_named():
    assert ADVANCED.writes == ADVANCED.names[: len(ADVANCED.writes)]
    assert ADVANCED.names[-1] == "repetition_penalty"


def test_another_process_finds_the_namedtuple_of_a_compiled_loop():
    kind = View(Slots, "live generated").kind
    assert pickle.loads(pickle.dumps(kind)) is kind is View(Slots, "live generated").kind
    assert kind is not View(Slots, "generated live").kind


def test_a_record_is_restored_by_its_class_or_with_its_sizes():
    pool = RECORDS[Pool]
    assert isinstance(View(Pool).restored([*View(Pool)(pool)]), Pool)
    view = View(Pool, "slot slot_start")
    part = view.restored([*view(pool)])
    assert (part.rows, part.count) == (6, 3) and part.slot is pool.slot
    with pytest.raises(TypeError, match="missing"):
        TreeLayout()
    assert isinstance(LAYOUT.restored(range(9)), TreeLayout)
