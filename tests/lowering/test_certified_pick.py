"""Which blocks ``select_blocks`` promotes: the search in registers against brute force, and the one in memory against that in registers.

What needs Triton's interpreter runs in a process of its own (``interpreted``); on CUDA the second part runs compiled.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from interpreted import interpreted  # noqa: E402

from benchmarks.certified_soundness import Draw, Shape, by_kernels, gaussian, ties  # noqa: E402
from kvcompile.lowering.certified import device_step as certified_device  # noqa: E402
from kvcompile.lowering.certified.kernels.top_k import leading  # noqa: E402
from kvcompile.schemes.certificate.policy import NAIVE, Certify, Count  # noqa: E402
from kvcompile.schemes.certified import Certified  # noqa: E402

N = 64
ONE = 2.0**-20
"""All amounts are multiples of this, so that they add up exactly in any order."""


@triton.jit
def pick(SHARE, TERM, CODED, CHOSEN, WIDENED, COVER: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, BUDGET: tl.constexpr,
         MOST_WIDENED: tl.constexpr, WIDEN: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    share = tl.load(SHARE + i)
    bits = tl.where(tl.load(CODED + i) != 0, share, -1.0).to(tl.float32).to(tl.int32, bitcast=True)
    chosen, widened = leading(bits, share, tl.load(TERM + i), COVER, LEAST, MOST, BUDGET, MOST_WIDENED, WIDEN)
    tl.store(CHOSEN + i, chosen.to(tl.int8))
    tl.store(WIDENED, widened.to(tl.int8))


def must_leave(share: list[float], amount: list[float], budget: float) -> int:
    """How many stand above the longest tail within a budget, where equal shares leave together."""
    most = 0
    for edge in sorted(set(share)):
        if not sum(a for s, a in zip(share, amount, strict=True) if s <= edge) <= budget:
            break
        most = sum(s <= edge for s in share)
    return len(share) - most


def wanted(share: list[float], term: list[float], coded: list[int], policy: dict) -> tuple[list[int], bool]:
    """As ``select_blocks`` says it, by sorting."""
    own, terms = ([x[i] for i in range(N) if coded[i]] for x in (share, term))
    narrow = len(own) if policy["COVER"] < 0 else must_leave(own, own, policy["COVER"])
    count, widened = min(max(narrow, policy["LEAST"]), policy["MOST"]), False
    if policy["WIDEN"]:
        wide = min(must_leave(own, terms, policy["BUDGET"]), policy["MOST_WIDENED"])
        count, widened = max(count, wide), wide > count
    order = sorted((i for i in range(N) if coded[i]), key=lambda i: (-share[i], i))
    return [int(i in set(order[:count])) for i in range(N)], widened


def searched() -> None:
    """Rows with many equal shares, zeros and what is no number, under limits of all kinds."""
    draw, seen = random.Random(1), set()
    for trial in range(160):
        span = draw.choice([1, 3, 50, 2**16])
        share = [draw.randrange(span + 1) * ONE * draw.choice([1, 1, 256]) for _ in range(N)]
        if trial % 5 == 0:
            share[draw.randrange(N)] = float("inf")
        term = [draw.randrange(1000) * ONE for _ in range(N)]
        if trial % 7 == 0:
            term[draw.randrange(N)] = float("inf")
        coded = [int(draw.random() < draw.choice([0.0, 0.5, 1.0, 1.0])) for _ in range(N)]
        least = draw.choice([0, 1, 5, 70])
        most = max(least, draw.choice([0, 3, 17, 64, 2**30]))
        finite = [x for x in share if x < float("inf")]
        policy = dict(
            COVER=draw.choice([-1.0, 0.0, draw.random() * sum(finite), sum(finite)]), LEAST=least, MOST=most, WIDEN=draw.random() < 0.5,
            BUDGET=draw.choice([0.0, draw.random() * 0.03, 1.0]), MOST_WIDENED=draw.choice([most, 2 * most]),
        )
        chosen, widened = torch.full([N], 9, dtype=torch.int8), torch.full([1], 9, dtype=torch.int8)
        # What is no number stands first, and keeps no budget.
        rows = [torch.tensor(x, dtype=torch.float64) for x in (share, term)]
        if trial % 2:
            rows = [torch.where(torch.isinf(x), torch.nan, x) for x in rows]
        pick[(1,)](*rows, torch.tensor(coded, dtype=torch.int8), chosen, widened, N=N, **policy)
        found = wanted(share, term, coded, policy)
        assert (chosen.tolist(), bool(widened)) == found, (trial, policy, share, coded)
        seen.add((sum(found[0]) == most, found[1], sum(found[0]) == least, span))
    assert len(seen) >= 8, "one kind of row proves little"


def lists(device: str, tokens: int, wide: int) -> None:
    """The list of ``select_blocks`` is its flags: of all, some and no blocks; in registers, and from memory piece by piece."""
    for size in (certified_device.WIDE, wide):
        with mock.patch.multiple(certified_device, WIDE=size, CHUNK=min(size, certified_device.CHUNK)):
            for policy in (Certify(tau_cov=0.9, k_max=5, explore=0.3), Certify(tau_cov=1.0, k_max=2**20), NAIVE):
                step, _, _ = gaussian(Draw(2, device), Shape(B=1, H=4, K=2, S=1, D=32, T=tokens)).step(policy, torch.float32)
                run = certified_device.DeviceStep(
                    policy, Certified(), dataclasses.replace(step.operands(), scale=0.2), step.cache.originals, None
                )
                run.key_scores()
                read, _ = run.select_blocks(torch.tensor([1], device=device))
                for flags, blocks, count in zip(read.flatten(0, 2), run.list.flatten(0, 2), run.listed.flatten(), strict=True):
                    assert torch.equal(blocks[: int(count)], flags.nonzero().flatten().to(torch.int32)), policy


def from_memory(device: str, tokens: int, wide: int) -> None:
    """Rows of more blocks than registers hold: the same counters, and figures that differ by the order of sums."""
    def two_splits(*operands: Any) -> Any:
        return by_kernels(*operands, 2)

    known, chunk = certified_device.WIDE, certified_device.CHUNK
    for number, policy in enumerate([
        Certify(tau_cov=0.9, k_min=0, k_max=3, explore=0.2), Certify(tau_cov=0.6, k_min=1, k_max=1, widen=2, key_budget=0.02, rank=0),
        Certify(tau_cov=1.0, k_max=128, v_tol=1.0, value_budget=0.05),
    ]):
        made = (ties if number % 2 else gaussian)(Draw(number, device), Shape(B=1, H=2, K=1, S=1, D=32, T=tokens))
        step, _, _ = made.step(policy, torch.float32)
        here = step.run(two_splits)
        certified_device.WIDE, certified_device.CHUNK = wide, wide
        there = step.run(two_splits)
        certified_device.WIDE, certified_device.CHUNK = known, chunk
        assert torch.equal(here[2], there[2]) and torch.allclose(here[1], there[1], rtol=1e-5, atol=1e-30), policy
        assert torch.allclose(here[0], there[0], rtol=1e-5, atol=1e-7)
    assert (here[2][..., Count.KEYS] > 4).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_from_memory_on_a_device() -> None:
    from_memory("cuda", 20_000, 1024)
    lists("cuda", 20_000, 1024)


@pytest.mark.timeout(600)
def test_the_search_of_choose_in_the_interpreter() -> None:
    interpreted(searched)
    interpreted(from_memory, "cpu", 90, 4)
    interpreted(lists, "cpu", 150, 4)
