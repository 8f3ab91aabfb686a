"""The one rule for how close a fast form must come to the definition."""

import torch

CAPS = {torch.bfloat16: 1e-2, torch.float16: 3e-3, torch.float32: 1e-5, torch.float64: 1e-10}
FLOORS = {
    torch.bfloat16: 4e-3,
    torch.float16: 5e-4,
    torch.float32: 1e-6,
}  # a few roundings: plain may be lucky


def relative_error(x: torch.Tensor, gold: torch.Tensor) -> float:
    """RMS of x - gold over RMS of gold, in float64."""
    return ((x.double() - gold).norm() / gold.norm()).item()


def assert_as_good_as(name: str, ours: torch.Tensor, plain: torch.Tensor, gold: torch.Tensor) -> None:
    """ours: the fast form; plain: the parallel one in its dtype, gates and sums in float32; gold: in float64.

    Allowed is twice the error of plain or the dtype's floor, whichever is more, and never more than its cap.
    Fewer than 64 numbers make no statistic, so for them the cap alone holds. Float64 is checked for its maths, so its cap is all that is asked.
    """
    assert ours.shape == gold.shape, f"{name}: shape {tuple(ours.shape)}, not {tuple(gold.shape)}"
    assert gold.dtype == torch.float64, f"{name}: gold is {gold.dtype}, not float64"
    finite = ours.isfinite()
    assert finite.all(), f"{name}: {(~finite).sum()} of {ours.numel()} entries are not finite"
    if not gold.any():
        assert not ours.any(), f"{name}: {ours.abs().max():.1e} where exactly 0 is right"
        return
    error, allowed = relative_error(ours, gold), CAPS[ours.dtype]
    if ours.dtype != torch.float64 and ours.numel() >= 64:
        allowed = min(allowed, max(2 * relative_error(plain, gold), FLOORS[ours.dtype]))
    assert error <= allowed, f"{name}: relative error {error:.1e}, allowed {allowed:.1e}"
