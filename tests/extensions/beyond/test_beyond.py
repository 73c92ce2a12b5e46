"""beyond: uniform tables are plain asymmetric codes, learned ones are data of each layer, and nothing else ever encodes or decodes."""

from __future__ import annotations

import dataclasses
import unittest.mock
from pathlib import Path

import pytest
import torch
from e2e_layers import cache_of, llama
from learned_tables import llama_paths, random_table, random_tables

import kvcompile
from kvcompile.errors import BadTables, TablesMissing
from kvcompile.extensions.beyond.storage import read_tables, save_tables
from kvcompile.extensions.beyond.tables import ModelTables, SiteTables, Table, uniform_levels, uniform_table, uniform_thresholds
from kvcompile.lowering.ops.append_window import append_window_body
from kvcompile.lowering.ops.operations import append_body, read_back_body
from kvcompile.lowering.ops.sliding import unroll_body
from kvcompile.schemes import Beyond, parse
from kvcompile.schemes.asymmetric import Axis, Kivi
from kvcompile.testing.samples import normal
from kvcompile.types import Role, SlotSpec

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")


def ties(dtype: torch.dtype) -> torch.Tensor:
    """Keys with every quotient that rounding has to break, groups of zero range, huge, tiny and unknown values; [2, 2, 40, 64]."""
    x = normal(2, 2, 40, 64, seed=3)
    x[0, 0] = (torch.arange(40 * 64).reshape(40, 64) % 31) / 2 * 0.25
    x[0, 1, 0], x[0, 1, 1] = 0.0, 7.25
    x[1, 0, 2] *= 1e-6
    x[1, 0, 3] *= 1e3
    x[1, 1, 4, 5], x[1, 1, 5, 6] = float("nan"), float("inf")
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_uniform_tables_are_plain_asymmetric_codes_bit_for_bit(bits: int, dtype: torch.dtype) -> None:
    mine, plain, slot = Beyond(bits), Kivi(bits=bits, axis=Axis.TOKEN), SlotSpec(2, 64, dtype, Role.VALUE)
    found, wanted = mine.encode(ties(dtype)), plain.encode(ties(dtype))
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    assert torch.equal(mine.decode(found, slot).nan_to_num(7), plain.decode(wanted, slot).nan_to_num(7))


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_uniform_thresholds_round_as_round_does(bits: int) -> None:
    from kvcompile.extensions.beyond.scheme import codes_of

    x = torch.arange(0, 2**bits - 1, 0.125)
    near = torch.cat([x, torch.nextafter(x, torch.tensor(99.0)), torch.nextafter(x, torch.tensor(-99.0)).clamp(min=0)])
    assert torch.equal(codes_of(near, uniform_thresholds(bits)), torch.round(near).to(torch.int32))
    assert torch.equal(uniform_levels(bits)[codes_of(x, uniform_thresholds(bits)).long()], torch.round(x))


def test_bits_a_value_are_those_of_the_source() -> None:
    """Codes and 16-bit statistics, its Appendix E; tables come beside, once for a whole batch."""
    slot = SlotSpec(8, 128, torch.bfloat16, Role.KEY)
    assert Beyond().bits_per_value(slot) == 5.0
    assert [Beyond(bits).bits_per_value(slot) for bits in (2, 3, 5)] == [3.0, 4.0, 6.0]
    assert Beyond(group=128).bits_per_value(slot) == 4.25
    assert Beyond().layout(slot).bytes_per_head * 8 == 4 * 8 * 4 * (16 + 15)


def test_a_random_table_decodes_by_the_formula() -> None:
    table, x = random_table(4, 2, 2, 5), normal(2, 2, 9, 64)
    slot = SlotSpec(2, 64, torch.float32, Role.VALUE)
    scheme = Beyond(trained=True, tables=SiteTables(table, table))
    planes = scheme.encode(x, table.thresholds[None, None])
    grouped = x.unflatten(-1, (2, 32))
    zero, scale = (plane.float().unsqueeze(-1) for plane in (planes[2], planes[1]))
    place = (grouped - zero) / scale
    code = (place.unsqueeze(-1) >= table.thresholds[:, None, :, None]).sum(-1)
    level = table.levels[:, None, :, None].expand(*place.shape, -1).gather(-1, code.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(scheme.decode(planes, slot), (level * scale + zero).flatten(-2))


def test_the_bound_of_learned_tables_holds_and_is_near() -> None:
    from kvcompile.testing.bounds import bound_of

    x = normal(3, 2, 300, 64, seed=11)
    for seed in range(4):
        table = random_table(4, 2, 2, seed)
        scheme, slot = Beyond(trained=True, tables=SiteTables(table, table)), SlotSpec(2, 64, torch.float32, Role.VALUE)
        error = (scheme.decode(scheme.encode(x, table.thresholds[None, None]), slot).double() - x.double()).abs()
        bound = bound_of(scheme, x, slot)
        assert (error <= bound).all() and (error > 0.8 * bound).any()


def test_every_write_path_takes_the_same_thresholds() -> None:
    """``append``, the windowed form beside another scheme, the copy of a sliding cache and a first call's attention."""
    table, x = random_table(3, 2, 2, 1), normal(1, 2, 70, 64)
    scheme, slot = Beyond(3, trained=True, tables=SiteTables(table, table)), SlotSpec(2, 64, torch.float32, Role.KEY)
    text, thresholds = scheme.spec(), table.thresholds[None, None]
    wanted = scheme.encode(x, thresholds)
    layout = scheme.layout(slot)
    planes = [scheme.empty(plane, slot, 2, 1) for plane in layout.planes]
    append_body(x, planes[:3], torch.arange(70).unsqueeze(0), text, None, [thresholds])
    windowed = [scheme.empty(plane, slot, 2, 1) for plane in layout.windowed(slot, 8).planes]
    append_window_body(x, windowed, torch.arange(70).unsqueeze(0), None, text, [thresholds])
    for at, rows in enumerate(wanted):
        for found in (planes, windowed):
            assert torch.equal(found[at].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :70], rows)
    copied = unroll_body(x, planes[:3], torch.tensor([70]), 3, 70, text, [thresholds])
    for made, rows in zip(copied, wanted, strict=True):
        assert torch.equal(made[0], torch.cat([rows[:, :, -3:], rows], 2))
    back = read_back_body(x, [table.levels[None, None]], [thresholds], text)
    assert torch.equal(back, scheme.decode(wanted, slot))


def test_a_learned_scheme_never_falls_back_on_uniform_tables() -> None:
    text = random_tables(["a"]).spec()
    assert text == "beyond(bits=4,group=32,scale_dtype=float16,trained=True)"
    unbound, slot = parse(text), SlotSpec(2, 32, torch.float32, Role.KEY)
    for wrong in (
        lambda: unbound.encode(normal(1, 2, 3, 32)), lambda: unbound.constants(slot), lambda: unbound.for_module("a"),
        lambda: random_tables(["a"]).for_module("b"), lambda: random_tables(["a"]).constants(slot),
    ):
        with pytest.raises(TablesMissing, match="expected learned tables for the attention at"):
            wrong()


def test_paths_that_begin_further_out_are_the_same_attention() -> None:
    tables = random_tables(["model.layers.0.self_attn", "model.layers.10.self_attn"]).tables
    assert isinstance(tables, ModelTables)
    assert tables.for_module("layers.0.self_attn") == tables.for_module("model.layers.0.self_attn") == tables.for_module(
        "lm.model.layers.0.self_attn"
    )
    for wrong in ("0.self_attn_", "self_attn", ""):
        with pytest.raises(TablesMissing):
            tables.for_module(wrong)


def test_tables_compare_by_what_they_hold() -> None:
    one, other = random_table(4, 2, 1, 0), random_table(4, 2, 1, 0)
    assert one == other and hash(one) == hash(other) and one != random_table(4, 2, 1, 1)
    assert random_tables(["a"]) == random_tables(["a"]) != random_tables(["a"], seed=1)


@pytest.mark.parametrize("change", [
    {"levels": torch.zeros(2, 2, 15)}, {"levels": torch.full((2, 2, 16), float("nan"))},
    {"thresholds": torch.arange(15.0).flip(0).repeat(2, 2, 1)}, {"levels": torch.zeros(2, 2, 16, dtype=torch.float64)},
], ids=["shape", "nan", "order", "dtype"])
def test_tables_that_are_none_are_refused(change: dict[str, torch.Tensor]) -> None:
    with pytest.raises(BadTables):
        dataclasses.replace(random_table(4, 2, 2, 0), **change)


def test_tables_of_other_bits_are_refused() -> None:
    with pytest.raises(BadTables, match="expected tables of 3 bits, found tables of 4"):
        dataclasses.replace(random_tables(["a"]), bits=3)


# A static cache through Inductor is in the acceptance's slice for CPUs.
@pytest.mark.parametrize(("inner", "kind"), [
    ("eager", "static"), ("eager", "dynamic"), pytest.param("inductor", "dynamic", marks=pytest.mark.compile),
])
def test_each_layer_has_its_own_tables(kind: str, inner: str) -> None:
    """Stores hold the layer's tables, their codes come of them, and every step attends to what codes stand for, the first too."""
    scheme, model = random_tables(llama_paths(2)), llama(head_dim=32)
    owner = kvcompile.backend(scheme, inner=inner, strict=True)
    compiled, plain = torch.compile(model, backend=owner), llama(head_dim=32)
    for _ in range(2):
        cache, pieces = cache_of(model, kind, 128), cache_of(model, kind, 128)
        words = torch.randint(1, 64, (2, 75), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            once = compiled(words, past_key_values=cache).logits
            # Each count is a graph, and Inductor takes 15 s for one.
            counts = (70, 1, 3, 1) if inner == "eager" else (73, 1, 1)
            parts = torch.split(words, counts, dim=1)
            found = torch.cat([compiled(part, past_key_values=pieces).logits for part in parts], 1)
            dense = plain(words).logits
        assert torch.allclose(found, once, atol=2e-4)
        assert 0.01 * dense.norm() < (once - dense).norm() < 0.5 * dense.norm()
    assert isinstance(scheme.tables, ModelTables)
    kept = {store.spec.scheme.tables for state in owner.memory.live for store in state.stores.values()}  # type: ignore[attr-defined]
    assert kept == set(scheme.tables.sites.values())
    for store in (store for state in owner.memory.live for store in state.stores.values()):
        table: Table = store.spec.scheme.table(store.spec.slot)  # type: ignore[attr-defined]
        assert torch.equal(store.plane("levels")[0, 0], table.levels) and torch.equal(store.plane("thresholds")[0, 0], table.thresholds)
        copied = store.select_rows(torch.tensor([1, 0]))
        store.clear()
        assert torch.equal(store.plane("levels"), copied.plane("levels")) and torch.equal(copied.plane("levels")[0, 0], table.levels)


@pytest.mark.parametrize("policy", ["kv", "vk", "windowed"])
def test_beside_other_schemes(policy: str) -> None:
    learned, model = random_tables(llama_paths(2)), llama(head_dim=32)
    pair = {"kv": {"k": learned, "v": "int8"}, "vk": {"k": "int8", "v": learned}, "windowed": {"k": "kivi", "v": learned}}[policy]
    compiled, plain = torch.compile(model, backend=kvcompile.backend(pair, inner="eager", strict=True)), llama(head_dim=32)
    caches = [cache_of(model, "static", 128) for _ in range(2)]
    for count in (70, 1, 3):
        words = torch.randint(1, 64, (2, count), generator=torch.Generator().manual_seed(count))
        with torch.no_grad():
            found, wanted = (run(words, past_key_values=cache).logits for run, cache in zip((compiled, plain), caches, strict=True))
        assert (found - wanted).norm() <= 0.4 * wanted.norm()


@pytest.mark.parametrize("form", ["paged", "sliding"])
def test_in_every_form_of_cache(form: str) -> None:
    """Tables that hold uniform levels serve as ``beyond()`` does, through pools and windows too; others are used as well."""
    import test_paged
    import test_sliding

    def error(scheme: Beyond) -> float:
        torch._dynamo.reset()
        owner = kvcompile.backend(scheme, inner="eager", strict=True)
        if form == "paged":
            return test_paged.BY_NAME["blocks-first"].error(owner, test_paged.BRIEF, dim=32)
        return test_sliding.BY_NAME["roll-and-put"].error(owner, chunks=test_sliding.CHUNKS)

    def site(table: Table) -> Beyond:
        return Beyond(trained=True, tables=SiteTables(table, table))

    plain = Beyond()
    found: list[SlotSpec] = []

    def seen(self: Beyond, slot: SlotSpec) -> None:
        found.append(slot)

    with unittest.mock.patch.object(Beyond, "check", seen):
        wanted = error(plain)
    heads, groups = found[0].heads, found[0].head_dim // plain.channels(found[0].head_dim)
    assert error(site(uniform_table(4, heads, groups))) == wanted
    assert wanted < error(site(random_table(4, heads, groups, 0))) < 1


def test_a_file_of_tables_does_not_hold_a_window(tmp_path: Path) -> None:
    """A window is how a cache is served, and no part of what was learned."""
    made = random_tables([""], groups=2)
    save_tables(dataclasses.replace(made, window=32), tmp_path / "t.safetensors")
    back = read_tables(tmp_path / "t.safetensors")
    assert back == made and back.window == 0
    assert dataclasses.replace(back, window=32).window == 32
