"""Inverse: find an argument for which a program writes its tokens at wanted positions.

A program may compute positions from anything: p from 3 p + 1, from hundredths, from a count from the end. Where the positions rise or fall
with the argument, token by token, bisection finds one for any spelling of the arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

RANGES = ((-1 << 24, 1 << 24), (0, 1 << 24), (0, 1 << 12), (0, 255), (0, 63), (0, 31))
"""Ranges of integers that are searched; float32 holds all integers of the first. A program with a table of positions takes small ones."""


def solve(positions: Callable[[torch.Tensor], torch.Tensor | None], held: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor | None:
    """Return an argument like ``held`` [..., S or 1] for which ``positions`` returns ``wanted`` [S]; None where none was found.

    ``positions`` returns None for an argument that the program does not run with. Only integers are tried.
    """
    most = 1 << 24 if held.dtype.is_floating_point else torch.iinfo(held.dtype).max
    shape = held.shape[-1:] if held.dim() else held.shape
    if held.numel() == 0 or shape.numel() not in {1, wanted.numel()}:
        return None

    def at(numbers: torch.Tensor) -> torch.Tensor | None:
        found = positions(numbers.to(held.dtype).expand(held.shape).contiguous())
        if found is None or found.numel() % wanted.numel():
            return None
        return found.view(-1, wanted.numel())[0].to(torch.int64)

    target = wanted if shape.numel() == wanted.numel() else wanted[:1]
    for sign, (first, last) in itertools.product((1, -1), RANGES):
        if last > most:
            continue
        low, high = torch.full_like(target, first), torch.full_like(target, last)
        while bool((low < high).any()):
            middle = (low + high).div(2, rounding_mode="floor")
            found = at(middle.view(shape))
            if found is None:
                break
            short = sign * found[: target.numel()] < sign * target
            low, high = torch.where(short, middle + 1, low), torch.where(short, high, middle)
        else:
            found = at(low.view(shape))
            if found is not None and torch.equal(found, wanted):
                return low.view(shape).to(held.dtype).expand(held.shape).contiguous()
    return None
