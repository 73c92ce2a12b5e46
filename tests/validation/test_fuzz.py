"""A fixed slice of the fuzzer (``benchmarks/fuzz``), and all that it ever found."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.fuzz import workers
from benchmarks.fuzz.choices import drawn
from benchmarks.fuzz.corpus import CORPUS, FORGOTTEN, UNLOOKED
from benchmarks.fuzz.expressions import BATCH, DIM, HEADS
from benchmarks.fuzz.features import FEATURES, NAMES, PLAIN, completed, odd, together
from benchmarks.fuzz.modules import drawn_tokens, module_of, unwritten
from benchmarks.fuzz.records import OtherRun, Record
from benchmarks.fuzz.schemes import SCHEMES
from benchmarks.fuzz.script import Run
from benchmarks.fuzz.shrinking import shrunk
from benchmarks.fuzz.trial import Found, Result, Way, tried
from kvcompile import schemes
from kvcompile.types import Role, SlotSpec

GOOD = {Found.RIGHT, Found.REFUSED, Found.NOTED, Found.OUTSIDE}
SEEDS = 32


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_program_is_right_or_refused(seed: int) -> None:
    result = tried(seed, drawn(seed))
    assert result.found in GOOD, f"{odd(result.choice)}: {result.said}"


@pytest.mark.parametrize(("seed", "given"), CORPUS)
def test_what_was_found_once_stays_mended(seed: int, given: dict[str, str]) -> None:
    result = tried(seed, given)
    assert result.found in GOOD, f"{given}: {result.said}"


@pytest.mark.parametrize(("given", "found"), UNLOOKED)
def test_where_the_host_does_not_look_no_number_is_wrong(given: dict[str, str], found: str) -> None:
    result = tried(1, given, Way(unlooked=True))
    assert result.found is Found[found], result.said
    # Where it looks the dense cache has served what a window could not.
    assert found != "TOLD" or tried(1, given).found is Found.RIGHT


@pytest.mark.parametrize("given", FORGOTTEN)
def test_tokens_that_a_window_dropped_are_told(given: dict[str, str]) -> None:
    result = tried(1, given)
    assert result.found is Found.TOLD and "TokensForgotten" in result.said


@pytest.mark.parametrize(("events", "forgotten"), [
    (("back-blocks", "ahead-one"), True), (("back-three", "ahead-one"), False), (("ahead-one", "back-three"), False),
    (("back-three", "nothing"), False),
    (("ahead-one", "ahead-five"), False),
])
def test_a_script_that_skips_what_it_dropped_is_known(events: tuple[str, str], forgotten: bool) -> None:
    """No other script may end with that error."""
    choice = completed({"chunks": "20,1,1,5,1,1", "event": events[0], "then": events[1]})
    assert choice is not None
    module, text, _ = module_of(choice)
    run = Run(module, text, choice, lambda module: module, "cpu")
    run.play()
    assert run.skips_forgotten() is forgotten


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_plain_program_is_rewritten_under_every_scheme(scheme: str) -> None:
    """What a scheme loses stays far below what a lost token would change: over half of it would be a loss that nobody explains."""
    choice = completed({"scheme": scheme, "chunks": "36,1,1,1,1,1"})
    assert choice is not None
    result = tried(1, choice)
    assert result.found is Found.RIGHT
    assert float(result.said) <= max(SCHEMES[scheme].loss * 0.7, 1e-5)


@pytest.mark.parametrize("name", ["int8", "nf4", "gauss"])
def test_tokens_are_stored_again_as_they_are_stored_once(name: str) -> None:
    """Events write rows that were decoded: what each encoding lost would add up, and hide a lost token."""
    choice = PLAIN | {"scheme": name}
    scheme, slot = schemes.parse(SCHEMES[name].text), SlotSpec(HEADS, DIM, torch.float32, Role.VALUE)
    x = drawn_tokens((BATCH, HEADS, 7, DIM), choice)
    for made in (x, unwritten(x.shape, choice | {"unwritten": "nines"})):
        kept = made
        for _ in range(3):
            kept = -scheme.decode(scheme.encode(kept), slot)
        torch.testing.assert_close(kept, -made, rtol=SCHEMES[name].loss, atol=0.0)


def test_every_scheme_of_the_package_is_fuzzed() -> None:
    assert {text.text.split("(")[0] for text in SCHEMES.values()} == {scheme.name for scheme in schemes.SCHEMES}


def test_the_fuzzer_sees_a_difference() -> None:
    """A cap of the negative scores, which the matcher reads wrongly: found where rewrites are not validated."""
    choice = {"scores": "cap-negative"}
    assert tried(0, choice, Way(validate=False)).found is Found.DIFFERENT
    assert tried(0, choice).found is Found.REFUSED


def test_the_slice_holds_both_outcomes() -> None:
    """Plain programs are rewritten: a matcher that refused everything would pass the slice."""
    assert tried(1, PLAIN).found is Found.RIGHT
    choice = completed({"layout": "concatenated", "groups": "2", "mask": "window"})
    assert choice is not None
    assert tried(1, choice).found is Found.RIGHT


def test_a_seed_is_always_the_same_possible_program() -> None:
    matrix = together()
    for seed in range(200):
        choice = drawn(seed)
        assert choice == drawn(seed)
        at = [NAMES.index(item) for item in choice.items()]
        assert matrix[np.ix_(at, at)].all(), choice
    assert {feature: value for feature, value in drawn(0).items() if value not in FEATURES[feature]} == {}


def test_a_failure_is_made_smaller() -> None:
    """Shrinking drops what is not needed, and keeps what is."""
    way = Way(validate=False)
    choice = completed({"scores": "cap-negative", "groups": "2", "mask": "window", "event": "read"})
    assert choice is not None
    found = tried(0, choice, way)
    assert found.found is Found.DIFFERENT
    assert odd(shrunk(found, way).choice) == {"scores": "cap-negative"}


def test_records_of_several_runs_are_one(tmp_path: Path) -> None:
    first, second, both = Record(Way()), Record(Way()), Record(Way())
    first.add([Result(seed, drawn(seed), Found.RIGHT) for seed in range(4)])
    second.add([Result(6, drawn(6), Found.FAULT, "why"), Result(5, drawn(5), Found.REFUSED)])
    for number, record in enumerate((first, second)):
        record.save(tmp_path / f"{number}.json")
        both.merge(tmp_path / f"{number}.json")
    assert both.missing(range(8)) == [range(4, 5), range(7, 8)]
    assert both.counts() == {Found.RIGHT: 4, Found.FAULT: 1, Found.REFUSED: 1}
    assert both.bad[6].said == "why"
    with pytest.raises(OtherRun):
        Record(Way(inner="inductor")).merge(tmp_path / "0.json")


def test_the_command_goes_on_when_its_processes_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for ever behind the fifteenth chunk of each process, so no run had more than 300 programs a process."""
    monkeypatch.setattr(workers, "CHUNK", 1)
    monkeypatch.setattr(workers, "LIFE", 2)
    found = [result for results in workers.results(range(3), 1, time.monotonic() + 600) for result in results]
    assert sorted(result.seed for result in found) == [0, 1, 2]


def test_a_run_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for ever for chunks that were cancelled."""
    monkeypatch.setattr(workers, "CHUNK", 1)
    started = time.monotonic()
    found = [result for results in workers.results(range(5000), 1, started + 10) for result in results]
    assert len(found) < 5000
    assert time.monotonic() - started < 120


@pytest.mark.parametrize("given", [{}, {"scheme": "int8", "positions": "counter"}, {"scheme": "kivi", "chunks": "20,1,1,5,1,1"}])
def test_inductor_is_right_where_eager_is(given: dict[str, str]) -> None:
    choice = completed(given)
    assert choice is not None
    assert tried(2, choice, Way(inner="inductor")).found is Found.RIGHT
