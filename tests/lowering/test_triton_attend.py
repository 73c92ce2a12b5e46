"""The attend kernel in Triton's interpreter against ``attend_body`` in float64, and compiled offline."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hot_loops import instructions_per_element
from interpreted import interpreted
from registry import PLAIN

from kvcompile import schemes
from kvcompile.lowering.decode import offline
from kvcompile.lowering.decode.config import AttendConfig, Bias, ExtraOperands, Masks, Tile
from kvcompile.lowering.ops.kept_tokens import kept_tokens as kept_of_runs
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import attend_body
from kvcompile.schemes.asymmetric import UNPACK
from kvcompile.testing.samples import holds
from kvcompile.types import PAGE, Extent, KernelFormat, Layout, PlaneSpec, Role, SlotSpec, pages_for

NAMED = ("dense", "int8", "fp8", "int4", "kivi", "lookup", "beyond", "int8-static", "fp8-static", "early", "normed", "padded")
"""Schemes whose cases try what the template does with them, and what schemes share."""
SCHEMES = (*NAMED, *(scheme.name for scheme in PLAIN if scheme.name not in NAMED))
"""Those and all that are registered: one that is not named has the cases of ``any_cases``."""

FILL = -1.5
"""A score among those of visible tokens."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention: shapes, masks, schemes and how the kernel is cut."""

    key: str
    value: str
    T: int = 65
    B: int = 1
    K: int = 1
    G: int = 4
    S: int = 1
    D: int = 64
    Dv: int = 64
    dtype: torch.dtype = torch.float16
    lo: bool = False
    keep: bool = False
    fronts: tuple[int, ...] = ()
    bias: Bias = Bias.NONE
    sinks: bool = False
    softcap: float = 0.0
    splits: int = 3
    shares: int = 0
    direct: bool = False
    tile: Tile = Tile()
    plain: bool = False
    scale: float = 0.2
    magnitude: float = 1.0
    outlier: bool = False
    equal: bool = False
    exact_newest: int = 0
    rotary: int = 0
    interleaved: bool = False
    exact_first: int = 0
    exact_first_at: int | None = None

    def __str__(self) -> str:
        plain = Case(self.key, self.value)
        return " ".join(
            [f"{self.key}/{self.value}"]
            + [f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self) if getattr(self, f.name) != getattr(plain, f.name)]
        )


@dataclasses.dataclass(frozen=True)
class Lookup(schemes.Scheme):
    """Four-bit indices into a table of each head and channel group, scale and zero point a token and group: levels of no order."""

    group: int = 32
    block_tokens: int = 1

    name = "lookup"

    def layout(self, slot: SlotSpec) -> Layout:
        rows, width = PAGE // self.block_tokens, slot.head_dim // self.group
        return Layout((
            PlaneSpec("codes", torch.uint8, slot.head_dim // 2), PlaneSpec("scales", torch.float16, width, rows),
            PlaneSpec("zeros", torch.float16, width, rows), PlaneSpec("table", torch.float32, 16, width, Extent.BATCH),
        ))

    def format(self, slot: SlotSpec) -> KernelFormat:
        return KernelFormat(torch.uint8, 2, self.group, True, UNPACK[4], block=self.block_tokens, zeros=True, levels=16)

    def encode(self, x_BKSD: torch.Tensor, *fixed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError("tests make its planes of noise")

    def bound(self, slot: SlotSpec) -> object:
        raise NotImplementedError


schemes.BY_NAME.setdefault("lookup", Lookup)


def cases(scheme: str) -> list[Case]:
    """Odd shapes and every mask, one axis at a time."""
    if scheme in {"kivi", "lookup"}:
        return asymmetric_cases(scheme)
    if scheme == "beyond":
        return tabled_cases()
    if scheme in OPTIONS:
        return OPTIONS[scheme]()
    if scheme not in NAMED:
        return any_cases(scheme)
    base = Case(scheme, scheme)
    wide = Tile(block_t=128, block_r=16, tokens_first=False)
    found = [dataclasses.replace(base, T=T, B=B) for T, B in ((1, 1), (63, 3), (64, 1), (200, 3))]
    odd = "int4(group=16)" if scheme == "int4" else scheme
    found += [
        Case(odd, odd, G=G, K=2, D=D, Dv=Dv) for G, D, Dv in ((1, 80, 80), (7, 64, 80), (8, 96, 64))
    ]
    found += [
        dataclasses.replace(base, dtype=torch.bfloat16, T=130, magnitude=30.0),
        dataclasses.replace(base, dtype=torch.float32, T=70),
        dataclasses.replace(base, magnitude=1e-4, T=100),
        dataclasses.replace(base, outlier=True, T=100, dtype=torch.bfloat16),
    ]
    masks_and_tiles = [
        dataclasses.replace(base, lo=True, T=200, B=2), dataclasses.replace(base, lo=True, T=400, B=3, splits=7, shares=2),
        dataclasses.replace(base, keep=True, T=100, B=2),
        dataclasses.replace(base, bias=Bias.ADDED, S=3, T=90, B=2),
        dataclasses.replace(base, bias=Bias.BOOLEAN, T=90, keep=True),
        dataclasses.replace(base, bias=Bias.REPLACING, T=90, S=2),
        dataclasses.replace(base, bias=Bias.ADDED_OR_REPLACING, T=90, S=3, B=2, softcap=5.0),
        dataclasses.replace(base, sinks=True, softcap=5.0),
        dataclasses.replace(base, S=5, T=150, B=2, lo=True, keep=True),
        dataclasses.replace(base, S=5, T=150, tile=wide, sinks=True),
        dataclasses.replace(base, T=300, tile=dataclasses.replace(wide, tokens_first=True, block_r=8), B=2),
        dataclasses.replace(base, S=40, T=100, tile=Tile(32, 128, True)), dataclasses.replace(base, S=20, T=70, tile=Tile(64, 64, True)),
    ]
    # What these vary does not depend on how words are decoded: one scheme has all of them, the others every second.
    found += masks_and_tiles if scheme == "int4" else masks_and_tiles[scheme == "int8" :: 2]
    if scheme == "dense":
        found += [
            dataclasses.replace(base, S=20, T=20, splits=1, direct=True, plain=True, tile=wide, sinks=True),
            dataclasses.replace(base, S=20, T=70, splits=1, direct=True, plain=True, B=2, keep=True, tile=Tile(block_r=16)),
            dataclasses.replace(base, value="int8", S=2), dataclasses.replace(base, key="int4", T=200),
        ]
    if scheme == "int4":
        found += [dataclasses.replace(base, key="int8(granularity=group,group=16)", value="int4(granularity=token)", D=128),
                  dataclasses.replace(base, key="int4(group=16)", value="int4(group=16)", D=80, Dv=80)]
    return found


def any_cases(scheme: str) -> list[Case]:
    """One token and several, grouped heads, odd widths, masks and dtypes, for a scheme that nothing else is known of."""
    made = schemes.parse(scheme)
    wide, odd = (next(dim for dim in dims if both_hold(made, dim)) for dims in ((128, 64, 256), (80, 96, 64, 128, 256)))
    base = Case(scheme, scheme, D=wide, Dv=wide, tile=Tile(block_t=32), exact_newest=40 if made.window else 0)
    return [
        dataclasses.replace(base, T=130, B=3), dataclasses.replace(base, T=200, B=2, G=7, K=2, D=odd, Dv=odd, lo=True, keep=True),
        dataclasses.replace(base, T=150, S=5, B=2, tile=Tile(32, 16, True), sinks=True, softcap=5.0),
        dataclasses.replace(base, T=100, S=20, tile=Tile(32, 32, False), bias=Bias.ADDED), dataclasses.replace(base, T=70, magnitude=1e-3),
        dataclasses.replace(base, T=130, dtype=torch.float32, outlier=True), dataclasses.replace(base, T=300, B=2, fronts=(170, 33)),
    ]


def asymmetric_cases(scheme: str) -> list[Case]:
    """Zero points, blocks of tokens, tables; the newest tokens beside the planes; RoPE behind the decoding."""
    fine = Tile(block_t=32)
    four, three = ("kivi(bits=4)", "kivi(bits=3)") if scheme == "kivi" else ("lookup", "lookup(block_tokens=32)")
    base = Case(scheme, scheme, tile=fine)
    found = [dataclasses.replace(base, T=T, B=B, D=128, Dv=128) for T, B in ((1, 1), (63, 3), (200, 3))]
    found += [
        Case(four, four, T=150, tile=fine, D=D, Dv=Dv, G=G, K=2) for D, Dv, G in ((128, 128, 4), (96, 64, 7))
    ]
    found += [
        Case(three, three, T=90, tile=fine), dataclasses.replace(base, key=four, dtype=torch.float32, T=70),
        dataclasses.replace(base, T=130, magnitude=1000.0), dataclasses.replace(base, T=130, magnitude=1e-3),
        dataclasses.replace(base, key=four, value=four, outlier=True, T=100), dataclasses.replace(base, equal=True, T=80),
        dataclasses.replace(base, T=200, B=3, lo=True, keep=True), dataclasses.replace(base, S=3, T=150, B=2, bias=Bias.ADDED),
        dataclasses.replace(base, value=four, S=5, T=150, tile=Tile(32, 16, True), sinks=True, softcap=5.0),
        dataclasses.replace(base, key=four, S=20, T=100, tile=Tile(32, 32, False)),
        dataclasses.replace(base, T=100, exact_newest=40, B=3), dataclasses.replace(base, T=700, exact_newest=40, B=4, splits=9, shares=2),
        dataclasses.replace(base, T=100, exact_newest=100, sinks=True),
        dataclasses.replace(base, T=20, exact_newest=36, D=80 if scheme == "lookup" else 96, Dv=96),
        dataclasses.replace(base, T=150, exact_newest=70, S=4, B=2, lo=True, keep=True),
        dataclasses.replace(base, T=150, exact_newest=40, bias=Bias.BOOLEAN, B=2, S=4),
        dataclasses.replace(base, T=90, rotary=64), dataclasses.replace(base, T=120, rotary=32, exact_newest=40, B=2, interleaved=True),
        dataclasses.replace(base, T=90, rotary=64, interleaved=True, S=5, tile=Tile(32, 16, True)),
        Case("dense", "dense", T=120, rotary=48, exact_newest=50, B=2, tile=Tile(32, 16, False), S=2),
        Case("int4", "int8", T=120, exact_newest=33),
    ]
    if scheme == "lookup":
        # Large magnitudes overflow float16 in the low-precision reference, not here.
        fitting = [case for case in found if case.magnitude <= 1 and not case.outlier and not case.keep and case.key != "dense"][::2]
        return [dataclasses.replace(case, D=max(64, case.D // 32 * 32), Dv=max(64, case.Dv // 32 * 32)) for case in fitting]
    return [
        *found, dataclasses.replace(base, key="kivi(axis=token)", value="kivi(axis=channel,bits=4)", T=100),
        dataclasses.replace(base, key="kivi(group=16,window=16)", value="kivi(group=8,window=8)", T=100, tile=Tile(16)),
        dataclasses.replace(base, key="kivi(scale_dtype=bfloat16)", value="kivi(scale_dtype=float32)", T=100),
        dataclasses.replace(base, key="kivi(group=64,window=64,bits=4)", T=100), dataclasses.replace(base, T=130, tile=Tile(64)),
        dataclasses.replace(base, key="kivi(group=64,bits=3)", value="kivi(group=128)", D=128, Dv=128, T=200, exact_newest=40),
        dataclasses.replace(base, key="kivi(group=64)", value="kivi(group=128,bits=4)", Dv=256, T=100),
    ]


def tabled_cases() -> list[Case]:
    """Tables of every number of bits, words of five bytes among them, rows held twice and once, and tables beside a scheme without one."""
    two, three, four, five = (f"beyond(bits={bits})" for bits in (2, 3, 4, 5))
    twice = Tile(32, 8, True, copies=2)
    return [
        Case(four, four, T=100, B=3, tile=twice), Case(five, five, T=70, D=128, Dv=64, K=2, tile=twice),
        Case(three, two, T=90, S=3, B=2, D=128, lo=True, keep=True, tile=Tile(32, 16, True)), Case(two, five, T=65, dtype=torch.float32),
        Case("beyond(group=64)", "beyond(group=128)", T=130, D=128, Dv=128, G=8), Case("int4", five, T=100, Dv=128, exact_newest=33),
        Case(four, "kivi", T=100, exact_newest=40, tile=twice), Case(five, three, S=20, T=100, tile=Tile(32, 32, False)),
        Case("nf4", "nf4", T=130, D=96, Dv=96, K=2, dtype=torch.bfloat16, magnitude=30.0, tile=twice, sinks=True, softcap=5.0),
        Case("nf4", four, T=200, B=2, D=80, Dv=64, G=3, bias=Bias.ADDED, tile=twice),
        Case(three, five, T=70, D=256, Dv=256, G=2, tile=Tile(16, 8, True, copies=2)), Case(two, two, T=65, outlier=True, tile=twice),
        Case("gauss", "gauss", T=100, D=128, Dv=128, tile=twice), Case("gauss(bits=3)", "gauss(bits=2)", T=90, S=3, B=2, keep=True),
    ]


def early_cases() -> list[Case]:
    """First tokens as they are: beside the newest ones, behind padding, partly seen, more than a tile of them and fewer."""
    fine = Tile(block_t=32)
    four, kivi = Case("int4", "int4", exact_first=4), Case("kivi", "kivi", tile=fine, exact_newest=40)
    tabled = Case("nf4", "beyond", tile=fine, exact_first_at=0)
    return [
        *(
            dataclasses.replace(four, T=T, B=3, exact_first=count, exact_first_at=at)
            for T, count, at in ((3, 4, 0), (70, 4, 2), (200, 64, 61))
        ),
        dataclasses.replace(four, T=90, B=2, exact_first_at=-2),
        dataclasses.replace(four, key="dense", value="int8", T=130, exact_first=70, exact_first_at=3),
        dataclasses.replace(four, T=100, B=2, exact_first=9, exact_first_at=3, lo=True, keep=True),
        dataclasses.replace(four, T=100, B=2, exact_first=9, exact_first_at=3, S=4, lo=True),
        dataclasses.replace(four, T=100, B=2, exact_first=9, exact_first_at=3, S=4, bias=Bias.BOOLEAN, sinks=True),
        dataclasses.replace(four, T=100, S=20, exact_first=5, exact_first_at=1, tile=Tile(32, 64, False)),
        dataclasses.replace(four, T=300, B=3, exact_first=7, exact_first_at=1, splits=9, shares=2),
        *(
            dataclasses.replace(kivi, T=T, exact_first=count, B=2)
            for T, count in ((200, 4), (200, 32), (130, 70), (45, 20), (20, 64))
        ),
        dataclasses.replace(kivi, T=150, exact_first=6, S=4, B=2, lo=True, keep=True),
        dataclasses.replace(kivi, T=150, exact_first=6, S=5, softcap=5.0), dataclasses.replace(kivi, T=120, exact_first=5, rotary=32),
        dataclasses.replace(tabled, T=150, exact_first=5), dataclasses.replace(tabled, T=150, exact_first=40, exact_first_at=37, B=2),
        dataclasses.replace(tabled, T=30, exact_first=3, S=3),
    ]


def normed_cases() -> list[Case]:
    """Norms of tokens beside folded scales, beside what is decoded element by element, and first tokens."""
    normed = Case("normed", "kivi", T=150, tile=Tile(block_t=32), exact_newest=40, B=2)
    return [
        normed, dataclasses.replace(normed, T=200, D=128, Dv=128, exact_first=4, outlier=True),
        dataclasses.replace(normed, key="normed(bits=3)"),
        dataclasses.replace(normed, key="normed(bits=4,group=16,window=16)", tile=Tile(16), S=3, softcap=5.0),
        dataclasses.replace(normed, dtype=torch.float32), dataclasses.replace(normed, S=20, tile=Tile(32, 32, False), sinks=True),
        dataclasses.replace(normed, magnitude=1000.0, keep=True, lo=True), dataclasses.replace(normed, tile=Tile(64), magnitude=1e-3),
    ]


def padded_cases() -> list[Case]:
    """Padding in front of rows, where tiles that hide nothing have a loop of their own: whole splits of it, all of a row, or none."""
    fine = Tile(block_t=32)
    kivi = Case("kivi", "kivi", T=300, B=2, fronts=(170, 33), exact_newest=40, tile=fine)
    return [
        kivi, dataclasses.replace(kivi, fronts=(0, 999)), dataclasses.replace(kivi, S=4, fronts=(64, 1)),
        dataclasses.replace(kivi, S=20, fronts=(64, 1), tile=Tile(32, 32, False)),
        dataclasses.replace(kivi, splits=9, T=600, fronts=(500, 0)),
        dataclasses.replace(kivi, key="normed", fronts=(5, 290)), dataclasses.replace(kivi, T=40, fronts=(7, 0)),
        *(dataclasses.replace(kivi, exact_first=exact_first, fronts=(90, 3)) for exact_first in (4, 50)),
        Case("nf4", "beyond", T=300, B=2, fronts=(100, 201), tile=fine),
        Case("nf4", "nf4", T=300, B=2, fronts=(250, 0), splits=1, tile=fine),
        Case("nf4", "beyond", T=200, B=2, fronts=(60, 60), exact_first=5, exact_first_at=60, tile=fine),
        Case("nf4", "nf4", T=600, B=3, fronts=(1, 100, 0), splits=9, shares=2, tile=fine),
    ]


def both_hold(scheme: schemes.Scheme, head_dim: int) -> bool:
    """Whether keys and values of some width can be held."""
    return all(holds(scheme.for_role(role), SlotSpec(1, head_dim, torch.float16, role)) for role in Role)


OPTIONS = {"early": early_cases, "normed": normed_cases, "padded": padded_cases}
"""Cases of what schemes share, by their names among the schemes."""


def encoded(name: str, x: torch.Tensor, role: Role, generator: torch.Generator) -> list[torch.Tensor]:
    """Rows [B, K, n, width] of every plane for whole pages of tokens x, and its tables or static scales."""
    made = schemes.parse(name)
    if not isinstance(made, Lookup):
        slot = SlotSpec(x.shape[1], x.shape[3], x.dtype, role)
        read = made.for_role(role).layout(slot).planes[: made.for_role(role).format(slot).planes]
        if made.for_role(role).format(slot).static:
            # Scales of another magnitude than the tokens would make scores so large that float32's rounding of them decides.
            scales = x.float().abs().amax((0, 2, 3))[None, None, :, None, None] / made.qmax
            return [*made.for_role(role).encode(x, scales), scales]
        tables = [plane for plane in read if plane.constant]
        learned = [torch.rand(plane.shape(1, 1, x.shape[1]), generator=generator) * plane.width for plane in tables]
        return [*made.for_role(role).encode(x), *learned]
    B, K, T, D = x.shape
    shape = B, K, T // made.block_tokens, D // made.group
    level = x.abs().amax()
    codes = torch.randint(0, 256, (B, K, T, D // 2), generator=generator, dtype=torch.int32).to(torch.uint8)
    scales, zeros = (torch.rand(shape, generator=generator) * level).half(), (torch.randn(shape, generator=generator) * level).half()
    return [codes, scales, zeros, torch.rand(1, 1, K, D // made.group, 16, generator=generator)]


def make_planes(name: str, x: torch.Tensor, plain: bool, generator: torch.Generator, role: Role = Role.KEY) -> list[torch.Tensor]:
    """A store of one page more than needed, poisoned, then written with x [B, K, T, D]; blocks that are not whole hold zeros."""
    B, K, T, D = x.shape
    if plain:
        return [x.unsqueeze(0)]
    pages = pages_for(T) + 1
    whole = torch.cat([x, x.new_zeros(B, K, pages * PAGE - T, D)], 2)
    planes = []
    for rows in encoded(name, whole, role, generator):
        if rows.dim() == 5:
            planes.append(rows)
            continue
        block = pages * PAGE // rows.shape[2]
        behind = (torch.arange(rows.shape[2]) * block >= T)[:, None]
        if rows.dtype.is_floating_point:
            poison = torch.full_like(rows, float("nan"))
        else:
            poison = torch.randint(-128, 128, rows.shape, dtype=torch.int8, generator=generator).view(rows.dtype)
        filled = torch.where(behind, poison, rows)
        planes.append(filled.unflatten(2, (pages, PAGE // block)).permute(2, 0, 1, 3, 4).contiguous())
    return planes


def operands(case: Case, seed: int = 0) -> dict[str, object]:
    """Random operands of one case, as ``attend`` takes them."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, generator=g) * case.magnitude
        if case.outlier:
            x[..., 3] *= 100
        if case.equal:
            x[:] = x[..., :1, :1]
        return x.to(case.dtype)

    H = case.K * case.G
    q = randn(case.B, case.S, H, case.D).transpose(1, 2) / case.magnitude
    keys = make_planes(case.key, randn(case.B, case.K, case.T, case.D), case.plain, g)
    values = make_planes(case.value, randn(case.B, case.K, case.T, case.Dv), case.plain, g, Role.VALUE)
    hi = torch.arange(case.T - case.S, case.T).unsqueeze(0).repeat(case.B, 1)
    hi = (hi - 7 * torch.arange(case.B).unsqueeze(1)).clamp(min=-1)
    if case.shares:
        # Rows of very different lengths.
        hi = hi // (1 + 2 * torch.arange(case.B).unsqueeze(1))
    elif case.B > 2:
        hi[-1] = -1
    lo = (hi - 66) if case.lo else None
    keep = kept_tokens(case, g)
    if keep is not None:
        unseen = int((keep.cumsum(1) == 0).all(0).sum().clamp(max=9))
        poison_rejected(keys, values, unseen)
        poison_codes(case, unseen, keys, values)
    bias = None
    if case.bias is Bias.ADDED:
        bias = torch.randn(case.B, 1, case.S, case.T, generator=g).to(case.dtype)
    if case.bias is Bias.ADDED_OR_REPLACING:
        bias = torch.randn(case.B, 1, case.S, case.T - 5, generator=g).to(case.dtype)
        bias = bias.masked_fill(torch.rand(bias.shape, generator=g) > 0.5, float("-inf"))
    if case.bias in {Bias.BOOLEAN, Bias.REPLACING}:
        bias = (torch.rand(1, H, 1, case.T - 5, generator=g) > 0.5).expand(case.B, H, case.S, case.T - 5)
    sinks = torch.randn(H, generator=g) if case.sinks else None
    exact_newest = base = rope = None
    if case.exact_newest:
        exact_newest = [randn(case.B, case.K, case.exact_newest, width) for width in (case.D, case.Dv)]
        base = case.T - case.exact_newest - 3 * torch.arange(case.B)
    exact_first = exact_first_at = None
    if case.exact_first:
        exact_first = [randn(1, case.B, case.K, case.exact_first, width) for width in (case.D, case.Dv)]
        if case.exact_first_at is not None:
            exact_first_at = (case.exact_first_at + 5 * torch.arange(case.B)).reshape(1, case.B, 1, 1, 1)
        poison_first(exact_first_at, case.exact_first, keys, values)
    if case.rotary:
        angle = torch.rand(1, case.T, case.rotary, generator=g) * 6
        rope = [angle.cos(), angle.sin()]
    return dict(
        q=q, keys=keys, values=values, hi=hi, lo=lo, keep=keep, bias=bias, sinks=sinks, key_scheme=schemes.parse(case.key).spec(),
        value_scheme=schemes.parse(case.value).spec(), scale=case.scale / case.magnitude, softcap=case.softcap, value_dim=case.Dv,
        exact_newest=exact_newest, base=base, rope=rope, interleaved=case.interleaved, exact_first=exact_first,
        exact_first_at=exact_first_at,
        **({"fill": FILL} if case.bias in {Bias.REPLACING, Bias.ADDED_OR_REPLACING} else {}),
    )


def poison_first(exact_first_at: torch.Tensor | None, count: int, *stores: list[torch.Tensor]) -> None:
    """NaN in the scales of tokens whose codes nobody may read, where a token has its own."""
    for planes in stores:
        for plane in planes[1:]:
            if plane.dtype.is_floating_point and plane.shape[3] == planes[0].shape[3]:
                for row in range(plane.shape[1]):
                    first = 0 if exact_first_at is None else int(exact_first_at[0, row])
                    for t in range(max(first, 0), min(first + count, plane.shape[0] * PAGE)):
                        plane[t // PAGE, row, :, t % PAGE] = float("nan")


def kept_tokens(case: Case, g: torch.Generator) -> torch.Tensor | None:
    """A mask of tokens [B, T + 3]: what is hidden by chance and in front, or padding in front and three tokens in the middle of a row."""
    if case.fronts:
        keep = torch.arange(case.T + 3)[None] >= torch.tensor(case.fronts)[:, None]
        keep[1, case.T // 2 : case.T // 2 + 3] = False
        return keep
    if not case.keep:
        return None
    keep = torch.rand(case.B, case.T + 3, generator=g) > 0.3
    keep[:, :9] = False
    return keep


def poison_rejected(keys: list[torch.Tensor], values: list[torch.Tensor], unseen: int) -> None:
    """NaN in every float plane at the first tokens, which no row keeps."""
    for plane in (*keys, *values):
        if plane.dtype.is_floating_point and plane.shape[3] == keys[0].shape[3]:
            plane[0, :, :, :unseen] = float("nan")


def poison_codes(case: Case, unseen: int, *stores: list[torch.Tensor]) -> None:
    """The code of NaN at the first tokens, which no row keeps, of schemes whose codes hold it."""
    for name, planes in zip((case.key, case.value), stores, strict=True):
        scheme = schemes.parse(name)
        if scheme.format(SlotSpec(case.K, case.D, case.dtype, Role.KEY)).static:
            planes[0][0, :, :, :unseen] = scheme.spoiled(1, 1)[0][0, 0, 0, 0]


def scale_pack(planes: list[torch.Tensor], fmt: KernelFormat) -> int:
    """All scales of a token as one word, as the lowering chooses where it can."""
    scales = planes[1].shape[-1] if fmt.scaled and planes[1].dtype == torch.float16 else 1
    return scales if scales in {2, 4} else 1


def run_kernel(
    case: Case, args: dict, launch: Callable[[Any, tuple, list[torch.Tensor]], None] | None = None, packed: bool = False
) -> torch.Tensor:
    """The rendered kernel, launched by ``launch`` (kernel, grid, tensors) or as Triton does it, and a merge in eager torch."""
    q, keys, values = args["q"], args["keys"], args["values"]
    masks = Masks(
        lo=case.lo, keep=case.keep or bool(case.fronts), bias=case.bias, sinks=case.sinks,
        bias_per_head=case.bias in {Bias.BOOLEAN, Bias.REPLACING}, fill=args.get("fill", 0.0),
        bias_per_query=case.bias in {Bias.ADDED, Bias.ADDED_OR_REPLACING},
    )
    formats = [
        schemes.parse(args[name]).format(SlotSpec(case.K, width, case.dtype, role))
        for name, width, role in (("key_scheme", case.D, Role.KEY), ("value_scheme", case.Dv, Role.VALUE))
    ]
    half = [fmt.symmetric or planes[1].dtype == torch.float16 for fmt, planes in zip(formats, (keys, values), strict=True)]
    config = AttendConfig(
        args["key_scheme"], args["value_scheme"], case.D, case.Dv, case.K, case.G, case.dtype, keys[0].dtype, values[0].dtype,
        args["scale"], case.softcap, masks, keys[0].shape[3], not case.plain, case.splits, packed, case.tile, case.S == 1,
        ExtraOperands(case.exact_newest > 0, True, case.rotary, case.interleaved, False, case.exact_first, case.exact_first_at is not None),
        case.shares, case.direct, key_scale_pack=scale_pack(keys, formats[0]), value_scale_pack=scale_pack(values, formats[1]),
        key_generic=not half[0], value_generic=not half[1],
    )
    exact_newest, rope = args["exact_newest"] or [None] * 2, args["rope"] or [None] * 2
    tensors = {"Q": q, "HI": args["hi"], "K_WORDS": keys[0], "V_WORDS": values[0], "LO": args["lo"], "KEEP": args["keep"],
               "KEPT": None if args["keep"] is None else kept_of_runs(args["keep"]), "BIAS": args["bias"], "SINKS": args["sinks"],
               "RECENT_K": exact_newest[0], "RECENT_V": exact_newest[1], "BASE": args["base"], "COS": rope[0], "SIN": rope[1],
               "EARLY_AT": args["exact_first_at"], **dict(zip(("EARLY_K", "EARLY_V"), args["exact_first"] or (), strict=False))}
    for letter, planes, fmt in zip("KV", (keys, values), formats, strict=True):
        tensors |= {f"{letter}_SCALES": planes[min(1, len(planes) - 1)], f"{letter}_ZEROS": planes[2] if fmt.zeros else None,
                    f"{letter}_TABLE": planes[fmt.planes - 1], f"{letter}_STATIC": planes[fmt.planes - 1],
                    f"{letter}_NORMS": planes[fmt.norms_at] if fmt.norms else None}
    inputs = {name: tensors[name] for name in config.operands}
    out = torch.full(
        (case.B, case.K * case.G, case.S, case.Dv) if case.direct else (case.splits, case.B, case.K * case.G, case.S, case.Dv + 2),
        float("nan"), dtype=case.dtype if case.direct else torch.float32,
    )
    source = offline.render(config, {n: offline.Operand.of(t) for n, t in inputs.items()}, offline.Operand.of(out))
    kernel = getattr(offline.load_module(source), offline.KERNEL)
    tiles = -(-case.S * case.G // case.tile.rows)
    grid = (tiles, case.B * case.K, case.splits)
    if launch is None:
        kernel[grid](*inputs.values(), out)
    else:
        launch(kernel, grid, [*inputs.values(), out])
    if case.direct:
        return out
    acc, m, l = out[..., :-2], out[..., -2:-1], out[..., -1:]
    if case.sinks:
        top = torch.maximum(m.amax(0), args["sinks"][None, :, None, None] * 1.4426950408889634)
    else:
        top = m.amax(0)
    top = torch.where(top.isneginf(), 0.0, top)
    weight = torch.exp2(m - top)
    total = (l * weight).sum(0)
    if case.sinks:
        total = total + torch.exp2(args["sinks"][None, :, None, None] * 1.4426950408889634 - top)
    return torch.where(total == 0, 0.0, (acc * weight).sum(0) / total).to(case.dtype)


FACTORS = (1.0, 1.1, 1.3, 0.7, 0.9, 1.7, 1.9, 0.6)
"""Queries are multiplied, and their scale is divided, by these: sums of float32 then round in other ways, by luck better or worse."""


def eager_error(case: Case, args: dict) -> torch.Tensor:
    """The largest error of the eager body in the case's dtype; in float32, of several calls that differ in how they round.

    One alone may be lucky by a factor of fifty: a score of 20,000 is rounded to 0.002, and two nearly equal ones share weights by that.
    """
    found = []
    for factor in FACTORS if case.dtype == torch.float32 else FACTORS[:1]:
        given = {**args, "q": args["q"] * factor, "scale": args["scale"] / factor}
        exact = attend_body(AttendOperands(**{**given, "q": given["q"].double()}), compute=torch.float64)
        found.append((attend_body(AttendOperands(**given), compute=case.dtype).double() - exact).abs().max())
    return torch.stack(found).max()


def check(case: Case, out: torch.Tensor, args: dict, slack: float = 1.0) -> str | None:
    """None, or how far the result is off: at most twice the eager low-precision error plus one rounding band."""
    exact = attend_body(AttendOperands(**{**args, "q": args["q"].double()}), compute=torch.float64)
    band = torch.finfo(case.dtype).eps * exact.abs().max()
    # Large scores are rounded once by the eager body, and by the kernel with the norm, with the scale and when the maximum is subtracted.
    roundings = 3 if case.outlier and case.dtype == torch.float32 else 1
    allowed = 2 * slack * (roundings * eager_error(case, args) + band)
    error = (out.double() - exact).abs().max()
    return None if error <= allowed else f"{case}: error {error:.3g}, allowed {allowed:.3g}"


def allow_ranges_over_scalars() -> None:
    """Triton 3.6's interpreter turns one-element arrays into ints, which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patched


def compare(*names: str) -> None:
    """Every case of the schemes."""
    allow_ranges_over_scalars()
    failures = []
    for case in itertools.chain.from_iterable(cases(name) for name in names):
        if case.dtype == torch.bfloat16 and "dense" in (case.key, case.value):
            continue  # The interpreter's dot treats bfloat16 as integers; test_gpu_attend has these.
        args = operands(case)
        try:
            failure = check(case, run_kernel(case, args), args)
        except Exception as error:  # noqa: BLE001 - every case must be reported
            failure = f"{case}: {type(error).__name__} {str(error)[-400:]}"
        if failure:
            failures.append(failure)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_interpreted_kernel_equals_eager(scheme: str) -> None:
    interpreted(compare, scheme, guarded=True)


def compare_nan() -> None:
    """A query of NaN, which a rewritten graph makes of one that sees places behind its store, gives NaN, and others what they gave."""
    allow_ranges_over_scalars()
    for scheme in SCHEMES:
        plain = scheme in {"dense", "int8", "fp8", "int4", "int8-static", "fp8-static"}
        case = dataclasses.replace(Case(scheme, scheme) if plain else cases(scheme)[0], B=2, T=100)
        args = operands(case)
        plain = run_kernel(case, args)
        out = run_kernel(case, {**args, "q": torch.where(torch.arange(case.B)[:, None, None, None] == 1, float("nan"), args["q"])})
        assert bool(out[1].isnan().all()) and torch.equal(out[0], plain[0]), case


def test_a_query_of_nan_gives_nan() -> None:
    interpreted(compare_nan)


def config_of(scheme: str, **changes: object) -> AttendConfig:
    word = schemes.parse(scheme).format(SlotSpec(8, 128, torch.bfloat16, Role.KEY)).word_dtype
    return dataclasses.replace(AttendConfig(scheme, scheme, 128, 128, 8, 4, torch.bfloat16, word, word, 0.088, splits=64), **changes)


COMPILED = [
    ("int4", "sm_90", {}), ("int8", "sm_80", {"one_query": False}), ("fp8", "sm_100", {}),
    ("int8-static", "sm_80", {}), ("fp8-static", "sm_80", {}),
    ("fp8-static", "sm_90", {"tile": Tile(64, 64, False, 4, 3), "one_query": False}), ("int8-static", "sm_100", {"one_query": False}),
    ("dense", "sm_90", {"tile": Tile(64, 64, False, 4, 3), "one_query": False, "direct": True, "splits": 1}),
    ("kivi", "sm_90", {"tile": Tile(32, 8, True, 1, 3), "beside": ExtraOperands(exact_newest=True)}),
    ("kivi(bits=3)", "sm_80", {"tile": Tile(32, 8, True, 4, 2), "beside": ExtraOperands(exact_newest=True, rotary_dim=128)}),
    (
        "normed", "sm_90",
        {"tile": Tile(32, 8, True, 1, 3), "beside": ExtraOperands(exact_newest=True, exact_first=4), "value_scheme": "kivi"},
    ),
    ("beyond", "sm_80", {"tile": Tile(32, 8, True, 1, 3, 2, 1), "value_scale_pack": 4, "key_scale_pack": 4}),
    ("beyond(bits=3)", "sm_100", {"tile": Tile(32, 8, True, 1, 3), "value_scale_pack": 4, "key_scale_pack": 4}),
    ("lookup", "sm_100", {"tile": Tile(32, 16, True, 4, 2), "one_query": False, "beside": ExtraOperands(rotary_dim=64, interleaved=True)}),
]


@pytest.mark.parametrize(("scheme", "arch", "changes"), COMPILED)
def test_compiles_offline(scheme: str, arch: str, changes: dict) -> None:
    config = config_of(scheme, **changes)
    built = offline.compile_offline(offline.attend_source(config), config, arch)
    assert "tt.dot" in built["ttgir"] or "warp_group_dot" in built["ttgir"] or "mma" in built["ttgir"]
    count = instructions_per_element(config, built["cubin"])
    # Whatever is decoded in float32 costs more than what the tensor cores take as it is.
    assert 0.5 < count.per_element < (40 if config.plans[0].elements else 8), count
    assert PAGE == config.page_rows


def test_norms_are_copied_asynchronously() -> None:
    """As words and scales are: a load of their own, 16 bits a thread, took a quarter of the kernel's time on an H200."""
    copies = []
    for scheme in ("kivi", "normed"):
        config = config_of(scheme, value_scheme="kivi", tile=Tile(32, 8, True, 1, 3), beside=ExtraOperands(exact_newest=True))
        built = offline.compile_offline(offline.attend_source(config), config)
        copies.append(str(built["ttgir"]).count("async_copy_global_to_local"))
    assert copies[1] > copies[0]


TABLE_COSTS = {"beyond": 4.1, "nf4": 3.9, "beyond(bits=3)": 5.8, "gauss": 3.8, "gauss(bits=3)": 5.0, "gauss(bits=2)": 2.85}
"""Issued instructions of a step per key and value element, of a token's scales as one word, four query heads a kv head.

One scale a token is no word: those of keys and of values each pass through shared memory once."""


@pytest.mark.parametrize("scheme", TABLE_COSTS)
def test_levels_are_looked_up_where_the_tensor_cores_want_them(scheme: str) -> None:
    """What is chosen without tuning: no change of layout but that of the probabilities, and few instructions an element."""
    from kvcompile.lowering.decode.tiles import choose_tiles
    from kvcompile.lowering.site_kernel import SHARED_MEMORY

    groups = 128 // schemes.parse(scheme).format(SlotSpec(8, 128, torch.bfloat16, Role.KEY)).group
    base = config_of(scheme, value_scale_pack=groups, key_scale_pack=groups)
    (chosen,) = choose_tiles(base, 4, PAGE, tuned=False, shared_memory=SHARED_MEMORY["sm_90"])
    key, value = chosen.plans
    assert key.picked and value.paired and chosen.tile.copies == 2 and chosen.tile.num_warps == 1
    built = offline.compile_offline(offline.attend_source(chosen), chosen)
    count = instructions_per_element(chosen, built["cubin"])
    assert count.per_element < TABLE_COSTS[scheme], count
    single = groups == 1
    assert count.opcodes.get("STS", 0) <= 1 + single and count.opcodes.get("BAR", 0) <= 3 + single, count


@pytest.mark.parametrize(("bits", "group"), [(2, 32), (4, 32), (2, 64)])
def test_kivi_decodes_in_packed_halves(bits: int, group: int) -> None:
    """What is chosen without tuning: scales folded into queries, values by one multiply-add, which a tile above a block would rule out."""
    from kvcompile.lowering.decode.tiles import choose_tiles
    from kvcompile.lowering.site_kernel import SHARED_MEMORY

    spell = [schemes.parse(f"kivi(bits={bits},group={group},window=64)").for_role(role).spec() for role in Role]
    base = AttendConfig(*spell, 128, 128, 8, 4, torch.bfloat16, torch.uint8, torch.uint8, 0.09, value_scale_pack=4)
    (chosen,) = choose_tiles(base, 4, PAGE, tuned=False, shared_memory=SHARED_MEMORY["sm_90"])
    key, value = chosen.plans
    assert key.folded and value.shifted, (key.decode, value.decode)
    assert chosen.tile.block_t <= group and chosen.tile.num_warps == 1


def test_rows_of_one_length_keep_their_splits() -> None:
    """More splits only where rows may differ in length and have more than one program each."""
    from kvcompile.lowering.decode.tiles import ONE_PASS, ragged_splits

    uniform, exact_newest = Masks(hi_per_batch=False, lo_per_batch=False), ExtraOperands(exact_newest=True)
    config = config_of("int8", masks=Masks(lo_per_batch=False))
    assert ragged_splits(config, 8, 16) == (64, 8)
    assert ragged_splits(config, 8, 2) == (16, 8)
    assert ragged_splits(config_of("kivi", masks=config.masks, beside=exact_newest), 5, 4) == (17, 4)
    assert ragged_splits(config, ONE_PASS, 2) == (2 * ONE_PASS, ONE_PASS)
    for other, splits, batch in (
        (config_of("int8", masks=uniform), 8, 16), (config, 1, 240), (config, 128, 1),
        (config_of("int8", masks=config.masks, one_query=False), 8, 16),
    ):
        assert ragged_splits(other, splits, batch) == (splits, 0)


@pytest.mark.parametrize("scheme", ["dense", "int8", "int4", "kivi", "kivi(bits=4)", "normed", "beyond", "squat"])
@pytest.mark.parametrize("tokens", [90, 40_000])
def test_the_merge_has_few_terms(scheme: str, tokens: int) -> None:
    """A merge of 127 splits that were folded one by one, as of two padded rows of kivi, took Triton longer than two minutes to compile."""
    from kvcompile.lowering.decode.tiles import ONE_PASS, choose_tiles, folds, ragged_splits, splits_for
    from kvcompile.lowering.site_kernel import SHARED_MEMORY

    window = schemes.parse(scheme).window > 0
    counts = set()
    for beside in (ExtraOperands(exact_newest=window), ExtraOperands(exact_newest=window, exact_first=4)):
        config = choose_tiles(config_of(scheme, masks=Masks(lo_per_batch=False), beside=beside), 4, PAGE, False, SHARED_MEMORY["sm_90"])[0]
        for batch, heads, multiprocessors in itertools.product((1, 2, 3, 4, 7, 16), (1, 2, 8, 32), (108, 132, 148)):
            counts.add(ragged_splits(config, splits_for(config, 4, batch * heads, multiprocessors, tokens), batch)[0])
    assert len(counts) > 3
    for splits in counts:
        assert splits % folds(splits) == 0 and splits // folds(splits) <= ONE_PASS and folds(splits) <= 2, splits


@pytest.mark.parametrize("scheme", ["kivi", "squat"])
def test_queries_wider_than_the_newest_tokens_compile(scheme: str) -> None:
    """GPT-J and CodeGen attend in float32 over a cache in bfloat16: the newest tokens are brought to the queries' type."""
    spell = [schemes.parse(scheme).for_role(role).spec() for role in Role]
    base = config_of("kivi", tile=Tile(32, 8, True, 1, 3), beside=ExtraOperands(exact_newest=True), splits=4)
    config = dataclasses.replace(base, key_scheme=spell[0], value_scheme=spell[1], dtype=torch.float32)
    source = offline.attend_source(config)
    operands = offline.operands_for(config)
    kernel = getattr(offline.load_module(source), offline.KERNEL)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvcompile.lowering.host.triton_api import POINTERS

    signature = dict.fromkeys(kernel.arg_names, "i32")
    for name, operand in operands.items():
        dtype = torch.bfloat16 if name.startswith("RECENT") else operand.dtype
        signature[name] = POINTERS[dtype]
    signature["OUT"] = "*fp32"
    assert triton.compile(ASTSource(kernel, signature, {}), target=GPUTarget("cuda", 90, 32)).asm["cubin"]
