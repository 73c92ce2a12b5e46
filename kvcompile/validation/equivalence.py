"""Equivalence: a cut program and its rewritten twin, run over the same random tokens and compared.

The twin stores tokens in full precision (the scheme "dense"), in the stores and through the runtime that a user's call goes through:
adoption of filled caches, the choice of a variant, growth. So the rewrite is the cause of every difference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.errors import KvcompileError
from kvcompile.passes.graph.worlds import Values
from kvcompile.passes.plan.plan import Plan, site_plan
from kvcompile.passes.plan.policy import policy_of
from kvcompile.passes.rewrite.rewrite import rewrite
from kvcompile.passes.rewrite.rewritten import Rewritten, Variant
from kvcompile.runtime.call.binding import bind
from kvcompile.runtime.call.bound import BoundGraph
from kvcompile.runtime.handle import tensor as handles
from kvcompile.runtime.store.growth import Growth
from kvcompile.runtime.store.live_caches import LiveCaches
from kvcompile.validation.arguments import Arguments
from kvcompile.validation.candidates import TrialCall
from kvcompile.validation.coverage import Coverage
from kvcompile.validation.dependence import Dependence
from kvcompile.validation.sessions import Sessions, countings
from kvcompile.validation.sizes import MOST_ELEMENTS, captured_values, elements, hints, read
from kvcompile.validation.subgraph import NotApart, Subgraph

log = logging.getLogger(__name__)

SEED = 20
ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4}
"""The largest error relative to the largest result that passes as rounding; in float32, 20 times the largest seen over all idioms."""
HOSTILE_ALLOWED = 1e-6
"""Error that is allowed in addition for scores 1e4 times larger: each is rounded by up to 1e7 * 2^-53, and so is its weight."""

ONE_TOKEN = "no call was found in which its queries see several tokens, so that scores matter"


class SiteOutcome(enum.Enum):
    """The result of a site's trial."""

    EQUAL = "validated"
    DIFFERENT = "differs"
    UNKNOWN = "not validated"


@dataclass(frozen=True)
class Verdict:
    """The outcome of a trial, with the reason as a sentence unless it is EQUAL.

    ``differs_on_padding``: the results of queries that see no token differ, though all others are equal.
    """

    outcome: SiteOutcome
    reason: str = ""
    differs_on_padding: bool = False


class _Session:
    """A series of calls of a program and of its twin, with the caches of both (``theirs``, ``ours``) kept from call to call."""

    def __init__(self, part: Subgraph, bound: BoundGraph, arguments: Arguments, dependence: Dependence) -> None:
        self.part, self.bound, self.arguments, self.dependence = part, bound, arguments, dependence
        self.ours: dict[int, Any] = {}
        self.theirs: dict[int, Any] = {}
        # Double precision shows an epsilon that is below the rounding of the program's own dtype.
        self.rounding = max(site.attention.rounding for site in part.sites)
        roots = {slot.placeholder for site in part.sites for slot in site.slots}
        effects = part.effects
        # Caches, and counters that the program itself increments.
        self.kept = [
            entry.index for entry in part.captured.inputs
            if isinstance(part.captured.fakes[entry.index], torch.Tensor) and (entry.node in roots or effects.writes.get(entry.node))
        ]

    def fill(self, moment: TrialCall, unwritten: float) -> None:
        """Fill the caches of the program and of its twin, with equal contents, before a call.

        A cache holds random tokens before the call's first position and ``unwritten`` times random tokens from it on. Paged, sliding and
        growing caches, and caches that are only read, hold random tokens throughout.
        """
        slots = {slot.placeholder: slot for site in self.part.sites for slot in site.slots if slot.placeholder is not None}
        for entry in self.part.captured.inputs:
            if entry.node not in slots:
                continue
            slot, fake = slots[entry.node], self.part.captured.fakes[entry.index]
            assert isinstance(fake, torch.Tensor)
            held = self.arguments.normal(self.arguments.shape(fake, moment), fake.dtype)
            if slot.kind.facts.filled and slot.block_table is None and slot.sliding is None:
                behind = held.narrow(slot.axes.token_dim, moment.start, held.shape[slot.axes.token_dim] - moment.start)
                behind.mul_(unwritten)
            self.theirs[entry.index], self.ours[entry.index] = held, held.clone()

    def call(self, moment: TrialCall) -> str:
        """Run one call of the program and of its twin; return how the results differ, as text, '' if they are equal.

        Raises NotApart if the program itself does not run.
        """
        args = self.arguments.make(moment, {**self.theirs})
        for index in self.kept:
            if index not in self.theirs:
                self.theirs[index], self.ours[index] = args[index], args[index].clone()
        mine = [self.ours.get(index, item.clone() if isinstance(item, torch.Tensor) else item) for index, item in enumerate(args)]
        others = None if self.dependence.whole else self.dependence.other(args)
        expected, found = self._expected(args), self.bound(*mine)
        for index in range(self.part.outputs):
            # A softmax that is masked after its exponentials is NaN where they vanish; ours, masked before, is right.
            ours = torch.where(expected[index].isfinite(), found[index], expected[index]) if moment.hostile else found[index]
            difference = compared(expected[index], ours, (HOSTILE_ALLOWED if moment.hostile else 0.0) + self.rounding)
            if difference:
                return f"the attention's result {difference}"
        if others is not None:
            self.dependence.add(expected, self._expected(others))
        return self._caches(moment, expected, found)

    def _expected(self, args: list[Any]) -> Any:
        """Return the results of the program that is not rewritten; raises NotApart if it does not run."""
        try:
            return self.part.captured.module(*args)
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            raise NotApart(f"it does not run when cut out of its graph ({type(error).__name__}: {first})") from error

    def differs_on_padding(self, moment: TrialCall) -> bool:
        """Run one call with padding among its tokens; return whether results of padding differ between program and twin.

        Raises NotApart if other results differ too.
        """
        args = self.arguments.make(moment, {**self.theirs})
        # The program increments counters among its arguments, so the twin gets copies.
        mine = [self.ours.get(index, item.clone() if isinstance(item, torch.Tensor) else item) for index, item in enumerate(args)]
        expected, found = self._expected(args), self.bound(*mine)
        roles = self.part.sites[0].attention.out_roles
        if not {"B", "S"} <= set(roles) or not compared(expected[0], found[0], self.rounding):
            return False
        both = [item.movedim((roles.index("B"), roles.index("S")), (0, 1)) for item in (expected[0], found[0])]
        padding = torch.arange(both[0].shape[1], device="cpu") + moment.start < moment.padding(both[0].shape[0])[:, None]
        if difference := compared(both[0][~padding], both[1][~padding], self.rounding):
            raise NotApart(f"with padding among the new tokens its result {difference}")
        return True

    def _caches(self, moment: TrialCall, expected: Sequence[Any], found: Sequence[Any]) -> str:
        """Return how the written parts of the program's and the twin's caches differ after a call, as text, "" if they are equal.

        Keeps the caches for the next call.
        """
        last = moment.start + self.arguments.tokens(moment)
        for site in self.part.sites:
            for slot in site.slots:
                for output in slot.outputs:
                    difference = compared(expected[output], handles.decoded(found[output])) if slot.sliding is None else ""
                    if difference and not slot.kind.facts.filled:
                        return f"the cache that it returns {difference}"
                place = next((entry.index for entry in self.part.captured.inputs if entry.node is slot.placeholder), None)
                if place is None:
                    continue
                if slot.outputs:
                    self.theirs[place], self.ours[place] = expected[slot.outputs[0]], found[slot.outputs[0]]
                if slot.kind.facts.filled and slot.block_table is None and slot.sliding is None:
                    dim = slot.axes.token_dim
                    theirs, ours = self.theirs[place], handles.decoded(self.ours[place])
                    held, stored = (item.narrow(dim, 0, min(last, item.shape[dim])) for item in (theirs, ours))
                    if difference := compared(held, stored):
                        return f"the cache that it writes {difference}"
        return ""


def compared(expected: Any, found: Any, more: float = 0.0) -> str:
    """Return how two results differ, as a predicate ("differs by ..."); '' if they are equal up to rounding in their dtype.

    ``more``: error that is allowed besides, as a share of the largest value. Results that are not both tensors are not compared: ''.
    """
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        return ""
    if expected.shape != found.shape:
        return f"has the shape {tuple(found.shape)} in place of {tuple(expected.shape)}"
    allowance = ALLOWED.get(expected.dtype, ALLOWED[torch.float32]) + more
    expected, found = expected.double(), found.double()
    odd = ~expected.isfinite()
    if not torch.equal(odd, ~found.isfinite()):
        return "is NaN or infinite in other elements"
    error = (expected - found).masked_fill(odd, 0).abs().max() if expected.numel() else torch.zeros((), device="cpu")
    scale = expected.masked_fill(odd, 0).abs().max().clamp(min=1e-3) if expected.numel() else torch.ones((), device="cpu")
    return f"differs by {float(error / scale):.1e} of its largest value" if float(error) > allowance * float(scale) else ""


class _Twin:
    """The twin of a program: rewritten with stores in full precision, once for each variant, and bound once for each session."""

    def __init__(self, part: Subgraph) -> None:
        self.part = part
        self.variants: dict[Variant, Rewritten] = {}

    @functools.cached_property
    def planned(self) -> Plan:
        """The plan of the program with every site under the scheme ``dense``."""
        pair = policy_of("dense").of("")
        assert pair is not None
        return Plan(tuple(site_plan(site, pair, self.part.effects) for site in self.part.sites), ())

    def variant(self, which: Variant) -> tuple[Rewritten, Callable[..., Any]]:
        """Return one variant of the rewritten program, and the function that runs it. Raises Unsupported as ``rewrite`` does."""
        if which not in self.variants:
            self.variants[which] = rewrite(self.part.captured, self.planned, which, self.part.effects)
        return self.variants[which], self.variants[which].module

    def session(self, arguments: Arguments, dependence: Dependence | None = None) -> _Session:
        """Return a session: a series of calls of the program and of its twin over caches that begin empty.

        ``dependence`` is added to; None where nobody asks for it.
        """
        part, first = self.part, self.variant(Variant.PAST)[0]
        bound = bind(part.captured, self.planned, part.effects, first, self.variant, Growth(), LiveCaches())
        return _Session(part, bound, arguments, dependence or Dependence(arguments, 0))


def tried(part: Subgraph, examples: Sequence[Any]) -> Verdict:
    """Return the verdict on the subgraph ``part``, from trials of it and its twin; ``examples``: the captured graph's arguments."""
    try:
        arguments = Arguments(part, examples, torch.Generator(device="cpu").manual_seed(SEED))
        twin, covered = _Twin(part), Coverage(part)
        verdict = _tried(twin, arguments, captured_values(part), covered)
        # Sizes may depend on one another in ways that no guard shows; the captured ones fit.
        if verdict.outcome is SiteOutcome.UNKNOWN and elements(part, hints(part)) <= MOST_ELEMENTS:
            verdict = _tried(twin, arguments, hints(part), covered)
    except NotApart as reason:
        return Verdict(SiteOutcome.UNKNOWN, str(reason))
    return verdict


def _tried(twin: _Twin, arguments: Arguments, values: Values, covered: Coverage) -> Verdict:
    """Return the verdict at the sizes ``values``, trying guesses at which ints count tokens until one lets calls be compared.

    If none does, the verdict of the first guess. Raises NotApart.
    """
    verdict = None
    for counters in countings(twin.part, arguments):
        found = _counting(twin, Sessions(twin.part, arguments, counters), values, covered)
        if found.outcome is not SiteOutcome.UNKNOWN:
            return found
        verdict = verdict or found
    assert verdict is not None
    return verdict


def _counting(twin: _Twin, ways: Sessions, values: Values, covered: Coverage) -> Verdict:
    """Return the verdict from sessions of the program and of its rewritten twin, at the sizes ``values`` and then at other sizes.

    Other sizes are tried until each symbol took two values. UNKNOWN if no call that proves something could be made.
    """
    arguments, sessions = ways.arguments, list(ways.all(values))
    dependence = Dependence(arguments, twin.part.outputs)
    done, several, unknown = False, False, ""
    for moments, unwritten in itertools.chain(sessions, ways.elsewhere(values, covered)):
        try:
            session = twin.session(arguments, dependence)
            session.fill(moments[0], unwritten)
            for number, moment in enumerate(moments):
                if difference := session.call(moment):
                    if arguments.pooled:
                        raise NotApart(f"with a block table other than the model's {difference}")
                    state = f"{moment.start} tokens before it" + (", unwritten slots not zero" if unwritten else "")
                    state += ", large scores and unusual masks" if moment.hostile else ""
                    return Verdict(SiteOutcome.DIFFERENT, f"{difference} (call {number + 1}, {state}, seed {SEED})")
                covered.add(moment.values)
                done, several = True, several or _several(arguments, moment)
        except NotApart as reason:
            unknown = unknown if moments[0].hostile else str(reason)
        except KvcompileError as error:
            # A call that the runtime refuses raises, and gives no wrong result.
            covered.refuse(values, moments[0].values)
            unknown = unknown if moments[0].ahead or moments[0].hostile else f"the rewritten attention was refused: {error}"
        except Exception as error:
            log.debug("the rewritten attention fails", exc_info=True)
            first = next(iter(str(error).splitlines()), "")
            return Verdict(SiteOutcome.DIFFERENT, f"it fails with {type(error).__name__}: {first} (seed {SEED})")
    # A program that reads one token has no other call.
    if not several and (unknown or not done):
        return Verdict(SiteOutcome.UNKNOWN, unknown or "no call of it could be made")
    if covered.wanted():
        return Verdict(SiteOutcome.UNKNOWN, covered.missing())
    padding = _differs_on_padding(twin, arguments, sessions)
    if several and not dependence.whole and not _moved_together(arguments):
        return Verdict(SiteOutcome.UNKNOWN, ONE_TOKEN, differs_on_padding=padding)
    return Verdict(SiteOutcome.EQUAL, differs_on_padding=padding)


def _moved_together(arguments: Arguments) -> bool:
    """Return whether other integers than positions are arguments, such as a buffer of padding: generated ones move with the positions.

    Queries may then see one token in all calls because of that, and not because the program reads one.
    """
    inputs, fakes = arguments.part.captured.inputs, arguments.part.captured.fakes
    tensors = [fake for entry in inputs if isinstance(fake := fakes[entry.index], torch.Tensor)]
    return not arguments.pooled and sum(fake.dtype in {torch.int32, torch.int64} for fake in tensors) > 1


def _several(arguments: Arguments, moment: TrialCall) -> bool:
    """Return whether there is more than one token that a query of a call, with scores of usual size, could see."""
    return not moment.hostile and moment.start + arguments.tokens(moment) > 1 and arguments.keys(moment) > 1


class _OfTheFirstStep(Arguments):
    """Makes the arguments that a graph was compiled with, on the CPU, but with random queries, new tokens and caches."""

    def make(self, moment: TrialCall, kept: dict[int, torch.Tensor]) -> list[Any]:
        """Return the arguments of the first step: ``kept`` caches, random queries and new tokens, others as the graph was compiled with.

        Raises NotApart where the value of one is not known.
        """
        made: list[Any] = []
        for entry, fake in zip(self.part.captured.inputs, self.part.captured.fakes, strict=True):
            if not isinstance(fake, torch.Tensor):
                made.append(read(fake, moment.values) if isinstance(fake, torch.SymInt) else fake)
                continue
            if entry.index in kept:
                made.append(kept[entry.index])
                continue
            shape = self.shape(fake, moment)
            value = self.normal(shape, fake.dtype) if entry.index in self.part.given else self.example(entry.index, shape)
            if value is None:
                raise NotApart(f"{entry.source} of the first step is not known")
            made.append(value.to(fake.dtype))
        return made


def first_step(part: Subgraph, examples: Sequence[Any]) -> Verdict:
    """Return the verdict on one call over full caches, with the positions and masks that the graph was compiled with.

    DIFFERENT if the twin raises an unexpected error, UNKNOWN if the program does not run by itself, the runtime refuses the call, or the
    results are equal but depend on no queries, as in a step whose queries see one token.
    """
    moment = TrialCall(hints(part), 0)
    try:
        arguments = _OfTheFirstStep(part, examples, torch.Generator(device="cpu").manual_seed(SEED))
        dependence = Dependence(arguments, part.outputs)
        session = _Twin(part).session(arguments, dependence)
        session.fill(moment, 1.0)
        difference = session.call(moment)
    except (NotApart, KvcompileError) as reason:
        return Verdict(SiteOutcome.UNKNOWN, str(reason))
    except Exception as error:
        log.debug("the rewritten attention fails", exc_info=True)
        return Verdict(SiteOutcome.DIFFERENT, f"it fails with {type(error).__name__}: {error} (the first step, seed {SEED})")
    if difference:
        return Verdict(SiteOutcome.DIFFERENT, f"{difference} (the first step, seed {SEED})")
    return Verdict(SiteOutcome.EQUAL) if dependence.whole else Verdict(SiteOutcome.UNKNOWN, "its queries see one token there")


def _differs_on_padding(twin: _Twin, arguments: Arguments, sessions: list[tuple[list[TrialCall], float]]) -> bool:
    """Return whether the twin's results of padding queries, which see no token, differ from the program's; False if no call can be made."""
    if not sessions or not arguments.free:
        return False
    first = sessions[0][0][0]
    moment = dataclasses.replace(first, padded=first.start + min(2, arguments.tokens(first)), blind=True)
    for infinite in (False, True):
        with contextlib.suppress(NotApart, KvcompileError):
            session = twin.session(arguments)
            session.fill(moment, 0.0)
            if session.differs_on_padding(dataclasses.replace(moment, infinite=infinite)):
                return True
    return False
