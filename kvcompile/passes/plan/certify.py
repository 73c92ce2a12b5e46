"""Certify: give a policy's schemes budgets and checks, or a report of their error where their attention has no certificate. Pure."""

from __future__ import annotations

import torch

from kvcompile.errors import BadSetting, NoOriginals
from kvcompile.passes.plan.policy import Pair, Policy
from kvcompile.passes.plan.reporting import check_scheme
from kvcompile.schemes import Certify
from kvcompile.schemes.certificate.policy import Fallback
from kvcompile.types import PAGE, Role, SlotSpec


def certifying(policy: Policy, certify: object) -> Policy:
    """The policy with ``certify`` for schemes whose attention has a certificate, and reports for the others.

    Exact layers beside others that fall back are left as they are: they are what the others fall back to.
    Raises BadSetting, or a SchemeError where there can be neither.
    """
    if not isinstance(certify, Certify):
        raise BadSetting(setting="certify", expected="a Certify", found=certify)
    text = certify.spec()
    given = {glob: (pair.k.certifying(text), pair.v.certifying(text)) for glob, pair in policy.pairs}
    some = any(key is not None or value is not None for key, value in given.values())

    def chosen(glob: str, pair: Pair) -> Pair:
        key, value = given[glob]
        if key is not None or value is not None:
            return Pair(key or pair.k, value or pair.v)
        if certify.fallback is Fallback.DENSE:
            inexact = [scheme for scheme in (pair.k, pair.v) if not scheme.exact]
            if some and not inexact:
                return pair
            raise NoOriginals(scheme=(inexact or [pair.k])[0].spec())
        for scheme, role in ((pair.k, Role.KEY), (pair.v, Role.VALUE)):
            check_scheme(scheme.for_role(role), SlotSpec(1, PAGE, torch.float32, role), glob)
        return Pair(pair.k, pair.v, certify)

    return Policy(tuple((glob, None if pair is None else chosen(glob, pair)) for glob, pair in policy.rules))
