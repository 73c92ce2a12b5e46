"""Dump: one compiled graph as text, at any stage of the pipeline from Dynamo's graph to machine code.

    captured    the ATen graph before matching
    normalised  the matched sites
    rewritten   the graph after the rewrite, with append and attend
    inductor    Inductor's output module for this machine: C++ on a CPU, Triton on a GPU
    triton      the attend kernel of each distinct site, printed for a GPU, which need not be present
    ptx, sass   that kernel compiled offline for an architecture
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable

import torch
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from kvcompile.backend import Backend
from kvcompile.details import distinct_kernels, kernel_title
from kvcompile.errors import NothingToDump
from kvcompile.lowering.compile import emitted_modules
from kvcompile.lowering.decode.offline import ARCHITECTURES, OfflineCompilation, sass
from kvcompile.lowering.site_kernel import Kernel, attends
from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.plan.plan import Plan
from kvcompile.passes.rewrite.rewritten import Rewritten, Variant
from kvcompile.records import GraphRecord
from kvcompile.report import short_paths
from kvcompile.tools.cli.normal_form import normal_form
from kvcompile.variants import Variants, kernel_text


class DumpStage(enum.Enum):
    """A stage of the pipeline that can be dumped; members in pipeline order."""

    CAPTURED = "captured"
    NORMALISED = "normalised"
    REWRITTEN = "rewritten"
    INDUCTOR = "inductor"
    TRITON = "triton"
    PTX = "ptx"
    SASS = "sass"


LANGUAGES = {DumpStage.NORMALISED: "text", DumpStage.PTX: "gas", DumpStage.SASS: "text"}
"""Language for highlighting each stage; Python for stages not listed."""


class Dump:
    """The pipeline stages of one graph as text; ``owner``: the backend that compiled it. ``graph`` None: the last graph with a site."""

    def __init__(self, owner: Backend, graph: int | None = None, variant: Variant | None = None) -> None:
        self.record = _choose(owner, graph)
        self.index = self.record.report.index
        self.asked = variant

    def text(self, stage: DumpStage, arch: str = "sm_90") -> str:
        """Return the text of one stage. Raises NothingToDump if the graph has none, OfflineCompilation for an unknown ``arch``."""
        if arch not in ARCHITECTURES:
            raise OfflineCompilation(expected=f"an architecture among {', '.join(ARCHITECTURES)}", found=arch, todo="pass one of these")
        makers: dict[DumpStage, Callable[[], str]] = {
            DumpStage.CAPTURED: self.captured, DumpStage.NORMALISED: self.normalised, DumpStage.REWRITTEN: self.rewritten,
            DumpStage.INDUCTOR: self.inductor, DumpStage.TRITON: lambda: self.triton(arch),
            DumpStage.PTX: lambda: self.compiled(arch, "ptx"), DumpStage.SASS: lambda: self.compiled(arch, "sass"),
        }
        return makers[stage]()

    def captured(self) -> str:
        """Return the ATen graph as text, with types and source lines."""
        captured = self._captured()
        inputs = "\n".join(f"#   {entry.node.name}: {_argument(entry.source)}" for entry in captured.inputs)
        return f"# graph {self.index} as captured; its inputs are\n{inputs}\n" + _readable(captured.module)

    def normalised(self) -> str:
        """Return the matched sites in their normal form, as text."""
        return normal_form(self._plan())

    def rewritten(self) -> str:
        """Return the rewritten graph of the chosen variant as text. Raises NothingToDump."""
        variant, rewritten = self._rewritten()
        title = f"# graph {self.index} rewritten, attention {kernel_text(rewritten, len(self._plan().sites))}\n"
        others = ", ".join(item.value for item in self._variants() if item is not variant)
        return title + (f"# other variants: {others}\n" if others else "") + _readable(rewritten.module)

    def inductor(self) -> str:
        """Return the output module that Inductor makes of the chosen variant for this machine; the compiled code is discarded.

        Raises NothingToDump if Inductor emits none.
        """
        variant, rewritten = self._rewritten()
        sources = emitted_modules(rewritten.module, self._made().inputs(variant), self._captured().fake_mode)
        if not sources:
            raise NothingToDump(expected="Inductor to emit a module", found="none", todo="report this with the target")
        return "\n".join(sources)

    def kernels(self, arch: str) -> list[tuple[Kernel, list[str]]]:
        """Return the distinct attend kernels of the chosen variant, each with the module paths of its sites. Raises NothingToDump."""
        _, rewritten = self._rewritten()
        found = distinct_kernels(attends(rewritten.module), arch)
        if not found:
            raise NothingToDump(
                expected="an attend kernel", found=f"graph {self.index} {kernel_text(rewritten, len(self._plan().sites))}",
                todo="ask for a graph that reads a filled cache (see --graph and --variant)",
            )
        return list(found.items())

    def triton(self, arch: str) -> str:
        """Return the Triton source of each distinct kernel. Raises NothingToDump without kernels."""
        return "\n".join(kernel_title("#", kernel, sites, arch) + kernel.source() for kernel, sites in self.kernels(arch))

    def compiled(self, arch: str, form: str) -> str:
        """Return the PTX or SASS of each distinct kernel; ``form``: "ptx" or "sass".

        Raises NothingToDump without kernels, and OfflineCompilation for an unknown ``arch`` or without a disassembler.
        """
        parts = []
        for kernel, sites in self.kernels(arch):
            parts.append(kernel_title("//", kernel, sites, arch))
            for made in kernel.compiled(arch):
                text = made["ptx"] if form == "ptx" else sass(made["cubin"])  # type: ignore[arg-type]
                assert isinstance(text, str)
                parts[-1] += text
        return "\n".join(parts)

    # --- choosing ----------------------------------------------------------------------------------

    def _plan(self) -> Plan:
        if self.record.planned is None:
            raise NothingToDump(expected="a captured graph", found="a graph that could not be retraced", todo="see `kvcompile explain`")
        return self.record.planned

    def _captured(self) -> Captured:
        assert self.record.captured is not None, "_choose returns captured graphs alone"
        return self.record.captured

    def _made(self) -> Variants:
        """Return the rewritten graphs. Raises NothingToDump if no site was rewritten."""
        if self.record.variants is None:
            raise NothingToDump(
                expected="a graph with a rewritten attention", found=f"graph {self.index} without one",
                todo="see `kvcompile explain` for the reasons and pass another --graph",
            )
        return self.record.variants

    def _variants(self) -> tuple[Variant, ...]:
        kinds = [item.site.key.kind.facts for item in self._plan().sites]
        if any(kind.created for kind in kinds):
            return (Variant.FRESH,)
        return (Variant.PAST,) if any(kind.extended for kind in kinds) else (Variant.PAST, Variant.FRESH)

    def _rewritten(self) -> tuple[Variant, Rewritten]:
        """Return the requested variant, or else the first one that a call compiled, and its rewritten graph. Raises NothingToDump."""
        made, possible = self._made(), self._variants()
        variant = self.asked or next((item for item in possible if item in made), possible[0])
        if variant not in possible:
            raise NothingToDump(
                expected=f"the variant {' or '.join(item.value for item in possible)} of graph {self.index}", found=variant.value,
                todo="its cache " + ("starts in this graph, so it is always empty" if Variant.FRESH in possible else "arrives filled"),
            )
        rewritten, _ = made.compiled(variant)
        # The rewriter sets no fake values on new nodes; printing and choosing kernels both need them.
        with torch.no_grad():
            FakeTensorProp(rewritten.module, self._captured().fake_mode).propagate_dont_convert_inputs(*made.inputs(variant))
        return variant, rewritten


def _choose(owner: Backend, graph: int | None) -> GraphRecord:
    """Return the record of graph ``graph``; None: the last one with a site, else the last one captured. Raises NothingToDump."""
    known = {record.report.index: record for record in owner.records}
    if graph is not None and graph not in known:
        among = f"{min(known)}..{max(known)}" if known else "none, since nothing was compiled"
        raise NothingToDump(expected=f"a graph among {among}", found=graph, todo="see `kvcompile explain` for the graphs")
    with_sites = [record for record in owner.records if record.planned is not None and record.planned.sites]
    chosen = known[graph] if graph is not None else next(reversed(with_sites or owner.records), None)
    if chosen is None or chosen.captured is None:
        found = "no graph at all" if chosen is None else "; ".join(str(item) for item in chosen.report.refusals)
        raise NothingToDump(expected="a captured graph", found=found, todo="see `kvcompile explain` for the reasons")
    return chosen


def _readable(module: torch.fx.GraphModule) -> str:
    return short_paths(module.print_readable(print_output=False)) + "\n"


def _argument(source: str) -> str:
    """Return a Dynamo source such as ``L['self']._modules['norm']._parameters['weight']`` as ``self.norm.weight``."""
    plain = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", source)
    return re.sub(r"^L\['(?:kwargs'\]\[')?([^']*)'\]", r"\1", plain)
