"""Kernels for ``attend``: the list of kernels for each device, in order of preference, each with the reason why it does not support a site.

Inductor's lowering, ``explain``, ``dump`` and the report all call ``choose``, so each names the kernel that really runs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import fx

from kvcompile import schemes
from kvcompile.lowering.attention_plugins import plugin_of, plugins
from kvcompile.lowering.certificate.report_op import report_site
from kvcompile.lowering.gluon.eligibility import SingleTokenFacts, single_token_facts
from kvcompile.lowering.gluon.plan import TWICE_HEADS, NoFragments, key_plan, measured, value_plan
from kvcompile.lowering.ops import operations as ops
from kvcompile.lowering.ops.attend_blocks import BlockOperands
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.sizes import Sizes
from kvcompile.lowering.prefill.decode_chunk import TOKENS
from kvcompile.lowering.prefill.site import many_rows
from kvcompile.lowering.prefill.table_slot import chunk_slot
from kvcompile.lowering.prefill.tiles import FEWEST_ROWS
from kvcompile.types import BESIDE, PAGE, QUERY_GROUP, QUERY_ROWS, Role, SlotSpec

QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclasses.dataclass(frozen=True)
class AttendFacts:
    """The facts that choose a kernel: device, both slots with their schemes' texts, and flags for the optional operands.

    ``rows``: query rows of a kv head if they are many; None if they are few, or known only to Inductor.
    ``one``: further facts for the Gluon kernel, if each batch row has one new token and the settings admit that kernel; otherwise None.
    """

    device: str
    slots: tuple[tuple[str, SlotSpec], ...]
    dtype: torch.dtype = torch.float32
    page_rows: int = PAGE
    rows: int | None = None
    exact_newest: bool = False
    rope: bool = False
    extra_key_planes: bool = False
    bias: bool = False
    one: SingleTokenFacts | None = None
    exact_first: bool = False
    log_sums: bool = False


@dataclasses.dataclass(frozen=True)
class AttendKernel:
    """A kernel for ``attend`` on one device, or on any (``device`` None).

    ``gap``: returns why the kernel does not support an attention, None if it does. ``lower``: returns the result as a box of Inductor's;
    None if the next kernel must take the attention, as the operands' strides do not fit or the kernel does not compile. ``many``: only for
    many query rows; ``one``: only for one new token.
    """

    name: str
    device: str | None
    gap: Callable[[AttendFacts], str | None]
    lower: Callable[[AttendOperands[Any]], Any | None]
    many: bool = False
    one: bool = False

    def serves(self, facts: AttendFacts) -> bool:
        """Return whether the kernel is meant for attentions of this device and number of rows."""
        asked = (not self.many or facts.rows is not None) and (not self.one or facts.one is not None)
        return self.device in {None, facts.device} and asked


def _cuda_gap(facts: AttendFacts) -> str | None:
    if facts.extra_key_planes:
        return "keys in two planes, as of a latent with its rotary part"
    if facts.dtype not in QUERY_DTYPES:
        return f"queries in {facts.dtype}"
    if facts.page_rows & (facts.page_rows - 1):
        return f"pages of {facts.page_rows} tokens, no power of two"
    if any(slot.role is Role.VALUE and schemes.parse(text).format(slot).norms for text, slot in facts.slots):
        return "norms of values"
    return None


def _gluon_gap(facts: AttendFacts) -> str | None:
    assert facts.one is not None
    (key_scheme, key), (value_scheme, value) = facts.slots
    given = {
        "keys stored before RoPE": facts.rope, "keys in two planes": facts.extra_key_planes, "a mask operand of its own": facts.bias,
        "first tokens in full precision": facts.exact_first, "log-sums beside the result": facts.log_sums,
        f"queries in {facts.dtype}": facts.dtype not in {torch.float16, torch.bfloat16},
        f"heads of {key.head_dim} and {value.head_dim} channels": key.head_dim != value.head_dim,
        f"pages of {facts.page_rows} tokens": facts.page_rows != PAGE,
    }
    unknown = next((what for what, there in given.items() if there), None) or facts.one.gap()
    if unknown is None:
        try:
            key_plan(key_scheme, key.head_dim, key.dtype)
            value_plan(value_scheme, value.head_dim, value.dtype, facts.one.group <= TWICE_HEADS)
        except NoFragments as gap:
            unknown = str(gap)
    if unknown is None and facts.one.measured and not measured(key_scheme, value_scheme, key.head_dim):
        unknown = f"not measured to be faster over these codes, or not with heads of {key.head_dim} channels"
    return f"not in Gluon: {unknown}" if unknown else None


def _prefill_gap(facts: AttendFacts) -> str | None:
    if facts.rope:
        return "keys stored before RoPE"
    if facts.bias:
        return "a mask operand of its own"
    formats = [schemes.parse(text).format(slot) for text, slot in facts.slots]
    if any(fmt.levels for fmt in formats) and not _decodes_chunks(facts):
        return "tables of levels that no chunk is decoded by"
    if any(fmt.norms for fmt in formats):
        return "norms of tokens"
    if any(fmt.static for fmt in formats):
        return "codes that hold NaN, with static scales"
    return _cuda_gap(facts)


def _decodes_chunks(facts: AttendFacts) -> bool:
    """Return whether both slots can be decoded in chunks, as the prefill template needs for table codes."""
    slots = zip(Role, facts.slots, strict=True)
    shapes = [(text, role, slot.head_dim, schemes.parse(text).format(slot).word_dtype, facts.dtype) for role, (text, slot) in slots]
    return all(chunk_slot(*shape) is not None for shape in shapes) and facts.page_rows % TOKENS == 0


def _cpu_gap(facts: AttendFacts) -> str | None:
    for text, slot in facts.slots:
        scheme = schemes.parse(text)
        fmt = scheme.format(slot)
        if fmt.block > 1:
            return f"scales of several tokens ({scheme.name})"
        if fmt.norms:
            return f"norms of tokens ({scheme.name})"
        if fmt.segments > 1:
            return f"words of several bytes ({scheme.name})"
    given = {"newest tokens in full precision": facts.exact_newest, "first tokens in full precision": facts.exact_first,
             "keys stored before RoPE": facts.rope, "keys in two planes": facts.extra_key_planes}
    return next((what for what, there in given.items() if there), None)


def _lower_gluon(operands: AttendOperands[Any]) -> Any | None:
    from kvcompile.lowering.gluon.lower import lower_gluon

    return lower_gluon(operands)


def _lower_prefill(operands: AttendOperands[Any]) -> Any | None:
    from kvcompile.lowering.prefill.lower import lower_prefill

    return lower_prefill(operands)


def _lower_decode(operands: AttendOperands[Any]) -> Any:
    from kvcompile.lowering.decode.lower import lower_decode

    return lower_decode(operands)


def _lower_cpu(operands: AttendOperands[Any]) -> Any:
    from kvcompile.lowering.cpu.lower import lower_attend_cpu

    return lower_attend_cpu(operands)


def _lower_eager(operands: AttendOperands[Any]) -> Any:
    from kvcompile.lowering.host.inductor_api import fallback_handler

    return fallback_handler(ops.attend)(*operands.arguments())


PREFILL = AttendKernel("Inductor Triton template for many rows", "cuda", _prefill_gap, _lower_prefill, many=True)
GLUON = AttendKernel("Gluon kernel for one token", "cuda", _gluon_gap, _lower_gluon, one=True)
DECODE = AttendKernel("Inductor Triton template", "cuda", _cuda_gap, _lower_decode)
CPP = AttendKernel("Inductor C++ template", "cpu", _cpu_gap, _lower_cpu)
EAGER = AttendKernel("eager body", None, lambda facts: None, _lower_eager)

KERNELS = (PREFILL, GLUON, DECODE, CPP, EAGER)
"""All kernels, best first."""


def kernels_for(facts: AttendFacts) -> Iterator[tuple[AttendKernel, str | None]]:
    """Yield (kernel, reason) for the kernels that support the attention, best first.

    The reason tells why a kernel that is preferred to it does not support the attention; None for the most preferred kernel.
    """
    why = None
    for kernel in KERNELS:
        if kernel.serves(facts):
            gap = kernel.gap(facts)
            if gap is None:
                yield kernel, why
            why = gap or why


def choose(facts: AttendFacts) -> tuple[AttendKernel, str | None]:
    """Return (kernel, reason): the first kernel that supports the attention, and why a preferred kernel does not, or None."""
    return next(kernels_for(facts))


BLOCKS = "Triton kernel over blocks of a pool"
"""What runs ``attend_blocks`` on CUDA, where nothing is gathered."""


def blocks_gap(facts: AttendFacts) -> str | None:
    """Return why no kernel can attend to a pool's blocks in place; None if one can."""
    return _cuda_gap(facts) if facts.device == "cuda" else f"it is for CUDA, and this is {facts.device}"


def facts_for(given: AttendOperands[Any], sizes: Sizes, device: str) -> AttendFacts:
    """Return the facts of an ``attend`` whose operands have sizes: Inductor's boxes, or fake tensors."""
    (_, heads, queries, dim), (pages, _, kv, page_rows, _) = sizes.shape(given.q), sizes.shape(given.keys[0])
    kv, cuda = sizes.static(kv), device == "cuda"
    slots = tuple(
        (text, SlotSpec(kv, sizes.static(width), sizes.dtype(given.values[0]), role))
        for text, role, width in ((given.key_scheme, Role.KEY, dim), (given.value_scheme, Role.VALUE, given.value_dim))
    )
    return AttendFacts(
        device, slots, sizes.dtype(given.q), 1 if sizes.equals(pages, 1) else sizes.static(page_rows),
        rows=many_rows(given, sizes) if cuda else None, exact_newest=bool(given.exact_newest), rope=bool(given.rope),
        extra_key_planes=bool(given.extra_key_planes), bias=given.bias is not None,
        one=single_token_facts(sizes.static(heads) // kv, given.softcap) if cuda and sizes.equals(queries, 1) else None,
        exact_first=bool(given.exact_first), log_sums=given.log_sums,
    )


def facts_of(node: fx.Node, device: str, slots: Mapping[str, SlotSpec]) -> AttendFacts:
    """Return the facts of an ``attend`` or ``attend_blocks`` node of a rewritten graph; ``slots``: the slots of its stores by scheme text.

    An ``attend_blocks`` node has the facts of the attention over gathered tokens that it is equal to.
    """
    given, gathered = operands_of(node)
    pair = tuple(
        (text, slots.get(text, SlotSpec(1, PAGE, torch.float32, role)))
        for text, role in ((given.key_scheme, Role.KEY), (given.value_scheme, Role.VALUE))
    )
    rows, group, queries = node.meta.get(QUERY_ROWS, 1), node.meta.get(QUERY_GROUP), given.q.meta.get("val")
    return AttendFacts(
        device, pair, pair[0][1].dtype if queries is None else queries.dtype, 1 if gathered else PAGE,
        rows=rows if device == "cuda" and rows >= FEWEST_ROWS else None,
        exact_newest=bool(given.exact_newest), rope=bool(given.rope), extra_key_planes=bool(given.extra_key_planes),
        bias=given.bias is not None,
        one=single_token_facts(group, given.softcap) if device == "cuda" and rows == 1 and group is not None else None,
        exact_first=bool(given.exact_first),
        log_sums=given.log_sums,
    )


def operands_of(node: fx.Node) -> tuple[AttendOperands[Any], bool]:
    """Return (operands of ``attend``, whether its tokens are gathered into one page) for an ``attend`` or ``attend_blocks`` node."""
    args, kwargs = cast(Any, (node.args, node.kwargs))
    if node.target is ops.attend_blocks:
        blocks: BlockOperands[Any] = BlockOperands(*args, **kwargs)
        return blocks.over(blocks.keys, blocks.values, blocks.hi, None), True
    given: AttendOperands[Any] = AttendOperands(*args, **kwargs)
    source = given.keys[0].args[:1] if isinstance(given.keys[0], fx.Node) else ()
    return given, any(isinstance(item, fx.Node) and item.target is ops.gather for item in source)


WITH_KERNELS = ("int8", "int4", "fp8")
"""Schemes that are proposed where another has no kernel; the first ones that have one for the same attention."""


def kernelless(graph: fx.Graph, device: str, slots: Mapping[str, SlotSpec]) -> tuple[str, ...]:
    """Return a sentence for each scheme of a rewritten graph that has no kernel on a device where other schemes have one."""
    found: dict[str, None] = {}
    own = {plugin.operation: plugin for plugin in plugins()}
    for node in graph.nodes:
        if node.target in {ops.attend, ops.attend_blocks}:
            facts = facts_of(node, device, slots)
            kernel, why = choose(facts)
            names, like = _names(text for text, _ in facts.slots), facts
        elif (plugin := own.get(node.target)) is not None:
            name = next((text for text in slots if plugin_of(text) is plugin), None)
            why = plugin.runs(device, True)
            if name is None or not why.startswith(EAGER.name):
                continue
            kernel, names, why = EAGER, _names([name]), why.partition(": ")[2]
            like = AttendFacts(device, tuple((text, slot) for text, slot in slots.items() if plugin_of(text) is plugin))
        else:
            continue
        # Without what the scheme alone asks of a kernel: its exact tokens, and keys before RoPE.
        plain = dataclasses.replace(like, exact_newest=False, exact_first=False, rope=False)
        others = [
            name for name in WITH_KERNELS
            if choose(dataclasses.replace(plain, slots=tuple((name, slot) for _, slot in like.slots)))[0] is not EAGER
        ] if kernel is EAGER else []
        if others:
            verb, whose = ("have", "their") if " and " in names else ("has", "its")
            found[
                f"{names} {verb} no kernel on {device} ({why}), so {whose} eager definition runs, which is slow; "
                f"{', '.join(others)} have one here"
            ] = None
    return tuple(found)


def _names(texts: Iterable[str]) -> str:
    """Return the names of the schemes with these texts, each once, joined by ``and``."""
    return " and ".join(dict.fromkeys(schemes.parse(text).name for text in texts))


def kernel_lines(graph: fx.Graph, device: str, slots: Mapping[str, SlotSpec], sites: int, compiled: bool = True) -> str:
    """Return a text that counts the operations for the ``sites`` of a rewritten graph, with the code that runs each.

    Not ``compiled``: eager bodies run them.
    """
    found: Counter[str] = Counter()
    attends, own = 0, {plugin.operation: plugin for plugin in plugins()}
    for node in graph.nodes:
        if node.target in {ops.attend, ops.attend_blocks}:
            attends += BESIDE not in node.meta
            found[_runs(node, device, slots, compiled)] += 1
        elif (plugin := own.get(node.target)) is not None:
            attends += 1
            found[f"{node.target.__name__.partition('.')[0]} ({plugin.runs(device, compiled)})"] += 1
        elif node.target is report_site:
            found[f"report_site ({'tensor code' if device == 'cuda' and compiled else 'eager body'})"] += 1
    appends = sum(node.target in {ops.append, ops.append_window} for node in graph.nodes)
    # SDPA may also be called elsewhere in the graph; sites without an attend are the ones to count.
    found["scaled_dot_product_attention"] = sites - attends
    found[f"append ({'compiled with the graph' if compiled else 'eager body'})"] = appends
    return ", ".join(f"{count} x {name}" for name, count in found.items() if count)


def _runs(node: fx.Node, device: str, slots: Mapping[str, SlotSpec], compiled: bool) -> str:
    """Return as text an attention's operation, the code that runs it, and why a preferred kernel does not."""
    facts = facts_of(node, device, slots)
    blocks = node.target is ops.attend_blocks
    if blocks and compiled and blocks_gap(facts) is None:
        return f"attend_blocks ({BLOCKS})"
    kernel, why = choose(facts) if compiled else (EAGER, None)
    name = f"codes gathered, {kernel.name}" if blocks and compiled else kernel.name
    return f"{'attend_blocks' if blocks else 'attend'} ({name}{f': {why}' if why else ''})"
