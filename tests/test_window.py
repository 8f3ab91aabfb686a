"""The window control: the operation. The laws all mixers share: test_mixer_laws."""

import pytest
import torch

from tolerance import assert_all_as_good_as
from unsoftmax.kernels.window.layer import WindowOptions, window_attention
from unsoftmax.kernels.window.reference import window_attention_reference

CASES = {  # T, window, sinks
    "shorter than the window": (5, 9, 2),
    "one block": (9, 9, 2),
    "one token past a block": (10, 9, 2),
    "many blocks": (70, 9, 2),
    "no sinks": (70, 9, 0),
    "more sinks than window": (70, 4, 11),
    "a window of one": (20, 1, 0),
    "one token": (1, 9, 2),
}


def inputs(T: int, device: torch.device, heads=(6, 2), dtype=torch.float64) -> list[torch.Tensor]:
    HQ, H = heads
    return [torch.randn(2, T, h, 8, dtype=dtype, device=device) for h in (HQ, H, H)]


def output_and_gradients(op, tensors, **more) -> dict[str, torch.Tensor]:
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    o, _ = op(*tensors, **more)
    return dict(
        zip(("o", "dq", "dk", "dv"), (o.detach(), *torch.autograd.grad(o.double().sin().sum(), tensors)))
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [(6, 2), (3, 1), (2, 2)], ids=str)
@pytest.mark.parametrize(("T", "window", "sinks"), CASES.values(), ids=CASES)
def test_output_and_gradients_equal_the_definition(T, window, sinks, heads, dtype, device):
    tensors, how = inputs(T, device, heads), {"window": window, "sinks": sinks, "scale": 0.4}
    gold = output_and_gradients(window_attention_reference, tensors, **how)
    ours, plain = (
        output_and_gradients(op, [x.to(dtype) for x in tensors], **how)
        for op in (window_attention, window_attention_reference)
    )
    assert_all_as_good_as(ours, plain, gold, dtype)


def test_packed_documents_equal_the_definition(device):
    lengths = [1, 0, 30, 9, 1, 8, 0]
    tensors = [x[:1] for x in inputs(sum(lengths), device)]
    how = {"window": 9, "sinks": 2, "cu_seqlens": torch.tensor([0, *lengths], device=device).cumsum(0)}
    gold, ours = (
        output_and_gradients(op, tensors, **how) for op in (window_attention_reference, window_attention)
    )
    assert_all_as_good_as(ours, gold, gold, torch.float64)


def test_the_state_has_one_size_however_long_the_text(device):
    short, long = (window_attention(*inputs(T, device), window=9, sinks=2)[1] for T in (1, 200))
    assert [s.shape for s in short] == [s.shape for s in long]


@pytest.mark.parametrize("options", [{"window": 0}, {"sinks": -1}], ids=str)
def test_an_option_out_of_range_is_named(options):
    with pytest.raises(ValueError, match=f"mixer.{next(iter(options))}"):
        WindowOptions(**options)
