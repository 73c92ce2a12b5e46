"""What a trial feeds a program: masks and padding as caches in use have them, unusual numbers, values of the compiled call, small sizes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import fx
from torch.utils._sympy.value_ranges import ValueRanges

from kvcompile.passes.graph.worlds import Guards
from kvcompile.passes.match.sites import MaskKind, MaskTerm
from kvcompile.validation.arguments import COUNTS, MOVES, Arguments
from kvcompile.validation.candidates import TrialCall
from kvcompile.validation.dependence import Dependence
from kvcompile.validation.equivalence import SiteOutcome, _counting
from kvcompile.validation.sessions import Sessions
from kvcompile.validation.sizes import SMALL, _chosen, _small
from kvcompile.validation.subgraph import NotApart

KEYS = 7
CALL = TrialCall({}, start=3, padded=2)


class Given(Arguments):
    """Arguments of a call of ``count`` tokens over 7 keys, of a program of which only these facts are known."""

    def __init__(self, count: int = 2, **facts: Any) -> None:
        self.count, self.random, self.first_reading = count, torch.Generator().manual_seed(0), {}
        vars(self).update(facts)

    def tokens(self, moment: TrialCall) -> int:
        return self.count

    def keys(self, moment: TrialCall) -> int:
        return KEYS


def flags(*rows: str) -> torch.Tensor:
    """A mask from rows of ones and zeros."""
    return torch.tensor([[mark == "1" for mark in row] for row in rows])


def test_a_mask_of_queries_is_causal_and_shows_what_is_written() -> None:
    assert torch.equal(Given(1).shown((KEYS,), CALL), flags("1111000")[0])
    assert torch.equal(Given(2).shown((2, KEYS), TrialCall({}, start=3)), flags("1111000", "1111100"))
    found = Given(2).shown((3, 1, 2, KEYS), CALL)
    assert torch.equal(found[0, 0], flags("1111000", "1111100")) and torch.equal(found[2, 0], flags("0011000", "0011100"))


def test_padding_is_on_the_left_of_each_row() -> None:
    assert torch.equal(Given().unpadded((3, KEYS), CALL), flags("1111111", "0111111", "0011111"))
    assert torch.equal(Given().unpadded((3, 1, 1, KEYS), CALL)[:, 0, 0], flags("1111111", "0111111", "0011111"))
    assert torch.equal(Given(1).shown((3, KEYS), CALL), flags("1111000", "0111000", "0011000"))


def test_unusual_masks_show_the_same_tokens() -> None:
    given, shown = Given(), flags("0111111", "1111111").expand(40, 2, KEYS)
    whole = given.changed(shown.long(), CALL)
    assert whole.dtype is torch.int64 and torch.equal(whole != 0, shown)
    assert set(whole[..., 1:3].unique().tolist()) == set(COUNTS) and (whole[..., 3:] == 1).all()
    lowest = torch.finfo(torch.float32).min
    added = given.changed(torch.where(shown, 0.0, lowest), CALL)
    assert torch.equal(added == lowest, ~shown), "what hides, hides"
    assert {row[row != lowest].unique().tolist()[0] for row in added.flatten(0, 1)} == set(MOVES)
    assert all(len(row[row != lowest].unique()) == 1 for row in added.flatten(0, 1)), "one number for a row, which a softmax does not see"
    fewer = given.changed(shown, CALL)
    assert not (fewer & ~shown).any() and fewer[..., 3:].all() and not fewer[..., 1:3].all(), "of the old tokens some are hidden"


def test_the_reading_that_was_right_is_tried_first() -> None:
    class Choosy(Given):
        wanted = 0

        def possible(self, made: list[Any], moment: TrialCall, strict: bool) -> bool:
            return bool(made[0] == self.wanted)

    given, options = Choosy(free=set()), [torch.tensor(number) for number in (4, 5, 6)]
    for wanted, reading in ((5, 1), (6, 2), (4, 0)):
        given.wanted, made = wanted, [None]
        assert given.chosen(made, [0], [options], CALL) and made[0] == wanted
        assert given.first_reading == {0: reading}
    given.wanted = 9
    assert not given.chosen([None], [0], [options], CALL)


def test_a_mask_shows_every_query_a_token_and_hides_what_no_position_does() -> None:
    term = MaskTerm(fx.Graph().placeholder("mask"), MaskKind.BOOL, ("S", "T"))
    good, all_seen, none_seen = (flags(row, "1111100") for row in ("1111000", "1111111", "0000000"))
    for limited in (False, True):
        given = Given(2, open=not limited)
        assert given.hides(term, good, CALL) and not given.hides(term, none_seen, CALL)
        assert given.hides(term, all_seen, CALL) is limited, "positions hide what was not written, where a limit says so"
        assert given.hides(term, all_seen, replace(CALL, ahead=True)) and given.hides(term, none_seen, replace(CALL, blind=True))


def test_values_of_the_compiled_call_are_known_where_the_shape_fits() -> None:
    given = Given(part=SimpleNamespace(sources={1: 0, 2: 5}), examples=[torch.arange(6).view(2, 3)])
    found = given.example(1, (2, 3))
    assert found is not None and torch.equal(found, torch.arange(6).view(2, 3)) and found is not given.examples[0]
    assert given.example(1, (3, 2)) is None and given.example(2, (2, 3)) is None and given.example(0, (2, 3)) is None


def test_a_weight_keeps_sums_of_order_one() -> None:
    entries = [SimpleNamespace(node=object())]
    part = SimpleNamespace(captured=SimpleNamespace(inputs=entries), given=set(), sources={})
    given = Given(part=part, tables={}, factors={}, queries=set(), examples=[])
    spreads = [given.plain(torch.empty(shape), 0, CALL).std().item() for shape in ((4096,), (64, 256), (4, 64, 64))]
    assert spreads == pytest.approx([1.0, 1 / 16, 1 / 8], rel=0.1)


def program(size: int, bounds: ValueRanges, **facts: Any) -> tuple[Any, dict[Any, int]]:
    """A program with one symbol, captured with a value, within bounds."""
    symbol = sympy.Symbol("s0", integer=True)
    env = SimpleNamespace(var_to_range={symbol: bounds}, guards=[], replace=lambda guard: guard)
    graph = fx.Graph()
    graph.placeholder("x").meta["val"] = torch.empty(2)
    captured = SimpleNamespace(fake_mode=SimpleNamespace(shape_env=env), graph=graph)
    return SimpleNamespace(captured=captured, guards=Guards(env), **facts), {symbol: size}


def test_a_size_is_made_no_smaller_than_its_guards_admit() -> None:
    part, known = program(5000, ValueRanges(100, 9000))
    assert _chosen(part, known, [list(known)]) == dict.fromkeys(known, 100)
    part, known = program(5000, ValueRanges(2, 9000))
    assert _chosen(part, known, [list(known)]) == dict.fromkeys(known, 5)


def test_sizes_up_to_four_times_the_small_ones_are_tried() -> None:
    part, known = program(9, ValueRanges(2, 9000))
    symbol = next(iter(known))
    assert _small(part, {symbol: 4 * SMALL}, known) and not _small(part, {symbol: 4 * SMALL + 1}, known)
    assert _small(part, {symbol: 2000}, {symbol: 1000}) and not _small(part, {symbol: 2001}, {symbol: 1000})


def test_a_cache_that_grows_with_its_sizes_is_called_once() -> None:
    """The next call would have other sizes: it is another program."""
    part, known = program(9, ValueRanges(2, 9000), sites=())
    given = Given(part=part, queries=(), offsets=(), pooled=False, limiting=set(), open=False, free=set())
    sessions = [[moment.start for moment in moments] for moments, _ in Sessions(part, given, frozenset()).all(known)]
    assert sessions[0] == [0] and all(len(moments) == 1 for moments in sessions)


@pytest.mark.parametrize(("starts", "fails", "outcome"), [
    ((0, 4), 4, SiteOutcome.EQUAL), ((0,), 0, SiteOutcome.UNKNOWN), ((0, 4), 0, SiteOutcome.EQUAL), ((0,), None, SiteOutcome.EQUAL),
], ids=str)
def test_a_call_that_could_not_be_made_counts_where_none_tells(starts: tuple[int, ...], fails: int | None, outcome: SiteOutcome) -> None:
    """Equal calls of several tokens prove it, whatever could not be run beside them."""
    verdict = _counting(*_sessions(starts, fails, tokens=3), {}, _covered())
    assert verdict.outcome is outcome


@pytest.mark.parametrize(("fails", "outcome"), [(4, SiteOutcome.UNKNOWN), (None, SiteOutcome.EQUAL)])
def test_a_query_that_sees_one_token_proves_little(fails: int | None, outcome: SiteOutcome) -> None:
    """It gives that token's value, whatever its score is; but a program may have no other call."""
    starts = (0,) if fails is None else (0, 4)
    assert _counting(*_sessions(starts, fails, tokens=1), {}, _covered()).outcome is outcome


@pytest.mark.parametrize(("keys", "dependent", "outcome"), [
    (KEYS, True, SiteOutcome.EQUAL), (KEYS, False, SiteOutcome.UNKNOWN), (1, False, SiteOutcome.EQUAL),
])
def test_results_that_depend_on_no_query_prove_little(keys: int, dependent: bool, outcome: SiteOutcome) -> None:
    """Equal calls of several tokens, whose masks show one to each query; but a program may read one token."""
    assert _counting(*_sessions((0, 4), None, 3, keys, dependent), {}, _covered()).outcome is outcome


def test_a_result_depends_on_queries_where_a_query_sees_two_tokens() -> None:
    q, keys, values = torch.randn(2, 4), torch.randn(3, 4), torch.randn(3, 4)
    inputs = [SimpleNamespace(node=name, index=index) for index, name in enumerate("qkv")]
    arguments: Any = SimpleNamespace(queries=("q",), part=SimpleNamespace(captured=SimpleNamespace(inputs=inputs)))

    def results(args: list[torch.Tensor]) -> list[torch.Tensor]:
        scores = args[0] @ args[1].T
        one, two = scores.clone(), scores.clone()
        one[:, 1:], two[:, 2:] = -torch.inf, -torch.inf
        return [one.softmax(-1) @ args[2], two.softmax(-1) @ args[2]]

    found = Dependence(arguments, 2)
    found.add(results([q, keys, values]), results(found.other([q, keys, values])))
    assert found.seen == {1} and not found.whole
    assert Dependence(arguments, 0).whole, "nobody asks"


def _covered() -> Any:
    return SimpleNamespace(add=lambda values: None, wanted=set, missing=lambda: "")


def _sessions(
    starts: tuple[int, ...], fails: int | None, tokens: int, keys: int = KEYS, dependent: bool = True,
) -> tuple[Any, Any]:
    """A twin whose calls are equal, but for those at one position, which cannot be made; and its sessions of one call each.

    Where it is not ``dependent``, no call's result changes with its queries.
    """
    def call(moment: TrialCall) -> str:
        if moment.start == fails:
            raise NotApart("no such call")
        return ""

    session = SimpleNamespace(fill=lambda moment, unwritten: None, call=call)
    captured = SimpleNamespace(inputs=[SimpleNamespace(node="q", index=0)], fakes=[torch.empty(1)])
    part = SimpleNamespace(captured=captured, outputs=1)
    arguments = SimpleNamespace(
        pooled=False, tokens=lambda moment: tokens, keys=lambda moment: keys, free=(), part=part, queries=() if dependent else ("q",),
    )
    moments = [([TrialCall({}, start)], 0.0) for start in starts]
    return (
        SimpleNamespace(session=lambda arguments, dependence=None: session, part=part),
        SimpleNamespace(arguments=arguments, all=lambda values: moments, elsewhere=lambda values, covered: []),
    )
