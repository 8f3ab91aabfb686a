"""Sketches phi of half the degree, and the features whose product is the square of a sketch's product.

    (x . y) ** p  is sketched by  (phi(x) . phi(y)) ** 2 = features(phi(x)) . features(phi(y), weighted)

phi is homogeneous of degree p / 2. An offset is one more coordinate of x and y (`append`), so sketches here
take vectors of D + 1.

Source  Ahle et al. 2020 (arXiv:1909.01410) for the random sketches; PolySketchFormer (arXiv:2310.01655) for
        squaring a sketch of half the degree so that no weight is negative.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import nn

SKETCHES = ("learned", "gaussian", "hadamard", "exact")
DEGREES = (2, 4, 8)
TILE = 8  # features come in tiles of TILE x TILE, so that no index is gathered for a single number
DIRECTIONS = 24  # principal directions whose products a learned sketch may start with


def num_features(r: int) -> int:
    """How many features a sketch of size r has: between r (r + 1) / 2 and r r."""
    t = math.gcd(r, TILE)
    return (r // t) * (r // t + 1) // 2 * t * t


@functools.lru_cache(maxsize=64)  # a CUDA graph cannot be captured over a copy from the host
def _pairs(n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode(False):  # autograd may save them later
        a, b = torch.triu_indices(n, n, device=device)
    return a, b


def features(x: torch.Tensor, *, weighted: bool = False) -> torch.Tensor:
    """Products of two coordinates of x [..., r], each pair of tiles once: [..., num_features(r)].

    features(x) . features(y, weighted=True) == (x . y) ** 2. A tile paired with itself keeps both orders of
    its coordinates; other pairs come once and weigh 2 on the weighted side, the keys'.
    """
    t = math.gcd(x.shape[-1], TILE)
    n = x.shape[-1] // t
    a, b = _pairs(n, x.device)
    tiles = x.unflatten(-1, (n, t))
    left = tiles.index_select(-2, a)
    if weighted:
        left = left * torch.where(a == b, 1.0, 2.0).to(x.dtype)[:, None]
    return (left.unsqueeze(-1) * tiles.index_select(-2, b).unsqueeze(-2)).flatten(-3)


@functools.lru_cache(maxsize=64)
def squared_norms(r: int, device: torch.device) -> torch.Tensor:
    """Where the features x_i x_i are, whose sum is the squared norm of x: [r] int64."""
    t = math.gcd(r, TILE)
    with torch.inference_mode(False):
        a, b = torch.triu_indices(r // t, r // t)
        squares = (a == b)[:, None, None] & torch.eye(t, dtype=torch.bool)
        return squares.flatten().nonzero().squeeze(1).to(device)


def append(x: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """x [..., D] with one more coordinate, so that a product gains the product of the values."""
    if isinstance(value, torch.Tensor):
        last = value.to(x.dtype).expand(x.shape[:-1]).unsqueeze(-1)
    else:  # made on the device: a copy from the host cannot be captured in a graph
        last = x.new_full((*x.shape[:-1], 1), value)
    return torch.cat((x, last), -1)


class RandomSketch(nn.Module):
    """A Gaussian or Hadamard (TensorSRHT) sketch: one for all heads, the same for q and k, never trained.

    leaf [degree / 2, D + 1, r] holds the matrices that meet the input, inner [2, r, r] (degree 8) those that
    meet their products. Entries are N(0, 1), or +1 and -1 in columns sampled with replacement from a Hadamard
    matrix whose rows have random signs. E phi(x) . phi(y) = (x . y) ** (degree / 2). They are buffers.
    """

    leaf: torch.Tensor
    inner: torch.Tensor | None

    def __init__(self, kind: str, degree: int, width: int, size: int) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("leaf", torch.empty(degree // 2, width, size))
        self.register_buffer("inner", torch.empty(2, size, size) if degree == 8 else None)

    @torch.no_grad()
    def reset(self) -> None:
        """Draw anew from torch's global generator."""
        for matrices in self.buffers():
            matrices.copy_(_gaussian(matrices) if self.kind == "gaussian" else _hadamard(matrices))

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [B, T, HQ, D + 1] and k [B, T, H, D + 1] to [..., r]."""
        return self._sketch(q), self._sketch(k)

    def _sketch(self, x: torch.Tensor) -> torch.Tensor:
        leaf = self.leaf.to(x.dtype)
        root = leaf.shape[-1] ** -0.5
        parts = [x @ matrix for matrix in leaf]
        while len(parts) > 1:
            parts = [a * b * root for a, b in zip(parts[::2], parts[1::2])]
            if self.inner is not None and len(parts) > 1:
                parts = [part @ matrix for part, matrix in zip(parts, self.inner.to(x.dtype))]
        return parts[0] if len(leaf) > 1 else parts[0] * root


def _gaussian(like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, dtype=torch.float32).to(like)


def _hadamard(like: torch.Tensor) -> torch.Tensor:
    count, width, size = like.shape
    order = 1 << max(width - 1, 0).bit_length()
    row, column = torch.arange(width)[:, None], torch.randint(order, (count, 1, size))
    common = row & column
    parity = sum((common >> bit) & 1 for bit in range(order.bit_length())) % 2
    sign = torch.randint(2, (count, width, 1)) * 2 - 1
    return (sign * (1 - 2 * parity)).to(like)


class LearnedSketch(nn.Module):
    """Each coordinate of phi is a product of degree / 2 linear maps, a set a key/value head, q and k apart.

    query and key [H, degree / 2, D + 1, r].
    """

    def __init__(self, degree: int, width: int, size: int, num_kv_heads: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(num_kv_heads, degree // 2, width, size))
        self.key = nn.Parameter(torch.empty(num_kv_heads, degree // 2, width, size))

    @torch.no_grad()
    def start(self, q_axes: torch.Tensor, k_axes: torch.Tensor, strength: torch.Tensor) -> None:
        """Set the maps so that phi_q . phi_k holds the r largest terms of (1 + s) ** (degree / 2).

        s = sum_m strength_m (q . q_axes_m) (k . k_axes_m), both factors of unit size. Expanded in these
        products and the appended coordinate (which stands for the 1), the power is a sum of monomials; the
        largest r become the coordinates of phi, the root of each coefficient on either side.

        Args:
            q_axes, k_axes: [H, D, M], the directions. strength: [H, M], descending, >= 0.
        """
        H, m, width, r = self.query.shape
        count = min(strength.shape[1], DIRECTIONS if m > 1 else r)
        terms, multinomial = _monomials(count + 1, m)
        sizes = torch.cat((torch.ones(H, 1), strength[:, :count].float().cpu()), 1)
        coefficient = sizes[:, terms].prod(-1) * multinomial
        best = coefficient.topk(min(r, coefficient.shape[1]), dim=1).indices
        for maps, axes in ((self.query, q_axes), (self.key, k_axes)):
            vectors = torch.zeros(H, width, count + 1)
            vectors[:, -1, 0] = 1.0
            vectors[:, :-1, 1:] = axes[..., :count].float().cpu() * sizes[:, None, 1:].sqrt()
            maps.zero_()
            for h in range(H):
                chosen = vectors[h][:, terms[best[h]]]  # [D + 1, terms, m]
                chosen[..., 0] *= multinomial[best[h]].sqrt()
                maps[h, :, :, : best.shape[1]] = chosen.permute(2, 0, 1).to(maps)

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [B, T, HQ, D + 1] and k [B, T, H, D + 1] to [..., r]."""
        H = len(self.key)
        grouped = q.unflatten(2, (H, -1))
        return _products(grouped, self.query).flatten(2, 3), _products(k.unsqueeze(3), self.key).squeeze(3)


def _products(x: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    m, r = maps.shape[1], maps.shape[3]
    joined = maps.to(x.dtype).transpose(1, 2).flatten(2)  # [H, D + 1, m r]: one product for all factors
    factors = (x.transpose(1, 2).flatten(2, 3) @ joined).unflatten(-1, (m, r))
    product = factors[..., 0, :]
    for i in range(1, m):
        product = product * factors[..., i, :]
    return product.unflatten(2, (x.shape[1], -1)).transpose(1, 2)


@functools.cache
def _monomials(variables: int, degree: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every monomial of a degree: the indices of its factors [n, degree], its multinomial coefficient [n]."""
    terms = torch.tensor(list(itertools.combinations_with_replacement(range(variables), degree)))
    coefficient = torch.full((len(terms),), float(math.factorial(degree)))
    run = torch.ones(len(terms))
    for i in range(1, degree):  # divide by the factorial of each run of equal factors
        run = torch.where(terms[:, i] == terms[:, i - 1], run + 1, 1.0)
        coefficient /= run
    return terms, coefficient


class ExactSketch(nn.Module):
    """Degree 2 needs no sketch: the square of q . k itself. phi is the input, and r is D + 1."""

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k as they come."""
        return q, k
