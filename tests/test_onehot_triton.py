"""One-hot slot attention's Triton kernels: in the interpreter in float32; on a GPU in every dtype."""

import pytest
import torch

from test_onehot import everything, in_dtype, inputs, slots
from tolerance import assert_all_as_good_as
from unsoftmax.kernels.gsa.onehot import slot_attention
from unsoftmax.kernels.gsa.onehot_reference import slot_attention_reference, slots_of
from unsoftmax.kernels.gsa.triton_onehot import (
    _Slots,
    blocks_for,
    forward_op,
    slot_attention_triton,
    tile_table,
)

SHAPES = {  # B, T, HQ, H, D, E, M, W
    "grouped heads": (2, 70, 4, 2, 16, 16, 16, 2),
    "odd sizes, one write a token": (1, 66, 3, 1, 5, 20, 7, 1),
    "more slots than a chunk has tokens": (1, 130, 2, 1, 16, 16, 70, 2),
    "a number of slots for each head": (2, 70, 6, 3, 8, 8, (5, 70, 20), 2),
    "few slots, a number for each head": (1, 130, 4, 2, 8, 8, (7, 12), 1),
    "a token": (2, 1, 4, 2, 8, 8, 5, 2),
    "a token, a number of slots for each head": (2, 1, 4, 2, 8, 8, (5, 20), 2),
}
WIDE = {  # on a GPU
    "head size 64, groups of 3": (2, 300, 9, 3, 64, 64, 64, 2),
    "head size 128": (1, 500, 8, 2, 128, 128, 64, 2),
    "head size 256": (1, 200, 2, 2, 256, 256, 48, 1),
    "256 slots": (1, 600, 2, 1, 64, 64, 256, 2),
    "28, 384 and 64 slots": (2, 700, 9, 3, 64, 64, (28, 384, 64), 1),
    "28 to 384 slots, head size 128": (1, 500, 16, 4, 128, 128, (28, 384, 64, 100), 2),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def triton_op(*arguments, **more):
    return slot_attention(*arguments, backend="triton", **more)


def with_blocks(blocks):
    """The kernels cut as given."""

    def op(q, k, v, write, bias=None, *, num_slots, state=None, cu_seqlens=None):
        scale, sizes = q.shape[-1] ** -0.5, slots_of(num_slots, k.shape[2])
        return slot_attention_triton(q, k, v, write, bias, sizes, scale, state, cu_seqlens, True, blocks)

    return op


def compare(shape, device, dtype=torch.float32, *, bias=True, state=None, cu=None, op=triton_op) -> None:
    """o, slots and every gradient, against the loop in float64."""
    tensors = inputs(shape, device)
    tensors = {n: x.double() if n != "write" else x for n, x in in_dtype(tensors, dtype).items()}
    if not bias:
        del tensors["bias"]
    held = [None, None]
    if state is not None:
        rounded = state._replace(k=state.k.to(dtype), v=state.v.to(dtype), bias=state.bias.float())
        held = [type(state)(*(x.double() for x in rounded)), rounded]
    more = {"num_slots": shape[6], "cu_seqlens": cu}
    gold = everything(slot_attention_reference, tensors, state=held[0], **more)
    plain, ours = (
        everything(f, in_dtype(tensors, dtype), state=held[1], **more) for f in (slot_attention_reference, op)
    )
    assert_all_as_good_as(ours, plain, gold, dtype)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_output_slots_and_gradients_equal_the_definition(shape, device):
    compare(shape, device)


@pytest.mark.parametrize(
    "name", ["grouped heads", "odd sizes, one write a token", "a number of slots for each head"]
)
def test_the_sizes_of_16_bits_equal_the_definition(name, device):
    shape = SHAPES[name]
    B, T, HQ, H, D, E, M, W = shape
    op = with_blocks(blocks_for(D, E, HQ // H, torch.bfloat16))
    compare(shape, device, state=slots(B, shape, device), op=op)
    packed, cu = (1, T, HQ, H, D, E, M, W), torch.tensor([0, 1, 1, T - 4, T], device=device)
    compare(packed, device, bias=False, cu=cu, op=op)


@pytest.mark.parametrize("bias", [False, True], ids=["no biases", "biases"])
@pytest.mark.parametrize("name", ["grouped heads", "a number of slots for each head"])
def test_slots_given_in_equal_the_definition_with_their_gradients(name, bias, device):
    shape = SHAPES[name]
    compare(shape, device, bias=bias, state=slots(2, shape, device))


@pytest.mark.parametrize("heads", [(2, 1, 10), (4, 2, (10, 18))], ids=["even", "uneven"])
@pytest.mark.parametrize("with_state", [False, True], ids=["from empty slots", "from slots given in"])
def test_packed_documents_equal_the_definition(with_state, heads, device):
    lengths = [0, 1, 65, 0, 64, 3, 0]
    shape = (1, sum(lengths), *heads[:2], 8, 8, heads[2], 2)
    cu = torch.tensor([0, *lengths], device=device).cumsum(0)
    compare(shape, device, state=slots(len(lengths), shape, device) if with_state else None, cu=cu)


def test_a_write_of_weight_zero_empties_its_slot(device):
    shape = (1, 70, 2, 1, 8, 8, 10, 2)
    tensors = inputs(shape, device)
    tensors["bias"][:, ::3, :, 0] = -torch.inf
    tensors["bias"][:, ::4, :, 1] = -torch.inf
    gold = everything(slot_attention_reference, tensors, num_slots=10)
    single = in_dtype(tensors, torch.float32)
    plain, ours = (everything(op, single, num_slots=10) for op in (slot_attention_reference, triton_op))
    assert_all_as_good_as(ours, plain, gold, torch.float32)


@pytest.mark.parametrize("heads", [(2, 1, 10), (4, 2, (10, 18))], ids=["even", "uneven"])
def test_a_later_token_changes_no_bit_before_it_and_nor_does_its_absence(heads, device):
    num_slots = heads[2]
    tensors = in_dtype(inputs((1, 140, *heads[:2], 8, 8, num_slots, 2), device), torch.float32)
    before = triton_op(**tensors, num_slots=num_slots)[0]
    other = {n: x.clone() for n, x in tensors.items()}
    for n, x in other.items():
        x[:, 90:] = x[:, 90:].flip(1) if n == "write" else 3 * x[:, 90:]
    assert torch.equal(triton_op(**other, num_slots=num_slots)[0][:, :90], before[:, :90])
    fewer = {n: x[:, :90] for n, x in tensors.items()}
    assert torch.equal(triton_op(**fewer, num_slots=num_slots)[0], before[:, :90])


def test_the_buffer_may_be_as_narrow_as_the_operands(device):
    tensors = in_dtype(inputs((1, 130, 2, 1, 8, 8, 10, 2), device), torch.float32)
    op = with_blocks(blocks_for(8, 8, 2, torch.float32)._replace(wide_parts=0))
    gold, ours = (everything(f, tensors, num_slots=10) for f in (triton_op, op))
    for name in gold:
        assert torch.equal(gold[name], ours[name]), name


def test_the_reverse_pass_gives_the_same_bits_however_many_tiles_it_loads_at_once(device):
    shape, cu = (1, 200, 1, 1, 8, 8, 10, 1), torch.tensor([0, 60, 199, 200], device=device)
    tensors, state = in_dtype(inputs(shape, device), torch.float32), slots(3, shape, device)
    tensors["write"] = tensors["write"].clamp_max(3)  # the others stay through many tiles
    held = state._replace(k=state.k.float(), v=state.v.float(), bias=state.bias.float())
    eight, two = (
        everything(with_blocks(blocks), tensors, num_slots=10, state=held, cu_seqlens=cu)
        for blocks in (blocks_for(8, 8, 1, torch.float32)._replace(ahead=n) for n in (8, 2))
    )
    for name in eight:
        assert torch.equal(eight[name], two[name]), name


def test_tiles_begin_with_each_document():
    table = tile_table(torch.tensor([0, 0, 65, 66]), 64)
    assert table.tolist() == [[0, 64, 0, 1], [64, 1, 0, 1], [65, 1, 2, 2]]


@pytest.mark.parametrize("keep", [False, True])
def test_a_graph_of_the_operator_has_no_break(keep, device):
    torch.library.opcheck(
        forward_op,
        graph_arguments(device, keep),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def graph_arguments(device: torch.device, keep: bool) -> tuple:
    tensors = in_dtype(inputs((1, 20, 4, 2, 8, 8, (10, 3), 2), device), torch.float32)
    q, k, v, write, bias = tensors.values()
    blocks, heads = list(blocks_for(8, 8, 2, torch.float32)), torch.tensor([[10, 0], [3, 10]], device=device)
    leaves = (x.requires_grad_() for x in (q, k, v))
    return *leaves, write, bias, *[None] * 4, heads.int(), 1, 10, 13, 0.3, keep, blocks


def test_the_operator_gives_what_eager_mode_gives(device):
    *inputs, keep, blocks = graph_arguments(device, True)
    leaves, found = inputs[:3], []
    for run in (forward_op, _Slots.apply):
        o, *ends = run(*inputs, keep, blocks)
        ends = ends[1:4] if run is forward_op else ends
        loss = o.sin().sum() + ends[0].cos().sum()
        found.append([o, *ends, *torch.autograd.grad(loss, leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES.values(), *WIDE.values()], ids=[*SHAPES, *WIDE])
def test_on_a_gpu_it_equals_the_definition_in_every_dtype(shape, dtype, device):
    compare(shape, device, dtype)
    compare(shape, device, dtype, state=slots(shape[0], shape, device))
