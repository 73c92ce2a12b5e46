"""Arguments: operands for a cut program, with positions and masks that a cache in use could have.

The candidates of the arguments that positions or masks are computed from (``candidates``) are combined until the program writes its tokens
at the wanted positions, and its masks show every query some token and not all slots after the last one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.match.mask.masks import shown_by
from kvcompile.passes.match.sites import MaskTerm
from kvcompile.validation.candidates import Candidates, TrialCall
from kvcompile.validation.inverse import solve
from kvcompile.validation.sizes import read
from kvcompile.validation.subgraph import NotApart

COMBINATIONS = 400
"""The most combinations of readings that are tried."""
MOVES = (-2e4, 0.0, 1e6)
"""Numbers to add to rows of an added mask in a hostile call, one to each; they do not change a softmax."""
COUNTS = (1, 2, 3, -1)
"""Integers that replace 1 in an integer mask of a hostile call."""
AHEAD = 2
"""How many slots further a limit of visible positions goes in a call that shows slots not written yet."""


class Arguments(Candidates):
    """A maker of the arguments of a program's calls: the first combination of candidates that makes a possible call."""

    def make(self, moment: TrialCall, kept: dict[int, torch.Tensor]) -> list[Any]:
        """Return the arguments of a call; ``kept``: caches and counters, by index, that stay from call to call.

        Raises NotApart if no combination of positions and masks makes a possible call.
        """
        made: list[Any] = []
        choices: dict[int, list[Any]] = {}
        for entry, fake in zip(self.part.captured.inputs, self.part.captured.fakes, strict=True):
            if isinstance(fake, torch.SymInt):
                made.append(read(fake, moment.values))
            elif not isinstance(fake, torch.Tensor):
                made.append(fake)
            elif entry.index in kept:
                made.append(kept[entry.index])
            elif entry.node in self.behind and entry.index not in self.part.given:
                choices[entry.index] = self.readings(fake, entry.index, moment)
                if moment.ahead and entry.node in self.limiting and not fake.dtype.is_floating_point and fake.dtype is not torch.bool:
                    choices[entry.index] = [value + AHEAD for value in choices[entry.index]]
                made.append(choices[entry.index][0])
            else:
                made.append(self.plain(fake, entry.index, moment))
        order = list(choices)
        first_reading = [
            [choices[index][self.first_reading[index]]]
            if self.first_reading.get(index, 99) < len(choices[index]) and not (moment.blind and choices[index][0].is_floating_point())
            else choices[index]
            for index in order
        ]
        every = [choices[index] for index in order]
        if self.chosen(made, order, first_reading, moment) or (first_reading != every and self.chosen(made, order, every, moment)):
            return self.hostile(made, order, moment) if moment.hostile else made
        for index, options in choices.items():
            made[index] = options[self.first_reading.get(index, 0)] if self.first_reading.get(index, 0) < len(options) else options[0]
        if self.solved(made, order, moment):
            return self.hostile(made, order, moment) if moment.hostile else made
        raise NotApart("no values of its positions and masks were found with which it writes its tokens in order")

    def chosen(self, made: list[Any], order: list[int], ways: list[list[torch.Tensor]], moment: TrialCall) -> bool:
        """Fill ``made`` with the first combination of readings that makes a possible call; return False if none does.

        ``order``: the arguments to fill; ``ways``: each one's readings. The next call tries the readings that were found first.
        """
        every = list(itertools.islice(itertools.product(*(range(len(options)) for options in ways)), COMBINATIONS))
        # A mask may hide all tokens from some query for any argument: then try without the check of masks.
        for way, strict in [*((way, True) for way in every), *((way, False) for way in every if self.free)]:
            for index, options, number in zip(order, ways, way, strict=True):
                made[index] = options[number]
            if self.possible(made, moment, strict):
                for index, options, number in zip(order, ways, way, strict=True):
                    if len(options) > 1 or index not in self.first_reading:
                        self.first_reading[index] = number
                return True
        return False

    def solved(self, made: list[Any], order: list[int], moment: TrialCall) -> bool:
        """Solve for the value of one argument from which the program computes the call's positions; return whether there is one.

        The value replaces that argument in ``made``; the other arguments stay. ``order``: the indices to try, in order.
        """
        count = self.tokens(moment)
        wanted = torch.arange(moment.start, moment.start + count, device="cpu")

        def positions(index: int, value: torch.Tensor) -> torch.Tensor | None:
            found = self.evaluated([*made[:index], value, *made[index + 1 :]])
            return found[0].reshape(-1) if found and self.indices else None

        for index in order:
            held = made[index]
            if held.dtype is torch.bool or self.part.captured.inputs[index].node not in self.places:
                continue
            value = solve(functools.partial(positions, index), held, wanted)
            if value is not None:
                made[index] = value
                if self.possible(made, moment, True) or (self.free and self.possible(made, moment, False)):
                    return True
                made[index] = held
        return False

    def hostile(self, made: list[Any], masks: Sequence[int], moment: TrialCall) -> list[Any]:
        """Return the arguments ``made`` with unusual values in each of ``masks`` (indices) for which the call stays possible.

        Masks that do not run along all cached tokens stay as they are. The new tokens of a row stay as visible as before, so no query loses
        all tokens that it sees.
        """
        strict = self.possible(made, moment, True)
        for index in masks:
            value, node = made[index], self.part.captured.inputs[index].node
            if node in self.places or not value.dim() or value.shape[-1] != self.keys(moment):
                continue
            changed = [*made[:index], self.changed(value, moment), *made[index + 1 :]]
            if self.possible(changed, moment, strict):
                made = changed
        return made

    def changed(self, mask: torch.Tensor, moment: TrialCall) -> torch.Tensor:
        """Return a mask like the argument ``mask`` [..., T], with unusual values.

        More past tokens are hidden, integers are others than 0 and 1, and other numbers are added.
        """
        old = torch.arange(mask.shape[-1], device="cpu") < moment.start
        if mask.dtype is torch.bool:
            return mask & ~(old & (torch.rand(mask.shape, generator=self.random, device="cpu") < 0.5))
        if not mask.dtype.is_floating_point:
            return torch.where(old & (mask != 0), self.among(COUNTS, mask.shape).to(mask.dtype), mask)
        moved = mask + self.among(MOVES, (*mask.shape[:-1], 1)).to(mask.dtype)
        return torch.where(mask > torch.finfo(mask.dtype).min, moved, mask)

    def possible(self, made: list[Any], moment: TrialCall, strict: bool) -> bool:
        """Return whether the program, with arguments ``made``, writes its tokens in order from the call's first position on.

        ``strict``: its masks must also pass ``hides``. True if the program computes neither positions nor masks and its offsets fit.
        """
        for offset in self.offsets:
            value = offset if isinstance(offset, int) else read(value_of(offset), moment.values)
            if value != moment.start:
                return False
        if self.checks is None:
            return True
        values = self.evaluated(made)
        if values is None:
            return False
        count = self.tokens(moment)
        wanted = torch.arange(moment.start, moment.start + count, device="cpu")
        if not all(self.in_order(value, wanted) for value in values[: len(self.indices)]):
            return False
        return not strict or all(
            self.hides(term, value, moment) for term, value in zip(self.terms, values[len(self.indices) :], strict=True)
            if term in self.free
        )

    def evaluated(self, made: list[Any]) -> Sequence[torch.Tensor] | None:
        """Return the positions and masks that the program computes from its arguments ``made``; None if it computes none, or fails."""
        if self.checks is None:
            return None
        module, taken, _ = self.checks
        try:
            found: Sequence[torch.Tensor] = module(
                *[item.clone() if isinstance(item, torch.Tensor) else item for item in (made[index] for index in taken)]
            )
        except (RuntimeError, IndexError, ValueError):
            # A position outside of a table, say.
            return None
        return found

    @staticmethod
    def in_order(value: torch.Tensor, wanted: torch.Tensor) -> bool:
        """Return whether ``value`` holds the ``wanted`` positions in every row."""
        flat = value.reshape(-1).to(torch.int64)
        if flat.numel() == 0 or flat.numel() % wanted.numel():
            return False
        if torch.equal(flat.view(-1, wanted.numel()), wanted.expand(flat.numel() // wanted.numel(), -1)):
            return True
        return torch.equal(flat.view(wanted.numel(), -1), wanted[:, None].expand(-1, flat.numel() // wanted.numel()))

    def hides(self, term: MaskTerm, value: torch.Tensor, moment: TrialCall) -> bool:
        """Return whether a mask shows every query some token (unless the call is ``blind``), and hides a slot after the last written token.

        It need not hide that slot if a limit by position does, or if the call's masks are to show such slots (``ahead``).
        """
        seen = shown_by(term, value).movedim(term.roles.index("T"), -1)
        last = moment.start + self.tokens(moment)
        # If only some slots not written yet are visible, positions decide which: the program itself shows them.
        behind = seen[..., last:]
        some = moment.blind or bool(seen[..., :last].any(-1).all())
        return some and (moment.ahead or not (self.open and behind.numel() and bool(behind.all(-1).any())))
