"""Laws of attention over a scheme's codes: it reads the decoded tokens, hidden tokens have no effect, and NaN propagates."""

from __future__ import annotations

import torch

from kvcompile.lowering.ops.operations import append_body, attend
from kvcompile.schemes import Scheme
from kvcompile.testing.laws import Over, law, unlike
from kvcompile.testing.problem import Problem, masks
from kvcompile.testing.samples import DTYPES
from kvcompile.types import PAGE, Role

DECODED = "let `decode` take the planes that attention reads, of some heads and of any pages, and give what `encode` was given"


@law(Over.DEFAULT, DECODED)
def attention_is_over_the_decoded_tokens(scheme: Scheme) -> None:
    """Check that attention equals the float64 reference: under every mask and bias, in every dtype, at several lengths and head groups.

    Raises Unlike.
    """
    problem = Problem(scheme, scheme)
    for operands in masks(problem).values():
        problem.check(**operands)
    for dtype in DTYPES:
        Problem(scheme, scheme, dtype).check()
    for tokens, kv_heads, groups in ((1, 1, 4), (PAGE - 1, 2, 7), (PAGE + 1, 1, 1), (1000, 1, 8)):
        Problem(scheme, scheme, kv_heads=kv_heads, groups=groups, tokens=tokens, queries=1, batch=3).check()


@law(Over.DEFAULT, DECODED)
def a_query_that_sees_nothing_gives_zeros(scheme: Scheme) -> None:
    """Check that a query that sees no token gives zeros, with and without sinks; raises Unlike.

    Its limit, padding, a mask or a bias hides all tokens from it.
    """
    for dtype in DTYPES:
        problem = Problem(scheme, scheme, dtype)
        hi = problem.hi.clone()
        hi[0, 1] = -1
        keep = torch.ones(problem.batch, problem.tokens, dtype=torch.bool, device="cpu")
        keep[1] = False
        nothing = torch.zeros(1, 1, problem.queries, problem.tokens, dtype=torch.bool, device="cpu")
        hidden = torch.where(nothing, 0.0, float("-inf"))
        for name, found in (
            ("behind all tokens", problem.check(hi=hi)[:, :, 1]), ("of padding", problem.check(keep=keep)[1]),
            ("of padding with sinks", problem.check(keep=keep, sinks=torch.zeros(6, device="cpu"))[1]),
            ("under a mask", problem.check(bias=nothing)), ("under a bias", attend(*problem.arguments(bias=hidden))),
        ):
            if found.any():
                unlike(f"zeros for queries {name}", f"values up to {float(found.abs().max()):.3g}")


@law(Over.DEFAULT, DECODED)
def tokens_that_are_hidden_have_no_say(scheme: Scheme) -> None:
    """Check that NaN or arbitrary codes in tokens that masks hide do not change attention's result; raises Unlike."""
    problem = Problem(scheme, scheme)
    lo, keep = torch.full_like(problem.hi, 10), torch.ones(1, problem.tokens, dtype=torch.bool, device="cpu")
    keep[:, 20:25] = False
    before = problem.check(lo=lo, keep=keep)
    for plane in (*problem.read(Role.KEY), *problem.read(Role.VALUE)):
        if plane.shape[3] == PAGE:  # A scale of several tokens is read for those that are seen.
            fill = float("nan") if plane.dtype.is_floating_point else 0x7F
            plane[0, :, :, :10] = fill
            plane[0, :, :, 20:25] = fill
    if not torch.equal(attend(*problem.arguments(lo=lo, keep=keep)), before):
        unlike("the same result whatever hidden tokens are", "another one")


@law(Over.DEFAULT, "make the scale of a group NaN where a value of it is NaN or Inf, so that whoever attends to it sees it")
def nan_that_is_attended_to_comes_out(scheme: Scheme) -> None:
    """Check that a key or value of NaN or Inf leaves no finite result to queries that see it; a key leaves earlier queries finite.

    Raises Unlike.
    """
    for role in Role:
        for poison in (float("nan"), float("inf")):
            for sinks in (None, torch.zeros(6, device="cpu")):
                _spoils(Problem(scheme, scheme), role, poison, sinks)


def _spoils(problem: Problem, role: Role, poison: float, sinks: torch.Tensor | None) -> None:
    """Set the key or value two positions before the end to ``poison``, and check that the last queries' results are not finite.

    Raises Unlike. For keys, the results of the first two queries, which do not see that token, must stay finite. Changes ``problem``.
    """
    planes, scheme = (problem.k_planes, problem.keys) if role is Role.KEY else (problem.v_planes, problem.values)
    x = torch.full((problem.batch, problem.kv_heads, 1, problem.width), poison, device="cpu")
    at = problem.tokens - 2
    # Inf times a negative query is minus infinity: no mass.
    problem.q.abs_()
    if problem.base is not None:
        newest = problem.exact_newest[0 if role is Role.KEY else 1]
        newest[:, :, at - int(problem.base)] = poison
    else:
        append_body(x, planes, torch.tensor([[at]], device="cpu"), scheme.spec())
    out = attend(*problem.arguments(sinks=sinks))
    if torch.isfinite(out[:, :, 2:]).any():
        unlike(f"no number where a {role.value} of {poison} is attended to", "numbers")
    if role is Role.KEY and not torch.isfinite(out[:, :, :2]).all():
        unlike(f"numbers for queries before a key of {poison}", "none")
