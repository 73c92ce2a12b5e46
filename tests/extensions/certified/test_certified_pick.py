"""Which blocks ``select_blocks`` promotes: the search against brute force, and rows that are looked at piece by piece.

What needs Triton's interpreter runs in a process of its own (``interpreted``); on CUDA the second part runs compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from interpreted import interpreted  # noqa: E402

from benchmarks.extensions.certified.certified_soundness import Draw, Shape, by_kernels, gaussian, ties  # noqa: E402
from kvcompile.extensions.certified import device_step as certified_device  # noqa: E402
from kvcompile.extensions.certified.kernels.top_k import bits_of, leading, led  # noqa: E402
from kvcompile.extensions.certified.scheme import Certified  # noqa: E402
from kvcompile.schemes.certificate.policy import NAIVE, Certify, Count, Select  # noqa: E402

N = 64
ONE = 2.0**-31
"""All amounts are multiples of this, so that they add up exactly in any order, and shares to less than one."""


@triton.jit
def pick(ORDER, SURE, TERM, CHOSEN, WIDENED, blocks, COVER: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, BUDGET: tl.constexpr,
         MOST_WIDENED: tl.constexpr, CERTAIN: tl.constexpr, WIDEN: tl.constexpr, CHUNK: tl.constexpr):
    i = tl.arange(0, CHUNK)
    available = 0
    top = 1
    for first in range(0, blocks, CHUNK):
        bits = bits_of(ORDER, first + i, blocks)
        available += tl.sum((bits >= 0).to(tl.int32), 0)
        top = tl.maximum(top, tl.max(bits, 0) + 1)
    edge, ties, tied, widened = leading(
        ORDER, SURE, TERM, blocks, available, top, COVER, LEAST, MOST, BUDGET, MOST_WIDENED, CERTAIN, WIDEN, CHUNK
    )
    for first in range(0, blocks, CHUNK):
        n = first + i
        chosen, ties = led(bits_of(ORDER, n, blocks), edge, ties, tied)
        tl.store(CHOSEN + n, chosen.to(tl.int8), mask=n < blocks)
    tl.store(WIDENED, widened.to(tl.int8))


def must_leave(share: list[float], amount: list[float], budget: float) -> int:
    """How many stand above the longest tail within a budget, where equal shares leave together."""
    most = 0
    for edge in sorted(set(share)):
        if not sum(a for s, a in zip(share, amount, strict=True) if s <= edge) <= budget:
            break
        most = sum(s <= edge for s in share)
    return len(share) - most


def wanted(share: list[float], sure: list[float], term: list[float], coded: list[int], policy: dict) -> tuple[list[int], bool]:
    """As ``select_blocks`` says it, by sorting."""
    own, most, terms = ([x[i] for i in range(N) if coded[i]] for x in (share, sure, term))
    narrow = len(own) if policy["COVER"] < 0 else must_leave(own, own, policy["COVER"])
    narrow = count = min(max(narrow, policy["LEAST"]), policy["MOST"])
    if policy["CERTAIN"]:
        certain = must_leave(own, most, policy["COVER"])
        count = max(count, certain if certain <= policy["MOST_WIDENED"] else 0)
    if policy["WIDEN"]:
        count = max(count, min(must_leave(own, terms, policy["BUDGET"]), policy["MOST_WIDENED"]))
    order = sorted((i for i in range(N) if coded[i]), key=lambda i: (-share[i], i))
    return [int(i in set(order[:count])) for i in range(N)], count > narrow


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
        # Exact shares may be above estimated ones, by another factor each, and no number where those are none.
        sure = [x * draw.choice([1, 1, 2, 5]) for x in share]
        coded = [int(draw.random() < draw.choice([0.0, 0.5, 1.0, 1.0])) for _ in range(N)]
        least = draw.choice([0, 1, 5, 70])
        most = max(least, draw.choice([0, 3, 17, 64, 2**30]))
        finite = [x for x in share if x < float("inf")]
        policy = dict(
            COVER=draw.choice([-1.0, 0.0, draw.random() * sum(finite), sum(finite)]), LEAST=least, MOST=most, WIDEN=draw.random() < 0.5,
            BUDGET=draw.choice([0.0, draw.random() * 1.5e-5, 1.0]), MOST_WIDENED=draw.choice([most, 2 * most]),
        )
        policy["CERTAIN"] = policy["COVER"] >= 0 and draw.random() < 0.6
        chosen, widened = torch.full([N], 9, dtype=torch.int8), torch.full([1], 9, dtype=torch.int8)
        order = torch.where(torch.tensor(coded) != 0, torch.tensor(share), -1.0)
        # What is no number keeps no budget.
        rows = [torch.tensor(sure), torch.tensor(term, dtype=torch.float64)]
        if trial % 2:
            rows = [torch.where(torch.isinf(x), torch.nan, x) for x in rows]
        pick[(1,)](order, *rows, chosen, widened, N, CHUNK=draw.choice([16, 64, 128]), **policy)
        found = wanted(share, sure, term, coded, policy)
        assert (chosen.tolist(), bool(widened)) == found, (trial, policy, share, coded)
        seen.add((sum(found[0]) == most, found[1], sum(found[0]) == least, span, policy["CERTAIN"] and not policy["WIDEN"]))
    assert len(seen) >= 12 and any(kind[1] and kind[4] for kind in seen), "one kind of row proves little"


@contextlib.contextmanager
def pieces_of(chunk: int) -> Iterator[None]:
    """Rows are looked at so many blocks at a time."""
    with mock.patch.object(certified_device, "CHUNK", chunk):
        yield


def lists(device: str, tokens: int, chunk: int) -> None:
    """The list of ``select_blocks`` is its flags: of all, some and no blocks; of a row at once, and piece by piece."""
    for size in (certified_device.CHUNK, chunk):
        with pieces_of(size):
            for policy in (
                Certify(tau_cov=0.9, k_max=5, explore=0.3), Certify(tau_cov=1.0, k_max=2**20), NAIVE,
                Certify(tau_cov=0.9, k_max=5, explore=0.3, select=Select.GROUP),
            ):
                step, _, _ = gaussian(Draw(2, device), Shape(B=1, H=4, K=2, S=1, D=32, T=tokens)).step(policy, torch.float32)
                run = certified_device.DeviceStep(
                    policy, Certified(), dataclasses.replace(step.operands(), scale=0.2), step.cache.originals, None
                )
                run.key_scores()
                read = run.select_blocks(torch.tensor([1], device=device)).read
                for flags, blocks, count in zip(read.flatten(0, 2), run.list.flatten(0, 2), run.listed.flatten(), strict=True):
                    assert torch.equal(blocks[: int(count)], flags.nonzero().flatten().to(torch.int32)), policy


def in_pieces(device: str, tokens: int, chunk: int) -> None:
    """Rows that are looked at piece by piece: the same counters, and figures that differ by the order of sums."""
    def two_splits(*operands: Any) -> Any:
        return by_kernels(*operands, 2)

    for number, policy in enumerate([
        Certify(tau_cov=0.9, k_min=0, k_max=3, explore=0.2, select=Select.GROUP), Certify(tau_cov=0.98, k_max=2, widen=2),
        Certify(tau_cov=0.6, k_min=1, k_max=1, widen=2, key_budget=0.02, rank=0),
        Certify(tau_cov=1.0, k_max=128, v_tol=1.0, value_budget=0.05),
    ]):
        made = (ties if number % 2 else gaussian)(Draw(number, device), Shape(B=1, H=2, K=1, S=1, D=32, T=tokens))
        step, _, _ = made.step(policy, torch.float32)
        here = step.run(two_splits)
        with pieces_of(chunk):
            there = step.run(two_splits)
        assert torch.equal(here[2], there[2]) and torch.allclose(here[1], there[1], rtol=1e-5, atol=1e-30), policy
        assert torch.allclose(here[0], there[0], rtol=1e-5, atol=1e-7)
    assert (here[2][..., Count.KEYS] > 4).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_in_pieces_on_a_device() -> None:
    in_pieces("cuda", 20_000, 1024)
    lists("cuda", 20_000, 1024)


@pytest.mark.timeout(600)
def test_the_search_of_choose_in_the_interpreter() -> None:
    interpreted(searched)
    interpreted(in_pieces, "cpu", 90, 4)
    interpreted(lists, "cpu", 150, 4)
