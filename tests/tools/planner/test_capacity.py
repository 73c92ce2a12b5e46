"""Capacity and recommendation: searches against trying every number, rules against options made for them, sources' figures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcompile.extensions.certified.scheme import SCRATCH
from kvcompile.schemes import parse
from kvcompile.tools.planner.activations import Activations
from kvcompile.tools.planner.capacity import Demand, _most
from kvcompile.tools.planner.figures import Damage, Figures, Speed, figures
from kvcompile.tools.planner.model import traced
from kvcompile.tools.planner.phantom import hollow, phantom
from kvcompile.tools.planner.recommend import Generation, Option, recommend
from kvcompile.tools.planner.stores import Remainder, StoredSlot, Stores
from kvcompile.tools.planner.weights import WeightFormat, counted
from kvcompile.types import PAGE, Extent, Role, SlotSpec

ROOMY = Demand(memory=80 * 10**9, weights=35 * 10**9, overhead=0, batch=16, context=4096)


def llama_70b(scheme: str) -> Stores:
    """The stores of Llama-2-70B's cache, without a model."""
    made = [(parse(scheme).for_role(role), SlotSpec(8, 128, torch.float16, role)) for role in Role for _ in range(80)]
    return Stores(tuple(StoredSlot("layer", slot, each, each.layout(slot), None, exact=True) for each, slot in made))


def option(label: str, kl: float | None, demand: Demand = ROOMY, noise: float = 0.0) -> Option:
    """An option of Llama-2-70B with a damage that is made up, and what rounding does where it was measured."""
    known = Figures((), {"rows": []})
    found = Option.of(label, llama_70b(label), demand, known)
    damage = None if kl is None else Damage(kl, noise, 1, 1, 1, 1, 1, 4000, False, "tinylm", "a run")
    return Option(**{**vars(found), "damage": damage})


def test_bytes_of_the_source() -> None:
    """Its equations (327,680 bytes a token, 2,560 of scales), and what its INT4 leaves out."""
    assert llama_70b("dense").bytes_per_token(4096) == 327_680
    assert llama_70b("int8").bytes_per_token(4096) == 163_840 + 2_560
    assert llama_70b("int4(group=32)").bytes_per_token(4096) == 327_680 / 3.5555555555555554
    assert llama_70b("dense").device_bytes(1, 4096) / 1e9 == pytest.approx(2 * 80 * 8 * 128 * 4096 * 2 / 1e9)


def test_corrected_table() -> None:
    batches = {name: ROOMY.largest_batch(llama_70b(name)) for name in ("dense", "fp8", "int8", "int4")}
    # 45 GB less the plane that a growing store holds twice, and with scales.
    assert batches == {"dense": 33, "fp8": 65, "int8": 65, "int4": 118}


@pytest.mark.parametrize(("tokens", "printed"), [(8192, 4.57), (32768, 1.57), (65536, 1.07), (131072, 0.82)])
def test_certified_total(tokens: int, printed: float) -> None:
    """Table 22 of the certified source, its measured device memory beside dense, follows from layouts and capacities of scratches."""
    scheme = parse("certified(tier2=host,scratch=2048,value_scratch=2048)")
    codes = scratch = host = 0
    for role in Role:
        for plane in scheme.for_role(role).layout(SlotSpec(8, 128, torch.bfloat16, role)).planes:
            pages = -(-tokens // PAGE)
            size = 32 * 8 * (pages * plane.bytes_per_page if plane.extent is Extent.TOKENS else plane.nbytes)
            if plane.host:
                host += size
            elif plane.name == SCRATCH:
                scratch += size
            else:
                codes += size
    assert host == 32 * 8 * tokens * 2 * 128 * 2 and scratch / 1e9 == pytest.approx(4.30, abs=0.01)
    assert (codes + scratch) / host == pytest.approx(printed, abs=0.01)


@pytest.mark.parametrize("scheme", ["dense", "kivi", "int4"])
def test_searches_find_the_last_that_fits(scheme: str) -> None:
    stores = llama_70b(scheme)
    for demand in (ROOMY, Demand(40 * 10**9, 35 * 10**9, 10**9, 2, 700, activations=Activations(((1e5, 10.0), (1e4, 300.0))), prefill=512)):
        rows, tokens = demand.largest_batch(stores), demand.longest_context(stores)
        assert demand.fits(stores, rows, demand.context) or rows == 0
        assert not demand.fits(stores, rows + 1, demand.context)
        assert demand.fits(stores, demand.batch, tokens) or tokens == 0
        assert not demand.fits(stores, demand.batch, tokens + 1)
    assert Demand(1, 2, 0, 1, 1).largest_batch(stores) == Demand(1, 2, 0, 1, 1).longest_context(stores) == 0


@pytest.mark.parametrize("end", [1, 2, 7, 100_000, 1 << 17])
def test_a_search_asks_few_times(end: int) -> None:
    for wanted in {0, 1, 2, 3, end // 2, end - 1, end, end + 5}:
        asked: list[int] = []

        def holds(number: int, wanted: int = wanted, asked: list[int] = asked) -> bool:
            asked.append(number)
            assert len(asked) <= 50, "it does not end"
            return number <= wanted

        assert _most(holds, end) == min(wanted, end)


def test_least_damage_that_fits() -> None:
    options = [option("dense", 0.0), option("int8", 1e-4), option("fp8", 1e-5), option("int4", 2e-2), option("kivi", None)]
    found = recommend(options, ROOMY, Generation.HOPPER, 0.01)
    assert found.scheme == "dense"
    assert found.most_requests == "fp8"
    tight = Demand(**{**vars(ROOMY), "batch": 50})
    options = [option(item.label, item.damage.kl if item.damage else None, tight) for item in options]
    assert recommend(options, tight, Generation.HOPPER, 0.01).scheme == "fp8"
    assert recommend(options, tight, Generation.AMPERE, 0.01).scheme == "int8"
    assert recommend(options, tight, Generation.HOPPER, 0.1).most_requests == "int4"
    reasons = "\n".join(recommend(options, tight, Generation.AMPERE, 0.01).reasons)
    assert "fp8 passed over: sm_80" in reasons
    assert "dense (102" in reasons
    assert "not considered, as their damage was not measured: kivi" in reasons


def test_nothing_fits() -> None:
    small = Demand(36 * 10**9, 35 * 10**9, 0, 16, 4096)
    found = recommend([option("dense", 0.0, small), option("int4", 0.02, small)], small, Generation.HOPPER, 0.1)
    assert found.scheme is None
    assert "int4 holds the most, 2 requests" in found.reasons[0]


def test_equal_damage_takes_fewer_bytes() -> None:
    assert recommend([option("int8", 1e-9), option("int4", 2e-9)], ROOMY, Generation.HOPPER, 0.01).scheme == "int4"


def test_what_rounding_does_is_no_damage() -> None:
    """Schemes whose KL differs by less than that of ``dense`` count as equal, and the one with fewer bytes is recommended."""
    damages = {"dense": 2.2e-4, "certified": 2.0e-4, "int8": 4.1e-4, "fp8": 2.7e-3}
    assert recommend([option(label, kl, noise=2.2e-4) for label, kl in damages.items()], ROOMY, Generation.HOPPER, 0.01).scheme == "int8"
    assert recommend([option(label, kl, noise=1e-4) for label, kl in damages.items()], ROOMY, Generation.HOPPER, 0.01).scheme == "dense"


def test_no_scheme_within_the_limit_serves_as_many() -> None:
    tight = Demand(**{**vars(ROOMY), "batch": 100})
    found = recommend([option("int8", 1e-4, tight), option("int4", 0.02, tight)], tight, Generation.HOPPER, 0.01)
    assert (found.scheme, found.most_requests) == ("int4", None)
    assert "nothing within a KL of 0.01 nats serves as many requests: 118" in found.reasons


def test_figures_are_of_runs_at_most_as_long() -> None:
    known = figures()
    short, long, beyond = (known.damage("int4", context) for context in (600, 4000, 100_000))
    assert short is not None
    assert long is not None
    assert beyond is not None
    assert (short.measured, long.measured, beyond.measured) == (600, 4000, 16_000)
    assert (short.model, long.model, long.questions) == ("tinylm", "tinylm-16k", 384)
    assert beyond.beyond and not long.beyond
    assert long.kl >= short.kl > 0.01
    assert known.damage("kivi(bits=8)", 600) is None
    assert isinstance(known.timed("kivi", 1, 100_000), Speed)
    assert known.timed("kivi", 1, 100_000).tokens == 131_072  # type: ignore[union-attr]


def test_phantoms_take_no_memory() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Embedding(8, 1 << 16), torch.nn.Linear(1 << 16, 1 << 18, bias=False))
    model[1].weight = torch.nn.Parameter(torch.empty(1 << 18, 1 << 16, device="meta", dtype=torch.bfloat16), False)
    hollow(model)
    assert model[1].weight.shape == (1 << 18, 1 << 16)
    assert model[1].weight.is_contiguous()
    assert model[1].weight[5, 7] == 0
    weights = counted(model)
    assert weights.entries == 1 << 34
    assert weights.nbytes(WeightFormat.NATIVE) == (1 << 35) + 8 * (1 << 16) * 4
    assert weights.nbytes(WeightFormat.INT4) == pytest.approx((1 << 34) * 4.15625 / 8 + 8 * (1 << 16) * 4)
    assert phantom(torch.empty(3, 0, device="meta")).shape == (3, 0)
    assert phantom(torch.empty(4, 5, device="meta").t()).stride() == (1, 5)


def test_remainder_is_counted() -> None:
    stores = Stores(llama_70b("int8").stored, Remainder(fixed=1000, per_token=10))
    assert stores.device_bytes(3, 64) == llama_70b("int8").device_bytes(3, 64) + 3 * (1000 + 640)


class StateBesideCache(torch.nn.Module):
    """An attention over a growing cache, with a state of 40 numbers a batch row in the cache that it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 32)

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None) -> Any:
        x = self.embedding(input_ids)
        q = x.unflatten(-1, (2, 16)).transpose(1, 2)
        before = (q[:, :, :0], q[:, :, :0], None) if past_key_values is None else past_key_values
        keys, values = torch.cat([before[0], q], 2), torch.cat([before[1], 2 * q], 2)
        state = x.new_zeros(x.shape[0], 4, 10)
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, values)
        return SimpleNamespace(logits=out, past_key_values=(keys, values, state))


@pytest.mark.parametrize("rows", [1, 4])
def test_what_belongs_to_no_slot_is_counted_by_row(rows: int) -> None:
    """A factory may trace more rows than one; ``Remainder`` is multiplied by the rows that are asked for."""
    found = traced("state", StateBesideCache(), {"input_ids": torch.ones(rows, 6, dtype=torch.long)})
    assert found.remainder == Remainder(fixed=4 * 10 * 4, per_token=0)
