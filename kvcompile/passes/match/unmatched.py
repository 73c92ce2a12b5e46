"""Find reads of caches where no site was found, so that no attention over a cache is skipped silently."""

from __future__ import annotations

from torch import fx

from kvcompile.passes.capture import flex
from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.operators import CONCATENATIONS, IN_PLACE, UPDATES, Kind, named
from kvcompile.passes.graph.pullback import trace
from kvcompile.passes.graph.shapes import bind, is_tensor, op_name, sizes, value_of
from kvcompile.passes.match.attention.weights import SOFTMAX
from kvcompile.passes.match.cache.gathers import GATHERS
from kvcompile.passes.match.sites import Miss

PROJECTIONS = named(Kind.PROJECTION) | {"embedding"}
PRODUCTS = named(Kind.PRODUCT) | {"flex_attention"}
FUNCTIONAL = UPDATES | CONCATENATIONS | {"where"}
CHOICES = {"topk", "sort", "argsort", "kthvalue", "argmax"}
LIMIT = 400
REACH = 40


def _is_cache(node: fx.Node, effects: Effects) -> bool:
    """Return whether a floating tensor of three dims or more looks like a cache.

    It is an argument that is written to in place, or the returned update or concatenation of an argument, or a view of such a tensor.
    """
    if not is_tensor(node) or value_of(node).dim() < 3 or not value_of(node).dtype.is_floating_point:
        return False
    root = effects.root.get(node, node)
    if root.op == "placeholder":
        return any(op_name(write) in IN_PLACE for write in effects.writes.get(root, ()))
    # The result may be a view of the cache: a window, or a transpose of all of it.
    if op_name(root) not in FUNCTIONAL or not effects.outputs_of(effects.family(root)):
        return False
    operands = root.all_input_nodes
    return any(effects.root.get(item, item).op == "placeholder" and is_tensor(item) and value_of(item).dim() >= 3 for item in operands)


def cache_behind(node: fx.Node, effects: Effects) -> fx.Node | None:
    """Return the cache that a value is computed from; None where none is found.

    The search stops at a projection, unless its input is a view of a cache or a gather from one.
    """
    seen: set[fx.Node] = set()
    stack = [node]
    while stack and len(seen) < LIMIT:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        if _is_cache(current, effects):
            return current
        if op_name(current) in PROJECTIONS:
            base = trace(current.args[0], lambda item: False).base  # type: ignore[arg-type]
            if op_name(base) in GATHERS:
                base = bind(base).get("self") or base
            if is_tensor(base) and _is_cache(base, effects):
                return base
            continue
        stack.extend(current.all_input_nodes)
        # Values written into a tensor are part of its value.
        stack.extend(item for write in effects.writes.get(current, ()) for item in write.all_input_nodes)
    return None


def unrecognised(captured: Captured, effects: Effects, spoken: set[fx.Node]) -> list[tuple[fx.Node, Miss]]:
    """Return (product, its Miss) for every product over a cache that no recogniser claimed (``spoken``: the claimed nodes).

    Left out are products near a softmax, whose recogniser reports them, and products whose results only rank tokens.
    """
    found = []
    for node in captured.graph.nodes:
        if op_name(node) not in PRODUCTS:
            continue
        operands = [item for item in node.all_input_nodes if is_tensor(item) and len(sizes(item)) >= 3]
        bases = [trace(item, lambda base: False).base for item in operands]
        reads = any(_is_cache(base, effects) for base in bases)
        if reads and node not in spoken and not _near_softmax(node, spoken) and not _chooses(node):
            found.append((node, _miss(node)))
    return found


def _miss(product: fx.Node) -> Miss:
    if op_name(product) == flex.NAME:
        return Miss(
            "the cache is read by flex_attention, whose score or mask function could not be run over whole index grids", product,
            advice="write score_mod and mask_mod in operations that broadcast, or use scaled_dot_product_attention",
        )
    if _cut_short(product):
        return Miss(
            f"the cache is read by {op_name(product)}, whose result leaves this graph before it meets a softmax and the values: a graph "
            "break splits the attention", product,
            advice="keep the attention in one graph (TORCH_LOGS=graph_breaks shows what breaks it)",
        )
    return Miss(
        f"the cache is read by {op_name(product)}, and no softmax or scaled_dot_product_attention was found around it", product,
        advice="spell the attention with torch.softmax or scaled_dot_product_attention",
    )


def _chooses(product: fx.Node) -> bool:
    """Return whether a product leads to a choice of tokens (top-k, sort): scores that only rank cache entries are not an attention."""
    stack, seen = [(product, 0)], set[fx.Node]()
    while stack:
        node, depth = stack.pop()
        if node in seen or depth > REACH:
            continue
        seen.add(node)
        if op_name(node) in CHOICES:
            return True
        stack += [(item, depth + 1) for item in node.users]
    return False


def _cut_short(product: fx.Node) -> bool:
    """Return whether a value computed from a product leaves the graph before it meets another product or a projection."""
    stack, seen = [product], set[fx.Node]()
    while stack:
        for user in stack.pop().users:
            if user.op == "output":
                return True
            if user not in seen and op_name(user) not in PROJECTIONS | PRODUCTS:
                seen.add(user)
                stack.append(user)
    return False


def _near_softmax(product: fx.Node, spoken: set[fx.Node]) -> bool:
    """Return whether a softmax or a claimed node is at most 24 steps before or after a product: its recogniser reports it."""
    for step in (lambda node: list(node.users), lambda node: node.all_input_nodes):
        stack, seen = [(product, 0)], set()
        while stack:
            node, depth = stack.pop()
            if node in seen or depth > 24:
                continue
            seen.add(node)
            if op_name(node) in SOFTMAX or node in spoken:
                return True
            if node is not product and op_name(node) in PROJECTIONS | PRODUCTS:
                continue
            stack += [(item, depth + 1) for item in step(node)]
    return False
