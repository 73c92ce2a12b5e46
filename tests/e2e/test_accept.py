"""The acceptance run: its cases cover what they should, its references notice what is wrong, and its CPU slice is right."""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import time
import unittest.mock
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcompile
from benchmarks.accept import drive, references, stock, traces
from benchmarks.accept.architectures import ARCHITECTURES
from benchmarks.accept.axes import AXES, SPREAD, Batch, Caching, Case, Dtype, Family, HeadDim, Mode, Prompt, Scheme, Trait
from benchmarks.accept.cases import all_cases, by_id, cpu_slice, invalid, pairs, witnesses
from benchmarks.accept.modules import RECIPES, Module
from benchmarks.accept.oracles import Oracle, round_trip, scheme_of
from benchmarks.accept.outcomes import Outcome, Result
from benchmarks.accept.run import Pool, Task, _Worker, stacks_at
from benchmarks.accept.subjects import Words
from benchmarks.accept.table import as_csv, as_json, count_table, read_csv, summary
from kvcompile.schemes import SCHEMES
from kvcompile.types import Role, SlotSpec

CPU = torch.device("cpu")
FAMILIES = [next(item for item in ARCHITECTURES if item.family is family and Trait.MODULE not in item.traits)
            for family in Family if family not in {Family.BUFFER, Family.CONCAT, Family.PAGED}]


def case_of(architecture: Any, scheme: Scheme = Scheme.INT8, caching: Caching = Caching.DYNAMIC) -> Case:
    """A plain case: one row of float32, the prompt uncompiled."""
    return Case(architecture, caching, Mode.DEFAULT, Prompt.EAGER, scheme, HeadDim.D64, Batch.ONE, Dtype.FP32)


# --- the cases ------------------------------------------------------------------------------------------


def test_every_valid_pair_of_values_is_covered() -> None:
    covered = {pair for case in all_cases() for pair in pairs(case)}
    assert not witnesses().keys() - covered
    schemes = {(Family.GROUPED, scheme) for scheme in Scheme}
    assert schemes <= {(case.architecture.family, case.scheme) for case in all_cases()}


def test_what_is_no_valid_pair_has_a_reason() -> None:
    reasons = {invalid(replace(case, prompt=Prompt.EAGER)) for case in all_cases()} - {None}
    assert "generate sends the prompt through model.forward, which is compiled" in reasons
    assert not any(invalid(case) for case in all_cases())
    missing = [
        (one, a, other, b) for index, one in enumerate(AXES) for other in list(AXES)[index + 1 :] for a in AXES[one] for b in AXES[other]
        if (one, a, other, b) not in witnesses()
    ]
    # What excludes them is a trait of the whole family, or generate's prompt.
    assert all(one == "family" or {a, b} & {Caching.GENERATE, Caching.GENERATE_DYNAMIC} for one, a, _, b in missing), missing


def test_every_architecture_meets_every_value_that_is_valid_for_it() -> None:
    for architecture in ARCHITECTURES:
        own = [case for case in all_cases() if case.architecture == architecture]
        for axis in SPREAD:
            met = {case.value(axis) for case in own}
            for value in set(AXES[axis]) - met:
                tried = [replace(case, **{axis: value}) for case in own]
                assert all(invalid(case) for case in tried), (str(architecture), value)


def test_there_are_enough_architectures_and_not_too_many_cases() -> None:
    assert len({str(item) for item in ARCHITECTURES}) == len(ARCHITECTURES) >= 45
    assert len({item.name for item in ARCHITECTURES if Trait.MODULE not in item.traits}) >= 40
    assert {item.name for item in ARCHITECTURES if Trait.MODULE in item.traits} == RECIPES.keys()
    assert 150 <= len(all_cases()) <= 350
    # A run that ends early has met every architecture.
    assert {case.architecture for case in all_cases()[: len(ARCHITECTURES)]} == set(ARCHITECTURES)


def test_identifiers_are_the_same_every_time_and_name_one_case_each() -> None:
    again = all_cases.__wrapped__()
    assert again == all_cases()
    assert len({case.id for case in again}) == len(again)
    assert all(by_id(case.id) == case for case in (*again[::20], *cpu_slice()))
    other = replace(again[0], mode=Mode.MAX_AUTOTUNE, head_dim=HeadDim.D80)
    assert by_id(other.id) == other
    with pytest.raises(KeyError):
        by_id("llama-int5")


def test_schemes_are_those_of_the_package() -> None:
    on_cuda = {scheme.name for scheme in SCHEMES if scheme.devices is None or "cuda" in scheme.devices}
    assert on_cuda == {scheme.value for scheme in Scheme} - {Scheme.MIXED.value, Scheme.ROTATED.value, Scheme.FIRST.value}


def test_the_cpu_slice_has_every_value_but_of_the_mode() -> None:
    for axis in ("scheme", "caching", "dtype", "prompt", "batch", "head_dim"):
        assert {case.value(axis) for case in cpu_slice()} == set(AXES[axis]), axis
    assert not any(invalid(case) for case in cpu_slice())


# --- the references -------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", FAMILIES, ids=str)
def test_attention_matters_in_the_logits(architecture: Any, one_thread: None) -> None:
    """A cache that is gone moves the logits far more than any case allows."""
    subject = Words.build(case_of(architecture), CPU, layers=1)
    request = subject.request(1, steps=2)
    plain = traces.uncompiled(subject, [request])
    with Oracle(subject.case).on(subject.model):
        control = traces.worst(plain, traces.uncompiled(subject, [request]))

    def forgetful(**given: Any) -> Any:
        past = given["past_key_values"]
        for layer in getattr(past, "self_attention_cache", past).layers:
            if getattr(layer, "keys", None) is not None:
                layer.keys.zero_(), layer.values.zero_()
        return subject.model(**given)

    moved = traces.worst(plain, [subject.logits(request, subject.model, forgetful)])
    allowed = references.ROUNDING[Dtype.FP32] + references.SHARE * control
    assert 0 < control < moved
    assert moved > 20 * allowed, (moved, control)


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.INT4, Scheme.ROTATED, Scheme.FIRST, Scheme.NORMED, Scheme.MIXED])
def test_the_error_of_quantization_is_no_allowance(scheme: Scheme, one_thread: None) -> None:
    """Logits that were not quantized at all are wrong: what is allowed is rounding beside the codes."""
    subject = Words.build(case_of(ARCHITECTURES[0], scheme), CPU, layers=1)
    requests = [subject.request(1), subject.request(2, steps=8)]
    plain = traces.uncompiled(subject, requests)
    verdict = references.verdict_on(subject, requests, traces.Trace(plain))
    assert not verdict.right and verdict.error > 2 * verdict.tolerance
    with Oracle(subject.case).on(subject.model):
        codes = traces.uncompiled(subject, requests)
    assert references.verdict_on(subject, requests, traces.Trace(codes)).right


@pytest.mark.parametrize("scheme", ["int4-rotated", "int8-sinks"])
def test_references_of_modules_know_rotation_and_first_tokens(scheme: str) -> None:
    """Keys [3, S, K * D] behind the reference's hooks: first tokens of a prompt as they are, all others as their codes, turned back."""
    case = by_id(f"per-row-{scheme}-static-compiled-default-d64-padded-float32")
    subject = Module.build(case, CPU)
    request = subject.request(1, 13, 1)
    plain = subject.model.k(request.x)
    with subject.rounded(lambda role: scheme_of(case, role)):
        found = subject.model.k(request.x)
    keys = scheme_of(case, Role.KEY)
    heads = plain.unflatten(-1, (subject.model.kv, -1)).transpose(1, 2)
    codes = round_trip(keys, heads, Role.KEY)
    unturned = keys.decode(keys.encode(heads), SlotSpec(heads.shape[1], heads.shape[3], heads.dtype, Role.KEY))
    assert torch.equal(codes, unturned) is (scheme == "int8-sinks")
    assert torch.equal(found[:, : keys.sinks], plain[:, : keys.sinks])
    assert torch.equal(found[:, keys.sinks :], codes.transpose(1, 2).flatten(2)[:, keys.sinks :])


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16])
def test_low_precision_is_held_to_twice_the_eager_error(dtype: Dtype, one_thread: None) -> None:
    subject = Words.build(replace(case_of(ARCHITECTURES[0], Scheme.DENSE), dtype=dtype), CPU, layers=1)
    requests = [subject.request(1, steps=8)]
    own = traces.uncompiled(subject, requests)
    verdict = references.verdict_on(subject, requests, traces.Trace(own))
    assert verdict.right and 0 < verdict.eager < 0.05
    off = [[item * (1 + 4 * verdict.tolerance) for item in own[0]]]
    assert not references.verdict_on(subject, requests, traces.Trace(off)).right


def test_generated_logits_are_outside_where_those_of_stock_are_as_far_off(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """Large scores amplify a sum's order: GPT-Neo's, unscaled, move its float32 logits by 1e-4 without any code of ours."""
    case = case_of(ARCHITECTURES[0], Scheme.DENSE, Caching.GENERATE)
    subject = Words.build(case, CPU, layers=1)
    request = subject.request(1, prompt=6, steps=4)
    plain = traces.uncompiled(subject, [request])
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    assert traces.worst(plain, stock.stock_logits(subject, [request])) < 1e-5, "its own tokens, whatever generate would choose"
    verdict = references.Verdict(1e-4, 2e-5, 0.0, 0.0, "request 1 step 2")
    assert stock.wrong(subject, [request], verdict)["outcome"] is Outcome.WRONG
    monkeypatch.setattr(stock, "stock_logits", lambda *given: [[item * (1 + 6e-5) for item in plain[0]]])
    found = stock.wrong(subject, [request], verdict)
    assert found["outcome"] is Outcome.OUTSIDE and "stock torch.compile is off by 6.0e-05" in found["detail"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_blocks_begin_with_padding_that_the_mask_hides_for_nobody(dtype: str, one_thread: None) -> None:
    """MPT writes -65504 into float32 scores: not their lowest number, so blocks of kivi have padding in them, here and in the reference."""
    case = by_id(f"mpt/eager-kivi-dynamic-compiled-default-d64-padded-{dtype}")
    subject = Words.build(case, CPU, layers=1)
    requests = [subject.request(1, steps=8)]
    owner = kvcompile.backend(case.scheme.spec(64), inner="eager", strict=True)
    trace, requests = traces.compiled(subject.copied(), requests, owner, lambda: 0)
    assert references.verdict_on(subject, requests, trace).right
    # The other reading of the padding is told apart.
    pads = case.batch.pads if dtype == "float16" else (0, 0, 0)
    with unittest.mock.patch.object(references, "Oracle", functools.partial(_counted_from, pads)):
        assert not references.verdict_on(subject, requests, trace).right


def _counted_from(pads: tuple[int, ...], *given: Any) -> Oracle:
    """An oracle whose rows begin at some positions."""
    made = Oracle(*given)
    made.pads = pads
    return made


def test_not_a_number_and_missing_steps_are_wrong() -> None:
    logits = [torch.ones(1, 4), torch.ones(1, 4)]
    case = case_of(ARCHITECTURES[0], Scheme.DENSE)
    assert references.compared(case, 0, logits, logits, logits, 0.0).right
    assert not references.compared(case, 0, [logits[0], logits[0] * float("nan")], logits, logits, 0.0).right
    assert not references.compared(case, 0, logits[:1], logits, logits, 0.0).right


def test_logits_that_have_nothing_to_do_with_the_reference_are_never_right() -> None:
    """A reference that is itself off by more than unrelated logits allows any error; such a case must be undecided, not right."""
    first, second, third = ([torch.randn(1, 512, generator=torch.Generator().manual_seed(seed))] for seed in range(3))
    verdict = references.compared(case_of(ARCHITECTURES[0], Scheme.DENSE), 0, third, first, second, 0.0)
    assert verdict.right and not verdict.telling
    near = [first[0] * 1.01]
    assert references.compared(case_of(ARCHITECTURES[0], Scheme.DENSE), 0, near, first, second, 0.0).telling


def test_more_graphs_than_stock() -> None:
    plain = traces.Trace([], [[1, 1, *[0] * 20], [0] * 22])
    assert not stock.more(traces.Trace([], [[1, 1, 1, *[0] * 19], [0, 1, *[0] * 20]]), plain)
    assert stock.more(traces.Trace([], [[1, 1, *[0] * 20], [*[0] * 21, 1]]), plain)
    assert stock.more(traces.Trace([], [[1] * 5 + [0] * 17, [0] * 22]), plain)


# --- processes ------------------------------------------------------------------------------------------


def _odd(pipe: Any, other: Any, log: Path) -> None:
    """A worker whose cases say what happens to it; it ends when the pool closes ``other``, of which a forked process has a copy."""
    other.close()
    # A machine may start processes with signals blocked.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    with log.open("a") as output:
        faulthandler.enable(output)
        while True:
            task = pipe.recv()
            with stacks_at(task.until, output):
                result = _odd_result(task)
            pipe.send(result)


def _odd_result(task: Task) -> Result:
    """The result of a case, by its name."""
    case = task.case
    if case == "both die" or (case == "dies" and not task.stock):
        os.kill(os.getpid(), signal.SIGSEGV)
    if case == "hangs":
        time.sleep(60)
    failed = Outcome.OUTSIDE if task.stock and case == "both fail" else Outcome.CRASHED if not task.stock and "fail" in case else None
    return Result(case, failed or Outcome.RIGHT, "an exception" if failed else "")


class _OddPool(Pool):
    def _worker(self, context: Any) -> _Worker:
        ours, theirs = get_context("fork").Pipe()
        process = get_context("fork").Process(target=_odd, args=(theirs, ours, self.log))
        process.start()
        theirs.close()
        return _Worker(process, ours, self.log)


def test_a_process_that_dies_or_hangs_loses_its_case_alone(tmp_path: Path) -> None:
    pool = _OddPool(1, 2.0, time.monotonic() + 60, 1, tmp_path / "log")
    found = {result.id: result for result in pool.results(["a", "dies", "b", "hangs", "both die", "c"])}
    assert [found[name].outcome for name in "abc"] == [Outcome.RIGHT] * 3
    assert found["dies"].outcome is Outcome.CRASHED and "SIGSEGV" in found["dies"].detail
    assert found["hangs"].outcome is Outcome.TIMEOUT
    assert found["both die"].outcome is Outcome.OUTSIDE and found["both die"].detail.startswith("stock torch.compile alone")
    # Both say where they were.
    assert "Segmentation fault" in found["dies"].trace and "in _odd" in found["dies"].trace
    assert "in _odd" in found["hangs"].trace and "Segmentation fault" not in found["hangs"].trace


def test_stock_is_asked_about_an_exception_in_a_process_of_its_own(tmp_path: Path) -> None:
    pool = _OddPool(1, 20.0, time.monotonic() + 60, 1, tmp_path / "log")
    found = {result.id: result for result in pool.results(["fails", "a", "both fail"])}
    assert {name: result.outcome for name, result in found.items()} == {
        "fails": Outcome.CRASHED, "a": Outcome.RIGHT, "both fail": Outcome.OUTSIDE,
    }
    assert found["both fail"].detail == "stock torch.compile alone: an exception; this backend: an exception"


def test_cases_after_the_deadline_are_not_run(tmp_path: Path) -> None:
    pool = _OddPool(2, 2.0, time.monotonic() - 1, 1, tmp_path / "log")
    assert {result.outcome for result in pool.results(["a", "b"])} == {Outcome.NOT_RUN}


def test_tables(tmp_path: Path) -> None:
    results = [
        Result("b", Outcome.CRASHED, 'x, "y" in /a/lib/site-packages/torch/z.py', seconds=3.4),
        Result("a", Outcome.RIGHT, error=1e-6, tolerance=2e-5, eager=0.0, graphs=3, stock=3),
    ]
    assert summary(results) == "2 cases: 1 right, 1 crashed"
    path = tmp_path / "run.csv"
    path.write_text(as_csv(results))
    right, crashed = read_csv(path)
    assert list(right.values()) == ["a", "right", "1e-06", "2e-05", "0e+00", "", "3", "3", "0", ""]
    assert (crashed["case"], crashed["seconds"], crashed["why"], crashed["graphs"]) == ("b", "3", 'x, "y" in torch/z.py', "")
    assert '"outcome": "crashed"' in as_json(results, {})


def test_counts_of_written_tables(tmp_path: Path) -> None:
    """Refused cases are counted by reason, other outcomes as they are; a file without an outcome has 0."""
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    first.write_text(as_csv([Result("a", Outcome.RIGHT), Result("b", Outcome.REFUSED, "pools"), Result("c", Outcome.REFUSED, "windows")]))
    second.write_text(as_csv([Result("a", Outcome.OUTSIDE, "x"), Result("b", Outcome.REFUSED, "pools")]))
    assert [line.strip("| ").split(" | ") for line in count_table([first, second]).splitlines()] == [
        ["outcome", "why", "first", "second"], ["---"] * 4, ["right", "", "1", "0"], ["refused", "pools", "1", "1"],
        ["refused", "windows", "1", "0"], ["outside", "", "0", "1"], ["all", "", "3", "2"],
    ]


# --- the slice ------------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("case", cpu_slice(), ids=lambda case: case.id)
def test_cpu_slice(case: Case, one_thread: None) -> None:
    result = drive.run_case(case, layers=1)
    assert not result.outcome.failed and result.outcome is not Outcome.OUTSIDE, result
