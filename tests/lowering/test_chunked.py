"""Chunks of tokens decoded once and attended to: both kernels in Triton's interpreter against ``attend_body`` and ``decode``."""

from __future__ import annotations

import dataclasses
import itertools
import types

import pytest
import torch
from interpreted import interpreted
from test_prefill_kernel import Prefill, merged, windowed
from test_triton_attend import Case, allow_ranges_over_scalars, check, operands

from kvcompile import schemes
from kvcompile.lowering.decode.config import Tile
from kvcompile.lowering.decode.offline import load_module, sass
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import decodable
from kvcompile.lowering.prefill import chunked
from kvcompile.lowering.prefill import decode_chunk as decode_source
from kvcompile.lowering.prefill.config import PrefillConfig
from kvcompile.lowering.prefill.tiles import CHUNKS, choose_cut, chunk_for
from kvcompile.types import Role, SlotSpec

RUNS = (("int8", "fp8"), ("int4",), ("kivi", "kivi(bits=4)"), ("beyond", "nf4", "beyond(bits=5)"), ("inductor",))
"""Schemes that one process takes, or the way through Inductor."""

CHUNK = 128
TILE = Tile(64, 32, False, 4, 2)
LARGE = Tile(64, 64, False, 4, 2)


def cases(scheme: str) -> list[Prefill]:
    """One chunk and many, whole and begun, every mask, rows with nothing to attend, recent tokens."""
    base = Case(scheme, scheme, S=20, T=300, tile=TILE)
    if schemes.parse(scheme).window:
        found = [
            base, dataclasses.replace(base, S=70, T=70, B=2, splits=1), dataclasses.replace(base, lo=True, T=500),
            dataclasses.replace(base, keep=True, B=2), dataclasses.replace(base, D=128, Dv=64, G=7, T=400, splits=1),
            dataclasses.replace(base, S=3, T=161, magnitude=1e-3, outlier=True), dataclasses.replace(base, B=2, fronts=(170, 5)),
        ]
        return [Prefill(case, exact_newest=schemes.parse(scheme).window) for case in (found if scheme == "kivi" else found[:2])]
    found = [
        base, dataclasses.replace(base, T=20, splits=1), dataclasses.replace(base, T=128, B=3, splits=1),
        dataclasses.replace(base, T=129, S=2), dataclasses.replace(base, D=128, Dv=64, K=2, T=330, G=7),
        dataclasses.replace(base, D=32, Dv=256, G=1, tile=LARGE), dataclasses.replace(base, sinks=True, softcap=5.0),
        dataclasses.replace(base, lo=True, B=2, T=460), dataclasses.replace(base, lo=True, S=150, T=400, G=1, splits=2),
        dataclasses.replace(base, keep=True, B=3, splits=1), dataclasses.replace(base, keep=True, lo=True, T=500, tile=LARGE),
        dataclasses.replace(base, scale=-0.2), dataclasses.replace(base, magnitude=1e-4), dataclasses.replace(base, outlier=True, T=150),
        dataclasses.replace(base, B=2, fronts=(200, 90)), dataclasses.replace(base, T=500, S=150, B=2, fronts=(999, 260), splits=2),
    ]
    if scheme == "int4":
        found += [
            dataclasses.replace(base, key="int8(granularity=group,group=16)", value="int4(granularity=token)", D=128),
            dataclasses.replace(base, key="int4(group=16,scale_dtype=float32)", value="int4(group=64,scale_dtype=bfloat16)", Dv=128),
        ]
    # Masks are those of what was decoded, whatever it was: they are int4's.
    few = {
        "fp8": found[:4], "int8": [*found[:6], *found[-2:]], "nf4": found[:2], "beyond(bits=5)": found[4:5],
        "beyond": [*found[3:5], found[8]],
    }
    chosen = few.get(scheme, found)
    return [Prefill(case) for case in chosen]


def run_chunks(case: Case, args: dict) -> torch.Tensor:
    """The operation on the interpreter, and a merge in eager torch."""
    tile = case.tile
    cut = [CHUNK, case.splits, tile.block_t, tile.block_r, tile.num_warps, tile.num_stages]
    partial = chunked.attend_chunks(AttendOperands(**{**args, "bias": None, "sinks": None}), cut, packed=False)
    assert partial.shape == (case.splits, case.B, case.K * case.G, case.S, case.Dv + 2)
    return merged(partial, args["sinks"]).to(case.dtype)


def off_scratch(scheme: str, dtype: torch.dtype) -> str | None:
    """None, or how far what the decoding kernel makes of a second chunk is from ``decode``: at most one rounding."""
    case = Case(scheme, scheme, T=2 * CHUNK - 5, B=2, K=3, D=64, Dv=128, dtype=dtype)
    args = operands(case)
    keys, values = args["keys"], args["values"]
    config = PrefillConfig(
        args["key_scheme"], args["value_scheme"], case.D, case.Dv, case.K, case.G, dtype, keys[0].dtype, values[0].dtype, 1.0,
        packed=False, chunk=CHUNK,
    )
    made = chunked.decoder(config)
    outs = [torch.full((case.B, case.K, CHUNK, dim), 7.0, dtype=dtype) for dim in (case.D, case.Dv)]
    given = {"NEWEST": torch.tensor([case.T - 1, CHUNK + 3]), "K_OUT": outs[0], "V_OUT": outs[1], "NEWEST_b": 1, "CAPACITY": 512}
    for letter, planes in (("K", keys), ("V", values)):
        slot = config.decoded["KV".index(letter)]
        for what, plane in zip(decode_source.planes_of(letter, slot), planes, strict=False):
            given |= {what: plane, **{f"{what}_{axis}": step for axis, step in zip("nbhr", plane.stride(), strict=False)}}
    kernel = getattr(load_module(made.source, "chunked"), made.name)
    given["FIRST"] = CHUNK
    kernel[(CHUNK // decode_source.TOKENS, case.B * case.K, 2)](*(given[name] for name in kernel.arg_names))
    for role, planes, out, name in zip(Role, (keys, values), outs, ("key_scheme", "value_scheme"), strict=True):
        own, slot = schemes.parse(args[name]), SlotSpec(case.K, out.shape[-1], dtype, role)
        exact = own.decode(decodable(own, planes, slot, slice(None)), slot).double()[:, :, CHUNK : case.T]
        found = out[:, :, : case.T - CHUNK].double()
        # The interpreter cuts float32 off to bfloat16, where a device rounds.
        near = torch.finfo(dtype).eps * (0.51 if dtype == torch.float16 else 1.01)
        if not ((found[0] - exact[0]).abs() <= near * exact[0].abs() + torch.finfo(dtype).tiny).all():
            return f"{scheme} {dtype} {role}: error {(found[0] - exact[0]).abs().max():.3g}"
        # The second row's newest token lies in the first of two programs' tokens: the second left all as it was.
        if not (out[1, :, decode_source.TOKENS :] == 7).all() or (out[1, :, :4] == 7).all():
            return f"{scheme} {dtype} {role}: decoded what nobody attends to"
    return None


def through_inductor() -> list[str]:
    """Failures of compiled graphs that lower ``attend`` as on CUDA, on a CPU: the operation runs in the interpreter, the merge in C++."""
    from torch._inductor.lowering import register_lowering
    from torch._inductor.utils import run_and_get_code

    from kvcompile.lowering.ops import operations as ops
    from kvcompile.lowering.prefill import lower as triton_prefill

    ops.LIBRARY.impl("attend_chunks", lambda *args: chunked.attend_chunks(*chunked.record_of(args, {}), packed=False), "CPU")
    properties = types.SimpleNamespace(multi_processor_count=4, shared_memory_per_block_optin=232448)
    torch.cuda.get_device_properties = lambda device: properties  # type: ignore[assignment,return-value]
    register_lowering(ops.attend, type_promotion_kind=None)(lambda *args: triton_prefill.lower_prefill(AttendOperands(*args)))

    def attend(args: dict) -> torch.Tensor:
        names = ("q", "keys", "values", "hi", "lo", "keep", "bias", "sinks", "key_scheme", "value_scheme", "scale", "softcap", "value_dim")
        return ops.attend(*(args[name] for name in names), args.get("exact_newest"), args.get("base"))

    base = Case("int4", "int8", S=256, T=500, sinks=True, lo=True)
    failures = []
    for case in (base, dataclasses.replace(base, B=2, T=700, keep=True, sinks=False), Case("kivi", "kivi", S=260, T=400)):
        torch._dynamo.reset()
        args = windowed(case) if case.key == "kivi" else operands(case)
        if case.B > 1:
            # As in a graph of any length: pages and new tokens are symbols.
            marked = [(plane, 0) for plane in (*args["keys"], *args["values"])] + [(args["q"], 2), (args["hi"], 1), (args["lo"], 1)]
            for tensor, axis in marked:
                torch._dynamo.mark_dynamic(tensor, axis)
        with torch._inductor.config.patch(force_disable_caches=True):
            out, sources = run_and_get_code(torch.compile(attend, fullgraph=True), args)
        if "kvcompile.attend_chunks" not in "".join(sources):
            failures.append(f"{case}: another way was chosen")
        failures.append(check(case, out, args) or "")
    return [failure for failure in failures if failure]


def compare(*names: str) -> None:
    """Every case of the schemes, or of the way through Inductor."""
    allow_ranges_over_scalars()
    failures: list[str | None] = []
    if names == ("inductor",):
        failures += through_inductor()
        names = ()
    for name in names:
        failures += [off_scratch(name, dtype) for dtype in (torch.float16, torch.bfloat16)]
    for prefill in itertools.chain.from_iterable(cases(name) for name in names):
        case = prefill.case
        args = windowed(case) if prefill.exact_newest else operands(case)
        try:
            failures.append(check(case, run_chunks(case, args), args))
        except Exception as error:  # noqa: BLE001 - every case must be reported
            failures.append(f"{case}: {type(error).__name__} {str(error)[-400:]}")
    found = [failure for failure in failures if failure]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("names", RUNS, ids=" ".join)
def test_interpreted_kernels_equal_eager(names: tuple[str, ...]) -> None:
    interpreted(compare, *names)


def config_of(scheme: str, tile: Tile) -> PrefillConfig:
    own = [schemes.parse(scheme).for_role(role) for role in Role]
    words = [made.format(SlotSpec(8, 128, torch.bfloat16, role)).word_dtype for made, role in zip(own, Role, strict=True)]
    return PrefillConfig(
        own[0].spec(), own[1].spec(), 128, 128, 8, 4, torch.bfloat16, words[0], words[1], 0.088, splits=2, tile=tile, chunk=8192,
        exact_newest=bool(schemes.parse(scheme).window),
    )


COMPILED = [
    ("int4", "sm_90", Tile(64, 256, False, 8, 3), "ttng.warp_group_dot"), ("kivi", "sm_80", Tile(64, 128, False, 8, 2), "tt.dot"),
    ("int8", "sm_100", Tile(64, 128, False, 8, 2), "ttng.tc_gen5_mma"),
]


@pytest.mark.parametrize(("scheme", "arch", "tile", "product"), COMPILED)
def test_compiles_offline(scheme: str, arch: str, tile: Tile, product: str) -> None:
    config = config_of(scheme, tile)
    built = chunked.attender(config).compiled(arch)["ttgir"]
    assert isinstance(built, str)
    assert product in built
    assert built.count("ttg.async_copy_global_to_local") >= 4
    made = chunked.decoder(config).compiled(arch)
    assert isinstance(made["cubin"], bytes)
    code = sass(made["cubin"])
    # Words and what is stored move 16 bytes at a time, and nothing is spilled.
    assert "STG.E.128" in code
    assert "LDL" not in code


def test_a_chunk_is_as_long_as_bytes_allow() -> None:
    config = config_of("int4", TILE)
    assert chunk_for(config, 1) == 16384
    assert chunk_for(config, 1, capacity=1000) == 1024
    assert chunk_for(config, 8) == CHUNKS[0]
    assert chunk_for(dataclasses.replace(config, kv_heads=1), 1) == CHUNKS[1]


def test_few_rows_and_dense_slots_are_the_templates_own() -> None:
    config = dataclasses.replace(config_of("int4", TILE), chunk=0)
    cut = choose_cut(config, 2048, 1, 132, 232448, None)
    assert cut == (16384, 1, 128, 128, 8, 3)
    assert choose_cut(config, 8192, 1, 132, 232448, None) == (16384, 1, 64, 256, 8, 3)
    assert choose_cut(config, 1000, 1, 132, 232448, None) is None
    assert choose_cut(dataclasses.replace(config, key_scheme="dense", key_word=torch.bfloat16), 2048, 1, 132, 232448, None) is None
    assert choose_cut(dataclasses.replace(config, page_rows=16), 2048, 1, 132, 232448, None) is None
