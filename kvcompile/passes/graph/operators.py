"""Operators: the kind of each ATen operator, one row for each group of equivalent names; other tables derive from this one.

To support a new spelling of a view, a copy or a write, add its name to a row. What a kind means is defined by one function in each place
that needs it: a map of coordinates (``pullback``), a map of mask expressions (``match.mask``), a recogniser of writes (``match.cache``).
"""

from __future__ import annotations

import enum


class Kind(enum.Enum):
    """The effect of an operator on the elements of its first operand."""

    COPY = "hands them on, in place or as a copy"
    RESHAPE = "a view or copy of all elements in their order, under other sizes"
    UNSQUEEZE = "a view with one more dim of size one"
    SWAP = "a view with two dims exchanged, dim0 and dim1"
    SWAP_LAST = "a view with its last two dims exchanged"
    REVERSE = "a view with its dims in reverse order"
    PERMUTE = "a view with its dims in the order dims"
    MOVE = "a view with the dims source at destination"
    BROADCAST = "a view with dims of size one repeated"
    SLICE = "a view of a range of one dim"
    SELECT = "a view of one entry of one dim"
    REPEAT = "a copy, repeated as a whole"
    INTERLEAVE = "a copy with each entry repeated"
    SPLIT = "several views that lie one behind another in one dim"
    CONCATENATE = "a copy behind the other operands', in one dim"
    STACK = "a copy beside the other operands', in a new dim"
    WRITE_ROWS = "the operand, written along one dim at the positions index"
    WRITE_PLACES = "the operand, written at the places indices"
    WRITE_WHOLE = "the operand, written as a whole"
    WRITE_SCATTER = "the operand, written where index says for each element"
    WRITE_RANGE = "the operand, written in a range of one dim"
    WRITE_ENTRY = "the operand, written at one entry of one dim, which the values lack"
    GATHER = "some of them, by index tensors"
    MAKE = "a new tensor of one number, or of none"
    PRODUCT = "a product of two activations, summed over a dim"
    PROJECTION = "a product with a weight"
    SOFTMAX = "a softmax"
    SIZE = "a size, a stride or a count, and no element"


NAMES: dict[Kind, tuple[str, ...]] = {
    Kind.COPY: (
        "alias", "detach", "detach_", "clone", "contiguous", "lift_fresh_copy", "lift_fresh", "dropout", "to", "_to_copy", "type_as",
        "_conj", "resolve_conj", "resolve_neg", "float", "half", "bfloat16", "positive",
    ),
    Kind.RESHAPE: ("view", "reshape", "_unsafe_view", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "_reshape_alias"),
    Kind.UNSQUEEZE: ("unsqueeze",),
    Kind.SWAP: ("transpose", "swapaxes", "swapdims"),
    Kind.SWAP_LAST: ("t", "mT", "adjoint"),
    Kind.REVERSE: ("numpy_T",),
    Kind.PERMUTE: ("permute",),
    Kind.MOVE: ("movedim",),
    Kind.BROADCAST: ("expand", "expand_as", "broadcast_to"),
    Kind.SLICE: ("slice", "narrow"),
    Kind.SELECT: ("select",),
    Kind.REPEAT: ("repeat", "tile"),
    Kind.INTERLEAVE: ("repeat_interleave",),
    Kind.SPLIT: ("unbind", "split", "split_with_sizes", "chunk", "tensor_split"),
    Kind.CONCATENATE: ("cat", "concat", "concatenate"),
    Kind.STACK: ("stack",),
    Kind.WRITE_ROWS: ("index_copy_", "index_copy"),
    Kind.WRITE_PLACES: ("index_put_", "_index_put_impl_", "index_put", "_unsafe_index_put"),
    Kind.WRITE_WHOLE: ("copy_",),
    Kind.WRITE_SCATTER: ("scatter_", "scatter"),
    Kind.WRITE_RANGE: ("slice_scatter",),
    Kind.WRITE_ENTRY: ("select_scatter",),
    Kind.GATHER: ("index", "_unsafe_index", "index_select", "embedding", "gather", "take_along_dim"),
    Kind.MAKE: ("zeros", "new_zeros", "zeros_like", "full", "new_full", "full_like", "empty", "new_empty", "empty_like"),
    Kind.PRODUCT: ("matmul", "bmm", "baddbmm", "einsum"),
    Kind.PROJECTION: ("linear", "mm", "addmm", "conv1d", "conv2d", "convolution"),
    Kind.SOFTMAX: ("softmax", "_softmax", "_safe_softmax"),
    Kind.SIZE: ("sym_size", "sym_stride", "sym_numel"),
}

KINDS: dict[str, Kind] = {name: kind for kind, names in NAMES.items() for name in names}
"""The kind of each operator by its bare name (``graph.shapes.op_name``)."""


def named(*kinds: Kind) -> frozenset[str]:
    """Return the names of all operators of ``kinds``."""
    return frozenset(name for kind in kinds for name in NAMES[kind])


COPIES = named(Kind.COPY)
CONCATENATIONS = named(Kind.CONCATENATE)
JOINS = named(Kind.CONCATENATE, Kind.STACK)
SPLITS = named(Kind.SPLIT)
SIZES = named(Kind.SIZE)
MAKERS = named(Kind.MAKE)
TURNS = named(Kind.SWAP, Kind.SWAP_LAST, Kind.PERMUTE)
VIEWS = named(
    Kind.RESHAPE, Kind.UNSQUEEZE, Kind.SWAP, Kind.SWAP_LAST, Kind.REVERSE, Kind.PERMUTE, Kind.MOVE, Kind.BROADCAST, Kind.SLICE, Kind.SELECT,
)
WRITES = named(Kind.WRITE_ROWS, Kind.WRITE_PLACES, Kind.WRITE_WHOLE, Kind.WRITE_SCATTER, Kind.WRITE_RANGE, Kind.WRITE_ENTRY)
IN_PLACE = frozenset(name for name in WRITES if name.endswith("_"))
UPDATES = WRITES - IN_PLACE
"""Writes that return a copy of their operand with the new values."""
