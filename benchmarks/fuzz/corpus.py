"""Corpus: programs that were once different or failed."""

from __future__ import annotations

from benchmarks.fuzz.features import Choice

CORPUS: tuple[tuple[int, Choice], ...] = (
    (1665, {"mask": "ahead", "given": "padding", "chunks": "5,1,1,3,1,1"}),
    (61053, {"mask": "int-not", "scores": "alibi-heads", "given": "float", "chunks": "5,1,1,3,1,1"}),
    (3, {"mask": "ahead", "given": "padding", "layout": "sliced", "chunks": "5,1,1,3,1,1"}),
    (3, {"mask": "int-not", "layout": "concatenated", "extent": "written", "caches": "arguments", "chunks": "5,1,1,3,1,1"}),
    (3, {"mask": "int-not", "given": "float", "layout": "ring", "chunks": "5,1,1,3,1,1"}),
    # A limit that was frozen at the step of the capture.
    (1, {"extent": "written", "mask": "tril-tail"}),
    (1, {"extent": "written", "mask": "tril-window-tail"}),
    (1, {"extent": "written", "mask": "arange-tail"}),
    # Writes to a part of a cache that were lost.
    (1, {"event": "row-zero"}),
    (1, {"event": "row-fill-zero"}),
    (1, {"event": "row-mul-zero"}),
    (1, {"event": "alias-zero"}),
    (1, {"event": "subclass-zero"}),
    # A module's counter that its user moved.
    (1, {"scheme": "kivi", "positions": "counter", "event": "back-three"}),
    (1, {"scheme": "certified", "positions": "counter", "event": "back-three"}),
    (1, {"scheme": "smartkv", "positions": "counter", "event": "ahead-one", "chunks": "20,1,1,5,1,1", "watched": "each"}),
    # Rows at lengths of their own, prompts out of order.
    (1, {"scheme": "kivi", "layout": "assigned", "places": "own-lengths"}),
    (1, {"scheme": "certified", "layout": "assigned", "places": "accepted"}),
    (1, {"scheme": "squat", "places": "reversed", "chunks": "20,1,1,5,1,1"}),
    # -1e4 taken for minus infinity, an int mask for a boolean.
    (1, {"given": "float-moved"}),
    (1, {"given": "int-segments"}),
    (1, {"given": "int-odd"}),
    (1, {"queries": "large", "hidden": "add-ten-thousand"}),
    # Positions compared in a dtype that does not hold them.
    (1, {"cast": "brain", "chunks": "301,1,1,3,1,1"}),
    (1, {"cast": "brain", "chunks": "301,1,1,3,1,1", "dtype": "bfloat16", "unwritten": "nines"}),
    # Tokens behind a sliding window's mask, taken for padding when a cache that was written to is encoded again.
    (1, {"scheme": "kivi", "extent": "written", "mask": "tril-window-tail", "given": "float", "event": "tokens-mul"}),
    # An eager prompt's tokens, taken for padding when the cache is adopted.
    (1, {"scheme": "kivi", "given": "padding", "prompt": "eager"}),
    (303368, {"scheme": "normed", "given": "padding", "places": "reversed"}),
    # Errors where stock runs.
    (1, {"layout": "negative"}),
    (1, {"event": "swapped"}),
    # A symbolic head dim.
    (5217, {"layout": "concatenated", "caches": "arguments", "extent": "written", "dynamic": "True"}),
    # A result's length in two spellings, which guards make equal.
    (201041, {
        "layout": "concatenated", "caches": "arguments", "extent": "written", "mask": "tril-from", "chunks": "301,1,1,3,1,1",
    }),
    # A row that went back while its mask still showed it the tokens of the furthest.
    (1007074, {"layout": "tokens-first", "mask": "furthest", "places": "own-lengths", "scheme": "squat"}),
    (1, {"layout": "assigned", "mask": "furthest", "places": "accepted", "given": "bool", "scheme": "kivi"}),
    # Rows that are encoded twice: no loss, where tokens are made of a scheme's levels.
    (1007578, {"layout": "tokens-first", "places": "accepted", "event": "all-negated", "then": "row-negated", "scheme": "gauss"}),
    # Scores misread, and validated by calls whose queries saw one token.
    (1, {"layout": "sliced", "mask": "half-steps", "scores": "int"}),
    (1, {"layout": "sliced", "mask": "every-second", "cast": "int16", "scores": "cap-negative"}),
    (1, {"layout": "paged", "chunks": "1,1,1,1,1,1", "scores": "int"}),
)
"""(seed, what is not plain). It only grows."""

UNLOOKED: tuple[tuple[Choice, str], ...] = (
    ({"scheme": "squat", "mask": "ahead", "cast": "brain", "layout": "halves", "places": "twice"}, "RIGHT"),
    ({"scheme": "kivi", "places": "twice", "chunks": "20,1,1,5,1,1", "event": "row-narrowed", "then": "detached-zero"}, "TOLD"),
    ({"scheme": "certified", "layout": "assigned", "places": "accepted"}, "TOLD"),
    ({"scheme": "normed", "event": "ahead-five"}, "TOLD"), ({"scheme": "normed", "event": "second-request"}, "RIGHT"),
    ({"scheme": "int8", "event": "ahead-thirty", "places": "shuffled"}, "RIGHT"),
    ({"scheme": "smartkv", "event": "ahead-thirty", "places": "reversed"}, "RIGHT"),
    ({"scheme": "squat", "then": "swapped"}, "RIGHT"),
    # A broken row, met by a call that its caches refuse.
    ({"scheme": "normed", "prompt": "eager", "event": "back-three", "then": "swapped"}, "TOLD"),
    # A limit that all queries of a prompt share, which kernels on a GPU read for each.
    ({"scheme": "int8", "mask": "furthest"}, "RIGHT"), ({"scheme": "kivi", "mask": "furthest", "chunks": "20,1,1,5,1,1"}, "RIGHT"),
)
"""Programs of seed 1, and what comes of them where the host does not look where calls write, by the name of a ``trial.Found``."""

FORGOTTEN: tuple[Choice, ...] = (
    {"scheme": "normed", "layout": "scatter", "chunks": "20,1,1,5,1,1", "event": "back-to-zero", "then": "ahead-one"},
    {"scheme": "certified", "chunks": "20,1,1,5,1,1", "event": "back-blocks", "then": "ahead-five"},
    {"scheme": "smartkv", "chunks": "20,1,1,5,1,1", "event": "back-blocks", "then": "ahead-five"},
)
"""Programs of seed 1 that go back, and then skip tokens that a window has dropped: the step raises, and all before it is right."""
