"""Subgraphs: sites that share caches, cut out as separate programs, from queries, new tokens, caches, positions and masks to their outputs.

    captured:  x -> projections -> q, k, v -> writes -> attention -> projection -> ...
    cut:                           q, k, v -> writes -> attention -> outputs, caches

Queries and new keys and values become inputs. So do results that come from other processes, or from calls on sharded or quantized tensors:
nothing may wait for another process here. All other nodes that the outputs or the caches depend on are copied. The cut program has the
results of the captured graph between these points, so a rewrite that is right for one is right for the other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from kvcompile.passes.capture.capture import Captured, Input
from kvcompile.passes.graph.dynamo import is_wrapper
from kvcompile.passes.graph.effects import Effects, analyse
from kvcompile.passes.graph.shapes import AS_WRITTEN, is_tensor, op_name, plain, value_of
from kvcompile.passes.graph.worlds import Guards
from kvcompile.passes.match.agreement import demands
from kvcompile.passes.match.sites import Amount, Attention, Site

COLLECTIVE = ("_c10d_functional", "c10d", "_dtensor")
"""Namespaces of operators in which processes wait for one another."""

Number = Callable[[int], int]


def same(number: int) -> int:
    """Return the number unchanged."""
    return number


class NotApart(Exception):
    """Raised where sites cannot be run separately from their graph; the message goes into the report."""


@dataclass(frozen=True)
class Subgraph:
    """A cut program: sites with all nodes between their inputs and outputs, as a separate captured graph.

    ``given``: the arguments, by index, that the captured graph computed (queries, new tokens, sizes). ``sources``: for every other
    argument, the index of the captured graph's argument that it was. ``outputs``: how many results are outputs of attentions; returned
    caches come after them. ``number``: the map that was applied to every int, where the program was made smaller.
    """

    captured: Captured
    effects: Effects
    sites: tuple[Site, ...]
    given: frozenset[int]
    sources: dict[int, int]
    outputs: int
    number: Number = same

    @functools.cached_property
    def guards(self) -> Guards:
        """The captured graph's guards, and the demands of its attentions, on the program's sizes."""
        return Guards(self.captured.fake_mode.shape_env, self.number, demands(self.captured.graph))


def sites_by_shared_caches(sites: Sequence[Site]) -> list[tuple[Site, ...]]:
    """Return the sites in groups, in order; sites of different groups share no cache tensor."""
    owner: dict[fx.Node, int] = {}
    members: dict[int, list[Site]] = {}
    for number, site in enumerate(sites):
        roots = [slot.root for slot in site.slots]
        merged = sorted({owner[root] for root in roots if root in owner})
        members[number] = [item for group in merged for item in members.pop(group)] + [site]
        for item in members[number]:
            for slot in item.slots:
                owner[slot.root] = number
    return [tuple(group) for group in members.values()]


def _entry_values(sites: Sequence[Site]) -> dict[fx.Node, None]:
    """Return the values that become arguments of a program of some sites: their queries and new tokens, in order."""
    found: dict[fx.Node, None] = {}
    for site in sites:
        attention = site.attention
        found[attention.q] = None
        if attention.beside is not None:
            found[attention.beside.q] = None
        for slot in site.slots:
            if slot.kind.facts.written:
                found[slot.write.values] = None
    # An attention's queries or new tokens may be another attention's result.
    results = {node for site in sites for node in site.attention.results}
    return {node: None for node in found if node not in results}


def _needed(captured: Captured, effects: Effects, wanted: Iterable[fx.Node], borders: Iterable[fx.Node]) -> set[fx.Node]:
    """Return all nodes that ``wanted`` depend on, back to the borders, with the in-place writes to tensors that these read."""
    stop, found, queue = set(borders), set(), list(wanted)
    while queue:
        node = queue.pop()
        if node in found:
            continue
        found.add(node)
        if node in stop or _is_size(node, stop):
            continue
        queue += () if _foreign(node) else node.all_input_nodes
        if is_tensor(node):
            queue += effects.writes_to(node)
    return found


def _is_size(node: fx.Node, borders: Iterable[fx.Node]) -> bool:
    """Return whether a node reads a size of a computed tensor; such a size is an argument of the cut program."""
    if op_name(node) != "sym_size":
        return False
    asked = node.args[0]
    return isinstance(asked, fx.Node) and asked.op != "placeholder" and asked not in borders


def _first_use(node: fx.Node, needed: set[fx.Node], effects: Effects) -> tuple[int, int]:
    """Return (order of the first needed node that reads a value, index among its inputs), by which arguments are sorted.

    Equal programs then have equal arguments, also where layers share some.
    """
    uses = [user for user in node.users if user in needed]
    first = min(uses, key=lambda user: effects.order[user], default=None)
    return (effects.order[first], first.all_input_nodes.index(node)) if first is not None else (len(effects.order), 0)


@dataclass(frozen=True)
class Outline:
    """The outline of a program of ``sites``: the captured graph's nodes that become its arguments (``begins``) or are copied (``inside``).

    ``outputs``: the sites' results, log-sums included. ``caches``: the captured graph's results that are the sites' caches, by index.
    """

    captured: Captured
    effects: Effects
    sites: tuple[Site, ...]
    begins: tuple[fx.Node, ...]
    inside: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    caches: dict[int, fx.Node]


def outline(captured: Captured, effects: Effects, sites: tuple[Site, ...]) -> Outline:
    """Return the outline of a program of ``sites``."""
    borders = _entry_values(sites)
    returned = captured.graph.find_nodes(op="output")[0].args[0]
    caches = {index: returned[index] for index in sorted({index for site in sites for slot in site.slots for index in slot.outputs})}
    roots = {slot.root for site in sites for slot in site.slots}
    outputs = tuple(dict.fromkeys(node for site in sites for node in site.attention.results))
    wanted = [*outputs, *_beside(sites), *caches.values(), *roots, *(write for root in roots for write in effects.writes.get(root, ()))]
    needed = _needed(captured, effects, wanted, borders)
    begins = [node for node in needed if node.op == "placeholder" or node in borders or _is_size(node, borders) or _foreign(node)]
    ordered = tuple(sorted(begins, key=lambda node: _first_use(node, needed, effects)))
    stop = set(begins)
    inside = sorted((node for node in needed if node not in stop and node.op != "output"), key=effects.order.__getitem__)
    return Outline(captured, effects, sites, ordered, tuple(inside), outputs, caches)


def _beside(sites: Sequence[Site]) -> list[fx.Node]:
    """Return the slices of keys, values and masks of sites with learned tokens, which only the rewritten graph reads."""
    parted = [site.attention for site in sites if site.attention.memory is not None]
    found = [node for attention in parted for node in (attention.k, attention.v, *(term.node for term in attention.masks))]
    return [*found, *(term.node for attention in parted if attention.memory is not None for term in attention.memory.masks)]


def cut(whole: Outline, number: Number = same) -> Subgraph:
    """Return the program of an outline; raises NotApart where it cannot be cut out of the captured graph.

    ``number`` maps every int in the records of the sites, where the program is to be made smaller.
    """
    captured = whole.captured
    if any(_shared(node) for node in whole.inside):
        raise NotApart("its mask or its positions are a tensor that is made of others")
    graph, env = fx.Graph(), {}
    given: set[int] = set()
    sources: dict[int, int] = {}
    entries: list[Input] = []
    borders = _entry_values(whole.sites)
    known = {entry.node: entry for entry in captured.inputs if entry.node not in borders}
    for index, node in enumerate(whole.begins):
        env[node] = made = graph.placeholder(node.name)
        made.meta = dict(node.meta)
        entry = known.get(node)
        entries.append(Input(index, made, node.name if entry is None else entry.source, False, node, entry is None or entry.owned))
        if entry is not None:
            sources[index] = entry.index
        elif not _foreign(node):
            given.add(index)
    _name_symbols(captured, graph, entries, given)
    for node in whole.inside:
        env[node] = graph.node_copy(node, lambda item: env[item])
        env[node].meta = dict(node.meta)
    graph.output(tuple(env[node] for node in (*whole.outputs, *whole.caches.values())))
    module = fx.GraphModule(captured.module, graph)
    fakes = tuple(value_of(entry.node) for entry in entries)
    apart = Captured(module, tuple(entries), fakes, captured.origin, captured.fake_mode)
    places = {index: len(whole.outputs) + position for position, index in enumerate(whole.caches)}
    translation = _Translation(env, places, number)
    sites = tuple(translation.of(site) for site in whole.sites)
    return Subgraph(apart, analyse(graph), sites, frozenset(given), sources, len(whole.outputs), number)


def _foreign(node: fx.Node) -> bool:
    """Return whether a node's plain tensor comes from a collective or from sharded or quantized tensors; it becomes an argument.

    Another process may know the verdict already, and would not take part in the call.
    """
    return _shared(node) and is_tensor(node) and not is_wrapper(value_of(node))


def _shared(node: fx.Node) -> bool:
    """Return whether a node is a call on sharded or quantized tensors (tensor subclasses), or a collective over processes."""
    return AS_WRITTEN in node.meta or getattr(node.target, "namespace", "") in COLLECTIVE


def _name_symbols(captured: Captured, graph: fx.Graph, entries: list[Input], given: set[int]) -> None:
    """Add an int argument to the program for each size symbol that occurs only inside expressions, such as s0 in a dim of size s0 + 1."""
    sizes = [size for entry in entries for size in _sizes(value_of(entry.node))]
    bare = {size.node.expr for size in sizes}
    free = {symbol for size in sizes for symbol in size.node.expr.free_symbols}
    for symbol in sorted(free - bare, key=str):
        made = graph.placeholder(f"size_{symbol}")
        env = captured.fake_mode.shape_env
        assert env is not None
        made.meta["val"] = env.create_symintnode(symbol, hint=None)
        given.add(len(entries))
        entries.append(Input(len(entries), made, str(symbol), False, made))


def _sizes(value: Any) -> list[torch.SymInt]:
    """Return the symbolic ints of a value: itself, or its sizes."""
    sizes = [value] if isinstance(value, torch.SymInt) else list(value.shape) if isinstance(value, torch.Tensor) else []
    return [size for size in sizes if isinstance(size, torch.SymInt)]


class _Translation:
    """A translation of the matcher's records: copies with the captured graph's nodes replaced by those of the cut program."""

    def __init__(self, env: dict[fx.Node, fx.Node], outputs: dict[int, int], number: Number) -> None:
        self.env, self.outputs, self.number = env, outputs, number
        self.made: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """Return a copy of a value, the same one for the same object; raises NotApart for a node outside of the program."""
        if isinstance(value, fx.Node):
            if value not in self.env:
                raise NotApart(f"{value.name} is not computed from its operands")
            return self.env[value]
        if isinstance(value, (tuple, frozenset)):
            kept = [item for item in value if not isinstance(item, fx.Node) or item in self.env]
            return type(value)(self.of(item) for item in kept)
        # A symbol that guards fixed is a number.
        value = plain(value)
        if type(value) is int:
            return self.number(value)
        if isinstance(value, Amount):
            return self._amount(value)
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return value
        if id(value) not in self.made:
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            if isinstance(value, Attention):
                fields["others"] = ()
            if "outputs" in fields:
                fields["outputs"] = tuple(self.outputs[index] for index in fields["outputs"])
                fields = {name: item if name == "outputs" else self.of(item) for name, item in fields.items()}
            else:
                fields = {name: self.of(item) for name, item in fields.items()}
            self.made[id(value)] = dataclasses.replace(value, **fields)
        return self.made[id(value)]

    def _amount(self, amount: Amount) -> Amount:
        """Return an amount with the ints in its expression mapped by ``number``."""
        changed = {item: sympy.Integer(self.number(int(item))) for item in amount.expr.atoms(sympy.Integer)}
        if all(old == new for old, new in changed.items()):
            return amount
        expr = amount.expr.xreplace(changed)
        return Amount(expr, amount.value.node.shape_env.create_symintnode(expr, hint=None))
