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


def assert_as_good_as(
    name: str, ours: torch.Tensor, plain: torch.Tensor, gold: torch.Tensor, dtype: torch.dtype | None = None
) -> None:
    """ours: the fast form; plain: the parallel form, gates and sums in float32; gold: in float64.

    dtype is that of the operands, if not of ours itself. Allowed is twice the error of plain or its floor,
    whichever is more, and never more than its cap. Fewer than 64 numbers make no statistic, so for them
    the cap alone holds. Float64 is checked for its maths, so there too.
    """
    dtype = dtype or ours.dtype
    assert ours.shape == gold.shape, f"{name}: shape {tuple(ours.shape)}, not {tuple(gold.shape)}"
    assert gold.dtype == torch.float64, f"{name}: gold is {gold.dtype}, not float64"
    finite = ours.isfinite()
    assert finite.all(), f"{name}: {(~finite).sum()} of {ours.numel()} entries are not finite"
    if not gold.any():
        assert not ours.any(), f"{name}: {ours.abs().max():.1e} where exactly 0 is right"
        return
    error, allowed = relative_error(ours, gold), CAPS[dtype]
    if dtype != torch.float64 and ours.numel() >= 64:
        allowed = min(allowed, max(2 * relative_error(plain, gold), FLOORS[dtype]))
    assert error <= allowed, f"{name}: relative error {error:.1e}, allowed {allowed:.1e}"


def assert_all_as_good_as(
    ours: dict[str, torch.Tensor],
    plain: dict[str, torch.Tensor],
    gold: dict[str, torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """assert_as_good_as for results by name, dq, dk and dv among them.

    Where all that a query sees is alike, dq and dk are differences that cancel. What is left over has no size
    to be relative to, so dv lends its own.
    """
    assert ours.keys() == plain.keys() == gold.keys()
    for name in gold:
        if name in ("dq", "dk") and gold[name].norm() < 1e-3 * gold["dv"].norm():
            error = ((ours[name].double() - gold[name]).norm() / gold["dv"].norm()).item()
            assert error <= CAPS[dtype], f"{name}: {error:.1e} of dv, allowed {CAPS[dtype]:.1e}"
        else:
            assert_as_good_as(name, ours[name], plain[name], gold[name], dtype)
