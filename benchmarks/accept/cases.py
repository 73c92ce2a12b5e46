"""Cases: which combinations are valid, and a deterministic set of them that covers every valid pair of two axes' values.

The full product has millions of combinations. ``allpairspy`` covers pairs between families of architectures and all other
axes; within its family each architecture is then dealt the rows that show it something new, and rows are added until every
architecture has met every value of the axes in ``SPREAD`` that is valid for it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.accept.architectures import ARCHITECTURES
from benchmarks.accept.axes import (
    AXES,
    SPREAD,
    Architecture,
    Batch,
    Caching,
    Case,
    Dtype,
    Family,
    HeadDim,
    Mode,
    Prompt,
    Scheme,
    Trait,
)

Pair = tuple[str, object, str, object]


def invalid(case: Case) -> str | None:
    """Return why a combination does not exist, or None where it does."""
    traits, caching = case.architecture.traits, case.caching
    if Trait.NO_STATIC in traits and not caching.grows:
        return Trait.NO_STATIC.value
    if Trait.NO_DYNAMIC in traits and caching.grows:
        return Trait.NO_DYNAMIC.value
    if caching.generates and Trait.MODULE in traits:
        return "a module without words cannot generate"
    if caching.generates and Trait.NO_GENERATE in traits:
        return Trait.NO_GENERATE.value
    if caching.generates and case.prompt is Prompt.EAGER:
        return "generate sends the prompt through model.forward, which is compiled"
    if Trait.NO_PADDING in traits and case.batch is Batch.PADDED:
        return Trait.NO_PADDING.value
    if Trait.STEPS_BACK in traits and case.batch is Batch.PADDED and case.scheme.windowed:
        return Trait.STEPS_BACK.value
    if Trait.EXPERTS in traits and case.dtype is not Dtype.FP32:
        return Trait.EXPERTS.value
    if Trait.FLOAT32 in traits and case.dtype is not Dtype.FP32:
        return Trait.FLOAT32.value
    if Trait.FIXED_DIM in traits and case.head_dim is not HeadDim.D64:
        return Trait.FIXED_DIM.value
    return None


def refusal(case: Case) -> str | None:
    """Return why docs/SUPPORT.md says that some attention of this case stays dense, or None where all must be rewritten."""
    traits = case.architecture.traits
    if Trait.CROSS in traits and case.prompt is Prompt.EAGER:
        return "a cache that is only read is stored compressed where a compiled call has filled it"
    for trait in (Trait.SPLIT_STATIC, Trait.FROM_THE_END):
        if trait in traits and not case.caching.grows:
            return trait.value
    if case.scheme.plain:
        return None
    if Trait.SLIDING in traits:
        return "windows that keep the newest tokens hold schemes without blocks only"
    if Trait.PAGED in traits:
        return "pools hold schemes without blocks only"
    if Trait.LATENT in traits and case.scheme is Scheme.NORMED:
        return "a latent is keys and values, so that keys are not rotated alone"
    if Trait.CROSS in traits and case.scheme is not Scheme.FIRST:
        return "a cache that is only read cannot keep its newest tokens beside its codes"
    if Trait.LATENT in traits and case.scheme is Scheme.CERTIFIED:
        return "keys and values that are made from a latent have no certificate"
    if Trait.STEPS_BACK in traits and case.scheme is Scheme.SMARTKV:
        return "widths are decided of rows that write at one position"
    if Trait.LATENT in traits and case.scheme is Scheme.SMARTKV:
        return "widths of keys and values that are made from a latent are not decided"
    return None


def members(family: Family) -> tuple[Architecture, ...]:
    """Return the architectures of a family."""
    return tuple(item for item in ARCHITECTURES if item.family is family)


def variants(case: Case) -> Iterator[Case]:
    """Return the valid cases that differ from ``case`` in the architecture only, within its family."""
    for architecture in members(case.architecture.family):
        changed = dataclasses.replace(case, architecture=architecture)
        if invalid(changed) is None:
            yield changed


def pairs(case: Case) -> Iterator[Pair]:
    """Return the pairs of values that a case covers."""
    for one, other in itertools.combinations(AXES, 2):
        yield one, case.value(one), other, case.value(other)


@functools.cache
def witnesses() -> dict[Pair, Case]:
    """Return a valid case for every pair of two axes' values that has one."""
    found: dict[Pair, Case] = {}
    for one, other in itertools.combinations(AXES, 2):
        rest = [axis for axis in AXES if axis not in {one, other}]
        for a, b in itertools.product(AXES[one], AXES[other]):
            if (one, a, other, b) in found:
                continue
            for values in itertools.product(*(AXES[axis] for axis in rest)):
                case = _first({one: a, other: b, **dict(zip(rest, values, strict=True))})
                if case is not None:
                    found.update((pair, case) for pair in pairs(case) if pair not in found)
                    break
    return found


def _first(row: dict[str, object]) -> Case | None:
    """Return the first valid case of a row of values by axis, whose ``family`` stands for its architectures."""
    rest = {axis: value for axis, value in row.items() if axis != "family"}
    for architecture in members(row["family"]):  # type: ignore[arg-type]
        case = Case(architecture, **rest)  # type: ignore[arg-type]
        if invalid(case) is None:
            return case
    return None


def _possible(row: Sequence[object]) -> bool:
    """Return whether the first values of a row, in the order of ``AXES``, can become a valid case."""
    given = dict(zip(AXES, row, strict=False))
    if "family" not in given:
        return True
    # Only these axes take part in ``invalid``; those not chosen yet are free.
    open_axes = [axis for axis in ("caching", "prompt", "batch", "dtype", "head_dim", "scheme") if axis not in given]
    defaults = {"mode": Mode.DEFAULT}
    for values in itertools.product(*(AXES[axis] for axis in open_axes)):
        if _first({**defaults, **given, **dict(zip(open_axes, values, strict=True))}) is not None:
            return True
    return False


@functools.cache
def all_cases() -> tuple[Case, ...]:
    """Return the cases of the whole run, architectures far from each other, each case once."""
    from allpairspy import AllPairs

    made: dict[Case, None] = {}
    met: set[tuple[Architecture, str, object]] = set()
    for values in AllPairs([list(AXES[axis]) for axis in AXES], filter_func=_possible):
        case = _first(dict(zip(AXES, values, strict=True)))
        if case is None:
            continue
        _add(max(variants(case), key=lambda item: (len(_news(item, met)), -_uses(item.architecture, made))), made, met)
    # With a filter, allpairspy gives up on pairs whose row it cannot finish.
    covered = {pair for case in made for pair in pairs(case)}
    for pair, case in witnesses().items():
        if pair not in covered:
            best = max(variants(case), key=lambda item: (len(_news(item, met)), -_uses(item.architecture, made)))
            _add(best, made, met)
            covered.update(pairs(best))
    for architecture in ARCHITECTURES:
        while (case := _missing(architecture, met)) is not None:
            _add(case, made, met)
    return tuple(_dealt(made))


def _add(case: Case, made: dict[Case, None], met: set[tuple[Architecture, str, object]]) -> None:
    made[case] = None
    met |= _news(case, met)


def _uses(architecture: Architecture, made: Iterable[Case]) -> int:
    return sum(case.architecture == architecture for case in made)


def _news(case: Case, met: set[tuple[Architecture, str, object]]) -> set[tuple[Architecture, str, object]]:
    """Return the values of ``SPREAD`` that a case's architecture has not met yet."""
    return {(case.architecture, axis, case.value(axis)) for axis in SPREAD} - met


def _missing(architecture: Architecture, met: set[tuple[Architecture, str, object]]) -> Case | None:
    """Return the valid case that shows an architecture the most values it has not met; None where it has met all."""
    turn = ARCHITECTURES.index(architecture)
    schemes, dims = AXES["scheme"], AXES["head_dim"]
    rows = itertools.product(*(AXES[axis] for axis in SPREAD))
    # Schemes and head dims go around, so that rows that are added differ in them too.
    made = sum(item == architecture for item, *_ in met)
    fixed = {"scheme": schemes[(turn + made) % len(schemes)], "head_dim": dims[(turn + made) % len(dims)]}
    if Trait.FIXED_DIM in architecture.traits:
        fixed["head_dim"] = HeadDim.D64
    cases = [Case(architecture, **fixed, **dict(zip(SPREAD, row, strict=True))) for row in rows]
    best = max((case for case in cases if invalid(case) is None), key=lambda case: len(_news(case, met)))
    return best if _news(best, met) else None


def _dealt(cases: Iterable[Case]) -> Iterator[Case]:
    """Return the cases in rounds of one for each architecture, so that a run that ends early has met them all."""
    queues = {architecture: [case for case in cases if case.architecture == architecture] for architecture in ARCHITECTURES}
    for row in itertools.zip_longest(*queues.values()):
        yield from (case for case in row if case is not None)


def _form() -> re.Pattern[str]:
    """Return the pattern of ``Case.id``."""
    axes = {"scheme": Scheme, "caching": Caching, "prompt": Prompt, "mode": Mode, "head_dim": HeadDim, "batch": Batch, "dtype": Dtype}
    values = {axis: [f"d{int(item)}" if axis == "head_dim" else str(item.value) for item in kind] for axis, kind in axes.items()}
    values = {"architecture": [str(item) for item in ARCHITECTURES], **values}
    return re.compile("-".join(f"(?P<{axis}>{'|'.join(map(re.escape, words))})" for axis, words in values.items()))


def by_id(identifier: str) -> Case:
    """Return the case with an identifier, of the whole run or not; raises KeyError for one that names no combination."""
    found = _form().fullmatch(identifier)
    if found is None:
        raise KeyError(identifier)
    return Case(
        next(item for item in ARCHITECTURES if str(item) == found["architecture"]), Caching(found["caching"]), Mode(found["mode"]),
        Prompt(found["prompt"]), Scheme(found["scheme"]), HeadDim(int(found["head_dim"][1:])), Batch(found["batch"]), Dtype(found["dtype"]),
    )


CPU_SLICE = (
    "gemma2/eager-int8-dynamic-eager-default-d64-one-float32",
    "llama-kivi-static-eager-default-d64-one-bfloat16",
    "gpt-fast-squat-static-compiled-default-d64-one-bfloat16",
    "llama/eager-certified-static-eager-default-d64-one-float32",
    "gpt2-fp8-generate-compiled-reduce-overhead-d96-one-float16",
    "bloom/eager-dense-dynamic-eager-default-d64-padded-float32",
    "deepseek_v3-int4-static-eager-default-d80-one-float32",
    # Known and open: with int4 here, and with lfm2, Inductor's C++ try_loop_split asserts (torch 2.13).
    "phi-int8-generate-dynamic-compiled-default-d128-padded-bfloat16",
    "nano-gpt-fp8+int4-dynamic-eager-default-d256-one-float16",
    "llama-nf4-dynamic-compiled-default-d64-one-float16",
    "qwen3-int8-static-static-compiled-default-d64-padded-float32", "mistral-fp8-static-dynamic-eager-default-d64-one-float32",
    "qwen3-int4-rotated-static-compiled-default-d64-padded-float32", "llama-int8-sinks-dynamic-eager-default-d80-padded-float32",
    "llama-normed-static-eager-default-d80-padded-float32", "llama-gauss-static-eager-default-d64-one-float32",
    "qwen3-beyond-static-compiled-default-d64-padded-float32", "opt-smartkv-static-compiled-default-d64-one-bfloat16",
)
"""A subset for a machine without a GPU: every scheme, kind of cache, prompt, batch and dtype, as few layers as there are kinds of them."""


def cpu_slice() -> tuple[Case, ...]:
    """Return the cases of ``CPU_SLICE``."""
    return tuple(map(by_id, CPU_SLICE))
