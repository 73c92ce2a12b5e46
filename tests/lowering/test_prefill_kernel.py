"""The prefill kernel in Triton's interpreter against ``attend_body`` in float64, and compiled offline."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from interpreted import interpreted
from registry import PLAIN
from test_triton_attend import Case, allow_ranges_over_scalars, both_hold, check, kept_tokens, operands, poison_rejected

from kvcompile import schemes
from kvcompile.lowering.attend_kernels import PREFILL, AttendFacts
from kvcompile.lowering.decode import offline
from kvcompile.lowering.decode.config import Masks, Tile
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import append_window_body
from kvcompile.lowering.prefill import first_tokens
from kvcompile.lowering.prefill import offline as prefill_offline
from kvcompile.lowering.prefill.config import PrefillConfig, normalized
from kvcompile.types import Role, SlotSpec, pages_for

NAMED = (("dense", "fp8"), ("int8",), ("int4",), ("kivi", "kivi(bits=4)"), ("early",))
"""Schemes that one process takes, whose cases try what the template does with them."""


def known(scheme: schemes.Scheme) -> bool:
    """Whether the template reads a scheme's planes itself; chunks of what stands in tables are decoded ahead of it (``test_chunked``)."""
    made = [(scheme.for_role(role), SlotSpec(1, 64, torch.float16, role)) for role in Role]
    if not both_hold(scheme, 64) or any(half.format(slot).levels for half, slot in made):
        return False
    facts = AttendFacts("cuda", tuple((half.spec(), slot) for half, slot in made), torch.float16, rows=80, exact_newest=scheme.window > 0)
    words = [half.format(slot).word_dtype for half, slot in made]
    config = PrefillConfig(made[0][0].spec(), made[1][0].spec(), 64, 64, 1, 4, torch.float16, words[0], words[1], 0.2, tile=Tile(64, 32))
    return PREFILL.gap(facts) is None and config.fits


RUNS = (*NAMED, *((kind.name,) for kind in PLAIN if kind.name not in itertools.chain(*NAMED) and known(kind())))
"""Those and all that are registered: one that is not named has a few cases."""

SHORT = ("fp8", "kivi(bits=4)", *(name for names in RUNS[len(NAMED) :] for name in names))
"""Schemes of few cases: they differ from others by their codes alone."""
TILE = Tile(64, 32, False, 4, 2)
LARGE = Tile(128, 16, False, 4, 2)


@dataclasses.dataclass(frozen=True)
class Prefill:
    """A case of the other template, and whether its last tokens are recent ones in full precision."""

    case: Case
    exact_newest: int = 0

    def __str__(self) -> str:
        return f"{self.case} exact_newest={self.exact_newest}"


def cases(scheme: str) -> list[Prefill]:
    """Odd shapes and every mask, one axis at a time."""
    if scheme == "early":
        return early_cases()
    if schemes.parse(scheme).window:
        base = Case(scheme, scheme, S=20, T=250, tile=TILE)
        found = [
            base, dataclasses.replace(base, S=70, T=70, splits=1, direct=True), dataclasses.replace(base, T=40, B=2),
            dataclasses.replace(base, D=128, Dv=64), dataclasses.replace(base, lo=True, T=300),
            dataclasses.replace(base, keep=True, B=2), dataclasses.replace(base, tile=LARGE, T=330),
            dataclasses.replace(base, magnitude=1e-3, outlier=True), dataclasses.replace(base, S=3, T=600, splits=5),
            dataclasses.replace(base, T=330, B=2, fronts=(150, 3)),
        ]
        found = found[:3] if scheme in SHORT else found
        return [Prefill(case, exact_newest=schemes.parse(scheme).window) for case in found]
    base = Case(scheme, scheme, S=20, T=150, tile=TILE)
    found = [
        base, dataclasses.replace(base, T=20), dataclasses.replace(base, T=64, B=3),
        dataclasses.replace(base, S=2, T=64, splits=1, direct=True),
        dataclasses.replace(base, D=128, Dv=64, K=2, T=330), dataclasses.replace(base, D=64, Dv=128, G=1, tile=LARGE),
        dataclasses.replace(base, D=32, Dv=256, G=7), dataclasses.replace(base, splits=1, direct=True, sinks=True, T=200),
        dataclasses.replace(base, lo=True, B=2, T=260), dataclasses.replace(base, lo=True, G=1, S=150, T=400, splits=1, direct=True),
        dataclasses.replace(base, lo=True, tile=LARGE, T=400, splits=2), dataclasses.replace(base, keep=True, B=2, T=200),
        dataclasses.replace(base, keep=True, lo=True, tile=LARGE, T=300), dataclasses.replace(base, softcap=5.0, sinks=True),
        dataclasses.replace(base, scale=-0.2), dataclasses.replace(base, magnitude=1e-4), dataclasses.replace(base, outlier=True),
        dataclasses.replace(base, tile=dataclasses.replace(TILE, block_r=64), S=70, T=300),
        # Padding: whole splits of it, all of a row, and rows before the first token that is kept.
        dataclasses.replace(base, T=300, B=2, fronts=(170, 999)), dataclasses.replace(base, T=300, S=200, B=2, fronts=(130, 70), lo=True),
        dataclasses.replace(base, T=70, S=70, B=2, fronts=(40, 1), splits=1, direct=True, tile=LARGE),
        # Beyond what float16 holds.
        dataclasses.replace(base, dtype=torch.bfloat16, magnitude=6e4), dataclasses.replace(base, dtype=torch.bfloat16, magnitude=1e-12),
    ]
    if scheme == "dense":
        found += [
            dataclasses.replace(base, S=70, T=70, splits=1, direct=True, plain=True, B=2, keep=True),
            dataclasses.replace(base, S=150, T=150, splits=1, direct=True, plain=True, sinks=True, lo=True),
            dataclasses.replace(base, value="int8"), dataclasses.replace(base, key="int4", value="dense"),
        ]
    if scheme == "int4":
        found += [
            dataclasses.replace(base, key="int8(granularity=group,group=16)", value="int4(granularity=token)", D=128),
            dataclasses.replace(base, key="int4(group=16)", value="int4(group=64)", Dv=128),
            dataclasses.replace(
                base, key="int4(scale_dtype=float32)", value="int4(scale_dtype=bfloat16)", dtype=torch.bfloat16, magnitude=1e9
            ),
        ]
    # Masks are dense's and int4's: int8 has the shapes, two of the masks and every magnitude.
    chosen = [*found[:9], *found[15:20]] if scheme == "int8" else found
    return [Prefill(case) for case in (found[:6] if scheme in SHORT else chosen)]


def early_cases() -> list[Prefill]:
    """First tokens in full precision: within a tile, over several, all of them, of rows that begin elsewhere."""
    base = Case("int4", "int4", S=20, T=150, tile=TILE, exact_first=4)
    kivi = dataclasses.replace(base, key="kivi", value="kivi", T=190)
    return [Prefill(dataclasses.replace(case, splits=max(case.splits, 2))) for case in (
        base, dataclasses.replace(base, exact_first=70, exact_first_at=3, B=2, keep=True),
        dataclasses.replace(base, T=30, exact_first=64, softcap=5.0),
        dataclasses.replace(base, exact_first=9, exact_first_at=61, B=3, lo=True, sinks=True),
        dataclasses.replace(base, exact_first_at=-2, G=1, key="int8"),
        dataclasses.replace(base, exact_first=16, exact_first_at=0, K=2, D=128, Dv=64, key="dense", value="dense", T=330),
        dataclasses.replace(kivi, exact_first=16, exact_newest=40),
        dataclasses.replace(kivi, exact_first=33, exact_newest=60, B=2, keep=True, lo=True),
    )]


def windowed(case: Case, seed: int = 0) -> dict[str, Any]:
    """Operands of a scheme with a window: a first part of the tokens is appended, then the S new ones."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, generator=g) * case.magnitude
        if case.outlier:
            x[..., 3] *= 100
        return x.to(case.dtype)

    found = []
    for role, name, dim in ((Role.KEY, case.key, case.D), (Role.VALUE, case.value, case.Dv)):
        scheme = schemes.parse(name).for_role(role)
        layout = scheme.layout(SlotSpec(case.K, dim, case.dtype, role))
        pages = pages_for(case.T) + 1
        planes = [torch.zeros(plane.shape(pages, case.B, case.K), dtype=plane.dtype) for plane in layout.planes]
        x = randn(case.B, case.K, case.T, dim)
        past = case.T - case.S
        if past:
            append_window_body(x[:, :, :past], planes, torch.arange(past).unsqueeze(0), None, scheme.spec())
        new = torch.arange(past, case.T).unsqueeze(0)
        exact_newest, _ = append_window_body(x[:, :, past:], planes, new, None, scheme.spec())
        fmt = scheme.format(SlotSpec(case.K, dim, case.dtype, role))
        found.append((planes[: fmt.planes], exact_newest))
    (keys, recent_k), (values, recent_v) = found
    hi = torch.arange(case.T - case.S, case.T).unsqueeze(0).repeat(case.B, 1)
    keep = kept_tokens(case, g)
    if case.keep:
        poison_rejected([p for p in keys if p.shape[3] == 64], values, 9)
    return dict(
        q=randn(case.B, case.S, case.K * case.G, case.D).transpose(1, 2) / case.magnitude, keys=keys, values=values, hi=hi,
        lo=(hi - 66) if case.lo else None, keep=keep, bias=None, sinks=None, key_scheme=schemes.parse(case.key).for_role(Role.KEY).spec(),
        value_scheme=schemes.parse(case.value).for_role(Role.VALUE).spec(), scale=case.scale / case.magnitude, softcap=case.softcap,
        value_dim=case.Dv, exact_newest=[recent_k, recent_v], base=torch.tensor([case.T - case.S - schemes.parse(case.key).window]),
    )


def config_for(case: Case, args: dict[str, Any]) -> PrefillConfig:
    keys, values = args["keys"], args["values"]
    keep = args["keep"]
    masks = Masks(lo=case.lo, keep=keep is not None, sinks=case.sinks, keep_per_batch=keep is None or keep.shape[0] == case.B)
    return PrefillConfig(
        args["key_scheme"], args["value_scheme"], case.D, case.Dv, case.K, case.G, case.dtype, keys[0].dtype, values[0].dtype,
        args["scale"], case.softcap, masks, keys[0].shape[3], not case.plain, case.splits,
        exact_newest=args.get("exact_newest") is not None, base_per_batch=case.exact_first > 0, packed=False, tile=case.tile,
    )


def run_kernel(case: Case, args: dict[str, Any]) -> torch.Tensor:
    """The rendered kernel and a merge in eager torch."""
    q, keys, values = args["q"], args["keys"], args["values"]
    more = None
    if case.exact_first:
        more, keep = first_sums(case, args)
        args = {**args, "keep": keep}
    config = config_for(case, args)
    assert config.fits
    key, _ = config.slots
    small, scales = normalized(q)
    exact_newest = args.get("exact_newest") or (None, None)
    tensors = {
        "Q": small if key.scaled else q, "Q_RAW": q, "Q_SCALES": scales, "HI": args["hi"], "K_WORDS": keys[0], "V_WORDS": values[0],
        "K_SCALES": keys[min(1, len(keys) - 1)], "V_SCALES": values[min(1, len(values) - 1)],
        "K_ZEROS": keys[-1], "V_ZEROS": values[-1],
        "LO": args["lo"], "KEEP": args["keep"], "SINKS": args["sinks"],
        "RECENT_K": exact_newest[0], "RECENT_V": exact_newest[1], "BASE": args.get("base"),
    }
    inputs = {name: tensors[name] for name in config.operands}
    heads = case.K * case.G
    shape = (case.B, heads, case.S, case.Dv) if config.direct else (case.splits, case.B, heads, case.S, case.Dv + 2)
    out = torch.full(shape, float("nan"), dtype=case.dtype if config.direct else torch.float32)
    source = prefill_offline.render(config, {n: offline.Operand.of(t) for n, t in inputs.items()}, offline.Operand.of(out))
    kernel = getattr(offline.load_module(source), offline.KERNEL)
    kernel[(-(-case.S * case.G // case.tile.block_r), case.B * case.K, case.splits)](*inputs.values(), out)
    return out if config.direct else merged(out if more is None else torch.cat([out, more]), args["sinks"]).to(case.dtype)


def first_sums(case: Case, args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the first tokens add to the kernel's sums, and the mask that hides their codes from it."""
    def do(op: Any, *given: Any, **options: Any) -> torch.Tensor:
        return op(*given, **options)

    found: AttendOperands[torch.Tensor] = AttendOperands(**args)
    capacity = found.keys[0].shape[0] * found.keys[0].shape[3]
    seen = capacity if found.keep is None else found.keep.shape[1]
    place = first_tokens.places(do, found, case.exact_first, case.B, found.q.device)
    sizes = case.B, case.K * case.G, case.K, case.S, case.D, case.Dv
    sums = first_tokens.partial_sums(do, lambda x: x, found, place, sizes, case.exact_first, capacity, seen)
    return torch.cat(sums, -1).unsqueeze(0), first_tokens.kept(do, found.keep, place, case.exact_first, seen, found.q.device)


def merged(out: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Partial results by log-sum-exp."""
    acc, m, l = out[..., :-2], out[..., -2:-1], out[..., -1:]
    top = m.amax(0)
    if sinks is not None:
        sink = sinks[None, :, None, None] * 1.4426950408889634
        top = torch.maximum(top, sink)
    top = torch.where(top.isneginf(), 0.0, top)
    weight = torch.exp2(m - top)
    total = (l * weight).sum(0)
    if sinks is not None:
        total = total + torch.exp2(sink - top)
    return torch.where(total == 0, 0.0, (acc * weight).sum(0) / total)


def compare(*names: str) -> None:
    """Every case of the schemes."""
    allow_ranges_over_scalars()
    failures = []
    for prefill in itertools.chain.from_iterable(cases(name) for name in names):
        case = prefill.case
        if case.dtype == torch.bfloat16 and "dense" in (case.key, case.value):
            continue  # The interpreter's dot treats bfloat16 as integers; test_gpu_attend has these.
        args = windowed(case) if prefill.exact_newest else operands(case)
        try:
            failure = check(case, run_kernel(case, args), args)
        except Exception as error:  # noqa: BLE001 - every case must be reported
            failure = f"{case}: {type(error).__name__} {str(error)[-400:]}"
        if failure:
            failures.append(failure)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("names", RUNS, ids=" ".join)
def test_interpreted_kernel_equals_eager(names: tuple[str, ...]) -> None:
    interpreted(compare, *names)


COMPILED = [("int4", "sm_90", "ttng.warp_group_dot"), ("kivi", "sm_80", "tt.dot"), ("dense", "sm_100", "ttng.tc_gen5_mma")]


@pytest.mark.parametrize(("scheme", "arch", "product"), COMPILED)
def test_compiles_offline(scheme: str, arch: str, product: str) -> None:
    own = [schemes.parse(scheme).for_role(role) for role in Role]
    words = [made.format(SlotSpec(8, 128, torch.bfloat16, role)).word_dtype for made, role in zip(own, Role, strict=True)]
    config = PrefillConfig(
        own[0].spec(), own[1].spec(), 128, 128, 8, 4, torch.bfloat16, words[0], words[1], 0.088, splits=2, tile=Tile(64, 128, False, 8, 2)
    )
    built = prefill_offline.compile_offline(prefill_offline.prefill_source(config), config, arch)
    text = built["ttgir"]
    assert isinstance(text, str)
    assert product in text
    # What the dots read arrives asynchronously, words and scales.
    assert text.count("ttg.async_copy_global_to_local") >= 2 * (2 + 2 * (scheme != "dense"))
