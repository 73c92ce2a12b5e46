"""Tables 11 to 22 of "Runtime-Certified Bounded-Error Quantized Attention", in kind: certificates, bytes, quality, times.

    python benchmarks/extensions/certified/certified_tables.py [--tables 11,12,13,14,15,16,17,18,19,20,21,22] [--json FILE]
        [--model tinylm-16k] [--lengths 1000,2000] [--questions 20] [--rows 4] [--tail 32] [--scheme certified] [--device cpu]
        [--tokens 65536,131072] [--drift 0.99] [--value-policy v_tol:0.002] [--dense-step MS] [--short]

    11, 12, 14, 15   certified beside the uncompressed model on a trained model: bounds before and after the fallback, differences of
                     quality in pairs, rungs and causes. Texts stand for PG-19, questions for RULER and NIAH
    13, 21, 22       bytes by layouts, and the source's Eq. 19 beside what query heads of a kv head asked for; nothing is run for 13 and 22
    16 to 20         one layer's attention on a GPU (``certified.py``): phases, sweeps of the scratches, lengths. Random keys and values, a
                     query that goes on as q = R q + noise; the source has one of PG-19's. 32 layers are 32 times one

A scratch's blocks are 16 tokens of every kv head of a layer, as the source's are (its 2,048 of keys and of values take 4.30 GB, ours
too); here each kv head fills its own. ``--short`` takes the fewest rows of 16 to 20 that show a sweep. Without a CUDA device tables 16 to
20 say so. Ends with 1 where a certificate was violated or a row failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from benchmarks.plan_source import TABLE_21, union
from kvcompile.extensions.certified.scheme import SCRATCH, Certified, Tier2
from kvcompile.schemes import parse
from kvcompile.tools.cli.subjects import SHIPPED, tinylm
from kvcompile.tools.evaluation.bench import Bench, Effort
from kvcompile.tools.evaluation.machine import machine
from kvcompile.tools.evaluation.measures import Measured
from kvcompile.tools.evaluation.results import Results, measured_plain
from kvcompile.types import PAGE, Extent, Layout, Role, SlotSpec

LAYERS, HEADS, K, D, BLOCK = 32, 32, 8, 128, 16
LENGTHS = (8192, 32768, 65536, 131072)
QUALITY, TIMED = {11, 12, 14, 15}, {16, 17, 18, 19, 20}
CAPACITIES = (0, 256, 512, 1024, 1280, 1536, 1792, 2048, 4096)
PAIRS = ((1024, 1024), (1024, 512), (1024, 256), (1024, 64), (2048, 2048), (2048, 512), (2048, 256), (2048, 64))
SHORT = {"capacities": (512, 1024), "pairs": ((1024, 64),)}
SCRATCHES = ((2048, 2048), (2048, 256), (1024, 256))
"""Blocks of keys and of values: the source's setting, its best one at 64K, the default here."""
TABLE_22 = {8192: 4.57, 32768: 1.57, 65536: 1.07, 131072: 0.82}
"""The source's total of device memory beside dense, with 2,048 blocks of each."""


@dataclasses.dataclass(frozen=True)
class Quality:
    """The records of one length: the uncompressed model's, certified's, and their comparison."""

    length: int
    base: Measured
    row: Measured
    results: Results


def qualities(options: argparse.Namespace) -> Iterator[Quality]:
    """Measure certified at every length, a bench each, so that certificates are those of that length."""
    subject = tinylm(options.device, None, SHIPPED[options.model])
    for length in options.lengths:
        effort = Effort((length,), options.tail, options.questions, batch=options.rows, inner=options.inner, attention=False)
        bench = Bench(subject, effort)
        base, row = bench.reference(), bench.measure(options.scheme)
        yield Quality(length, base, row, Results({}, {}, base, (row,)))


def table(title: str, *columns: str) -> Table:
    """An empty table; the first column is left, numbers are right."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        made.add_column(name, justify="right" if index else "left")
    return made


def table_11(found: Sequence[Quality]) -> Table:
    """Bounds of candidates while questions were answered."""
    made = table(
        "Table 11: candidate bounds of head-steps, while questions were answered (the most: texts too)", "prompt", "head-steps",
        "E_key p50", "p95", "most", "E_val p50", "p95", "most",
    )
    for item in found:
        told = item.row.asked
        figures = (told[f"{kind}_candidate_{half}"] for half in ("key", "value") for kind in ("p50", "p95", "most"))
        made.add_row(f"{item.length:,}", f"{told['head_steps']:,.0f}", *(f"{x:.3g}" for x in figures))
    return made


def table_12(found: Sequence[Quality]) -> Table:
    """Candidates beside what was returned."""
    made = table(
        f"Table 12: candidate and returned bounds, {found[-1].length:,} bytes, questions", "", "mean", "p50", "p95", "most",
    )
    told = found[-1].row.asked
    for name in ("candidate_key", "key", "candidate_value", "value"):
        mean = told[f"sum_{name}"] / max(1.0, told["head_steps"])
        label = name if "candidate" in name else f"returned_{name}"
        made.add_row(label.replace("_", " "), *(f"{x:.3g}" for x in (mean, *(told[f"{kind}_{name}"] for kind in ("p50", "p95", "most")))))
    return made


def layouts(scheme: Certified, heads: int = K) -> tuple[Layout, Layout]:
    """Layouts of the key and the value slot at the source's shape."""
    made = (scheme.for_role(role).layout(SlotSpec(heads, D, torch.bfloat16, role)) for role in (Role.KEY, Role.VALUE))
    keys, values = made
    return keys, values


def table_13() -> Table:
    """Bytes of a token and kv head by plane."""
    made = table(f"Table 13: bytes a token and kv head, D = {D}", "plane", "bytes", "of dense")
    dense, total = 2 * D * 2, 0.0
    for half, layout in zip(("key", "value"), layouts(Certified(tier2=Tier2.HOST, scratch=0)), strict=True):
        for plane in layout.planes:
            if plane.extent is Extent.TOKENS and not plane.originals:
                size = plane.bytes_per_page / PAGE
                total += size
                made.add_row(f"{half} {plane.name}", f"{size:g}", f"{size / dense:.2%}")
    made.add_row("tier 1 (the source: 288)", f"{total:g}", f"{total / dense:.2%}")
    return made


def table_14(found: Sequence[Quality]) -> Table:
    """Certified less uncompressed, with 95% intervals."""
    made = table(
        "Table 14: certified less the uncompressed model, 95% intervals over texts and questions", "prompt", "bits a byte", "KL, nats",
        "answers", "lost, won", "p", "points",
    )
    for item in found:
        beside = item.results.compared(item.row)
        pairs, share = beside.paired["all"], item.row.share()
        made.add_row(
            f"{item.length:,}", f"{beside.bits.value:+.4f} ({beside.bits.low:+.4f} to {beside.bits.high:+.4f})",
            f"{beside.kl.value:.2g} ({beside.kl.low:.2g} to {beside.kl.high:.2g})", f"{share.hits} of {share.trials}, "
            f"uncompressed {item.base.share().hits}", f"{pairs.lost}, {pairs.won}", f"{pairs.p:.2g}",
            f"{pairs.difference.value:+.1%} ({pairs.difference.low:+.0%} to {pairs.difference.high:+.0%})",
        )
    return made


def table_15(found: Sequence[Quality]) -> Table:
    """How often each rung and cause was, of head-steps."""
    names = ("widened", "rung_values", "cause_boundary", "cause_rank", "rung_head", "rung_layer")
    made = table("Table 15: triggers, share of head-steps", "prompt", "of", "head-steps", *(name.replace("_", " ") for name in names))
    for item in found:
        for kind, told in (("texts", item.row.telemetry), ("questions", item.row.asked)):
            steps = max(1.0, told["head_steps"])
            made.add_row(f"{item.length:,}", kind, f"{told['head_steps']:,.0f}", *(f"{told[name] / steps:.2%}" for name in names))
    return made


class Timed:
    """Rows of ``certified.py``'s measurement, each measured once; a row that fails is kept as its error."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rows, self.errors = options, dict[Any, dict[str, Any]](), list[str]()
        self.dense: dict[int, float] = {}

    def __call__(self, tokens: int, keys: int | None, values: int = 0, policy: str = "default") -> dict[str, Any] | None:
        """One row; ``keys``: blocks of their scratch, None for originals on the device."""
        from benchmarks.attention import attend_call, graph_ms
        from benchmarks.extensions.certified.certified import Values, Variant, measure
        from kvcompile.schemes.certificate.policy import parse_policy

        place = tokens, keys, values, policy
        if place not in self.rows:
            torch._dynamo.reset()
            torch.cuda.empty_cache()
            try:
                if tokens not in self.dense:
                    dense, *_ = attend_call("dense", 1, tokens, None)
                    self.dense[tokens] = graph_ms(dense)
                drift = self.options.drift if keys else 1.0
                variant = Variant("device" if keys is None else "host", Values.INT4, (keys or 0, values), drift)
                self.rows[place] = measure(tokens, parse_policy(policy), variant, 3.0, self.dense[tokens])
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the other rows are wanted all the same
                self.errors.append(f"{place}: {type(error).__name__}: {error}")
                print(self.errors[-1], flush=True)
        return self.rows.get(place)


def table_16(timed: Timed) -> Table:
    """Shares of phases at the first length."""
    options = timed.options
    tokens, slots = options.tokens[0], SHORT["capacities"][-1] if options.short else 2048
    made = table(f"Table 16: phases of a layer's step, {tokens:,} tokens, tier 2 on the host, {slots} blocks of keys", "phase", "us", "%")
    row = timed(tokens, slots, 256)
    if row is None:
        return made
    by_phase = {name: ms for name, ms in row["phases_ms"].items() if name != "kernels"}
    if options.dense_step:
        by_phase["not attention"] = options.dense_step / LAYERS - row["dense_ms"]
    for name, ms in sorted(by_phase.items(), key=lambda item: -item[1]):
        made.add_row(name.replace("_", " "), f"{1e3 * ms:.1f}", f"{ms / sum(by_phase.values()):.1%}")
    return made


def sweep(timed: Timed, number: int, tokens: int) -> Table:
    """Tables 17 and 18: times by capacity of the scratch of keys."""
    capacities = SHORT["capacities"] if timed.options.short else CAPACITIES
    made = table(
        f"Table {number}: scratch of keys, {tokens:,} tokens ({tokens // BLOCK:,} blocks), q = {timed.options.drift} q + noise",
        "blocks of keys", "ms, 32 layers", "x dense attention", "found", "MB over the bus, 32 layers",
    )
    for slots in (*capacities, None):
        row = timed(tokens, slots, 256 if slots else 0)
        if row is not None:
            name, host = "originals on the device" if slots is None else f"{slots:,}", slots is not None
            moved = LAYERS * (row["key_bytes_a_step"] + row["value_bytes_a_step"]) / 1e6 if host else 0.0
            made.add_row(
                name, f"{LAYERS * row['ms']:.2f}", f"{row['ratio']:.2f}", f"{row['key_hits']:.1%}" if slots else "", f"{moved:,.1f}",
            )
    return made


def table_19(timed: Timed) -> Table:
    """Scratches of keys and values of different sizes, under a policy that promotes values."""
    policy = timed.options.value_policy
    made = table(
        f"Table 19: scratches of keys and of values, {policy}", "tokens", "blocks of keys, values", "ms, 32 layers", "keys found",
        "values found", "MB over the bus: keys, values",
    )
    for tokens in timed.options.tokens:
        for keys, values in SHORT["pairs"] if timed.options.short else PAIRS:
            row = timed(tokens, keys, values, policy)
            if row is not None:
                moved = (f"{LAYERS * row[f'{half}_bytes_a_step'] / 1e6:,.1f}" for half in ("key", "value"))
                made.add_row(
                    f"{tokens:,}", f"{keys:,}, {values:,}", f"{LAYERS * row['ms']:.2f}", f"{row['key_hits']:.1%}",
                    f"{row['value_hits']:.1%}", ", ".join(moved),
                )
    return made


def table_20(timed: Timed) -> Table:
    """One scratch at several lengths."""
    slots = 1024
    made = table(
        f"Table 20: by length, {slots:,} blocks of keys and 256 of values", "tokens", "dense attention ms, 32 layers", "certified", "x",
        "promoted a head", "keys found", "MB over the bus", "fell",
    )
    for tokens in timed.options.tokens[:1] if timed.options.short else LENGTHS:
        row = timed(tokens, slots, 256)
        if row is not None:
            moved = LAYERS * (row["key_bytes_a_step"] + row["value_bytes_a_step"]) / 1e6
            made.add_row(
                f"{tokens:,}", f"{LAYERS * row['dense_ms']:.2f}", f"{LAYERS * row['ms']:.2f}", f"{row['ratio']:.2f}",
                f"{row['promoted_mean']:.0f}", f"{row['key_hits']:.1%}", f"{moved:,.1f}", f"{row['fallen']:.2%}",
            )
    return made


def table_21(timed: Timed) -> Table:
    """Eq. 19 beside what was asked for."""
    made = table(
        "Table 21: blocks that query heads ask for together, share of all", "tokens", "printed, 32 heads", "Eq. 19, 32 heads",
        "Eq. 19, 4 heads", "measured, a kv head's 4",
    )
    seen = {tokens: row for (tokens, keys, _, policy), row in timed.rows.items() if keys and policy == "default"}
    for tokens, (printed, _) in TABLE_21.items():
        measured = f"{seen[tokens]['key_union']:.1%}" if tokens in seen else ""
        made.add_row(f"{tokens:,}", f"{printed:.0%}", f"{union(tokens):.1%}", f"{union(tokens, heads=HEADS // K):.1%}", measured)
    return made


def device_bytes(scheme: Certified, tokens: int) -> tuple[int, int, int]:
    """Bytes of tier 1, of scratches, and of the host, of 32 layers and one row."""
    pages, tier1, scratch, host = -(-tokens // PAGE), 0, 0, 0
    for layout in layouts(scheme):
        for plane in layout.planes:
            size = LAYERS * K * (pages * plane.bytes_per_page if plane.extent is Extent.TOKENS else plane.nbytes)
            if plane.host:
                host += size
            elif plane.name == SCRATCH:
                scratch += size
            else:
                tier1 += size
    return tier1, scratch, host


def table_22() -> Table:
    """Bytes by length."""
    made = table(
        "Table 22: GB of one row of 32 layers, by layouts; scratches of keys and values: GB, and the total beside dense", "tokens", "dense",
        "tier 1", *(f"{keys:,} + {values:,}" for keys, values in SCRATCHES), "host", "printed, 2,048 + 2,048",
    )
    for tokens, printed in TABLE_22.items():
        dense, shown = LAYERS * K * tokens * 2 * D * 2, []
        for keys, values in SCRATCHES:
            tier1, scratch, host = device_bytes(Certified(tier2=Tier2.HOST, scratch=keys, value_scratch=values), tokens)
            shown.append(f"{scratch / 1e9:.2f}, {(tier1 + scratch) / dense:.2f}")
        made.add_row(f"{tokens:,}", f"{dense / 1e9:.2f}", f"{tier1 / 1e9:.2f}", *shown, f"{host / 1e9:.2f}", f"{printed:.2f}")
    return made


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    return tuple(int(part) for part in text.split(",") if part)


def main() -> int:
    """Measure what the tables need, and print them in order."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tables", type=numbers, default=tuple(range(11, 23)))
    parser.add_argument("--model", default="tinylm", choices=sorted(SHIPPED))
    parser.add_argument("--scheme", default="certified")
    parser.add_argument("--lengths", type=numbers, default=(1000, 2000), help="bytes of prompts of the trained model")
    parser.add_argument("--questions", type=int, default=20, help="a task and length")
    parser.add_argument("--rows", type=int, default=4, help="texts, and questions at a time")
    parser.add_argument("--tail", type=int, default=32, help="bytes decoded of each text")
    parser.add_argument("--inner", default="eager", choices=("inductor", "aot_eager", "eager"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=numbers, default=(65536, 131072), help="of one layer's attention, tables 16 to 19")
    parser.add_argument("--drift", type=float, default=0.99, help="R of q = R q + noise")
    parser.add_argument("--value-policy", default="v_tol:0.002", help="of table 19, as Certify.spec writes it")
    parser.add_argument("--dense-step", type=float, help="ms of a whole dense step at the first of --tokens, for table 16")
    parser.add_argument("--short", action="store_true", help="the fewest rows of tables 16 to 20")
    parser.add_argument("--json", type=pathlib.Path, help="all records")
    options = parser.parse_args()
    parse(options.scheme)
    torch.set_num_threads(options.threads)
    console, wanted, timed = Console(width=160), set(options.tables), Timed(options)
    found = tuple(qualities(options)) if wanted & QUALITY else ()
    builders: dict[int, Callable[[], Table]] = {
        11: lambda: table_11(found), 12: lambda: table_12(found), 13: table_13, 14: lambda: table_14(found), 15: lambda: table_15(found),
        16: lambda: table_16(timed), 17: lambda: sweep(timed, 17, options.tokens[0]), 18: lambda: sweep(timed, 18, options.tokens[-1]),
        19: lambda: table_19(timed), 20: lambda: table_20(timed), 21: lambda: table_21(timed), 22: table_22,
    }
    told = machine(options.device)
    console.print(", ".join(f"{name} {value}" for name, value in told.items()), highlight=False)
    for number in sorted(wanted):
        if number in TIMED and not torch.cuda.is_available():
            console.print(f"Table {number}: times are taken on a CUDA device, and this machine has none")
            continue
        console.print(builders[number]())
    if options.json:
        records = {
            "machine": told, "options": {name: str(value) for name, value in vars(options).items()},
            "quality": [{"length": item.length, "base": measured_plain(item.base), "row": measured_plain(item.row)} for item in found],
            "timed": list(timed.rows.values()), "errors": timed.errors,
        }
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    for error in timed.errors:
        console.print(error, highlight=False)
    return 1 if timed.errors else 0


if __name__ == "__main__":
    sys.exit(main())
