"""Reports of single graphs, made from the pipeline's results: each rewritten site as text and numbers, each refusal, seconds per pass."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvcompile.passes.graph.shapes import estimate
from kvcompile.passes.match.mask.masks import describe
from kvcompile.passes.match.sites import Refusal, Slot
from kvcompile.passes.plan.plan import BATCH, TOKENS, Plan, SitePlan
from kvcompile.report.wording import count_text, short_paths, short_scheme

REPORTS = (
    "certify with fallback='report' reads all keys and values a second time at every step, in float64, to bound its error; "
    "nothing falls back"
)


@dataclass(frozen=True)
class SiteReport:
    """One rewritten site as text and numbers.

    ``tokens``: new tokens per call; ``bytes_before``, ``bytes_after``: at the reported cache length.
    """

    path: str
    line: str
    idiom: str
    write: str
    cache: str
    mask: str
    heads: str
    scheme: str
    bits: float
    bytes_before: int
    bytes_after: int
    warnings: tuple[str, ...] = ()
    tokens: int = 1


class Pass(enum.Enum):
    """A pass over one graph, by the name that ``kvcompile explain --stage`` takes; members in pipeline order."""

    CAPTURE = "capture"
    MATCH = "match"
    PLAN = "plan"
    VALIDATE = "validate"
    REWRITE = "rewrite"
    VERIFY = "verify"
    COMPILE = "compile"


class SiteState(enum.Enum):
    """State of an attention, in the words of a report."""

    VALIDATED = "rewritten, validated"
    REWRITTEN = "rewritten, not validated"
    REFUSED = "refused, stays as it was"
    LEFT_OUT = "left out by the policy"


@dataclass
class GraphReport:
    """One captured graph: its sites, its refusals, and the seconds that our passes and the inner compiler took.

    ``uncached``: attentions without a cache. ``variants``: names of the rewritten variants that were compiled.
    ``kernels``: for each of these, the operations that the sites became.
    ``validated``: sites that were run against their rewritten twin and gave equal results.
    ``unvalidated``: sites that could not be run and were rewritten all the same (``validate="where possible"``), each with the reason.
    ``notes``: other differences from the uncompiled model.
    ``left_out``: module paths of attentions that the policy leaves unchanged.
    ``passes``: seconds of each pass, in the order in which they first ran; a variant that a call needs later adds to them.
    ``slow``: a sentence for each scheme without a kernel on the graph's device, with schemes that have one.
    """

    index: int
    sites: tuple[SiteReport, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    uncached: int = 0
    variants: tuple[str, ...] = ()
    pass_seconds: float = 0.0
    compile_seconds: float = 0.0
    kernels: tuple[str, ...] = ()
    validated: int = 0
    unvalidated: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    passes: dict[Pass, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def timing(self, name: Pass) -> Iterator[None]:
        """Add the seconds that the context takes to those of a pass."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.passes[name] = self.passes.get(name, 0.0) + time.perf_counter() - started

    def state(self, site: SiteReport) -> SiteState:
        """Return how a site of the graph was checked: VALIDATED against its rewritten twin, or REWRITTEN without that."""
        if any(line.startswith(f"{site.path or site.line}: ") for line in self.unvalidated) or not self.validated:
            return SiteState.REWRITTEN
        return SiteState.VALIDATED

    @property
    def words(self) -> str:
        """The graph's counts as a phrase: sites rewritten, validated, refused, left out, without a cache."""
        words = [f"{count_text(len(self.sites), 'attention')} rewritten"]
        words += [f"{self.validated} validated"] if self.sites else []
        words += [f"{len(self.refusals)} refused"] if self.refusals else []
        words += [f"{len(self.left_out)} left out by the policy"] if self.left_out else []
        words += [f"{self.uncached} attention-like without a cache"] if self.uncached else []
        return ", ".join(words)

    @property
    def paths(self) -> set[str]:
        """Module paths of the graph's attentions, rewritten or not."""
        found = [*(item.path for item in self.sites), *(item.path for item in self.refusals), *self.left_out]
        return {path for path in found if path}

    def take(self, other: GraphReport) -> None:
        """Copy every field of ``other``, a report of an equal graph, except its index and seconds."""
        for item in dataclasses.fields(self):
            if item.name not in {"index", "pass_seconds", "compile_seconds", "passes"}:
                setattr(self, item.name, getattr(other, item.name))


def _cache(slot: Slot) -> str:
    """Return a phrase for the kind of cache that a slot is stored in."""
    words = slot.kind.facts.cache
    if slot.block_table is not None:
        return f"{words}, read through a gather"
    return words if slot.sliding is None else f"{words}, newest {slot.sliding.slots}"


def site_report(item: SitePlan, tokens: int | None = None) -> SiteReport:
    """Return a planned site as a report row, with bytes for the captured batch and ``tokens`` tokens (None: the captured length)."""
    site = item.site
    at = {BATCH: estimate(site.key.batch), TOKENS: tokens if tokens is not None else estimate(site.key.capacity)}
    schemes = [short_scheme(item.key.scheme), short_scheme(item.value.scheme)]
    warnings = {part.scheme.warning for part in item.parts if part.scheme.warning} | ({REPORTS} if item.certify is not None else set())
    keys = [part for part in (item.key, item.extra_key) if part is not None]
    width = sum(part.spec.head_dim for part in item.parts)
    bits = sum(part.scheme.bits_per_value(part.spec) * part.spec.head_dim for part in item.parts) / width
    return SiteReport(
        site.path, site.line, site.attention.idiom, site.key.write.idiom, _cache(site.key), describe(site.bounds),
        f"{site.heads}/{site.key.heads} x {'+'.join(str(part.spec.head_dim) for part in keys)}",
        schemes[0] if schemes[0] == schemes[1] else f"keys {schemes[0]}, values {schemes[1]}",
        bits, int(sum(part.bytes_before for part in item.parts).subs(at)), int(sum(part.bytes_after for part in item.parts).subs(at)),
        tuple(sorted(warnings)), estimate(site.tokens),
    )


def graph_report(index: int, plan: Plan, uncached: int, tokens: int | None = None) -> GraphReport:
    """Return the report of one planned graph; ``uncached`` counts attentions without a cache.

    ``tokens``: the cache length to report bytes for, None for the captured one.
    """
    return GraphReport(index, tuple(site_report(item, tokens) for item in plan.sites), plan.refusals, uncached)


def alike(sites: tuple[SiteReport, ...]) -> list[list[SiteReport]]:
    """Return the sites in groups of equal idiom, write, cache, mask, heads, scheme and bytes, such as the same attention in each layer."""
    groups: dict[tuple[object, ...], list[SiteReport]] = {}
    for site in sites:
        key = (site.idiom, site.write, site.cache, site.mask, site.heads, site.scheme, site.bytes_before, site.bytes_after)
        groups.setdefault(key, []).append(site)
    return list(groups.values())


def place_of(site: SiteReport) -> str:
    """Return the site's module path, or ``file.py:12`` if Dynamo recorded none."""
    return site.path or site.line.partition(": ")[0].rpartition("/")[2]


def refusal_facts(refusal: Refusal) -> tuple[tuple[str, str], ...]:
    """Return a refusal as (name, text) facts, without empty ones."""
    facts = (
        ("why", refusal.reason), ("stage", refusal.stage.value), ("line", short_paths(refusal.line)), ("nearest", refusal.nearest),
        ("do", refusal.advice),
    )
    return tuple((name, value) for name, value in facts if value)
