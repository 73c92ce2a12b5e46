"""Details: the graphs of a record as text, around each attention, before and after the rewrite, and its kernels.

All of it is made when a report asks for it and not kept, so records of a served model do not grow.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from kvcompile.lowering.site_kernel import BlocksSite, ChunkedSite, Kernel, attends, site_kernel
from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.shapes import estimate, module_path
from kvcompile.passes.match.sites import Refusal, Site
from kvcompile.passes.plan.plan import Plan
from kvcompile.passes.rewrite.rewritten import Variant
from kvcompile.records import GraphRecord
from kvcompile.report.detail import GraphDetail, GraphLine, KernelText, LineKind, Listing, SiteDetail
from kvcompile.report.wording import count_text, short_scheme
from kvcompile.schemes import parse
from kvcompile.variants import TITLES

log = logging.getLogger(__name__)

LONGEST = 48
"""Nodes of a listing at most: a longer one is cut at its end, and says so."""
ARCH = "sm_90"
"""Architecture that kernels are printed for."""


class RecordSource:
    """A source of a report's details: records of graphs alone, so that the report outlives its backend, model and caches."""

    def __init__(self, records: Iterable[GraphRecord]) -> None:
        self.records = tuple(records)

    def detail(self, index: int) -> GraphDetail | None:
        """Return graph ``index`` as text; None if its record is gone."""
        return detail_of(self.records, index)

    def telemetry_text(self) -> str:
        """Return "": records hold no caches, so there is no telemetry."""
        return ""


def detail_of(records: Iterable[GraphRecord], index: int) -> GraphDetail | None:
    """Return the details of the record of graph ``index``; None if there is none."""
    found = next((record for record in records if record.report.index == index), None)
    return None if found is None else detail(found)


def detail(record: GraphRecord) -> GraphDetail:
    """Return the details of a record's graph: its sites and refused attentions, and the kernels of the variants that were compiled.

    Empty if the record holds no captured graph. If no call has compiled a variant, the kernels are those of the first one.
    """
    if record.captured is None:
        return GraphDetail()
    plan = record.planned or Plan((), record.report.refusals)
    after = _printed(record)
    listings = {variant: _after(module, plan, TITLES[variant]) for variant, module in after.items()}
    sites = tuple(
        SiteDetail(item.site.path, _before(record.captured, item.site), tuple(found[place] for found in listings.values()))
        for place, item in enumerate(plan.sites)
    )
    refused = tuple(SiteDetail(refusal.path, _refused(record.captured, refusal)) for refusal in record.report.refusals)
    kernels = tuple(itertools.chain.from_iterable(_kernels(module) for module in after.values()))
    return GraphDetail(sites, refused, tuple(dict.fromkeys(kernels)))


def _printed(record: GraphRecord) -> dict[Variant, fx.GraphModule]:
    """Return a printable copy of each variant that calls have compiled; if none was, of the variant that a call would compile first.

    Empty if the record holds no variants.
    """
    made = record.variants
    if made is None:
        return {}
    return {variant: made.printed(variant) for variant in [item for item in Variant if item in made] or list(made.made)[:1]}


# --- listings ------------------------------------------------------------------------------------


def _before(captured: Captured, site: Site) -> Listing:
    """Return the nodes of the captured graph from a site's caches and writes to its result.

    If these are more than ``LONGEST``, only the caches, the writes, the attention's own nodes and the operands and masks of these.
    """
    attention = site.attention
    caches = {slot.root for slot in site.slots} | {slot.placeholder for slot in site.slots if slot.placeholder is not None}
    writes = {slot.write.node for slot in site.slots}
    operands = {attention.q, attention.k, attention.v, *(slot.write.values for slot in site.slots)}
    masks = {term.node for term in attention.masks}
    own = {*attention.nodes, *attention.results}
    between = _between(captured.graph, caches | writes, set(attention.results))
    region = caches | writes | own | operands | masks
    if len(region | between) <= LONGEST:
        region |= between
    kinds = dict.fromkeys(caches, LineKind.CACHE) | dict.fromkeys(writes, LineKind.WRITE) | dict.fromkeys(own, LineKind.ATTENTION)
    return _listing("as captured", captured.graph, region, kinds)


def _between(graph: fx.Graph, sources: set[fx.Node], ends: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes on the way from ``sources`` to ``ends``: they depend on one of ``sources``, and one of ``ends`` depends on them."""
    below: set[fx.Node] = set()
    for node in graph.nodes:
        if any(item in sources or item in below for item in node.all_input_nodes):
            below.add(node)
    above, work = set(ends), list(ends)
    while work:
        for item in work.pop().all_input_nodes:
            if item not in above and item in below:
                above.add(item)
                work.append(item)
    return above & below


def _after(module: fx.GraphModule, plan: Plan, title: str) -> list[Listing]:
    """Return one listing per site of a plan: the operations of kvcompile that replace the site, and the nodes that these read."""
    ours = [node for node in module.graph.nodes if _is_ours(node)]
    return [_listing(title, module.graph, *_became(module.graph, ours, item.site, len(plan.sites))) for item in plan.sites]


def _became(graph: fx.Graph, ours: Sequence[fx.Node], site: Site, count: int) -> tuple[set[fx.Node], dict[fx.Node, LineKind]]:
    """Return (region, kinds): the operations that replace a site and the nodes that these read; and the kind of each operation and plane.

    The operations are those with the site's module path; if none has it and the graph has one site, all operations of kvcompile.
    """
    mine = [node for node in ours if module_path(node) == site.path and site.path] or ([*ours] if count == 1 else [])
    # Over an empty cache the model's own attention may stay.
    own = site.attention.output.target
    mine += [node for node in graph.nodes if node.target == own and module_path(node) == site.path and "attention" in _name(node)]
    region = {item for node in mine for item in (node, *node.all_input_nodes)}
    kinds = {item: LineKind.CACHE for item in region if item.op == "placeholder" and item.name.startswith("kv")}
    return region, kinds | {node: LineKind.WRITE if "append" in _name(node) else LineKind.ATTENTION for node in mine}


def _refused(captured: Captured, refusal: Refusal) -> Listing:
    """Return the listing "as captured" of a refused attention: the nodes of its module, with the refusal's evidence marked.

    If the module is unknown or has no node, the nodes with softmax or attention in their name.
    """
    nodes = [node for node in captured.graph.nodes if refusal.path and module_path(node) == refusal.path]
    shown = nodes or [node for node in captured.graph.nodes if "attention" in _name(node) or "softmax" in _name(node)]
    evidence = {node for node in shown if (node.format_node() or node.name) in refusal.evidence}
    return _listing("as captured", captured.graph, set(shown), dict.fromkeys(evidence, LineKind.ATTENTION))


def _listing(title: str, graph: fx.Graph, region: set[fx.Node], kinds: dict[fx.Node, LineKind]) -> Listing:
    lines = [_line(node, kinds.get(node, LineKind.OTHER)) for node in graph.nodes if node in region]
    return Listing(title, tuple(lines[:LONGEST]), max(0, len(lines) - LONGEST))


def _line(node: fx.Node, kind: LineKind) -> GraphLine:
    if node.op in {"placeholder", "get_attr"}:
        return GraphLine(node.name, _shape(node), "an argument" if node.op == "placeholder" else str(node.target), kind)
    given = [_argument(item) for item in node.args] + [f"{name}={_argument(item)}" for name, item in node.kwargs.items()]
    return GraphLine(node.name, _shape(node), f"{_name(node)}({', '.join(given)})", kind)


def _argument(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_argument, value))}]"
    return str(value)


def _name(node: fx.Node) -> str:
    """Return the operator of a node without its overload and namespace of torch: ``aten.cat``, ``kvcompile.attend``, ``getitem``."""
    target = node.target
    return str(target).removesuffix(".default") if not callable(target) or "." in str(target) else getattr(target, "__name__", str(target))


def _is_ours(node: fx.Node) -> bool:
    return node.op == "call_function" and _name(node).startswith("kvcompile")


def _shape(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    return "" if value is None or isinstance(value, (list, tuple)) else f"{type(value).__name__} {value}"


# --- kernels -------------------------------------------------------------------------------------


def distinct_kernels(nodes: Iterable[fx.Node], arch: str) -> dict[Kernel, list[str]]:
    """Return the distinct kernels of ``attend`` nodes, whose operands carry fake values, each with the module paths of its sites."""
    found: dict[Kernel, list[str]] = {}
    for node in nodes:
        found.setdefault(site_kernel(node, arch, estimate), []).append(_path(node))
    return found


def _path(node: fx.Node) -> str:
    """Return the module path of a node, or its name if Dynamo recorded no path."""
    return module_path(node) or node.name


def kernel_title(comment: str, kernel: Kernel, sites: list[str], arch: str) -> str:
    """Return a kernel's heading as lines that begin with the sign ``comment``: module paths (``sites``), schemes, heads, tile."""
    config, tile = kernel.config, kernel.config.tile
    heads = f"{config.kv_heads * config.group} query heads over {config.kv_heads} kv heads of {config.key_dim}"
    cut = ", ".join((count_text(tile.num_warps, "warp"), count_text(tile.num_stages, "stage"), count_text(config.splits, "split")))
    lines = [
        f"attend of {', '.join(sites)}",
        f"keys {_short(config.key_scheme)}, values {_short(config.value_scheme)}",
        f"{heads}, batch {kernel.batch}, {count_text(kernel.queries, 'new token')}",
        f"for {arch}: tile of {tile.block_t} tokens x {tile.block_r} rows, {cut}",
    ]
    if isinstance(kernel, ChunkedSite):
        lines.append(f"{kernel.config.chunk} tokens at a time: decoded by the first kernel, attended to by the second")
    if isinstance(kernel, BlocksSite):
        lines.append(f"blocks of {kernel.config.page_rows} tokens read in place by a table; items of tokens, merged by a second kernel")
    return "".join(f"{comment} {line}\n" for line in lines)


def _short(spelled: str) -> str:
    return short_scheme(parse(spelled))


def _kernel(node: fx.Node) -> tuple[Kernel | None, str]:
    """Return the kernel of an ``attend`` node and "", or None and the reason why none can be printed."""
    try:
        return site_kernel(node, ARCH, estimate), ""
    except Exception as error:
        # A page about a served model must not fail because one scheme has no kernel for a GPU.
        log.debug("a kernel could not be printed", exc_info=True)
        return None, f"no kernel is printed for {ARCH}: {type(error).__name__}: {error}"


def _kernels(module: fx.GraphModule) -> list[KernelText]:
    """Return the kernels of a variant's sites as text; for attention without a generated kernel, the reason in its place."""
    groups: dict[tuple[Kernel | None, str], list[str]] = {}
    for node in attends(module):
        kernel, why = _kernel(node)
        groups.setdefault((kernel, why), []).append(_path(node))
    return [
        KernelText(tuple(paths), "" if kernel is None else kernel_title("#", kernel, paths, ARCH) + kernel.source(), why)
        for (kernel, why), paths in groups.items()
    ]
