"""Law of compiled code: Inductor, with the C++ template on a CPU, gives the results of the eager definition."""

from __future__ import annotations

import torch

from kvcompile.schemes import Scheme
from kvcompile.testing.caches import ROWS, Buffers, compiled, inputs
from kvcompile.testing.laws import Over, law, unlike
from kvcompile.testing.samples import fitting

PROMPT, STEPS = 70, (1, 1, 5)


def outputs(scheme: Scheme, inner: str) -> list[torch.Tensor]:
    """Return the results of a prompt and steps through an attention that is compiled by the inner compiler ``inner``."""
    width, start, found = fitting(scheme).head_dim, 0, []
    run, given = compiled(Buffers(ROWS, width), scheme, inner), inputs(width, PROMPT + sum(STEPS))
    with torch.no_grad():
        for count in (PROMPT, *STEPS):
            found.append(run(*(x[:, :, start : start + count] for x in given), torch.arange(start, start + count, device="cpu")))
            start += count
    return found


@law(Over.DEFAULT, "write `encode` so that every compiler rounds it alike: products where there is a choice, no division by a constant")
def inductor_gives_what_the_definition_gives(scheme: Scheme) -> None:
    """Check that Inductor's code gives the results of the eager bodies, within 1e-4 of the largest; raises Unlike."""
    for index, (eager, found) in enumerate(zip(outputs(scheme, "eager"), outputs(scheme, "inductor"), strict=True)):
        error, size = float((found - eager).abs().max()), float(eager.abs().max())
        if not error <= 1e-4 * size:
            unlike(f"results of call {index} within {1e-4 * size:.3g}", f"an error of {error:.3g}")
