"""Golden graphs: one hand-written attention per idiom, before and after the rewrite, as text in ``tests/golden``.

``pytest tests/passes/test_golden.py --accept`` writes what it sees; the difference is then read in review.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_models import CASES, Case, inputs
from graph_text import graph_text, stable_symbols
from latent_models import LATENT_CASES
from paged_models import PAGED_CASES, PagedCase
from torch import fx

import kvcompile
from kvcompile.passes.rewrite.rewritten import Variant
from kvcompile.records import GraphRecord

GOLDEN = Path(__file__).parents[1] / "golden"
VERSION = "2.13"
"""The torch that wrote the files. Another one may capture the model's own operators differently, never ours."""

IDIOMS = (
    "tril-mask", "index-copy-attribute", "transposed-keys", "narrow", "slice-assign", "combined-one-write", "combined-two-writes",
    "per-row", "flat-bmm", "multi-query-einsum", "grouped-einsum", "grouped-matmul", "concatenated", "concatenated-time-first", "lists",
    "softcap", "sinks", "alibi-baddbmm", "hand-softmax", "keys-first", "tiled", "functional", "copied-back", "row-scatter",
    "latent-filled", "latent-one-buffer", "latent-two-products", "block-table", "rows-of-requests", "first-rows",
    "zeros-by-the-row", "sinks-behind", "differential-channels", "learned-scale",
)
"""One name a way to write, to group, to spell or to mask; the last one is refused."""

GOLDENS = [next(case for case in (*CASES, *LATENT_CASES, *PAGED_CASES) if case.name == name) for name in IDIOMS]

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")


class Shapes(fx.Interpreter):
    """Gives the nodes that the rewrite made their fake values."""

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node, kept on it."""
        value = super().run_node(n)
        n.meta.setdefault("val", value)
        return value


def compiled_by(case: Case | PagedCase) -> kvcompile.Backend:
    """A backend that has seen a prefill and a few decode steps."""
    module = case.make()
    owner = kvcompile.backend("int8", inner="eager")
    compiled = torch.compile(module, backend=owner, fullgraph=True)
    with torch.no_grad():
        given = (7, 1, 1, 1) if isinstance(case, PagedCase) else inputs(module, (7, 1, 1, 1))
        case.drive(module, compiled, given)
    return owner


def rewritten(record: GraphRecord, title: str) -> list[str]:
    """Every variant that was compiled of one graph."""
    parts = []
    made = record.variants
    for variant in (Variant.FRESH, Variant.PAST):
        if made is not None and record.captured is not None and variant in made:
            module = made.rewritten(variant).module
            with record.captured.fake_mode, torch.no_grad():
                Shapes(module).run(*made.inputs(variant), enable_io_processing=False)
            parts += [f"\n# {title} ({variant.value})\n", graph_text(module.graph)]
    return parts


def described(case: Case | PagedCase) -> str:
    """The decode graph as captured, its sites or refusals, and what decode and prefill became."""
    owner = compiled_by(case)
    prefill, decode, report = owner.records[0], owner.records[-1], owner.report().graphs[-1]
    parts = [f"# {case.name}: decode as captured\n", graph_text(decode.captured.graph), "\n"]
    parts += [f"# site: {site.idiom}; {site.write}; {site.cache}; {site.mask}\n" for site in report.sites]
    parts += [f"# refused at {item.stage.value}: {item.reason}\n" for item in report.refusals]
    parts += rewritten(decode, "decode rewritten") + rewritten(prefill, "prefill rewritten")
    return stable_symbols("".join(parts))


def ours(text: str) -> list[str]:
    """The lines that do not depend on the torch version: sites, refusals, our operations by name."""
    kept = []
    for line in text.splitlines():
        if line.startswith("# "):
            kept.append(line)
        elif "kvcompile::" in line:
            kept.append("kvcompile::" + line.partition("kvcompile::")[2].partition("(")[0])
    return kept


@pytest.mark.parametrize("case", GOLDENS, ids=str)
def test_golden(case: Case | PagedCase, accept: bool) -> None:
    found = described(case)
    path = GOLDEN / f"{case.name}.txt"
    if accept:
        path.parent.mkdir(exist_ok=True)
        path.write_text(found)
        return
    assert path.exists(), f"no golden file for {case.name}: run pytest tests/passes/test_golden.py --accept and read what it wrote"
    wanted = path.read_text()
    if torch.__version__.startswith(VERSION):
        assert found == wanted, "the graph changed: read the difference, then pytest tests/passes/test_golden.py --accept"
    else:
        assert ours(found) == ours(wanted)


def test_every_golden_file_has_its_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(IDIOMS)


def test_text_carries_no_place() -> None:
    for path in GOLDEN.glob("*.txt"):
        text = path.read_text()
        assert "0x" not in text and ".py" not in text and "device" not in text, path.name
