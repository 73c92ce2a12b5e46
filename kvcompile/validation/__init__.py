"""Validation: compare every rewrite with the program that it replaces, when it is compiled.

Sites that share caches are cut out of the captured graph, with all nodes between their inputs (queries, new tokens, caches, positions,
masks) and their outputs (``subgraph``). They are brought to the CPU in float64 (``cpu_program``), and compared with their rewritten twin
over random tokens (``equivalence``). Sites that differ are refused, and so are sites that could not be tried, unless the caller asks
otherwise. Sites that are equal programs are tried once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.dynamo import DisableTorchFunction, no_modes
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.match.sites import LimitKind, Site
from kvcompile.validation.coverage import Coverage
from kvcompile.validation.cpu_program import plain, unguarded
from kvcompile.validation.equivalence import ONE_TOKEN, SiteOutcome, Verdict, first_step, tried
from kvcompile.validation.fingerprint import fingerprint
from kvcompile.validation.sizes import MOST_ELEMENTS, captured_values, elements, hints, reductions
from kvcompile.validation.subgraph import NotApart, Number, Outline, cut, outline, same, sites_by_shared_caches

log = logging.getLogger(__name__)

__all__ = ["SiteOutcome", "Verdict", "verdicts"]


@contextlib.contextmanager
def _undisturbed(captured: Captured) -> Iterator[None]:
    """Run the body of the context in plain eager mode on the CPU: no modes, gradients or casts, and no guards for the caller's graph."""
    with (
        no_modes(), torch.inference_mode(False), torch.no_grad(),
        torch.autocast("cpu", enabled=False), DisableTorchFunction(), unguarded(captured.fake_mode),
    ):
        yield


def _tried(whole: Outline, number: Number, examples: Sequence[Any]) -> Verdict | None:
    """Return the verdict of trials on a program; None, without a trial, if its largest tensor has more than MOST_ELEMENTS elements.

    Trials run in float64, and in float32 where the program does not run in float64 or float64 decides nothing. ``number`` maps every
    int of the program. Raises NotApart if the program cannot be run by itself.
    """
    for dtype in (torch.float64, torch.float32):
        try:
            part = plain(cut(whole, number), dtype, number)
            if elements(part, captured_values(part)) > MOST_ELEMENTS:
                return None
            verdict = tried(part, examples)
        except NotApart:
            if dtype is torch.float32:
                raise
            continue
        if verdict.outcome is not SiteOutcome.UNKNOWN:
            break
    return verdict


def _verdict(whole: Outline, examples: Sequence[Any]) -> Verdict:
    """Return the verdict on a program from trials with generated arguments, or else with the arguments that the graph was compiled with."""
    # The caller chooses the slots in a block table: those of the first step are valid.
    pooled = any(slot.block_table is not None for site in whole.sites for slot in site.slots)
    once = _first_step(whole, examples) if pooled else None
    if once is not None and (once.outcome is SiteOutcome.DIFFERENT or (once.outcome is SiteOutcome.EQUAL and not _moves(whole))):
        return once
    try:
        verdict = _apart(whole, examples)
    except NotApart as reason:
        verdict = Verdict(SiteOutcome.UNKNOWN, str(reason))
    if once is not None and verdict.outcome is SiteOutcome.EQUAL and (most := _constant_limit(whole)) > 1:
        verdict = Verdict(SiteOutcome.UNKNOWN, f"it attends to a constant number of tokens ({most}), which trial calls do not reach")
    if verdict.outcome is not SiteOutcome.UNKNOWN or (once is None and (once := _first_step(whole, examples)) is None):
        return verdict
    if once.outcome is SiteOutcome.DIFFERENT:
        return once
    if once.outcome is SiteOutcome.EQUAL and verdict.reason == ONE_TOKEN:
        # All that generated arguments leave open are scores, and in the first step results depend on them.
        return dataclasses.replace(verdict, outcome=SiteOutcome.EQUAL, reason="")
    said = "its first step is equal" if once.outcome is SiteOutcome.EQUAL else f"nor could its first step be compared: {once.reason}"
    return Verdict(SiteOutcome.UNKNOWN, f"{verdict.reason}; {said}")


def _constant_limit(whole: Outline) -> int:
    """Return the largest constant upper limit on the number of tokens that an attention of the program reads; 0 if none is constant."""
    limits = (site.bounds.hi for site in whole.sites)
    return max((limit.offset + 1 for limit in limits if limit.kind is LimitKind.CONST and limit.amount is None), default=0)


def _moves(whole: Outline) -> bool:
    """Return whether a symbol of the program can take other values than in the first step.

    A verdict on that step alone then proves too little.
    """
    part = plain(cut(whole), torch.float32)
    covered = Coverage(part)
    covered.add(hints(part))
    return bool(covered.wanted())


def _first_step(whole: Outline, examples: Sequence[Any]) -> Verdict | None:
    """Return the verdict on the first step of a program, with its compiled arguments (``examples``).

    None if the program is too large to try, or does not run by itself.
    """
    try:
        part = plain(cut(whole), torch.float32)
    except NotApart:
        return None
    return first_step(part, examples) if elements(part, hints(part)) <= MOST_ELEMENTS else None


def _apart(whole: Outline, examples: Sequence[Any]) -> Verdict:
    """Return the verdict on a program or, if it is too large to try, on smaller versions of it: one version that is equal is enough."""
    part = cut(whole)
    verdict = Verdict(SiteOutcome.UNKNOWN, "its sizes are too large to try, and a smaller program could not be made of it")
    try:
        small = elements(part, captured_values(part)) <= MOST_ELEMENTS
    except NotApart as reason:
        # Guards may tie a size to a large number, which a reduction makes small.
        small, verdict = False, Verdict(SiteOutcome.UNKNOWN, str(reason))
    if small and (whole_size := _tried(whole, same, examples)):
        return whole_size
    for number in reductions(part):
        try:
            made = _tried(whole, number, examples)
        except NotApart:
            continue
        if made is None:
            continue
        if made.outcome is SiteOutcome.EQUAL:
            return made
        verdict = made if verdict.outcome is not SiteOutcome.DIFFERENT else verdict
    return verdict


def verdicts(
    captured: Captured, effects: Effects, sites: Sequence[Site], examples: Sequence[Any], known: dict[str, Verdict]
) -> list[tuple[tuple[Site, ...], Verdict]]:
    """Return the sites in groups that share caches, each with its verdict.

    ``known``: verdicts by fingerprint, which are looked up and added to.
    """
    found = []
    for group in sites_by_shared_caches(sites):
        try:
            with _undisturbed(captured):
                whole = outline(captured, effects, group)
                key = fingerprint(whole)
                if key not in known:
                    known[key] = _verdict(whole, examples)
            found.append((group, known[key]))
        except NotApart as reason:
            found.append((group, Verdict(SiteOutcome.UNKNOWN, str(reason))))
        except Exception as error:
            log.debug("a site could not be validated", exc_info=True)
            found.append((group, Verdict(SiteOutcome.UNKNOWN, f"validation itself failed with {type(error).__name__}: {error}")))
    return found
