"""Features: what a program may choose on every axis, the plain value first, and which values exclude each other.

A choice gives every feature one value. A program is a module (the first features) and a script of calls and events (the later ones).
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from benchmarks.fuzz.events import EVENTS
from benchmarks.fuzz.expressions import CASTS, COUNTED, HIDDEN, MASKS, READ, SCORES, SOFTMAX, TAILS, WEIGHTS
from benchmarks.fuzz.schemes import BY_TOKEN, SCHEMES

Choice = dict[str, str]
Matrix = npt.NDArray[np.bool_]

FEATURES: Mapping[str, tuple[str, ...]] = {
    "layout": (
        "heads-first", "tokens-first", "keys-transposed", "assigned", "sliced", "narrow", "scatter", "copied-back", "concatenated",
        "one-tensor", "halves", "layers", "rows", "ring", "paged", "keys-are-values", "largest-batch", "negative", "cross",
    ),
    "caches": ("buffers", "arguments"),
    "extent": ("whole", "written"),
    "groups": ("1", "2", "4", "tiled"),
    "mask": (*MASKS, *COUNTED, *TAILS),
    "cast": tuple(CASTS),
    "hidden": tuple(HIDDEN),
    "scores": tuple(SCORES),
    "softmax": tuple(SOFTMAX),
    "weights": tuple(WEIGHTS),
    "keys": tuple(READ),
    "values": tuple(READ),
    "memory": ("no", "two"),
    "fused": ("no", "sdpa", "einsum"),
    "beside": ("nobody", "sum", "returned", "before", "alias", "cleared", "log-sum"),
    "positions": ("argument", "int", "counter", "late-counter", "python-counter", "float"),
    "given": ("nothing", "bool", "float", "float-moved", "padding", "int-segments", "int-odd"),
    "dtype": ("float32", "bfloat16", "float16"),
    "queries": ("plain", "large"),
    "unwritten": ("zeros", "ones", "noise", "nines"),
    "chunks": ("5,1,1,1,1,1", "5,1,1,3,1,1", "1,1,1,1,1,1", "7,2,1,1,2,1", "20,1,1,5,1,1", "8,8,8,1,1,1", "36,1,1,1,1,1", "301,1,1,3,1,1"),
    "places": ("together", "own-lengths", "accepted", "reversed", "shuffled", "twice"),
    "prompt": ("compiled", "eager"),
    "event": tuple(EVENTS),
    "then": tuple(EVENTS),
    "watched": ("end", "each"),
    "dynamic": ("None", "True"),
    "scheme": tuple(SCHEMES),
}

PLAIN: Choice = {feature: values[0] for feature, values in FEATURES.items()}

_NO_PLACES = {"ring", "concatenated", "cross"}
_COUNTERS = {"counter", "late-counter", "python-counter"}
_TENSORS = {"argument", "float"}
_EVERY = {feature: frozenset(values) for feature, values in FEATURES.items()}
_BUFFERS = _EVERY["layout"] - {"concatenated"}
_ONE_EACH = {
    "heads-first", "tokens-first", "keys-transposed", "assigned", "sliced", "narrow", "scatter", "copied-back", "rows", "negative",
    "largest-batch",
}
_WITHOUT_T = {name for name, text in SCORES.items() if "t)" not in text and "(t " not in text}

SELDOM: Mapping[str, frozenset[str]] = {
    "layout": frozenset({"layers", "rows", "ring", "cross"}),
    "mask": frozenset({"window-float", "lt-float", "blind", "strict", "int-not", "half-steps"}),
    "hidden": frozenset({"small", "times", "then-cooled"}),
    "scores": frozenset({
        "cap-negative", "cap-biased", "negative", "temperature", "floor", "clamp", "clamp-half", "relu", "int", "float8", "half", "brain",
        "less-mean", "less-head-maximum",
    }),
    "softmax": frozenset({"plus-one", "two", "sigmoid", "differential"}),
    "weights": frozenset(WEIGHTS) - {"plain"},
    "keys": frozenset({"float8", "shifted", "clamped"}),
    "values": frozenset({"float8", "shifted", "clamped"}),
}
"""Values that no rewrite is expected of: programs that hold one hold many, so that the others are rewritten more often."""

NEEDS: list[tuple[str, set[str] | frozenset[str], str, set[str] | frozenset[str]]] = [
    ("mask", set(TAILS), "extent", {"written"}),
    ("mask", set(TAILS), "layout", _EVERY["layout"] - {"ring", "paged", "cross"}),
    ("mask", {*TAILS, *COUNTED}, "cast", {"none"}),
    ("mask", {*TAILS, *COUNTED}, "places", {"together"}),
    ("mask", {*TAILS, *COUNTED}, "layout", _EVERY["layout"] - {"ring", "cross"}),
    ("mask", {"half-steps"}, "layout", _EVERY["layout"] - {"ring"}),
    ("mask", {"half-steps"}, "cast", {"none"}),
    ("extent", {"written"}, "places", {"together", "reversed", "shuffled", "twice"}),
    ("extent", {"written"}, "layout", _EVERY["layout"] - {"ring", "paged", "cross"}),
    ("layout", {"concatenated"}, "extent", {"written"}),
    ("layout", {"sliced", "narrow", "largest-batch", "concatenated", "ring"}, "places", {"together"}),
    ("layout", {"concatenated", "cross"}, "caches", {"arguments"}),
    ("layout", {"cross"}, "mask", {"causal"}),
    ("layout", {"cross"}, "given", {"nothing"}),
    ("layout", {"cross"}, "cast", {"none"}),
    ("layout", {"cross"}, "places", {"together"}),
    ("layout", {"cross"}, "chunks", _EVERY["chunks"] - {"301,1,1,3,1,1"}),
    ("layout", {"cross"}, "hidden", {"none"}),
    ("layout", {"cross"}, "positions", {"argument"}),
    ("layout", {"cross"}, "scores", _WITHOUT_T - {"temperature"}),
    ("layout", {"cross"}, "beside", {"nobody", "sum", "returned", "log-sum"}),
    ("layout", {"cross", "concatenated"}, "beside", _EVERY["beside"] - {"before", "alias", "cleared"}),
    ("beside", {"before", "alias", "cleared"}, "layout", _EVERY["layout"] - {"largest-batch"}),
    ("beside", {"alias"}, "caches", {"buffers"}),
    ("beside", {"alias"}, "layout", _ONE_EACH | {"keys-are-values", "paged"}),
    ("beside", {"alias"}, "event", _EVERY["event"] - {"deepcopied", "swapped"}),
    ("beside", {"alias"}, "then", _EVERY["then"] - {"deepcopied", "swapped"}),
    ("places", {"own-lengths", "accepted"}, "layout", {"assigned", "rows", "tokens-first", "scatter", "paged"}),
    ("places", _EVERY["places"] - {"together"}, "positions", _TENSORS),
    ("places", {"twice"}, "layout", _EVERY["layout"] - {"copied-back"}),
    ("positions", _COUNTERS, "prompt", {"compiled"}),
    ("layout", {"paged"}, "chunks", _EVERY["chunks"] - {"301,1,1,3,1,1"}),
    ("memory", {"two"}, "scores", _WITHOUT_T),
    ("memory", {"two"}, "fused", {"no", "sdpa"}),
    ("fused", {"sdpa"}, "scores", {"plain"}),
    ("fused", {"sdpa"}, "softmax", {"softmax"}),
    ("fused", {"sdpa"}, "weights", {"plain"}),
    ("fused", {"sdpa"}, "hidden", {"fill", "add", "add-lowest", "none"}),
    ("fused", {"sdpa"}, "given", {"nothing", "bool", "float", "padding"}),
    ("fused", {"sdpa"}, "beside", _EVERY["beside"] - {"log-sum"}),
    ("softmax", {"hidden-zero", "where-any"}, "given", {"nothing", "bool", "padding"}),
    ("softmax", {"plus-one"}, "queries", {"plain"}),
    ("softmax", {"plus-one"}, "hidden", _EVERY["hidden"] - {"moved-up"}),
    ("softmax", {"plus-one"}, "scores", _EVERY["scores"] - {"alibi-steep"}),
    ("softmax", {"plus-one"}, "given", _EVERY["given"] - {"int-segments", "int-odd"}),
    ("given", {"float-moved", "int-segments", "int-odd"}, "dtype", {"float32"}),
    ("hidden", {"moved-down", "moved-up"}, "dtype", {"float32"}),
    ("hidden", {"minus-large", "lowest-brain"}, "dtype", {"float32", "bfloat16"}),
    ("scores", {"alibi-steep"}, "dtype", {"float32"}),
    ("scores", {"clamp-half", "half", "brain"}, "dtype", {"float32"}),
    ("queries", {"large"}, "dtype", {"float32"}),
    ("queries", {"large"}, "scheme", {"dense"}),
    ("queries", {"large"}, "scores", _EVERY["scores"] - {"half", "brain", "int", "float8"}),
    ("unwritten", {"nines"}, "scheme", BY_TOKEN),
]
"""(feature, values, another feature, the values that it may then have)."""

for _feature in ("event", "then"):
    NEEDS += [(_feature, {name}, *need) for name, event in EVENTS.items() for need in event.needs(_EVERY)]

NAMES: tuple[tuple[str, str], ...] = tuple((feature, value) for feature, values in FEATURES.items() for value in values)
INDEX = {name: at for at, name in enumerate(NAMES)}
SPANS = {feature: slice(INDEX[feature, values[0]], INDEX[feature, values[-1]] + 1) for feature, values in FEATURES.items()}
"""The indices of each feature's values among NAMES."""


@functools.cache
def together() -> Matrix:
    """Return which values [V, V] may occur in one choice, as far as two of them tell."""
    made = np.ones((len(NAMES), len(NAMES)), dtype=np.bool_)
    for span in SPANS.values():
        made[span, span] = False
    for feature, values, other, may in NEEDS:
        for value in values:
            for against in FEATURES[other]:
                if against not in may:
                    made[INDEX[feature, value], INDEX[other, against]] = made[INDEX[other, against], INDEX[feature, value]] = False
    return made | np.eye(len(NAMES), dtype=np.bool_)


def completed(given: Mapping[str, str]) -> Choice | None:
    """Return a choice with the given values, every other feature as plain as they allow; None where they exclude each other."""
    matrix, chosen = together(), [INDEX[item] for item in given.items()]
    if not matrix[np.ix_(chosen, chosen)].all():
        return None
    open_ = matrix[chosen].all(0)
    found = dict(given)
    for feature, span in SPANS.items():
        if feature in found:
            continue
        values = np.flatnonzero(open_[span])
        if not values.size:
            return None
        found[feature] = FEATURES[feature][values[0]]
        open_ &= matrix[span.start + values[0]]
    return {feature: found[feature] for feature in FEATURES}


def odd(choice: Choice) -> Choice:
    """The values of a choice that are not plain."""
    return {feature: value for feature, value in choice.items() if value != PLAIN[feature]}


def fingerprint() -> str:
    """Return what tells one grammar from another: seeds mean the same programs under one fingerprint."""
    rules = [(feature, sorted(values), other, sorted(may)) for feature, values, other, may in NEEDS]
    return hashlib.sha256(json.dumps([FEATURES, rules]).encode()).hexdigest()[:12]
