"""What this machine has, and whether each mixer computes what it should on it."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

import torch

from unsoftmax.convert.provenance import versions
from unsoftmax.kernels.mixer import AttentionShape, Mixer, Rotary
from unsoftmax.kernels.registry import MIXERS

SHAPE = AttentionShape(hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64)
TOKENS, CUT = 512, 200
ALLOWED = 1e-4  # float32, relative; a wrong state is off by about 1


def doctor(say: Callable[[str], None] = print) -> None:
    """Print versions and devices, then test each mixer on each kind of device here.

    Raises RuntimeError naming the mixers that failed.
    """
    for name, version in {"system": platform.platform(), **versions()}.items():
        say(f"{name:<14} {version}")
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda"))
    for n in range(torch.cuda.device_count()):
        say(f"{f'cuda:{n}':<14} {torch.cuda.get_device_name(n)}")
    say(f"{'cpu':<14} {torch.get_num_threads()} threads")
    failed = [f"{name} on {device}" for device in devices for name in MIXERS if not _test(name, device, say)]
    if failed:
        raise RuntimeError(f"the self-test failed for {', '.join(failed)}; please report it with the above")


def _test(name: str, device: torch.device, say: Callable[[str], None]) -> bool:
    """In two pieces through the state must equal the whole at once; says the error and the speed."""
    torch.manual_seed(0)
    mixer = MIXERS[name](SHAPE, MIXERS[name].Options()).to(device)
    x = torch.randn(1, TOKENS, SHAPE.hidden_size, device=device)
    try:
        whole, seconds = _whole(mixer, x), _seconds(mixer, x, device)
        error = ((_in_two_pieces(mixer, x) - whole).norm() / whole.norm()).item()
    except Exception as problem:
        say(f"{name:<14} {device}: {type(problem).__name__}: {problem}")
        return False
    good = error <= ALLOWED
    say(
        f"{name:<14} {device}: {'ok' if good else 'WRONG'}   pieces against whole {error:.0e}   "
        f"{TOKENS / seconds:,.0f} tokens/s forward in one layer"
    )
    return good


def _rotary(x: torch.Tensor) -> Rotary:
    angle = torch.zeros(1, x.shape[1], SHAPE.head_dim, device=x.device)
    return Rotary(angle.cos(), angle.sin())


@torch.no_grad()
def _whole(mixer: Mixer, x: torch.Tensor) -> torch.Tensor:
    return mixer(x, rotary=_rotary(x))[0]


@torch.no_grad()
def _in_two_pieces(mixer: Mixer, x: torch.Tensor) -> torch.Tensor:
    first, state = mixer(x[:, :CUT], rotary=_rotary(x[:, :CUT]), keep_state=True)
    second, _ = mixer(x[:, CUT:], rotary=_rotary(x[:, CUT:]), state=state)
    return torch.cat((first, second), dim=1)


def _seconds(mixer: Mixer, x: torch.Tensor, device: torch.device) -> float:
    """Seconds of a forward pass; the caller has run one already."""
    began = time.perf_counter()
    _whole(mixer, x)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
