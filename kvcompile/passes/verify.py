"""Verify: check the rewritten graph for the facts that soundness needs; a missing fact is an error.

The facts are read from the rewritten graph, not from the rewriter's records. No node reads or writes a cache tensor. Every plane
is written by exactly one append, and attends and gathers read it only afterwards (only before, if the model writes after it attends;
a sliding cache may be unrolled before). Calibration comes before that append. Planes that attention adds to have no append. Planes are
never returned. An attention has a limit for each query. Every result has the shape and dtype of the captured graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from kvcompile.errors import VerificationFailed
from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.dynamo import OpOverload
from kvcompile.passes.graph.shapes import equal, op_name, source_line
from kvcompile.passes.rewrite.rewritten import Binding, Rewritten
from kvcompile.schemes import Adaptive

KEEP_FIRST, ROTATE_CHANNELS = "kvcompile::keep_first", "kvcompile::rotate_channels"
APPENDS = {"kvcompile::append", "kvcompile::append_window", KEEP_FIRST}
CALIBRATE, UNROLL, GATHER = "kvcompile::calibrate", "kvcompile::unroll", "kvcompile::gather"
READ_BACK = "kvcompile::read_back"


def _name(node: fx.Node) -> str:
    return node.target._schema.name if isinstance(node.target, OpOverload) else ""


def _fail(fact: str, found: object, node: fx.Node | None = None) -> None:
    raise VerificationFailed(fact=fact, found=found, where=source_line(node) if node is not None else "the graph")


def verify(rewritten: Rewritten, captured: Captured, fakes: tuple[Any, ...]) -> None:
    """Raise VerificationFailed unless the rewritten graph has all facts of the module docstring; ``fakes`` are its inputs' fake values."""
    graph = rewritten.module.graph
    placeholders = list(graph.find_nodes(op="placeholder"))
    count = sum(len(binding.plan.layout.planes) for binding in rewritten.bindings)
    if len(placeholders) != len(rewritten.kept) + count + len(rewritten.cursors) + len(rewritten.sizes):
        _fail("as many inputs as kept arguments, planes, cursors and sizes", len(placeholders))
    planes = placeholders[len(rewritten.kept) : len(rewritten.kept) + count]
    read_only = [binding for binding in rewritten.bindings if not binding.plan.slot.kind.facts.written]
    unwritten = _planes(read_only, planes)
    late = [binding for binding in rewritten.bindings if binding.plan.slot.write.late]
    # Planes of a concatenated cache grow behind that attention's limit, so its order with the append does not matter.
    either = _planes([binding for binding in late if binding.plan.slot.kind.facts.extended], planes)
    before = _planes(late, planes)
    order = {node: index for index, node in enumerate(graph.nodes)}
    own = {f"kvcompile::{binding.plan.scheme.attention}" for binding in rewritten.bindings}
    own |= {f"kvcompile::{scheme.observes}" for binding in rewritten.bindings if isinstance(scheme := binding.plan.scheme, Adaptive)}
    attends = {"kvcompile::attend", "kvcompile::attend_blocks", "kvcompile::report_site"} | own
    specs = [spec for binding in rewritten.bindings for spec in binding.plan.layout.planes]
    for plane, spec in zip(planes, specs, strict=True):
        name = spec.name
        writers = [user for user in plane.users if _name(user) in APPENDS]
        # Sinks of keys in two stores are concatenated before they are read.
        joined = [user for user in plane.users if spec.exact_first and op_name(user) == "cat"]
        # With tiled values, each attention reads a slice of the key heads.
        joined += [user for user in plane.users if op_name(user) == "slice"]
        beside = {user for user in joined if all(_name(reader) in attends for reader in user.users)}
        readers = [user for user in plane.users if _name(user) in attends or _name(user) == GATHER or user in beside]
        calibrated = [user for user in plane.users if _name(user) == CALIBRATE]
        turns = [user for user in plane.users if _name(user) == ROTATE_CHANNELS]
        copies = [user for user in plane.users if _name(user) == UNROLL]
        tables = [user for user in plane.users if spec.constant and _name(user) == READ_BACK]
        known = {*writers, *readers, *calibrated, *copies, *tables, *turns}
        asking = {user for user in plane.users if _asks(user, name, writers, order) or (spec.first and _counts(user))}
        others = [user for user in plane.users if user not in known | asking]
        if plane in unwritten and writers:
            _fail("no append into a plane of a cache that is only read", f"{len(writers)} appends into {plane.name}")
        if spec.tally and writers:
            _fail("no append into a plane that attention adds to", f"{len(writers)} appends into {plane.name}")
        if plane not in unwritten and not spec.tally and not spec.constant and len(writers) != 1:
            _fail("one append into every plane", f"{len(writers)} appends into {plane.name}")
        if any(order[turn] < order[node] for turn in turns for node in calibrated):
            _fail("a rotation is calibrated before anything is rotated by it", turns[0].format_node(), turns[0])
        if others:
            _fail("only calibrate, append, gather and attend touch a plane", others[0].format_node(), others[0])
        if not writers:
            continue
        if len(calibrated) > 1 or any(order[node] > order[writers[0]] for node in calibrated):
            _fail("a plane is calibrated once, before the append that encodes with it", calibrated[-1].format_node(), calibrated[-1])
        wrong = [reader for reader in readers if (order[reader] < order[writers[0]]) != (plane in before)]
        if wrong and plane not in either:
            place = "ahead of the append of tokens that the next call reads" if plane in before else "after the append of its tokens"
            what = "gather" if _name(wrong[0]) == GATHER else "attend"
            _fail(f"every {what} comes {place}", wrong[0].format_node(), wrong[0])
        early = [copy for copy in copies if order[copy] > order[writers[0]]]
        if early:
            _fail("a sliding cache is unrolled before it is written to", early[0].format_node(), early[0])
    _same_results(rewritten, captured, fakes)


def _planes(bindings: list[Binding], planes: list[fx.Node]) -> set[fx.Node]:
    """Return the placeholders of all planes of ``bindings``."""
    return {planes[item.first_plane + index] for item in bindings for index in range(len(item.plan.layout.planes))}


def _asks(user: fx.Node, name: str, writers: list[fx.Node], order: dict[fx.Node, int]) -> bool:
    """Return whether a node reads no tokens of a plane: only its size, or the clock, and that in an allowed order.

    The clock may be read before the append, to count positions, or after it, to test for rows whose tokens came out of order.
    """
    if op_name(user) == "sym_size":
        return True
    views, users = [user], []
    for view in views:
        if op_name(view) == "select":
            views += view.users
        else:
            users.append(view)
    if name != "clock" or len(views) == 1:
        return False
    behind = all(op_name(node) == "lt" for node in users)
    return all((order[view] > order[writer]) if behind else (order[view] < order[writer]) for view in views for writer in writers)


def _counts(user: fx.Node) -> bool:
    """Return whether a node reads the plane ``first`` only to subtract its number from positions."""
    return op_name(user) == "reshape" and all(op_name(node) == "sub" for node in user.users)


class _Changed(fx.Interpreter):
    """Interpreter that runs only changed nodes: a captured node with unchanged operands returns its recorded fake value."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.other: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        """Return the value of one node, recorded or computed."""
        known = n.meta.get("val")
        called = n.op in {"call_function", "call_method"}
        if called and known is not None and self.other.isdisjoint(n.all_input_nodes):
            return known
        if isinstance(n.target, OpOverload) and n.target.namespace == "kvcompile":
            self._limits(n, n.target)
        value = super().run_node(n)
        if called and not _alike(value, known):
            self.other.add(n)
        return value


    def _limits(self, node: fx.Node, called: OpOverload) -> None:
        """Fail unless the limits of an attention's queries are one for each: kernels do not broadcast them."""
        args, options = self.fetch_args_kwargs_from_env(node)
        given = {**dict(zip((argument.name for argument in called._schema.arguments), args, strict=False)), **options}
        for limit in (given.get("hi"), given.get("lo")):
            if isinstance(limit, torch.Tensor) and not equal(limit.shape[1], given["q"].shape[2]):
                _fail("a limit for each query", f"{tuple(limit.shape)} for queries {tuple(given['q'].shape)}", node)


def _alike(value: Any, known: Any) -> bool:
    """Return whether two values are tensors of equal sizes, strides, dtype and device."""
    if not isinstance(value, torch.Tensor) or not isinstance(known, torch.Tensor):
        return False
    same = value.dtype == known.dtype and value.device == known.device and _shape(value) == _shape(known)
    return same and tuple(map(str, value.stride())) == tuple(map(str, known.stride()))


def _same_results(rewritten: Rewritten, captured: Captured, fakes: tuple[Any, ...]) -> None:
    with captured.fake_mode, torch.no_grad():
        found = _Changed(rewritten.module).run(*fakes, enable_io_processing=False)
    output = next(iter(captured.graph.find_nodes(op="output")))
    before = [item for index, item in enumerate(output.args[0]) if index not in rewritten.dropped_outputs]
    after = list(found) if isinstance(found, (list, tuple)) else [found]
    if len(before) != len(after):
        _fail("as many results as before", len(after))
    for old, new in zip(before, after, strict=True):
        value = old.meta.get("val") if isinstance(old, fx.Node) else old
        if not isinstance(value, torch.Tensor):
            continue
        if not (isinstance(new, torch.Tensor) and new.dtype == value.dtype and _one_shape(new, value)):
            _fail(f"a result of {value.dtype} {tuple(value.shape)}", f"{new.dtype} {tuple(new.shape)}", old)


def _one_shape(value: torch.Tensor, known: torch.Tensor) -> bool:
    """Return whether two results have one shape: proved, or guarded if the sizes are equal in the captured call."""
    return value.dim() == known.dim() and all(equal(size, other) for size, other in zip(value.shape, known.shape, strict=True))


def _shape(value: torch.Tensor) -> tuple[str, ...]:
    return tuple(str(size) for size in value.shape)
