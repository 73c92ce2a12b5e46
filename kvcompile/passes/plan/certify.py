"""Certify: add a certificate, or an error report where a scheme has no certificate, to the schemes of a policy. Pure."""

from __future__ import annotations

import torch

from kvcompile.errors import BadSetting, NoOriginals
from kvcompile.passes.plan.policy import Pair, Policy
from kvcompile.passes.plan.reporting import check_scheme
from kvcompile.schemes import Certify
from kvcompile.schemes.certificate.policy import Fallback
from kvcompile.types import PAGE, Role, SlotSpec


def certifying(policy: Policy, certify: object) -> Policy:
    """Return the policy with ``certify`` set on schemes that have a certificate, and error reports for the others.

    Exact schemes stay unchanged where other layers fall back to dense: they have nothing to fall back to. Raises BadSetting if ``certify``
    is not a Certify, or a SchemeError if a scheme supports neither.
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
