"""The normal form of matched sites as text: the facts that each matcher read, with the graph's node names.

With the captured graph at hand it shows the origin of queries, keys and values, the cache's layout and writes, and the meaning of the mask,
before anything is rewritten.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from kvcompile.passes.graph.shapes import estimate, value_of
from kvcompile.passes.match.match import Matched
from kvcompile.passes.match.paged_places import Places
from kvcompile.passes.match.sites import Bounds, Limit, LimitKind, MaskKind, Position, Refusal, Site, Slot
from kvcompile.passes.plan.plan import Plan, SlotPlan
from kvcompile.report import short_paths

WIDTH = 12


def normal_form(plan: Plan) -> str:
    """Return all sites of a plan as text, one paragraph each, and its refusals."""
    return _joined([_site(item.site, [_planned(part) for part in item.parts]) for item in plan.sites], plan.refusals)


def matched_form(matched: Matched) -> str:
    """Return all sites of a matched graph as text, before schemes are chosen, and its refusals."""
    return _joined([_site(site, [_slot("slot", slot) for slot in site.slots]) for site in matched.sites], matched.refusals)


def _joined(blocks: list[str], refusals: Iterable[Refusal]) -> str:
    return "\n\n".join([*blocks, *(f"refused      {short_paths(str(refusal))}" for refusal in refusals)]) + "\n"


def _rows(title: str, facts: list[tuple[str, str]]) -> list[str]:
    return [title, *(f"  {name:{WIDTH}} {text}" for name, text in facts)]


def _typed(node: fx.Node, roles: tuple[str, ...]) -> str:
    """Return a node as text: ``%node  [B, S, H, D] = bfloat16[1, 24, 4, 64]``."""
    value = value_of(node)
    shape = ", ".join(str(size) for size in value.shape)
    named = ", ".join(role or "1" for role in roles)
    return f"%{node.name}  [{named}] = {str(value.dtype).removeprefix('torch.')}[{shape}]"


def _site(site: Site, slots: list[list[str]]) -> str:
    """Return one site as text; ``slots``: the lines of each of its slots."""
    attention = site.attention
    extras = [f"scale {attention.scale:.6g}"]
    extras += [f"{'over' if factor.divides else 'times'} %{factor.node.name}" for factor in attention.factors]
    extras += [f"softcap {attention.softcap:g}"] if attention.softcap else []
    extras += [f"sinks %{attention.sinks.name}"] if attention.sinks is not None else []
    extras += [f"log-sums %{attention.log_sums.name}"] if attention.log_sums is not None else []
    heads = f"H = {site.heads} query heads over K = {site.key.heads} kv heads, G = {site.groups}, D = {site.key.head_dim}"
    lines = _rows(f"site {site.index}: {site.path or 'module path unknown'}", [
        ("line", short_paths(site.line)),
        ("attention", f"%{attention.output.name}, spelled as {attention.idiom}: softmax(q k^T x scale + mask) v, {', '.join(extras)}"),
        ("heads", f"{heads}, S = {estimate(site.tokens)} new tokens a call"),
        ("q", _typed(attention.q, attention.q_roles)),
        ("k", _typed(attention.k, attention.k_roles)),
        ("v", _typed(attention.v, attention.v_roles)),
        ("mask", _mask(site.bounds)),
    ])
    return "\n".join([*lines, *(line for slot in slots for line in slot)])


def _planned(part: SlotPlan) -> list[str]:
    """Return the lines of a planned slot, under its role, with the scheme and planes that it is stored in."""
    planes = ", ".join(f"{plane.name} {str(plane.dtype).removeprefix('torch.')} x {plane.width}" for plane in part.layout.planes)
    return _slot(part.role.value, part.slot, ("stored as", f"{part.scheme.spec()}: {planes} a token and head"))


def _slot(title: str, slot: Slot, *more: tuple[str, str]) -> list[str]:
    """Return the lines of a slot under a title; ``more``: further (name, text) facts, after those of the graph."""
    write, table = slot.write, slot.block_table
    labels = tuple("·".join(label) or "fixed" for label in slot.axes.labels)
    leaves = f"; returned as result {', '.join(map(str, slot.outputs))}" if slot.outputs else ""
    comes = f"%{slot.placeholder.name}: " if slot.placeholder is not None else ""
    tokens = labels[write.token_dim] if write.token_dim < len(labels) else "T"
    new = f"new tokens %{write.values.name} along {tokens}, {_position(write.position)}"
    if write.places is not None:
        new = f"new tokens %{write.values.name} at the places {_places(write.places)}"
    facts = [
        ("cache", f"{comes}{slot.kind.value}{leaves}"),
        ("layout", _typed(slot.root, labels)),
        ("write", f"%{write.node.name}, spelled as {write.idiom}: {new}"),
        *([] if table is None else [("read", f"%{table.gather.name}, of each row the places {_places(table.places)}")]),
        *more,
    ]
    return [f"  {title}", *(f"    {name:{WIDTH - 2}} {text}" for name, text in facts)]


def _places(places: Places) -> str:
    """Return slot indices as text: a sum of index tensors and running indices, each times its weight."""
    terms = []
    for item in places.picked:
        named = {"T": "t", "N": f"t // {item.every}", "O": f"t % {item.every}", "BT": "b, t", "BN": f"b, t // {item.every}"}
        terms.append((item.weight, f"%{item.node.name}[{', '.join(named.get(role, role.lower()) for role in item.roles if role)}]"))
    terms += [(run.weight, f"{run.role.lower()} % {run.size}" if run.role == "T" else run.role.lower()) for run in places.running]
    words = [name if weight == 1 else f"{weight} x {name}" for weight, name in terms]
    return " + ".join([*words, *([str(places.first)] if places.first else [])])


def _position(position: Position) -> str:
    if position.index is not None:
        return f"at the positions in %{position.index.name}{' of each row' if position.rows else ''}"
    if position.past is not None:
        return f"behind the past in %{position.past.name}"
    if isinstance(position.offset, fx.Node):
        return f"from position %{position.offset.name} on"
    return f"from position {position.offset} on"


def _mask(bounds: Bounds) -> str:
    """Return the mask as text: the conditions under which query s of row b sees position t."""
    words = [f"t <= {_limit(bounds.hi)}"]
    if bounds.lo is not None:
        words.append(f"t >= {_limit(bounds.lo)}")
    if bounds.keep is not None:
        words.append(f"%{bounds.keep[0].name}[b, t]")
    for term in bounds.carried:
        index = ", ".join(role.lower() or "0" for role in term.roles)
        words.append({
            MaskKind.BOOL: f"%{term.node.name}[{index}]", MaskKind.FILL: f"not %{term.node.name}[{index}]",
            MaskKind.ADD: f"plus {'' if term.factor == 1.0 else f'{term.factor:g} * '}%{term.node.name}[{index}] (carried as a tensor)",
        }[term.kind])
    return " and ".join(words)


def _limit(limit: Limit) -> str:
    index = ", ".join(role.lower() for role in limit.roles)
    base = {
        LimitKind.NODE: f"%{limit.node.name}{f'[{index}]' if index else ''}" if limit.node is not None else "", LimitKind.OWN: "s",
        LimitKind.ALL: "T - 1", LimitKind.CONST: "",
    }[limit.kind]
    terms = [(1, base)] if base else []
    terms += [(1, str(limit.amount.expr))] if limit.amount is not None else []
    terms += [(limit.offset, "")] if limit.offset or not terms else []
    text = ""
    for count, name in terms:
        factor = f"{abs(count)} x {name}" if name and abs(count) != 1 else name or str(abs(count))
        sign = "-" if count < 0 else "+"
        text += f" {sign} {factor}" if text else f"-{factor}" if count < 0 else factor
    return text
