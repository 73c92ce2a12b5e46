"""Quality of tinylm with smartkv's compiled cache, beside other schemes whose caches hold as many bytes.

    python benchmarks/extensions/smartkv/smartkv_quality.py --lengths 1600,4096,8192 --seeds 3 --json FILE [--parts LIST] [--plot PNG]

reference  bits per byte of the uncompressed model on the decoded bytes, as trained and with its positions stretched (YaRN, factor 2)
texts      a prompt goes through the compiled model, then the bytes that follow it, one at a time and always the true ones: KL from
           the uncompressed model, bits per byte and bytes held, of uniform schemes, of kivi, of kivi with the bits of each layer by
           what it does there alone (found on other texts), and of smartkv with the budget at which it holds as many bytes
ablation   smartkv with one option changed, at the first length, with the budget at which it holds as many bytes as int4
tier2      smartkv of three budgets without and with originals kept (``tier2=device``), at the first length; not among the usual parts
tasks      exact answers, decoded greedily, to questions about lines that were planted in the prompt, at the first length

Bytes held: the mean over decode steps of what ``report()`` says, without originals that are kept, of the tokens' bytes in 16 bits. The
model runs in float32 on a CPU, so windows of tokens in full precision, which kivi has, are counted as 16 bits. A seed is a draw of texts
and questions: there is one trained model, and nothing else is random. Prompts longer than 2,048 bytes are fewer and have a shorter tail,
and those that tinylm was not trained for run with stretched positions. What FILE holds already is not measured again.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2] / "examples"), str(HERE)]

import smartkv_figures as figures
from tinylm import codec, corpus, evaluate, tasks

import kvcompile
from kvcompile.tools.cli.targets import static_cache

TINYLM = HERE.parents[2] / "examples" / "tinylm"
STRETCHED = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 4352}
CANDIDATES = ("kivi(bits=2)", "kivi(bits=3)", "kivi(bits=4)", "int8")
"""Schemes that the policy by layer chooses from."""
TASKS = ("needle", "multikey", "variable")
LEAST = 0.222
"""The least budget of the default widths for tinylm, a little above what a token takes at least."""
WIDE = "2/3/4/8"
progress = Console(stderr=True)


@dataclass(frozen=True)
class Subject:
    """A scheme or a policy by a name."""

    label: str
    family: str
    scheme: Any = None

    @property
    def choice(self) -> Any:
        """Return the scheme or policy that ``kvcompile.backend`` is called with."""
        return self.scheme if self.scheme is not None else self.label


@dataclass
class Rows:
    """Measured rows, written to a file as they come; a row is known by its key."""

    path: Path | None
    settings: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path and self.path.is_file():
            self.rows = json.loads(self.path.read_text())["rows"]

    def of(self, key: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the row of ``key``, measured where it is not there."""
        for row in self.rows:
            if all(row.get(name) == value for name, value in key.items()):
                return row
        started = time.perf_counter()
        row = {**key, **measure(), "seconds": round(time.perf_counter() - started, 1)}
        self.rows.append(row)
        if self.path:
            self.path.write_text(json.dumps({**self.settings, "rows": self.rows}, indent=1) + "\n")
        progress.print(f"{row['seconds']:6.1f} s  {_short(row)}", soft_wrap=True)
        return row


def _short(row: dict[str, Any]) -> str:
    """A row in one line."""
    shown = {name: row[name] for name in ("part", "length", "label")}
    shown |= {name: f"{row[name]:.4f}" for name in ("held", "stretched", "trained") if name in row}
    shown |= {name: f"{figures.mean(row[name]):.4f}" for name in ("kl", "bits") if name in row}
    return "  ".join(f"{name} {value}" for name, value in {**shown, **row.get("tasks", {})}.items())


@functools.cache
def load(stretched: bool) -> Any:
    """tinylm in float32, with its positions as trained or stretched to twice their number."""
    options = {"rope_parameters": STRETCHED, "max_position_embeddings": 2 * 4352} if stretched else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.utils.logging.disable_progress_bar()
        return transformers.LlamaForCausalLM.from_pretrained(TINYLM, dtype=torch.float32, **options).eval()


class Texts:
    """Held-out texts of one length: prompts, the bytes behind them, and what the uncompressed model says of those."""

    def __init__(self, length: int, tail: int, places: Sequence[Sequence[int]], stretched: bool | None = None) -> None:
        self.length, self.tail = length, tail
        self.model = load(length + tail >= 4352 if stretched is None else stretched)
        text = corpus.heldout_text()
        self.ids = [torch.tensor([codec.encode(text[at : at + length + tail]) for at in seed]) for seed in places]

    @functools.cached_property
    def reference(self) -> list[torch.Tensor]:
        """Log-probabilities of the tail's bytes, a tensor a seed."""
        with torch.no_grad():
            return [
                torch.cat([self.model(input_ids=row[None, :-1], use_cache=False).logits[:, self.length :].log_softmax(-1) for row in ids])
                for ids in self.ids
            ]

    def bits(self, found: torch.Tensor, seed: int) -> list[float]:
        """Bits per byte of each text of a seed."""
        targets = self.ids[seed][:, self.length + 1 :, None]
        return (-found.gather(-1, targets).mean((1, 2)) / math.log(2)).tolist()

    def cache(self, more: int | None = None) -> Any:
        """An empty cache with room for a prompt and what follows, which is the tail unless told."""
        return static_cache(self.model, self.length + (self.tail if more is None else more))


def compiled(model: Any, choice: Any, validate: bool = True) -> tuple[Any, Any]:
    """The model compiled for a scheme, operations by their eager bodies; and the backend."""
    torch.compiler.reset()
    gc.collect()
    owner = kvcompile.backend(choice, inner="eager", strict=True, validate=validate)
    return torch.compile(model, backend=owner), owner


def held(owner: Any) -> float:
    """Bytes held by the live caches, of 16 bits, with windows in full precision counted as 16 bits."""
    report = owner.report()
    stores = [store for state in owner.memory.live for store in state.stores.values()]
    wide = sum(
        plane.nbytes * (1 - 2 / plane.itemsize) for store in stores
        for plane, spec in zip(store.planes, store.spec.layout.planes, strict=True) if spec.name == "window"
    )
    return (report.allocated - report.originals - wide) / (report.dense * 2 / 4)


def decoded(model: Any, owner: Any, texts: Texts, ids: torch.Tensor) -> tuple[torch.Tensor, list[float], kvcompile.schemes.Churn]:
    """Log-probabilities of the bytes behind the prompts, the bytes held after every step, and what deciding widths changed."""
    gc.collect()
    cache, steps, shares = texts.cache(), [], []
    first, last = texts.length + 1, ids.shape[1] - 1
    with torch.no_grad():
        for start, stop in [(0, first), *((at, at + 1) for at in range(first, last))]:
            logits = model(input_ids=ids[:, start:stop].contiguous(), past_key_values=cache, use_cache=True).logits
            steps.append(logits[:, -1:].float().log_softmax(-1))
            if stop > first:
                shares.append(held(owner))
    return torch.cat(steps, 1), shares, owner.report().churn


def measured(texts: Texts, choice: Any) -> dict[str, Any]:
    """KL, bits per byte and the share of equal next bytes of every text, and bytes held."""
    model, owner = compiled(texts.model, choice)
    row: dict[str, Any] = {"kl": [], "bits": [], "same": [], "seed": [], "held": [], "held_most": 0.0}
    row |= {"allocations": 0, "moved": 0, "promoted": 0}
    for seed, ids in enumerate(texts.ids):
        found, shares, churn = decoded(model, owner, texts, ids)
        reference = texts.reference[seed]
        row["kl"] += torch.nn.functional.kl_div(found, reference, log_target=True, reduction="none").sum(-1).mean(-1).tolist()
        row["same"] += (found.argmax(-1) == reference.argmax(-1)).float().mean(-1).tolist()
        row["bits"] += texts.bits(found, seed)
        row["seed"] += [seed] * len(ids)
        row["held"].append(figures.mean(shares))
        row["held_most"] = max(row["held_most"], *shares)
        for name in ("allocations", "moved", "promoted"):
            row[name] += getattr(churn, name)
    row["held"] = figures.mean(row["held"])
    return row


def probed(texts: Texts, choice: Any) -> float:
    """Bytes held with one text."""
    model, owner = compiled(texts.model, choice, validate=False)
    return figures.mean(decoded(model, owner, texts, texts.ids[0][:1])[1])


class Study:
    """All measurements of one length."""

    def __init__(self, rows: Rows, options: argparse.Namespace, length: int, tail: int | None = None, texts: int | None = None) -> None:
        far = length > 2048
        count = texts or (options.far_texts if far else options.texts)
        tail = tail or (options.far_tail if far else options.tail)
        self.rows, self.options, self.length = rows, options, length
        self.places = figures.starts(len(corpus.heldout_text()), length + tail, options.seeds, count)
        self.texts = Texts(length, tail, self.places)
        self.scope = {"length": length, "tail": tail, "seeds": options.seeds, "texts": count}

    def text(self, subject: Subject, part: str = "texts") -> dict[str, Any]:
        """The row of a subject."""
        key = {"part": part, **self.scope, "label": subject.label}
        told = {"family": subject.family, "choice": str(subject.choice)}
        return self.rows.of(key, lambda: {**told, **measured(self.texts, subject.choice)})

    def smartkv(self, target: float, extra: str = "", least: float = LEAST) -> str | None:
        """smartkv, spelled, with the budget at which it holds ``target``; None where its least budget holds more."""
        def spelled(budget: float) -> str:
            return f"smartkv(budget={budget:.4f}{',' + extra if extra else ''})"

        def probe() -> dict[str, Any]:
            return {"budget": figures.budget_for(lambda budget: probed(self.texts, spelled(budget)), target, least)}

        key = {"part": "budget", **self.scope, "label": f"smartkv({extra})", "target": round(target, 5)}
        budget = self.rows.of(key, probe)["budget"]
        return spelled(budget) if budget else None

    def like(self, held_bytes: float, extra: str = "", least: float = LEAST, family: str = "smartkv") -> dict[str, Any] | None:
        """The row of smartkv in so many bytes, one that is there where its bytes are within 1%; None where it cannot be that small."""
        for row in self.rows.rows:
            here = row["part"] == "texts" and all(row[name] == value for name, value in self.scope.items())
            if here and row["family"] == family and abs(row["held"] / held_bytes - 1) <= 0.01:
                return row
        spelled = self.smartkv(held_bytes, extra, least)
        if spelled is None:
            progress.print(f"smartkv({extra}) cannot hold {held_bytes:.3f} or less at {self.length}")
            return None
        return self.text(Subject(spelled, family))

    def weights(self) -> str:
        """``layer_weights`` by the harm that 2 bits do in each layer alone."""
        harm = [self._harm(layer, CANDIDATES[0]) for layer in range(self.texts.model.config.num_hidden_layers)]
        return "/".join(f"{each / figures.mean(harm):.3g}" for each in harm)

    def mixed(self, limit: float) -> dict[str, Any] | None:
        """The row of the policy whose layers have the schemes that do the least harm within a share of bytes."""
        harm = [{name: self._harm(layer, name) for name in CANDIDATES} for layer in range(self.texts.model.config.num_hidden_layers)]
        names = figures.mixture(harm, {name: self._share(name) for name in CANDIDATES}, limit)
        if names is None:
            progress.print(f"no mixture holds {limit:.3f} or less at {self.length}")
            return None
        return self.text(self.policy(names))

    @staticmethod
    def policy(names: Sequence[str]) -> Subject:
        """The subject of a scheme for each layer."""
        bits = "/".join(name.partition("=")[2].rstrip(")") or name[-1] for name in names)
        return Subject(f"kivi by layer {bits}", "kivi by layer", {f"model.layers.{layer}.*": name for layer, name in enumerate(names)})

    def _share(self, name: str) -> float:
        """Bytes held by a candidate."""
        return self.rows.of({"part": "share", **self.scope, "label": name}, lambda: {"held": probed(self.texts, name)})["held"]

    def _harm(self, layer: int, name: str) -> float:
        """The mean KL where one layer alone has a scheme, on other texts than those that are measured."""
        key = {"part": "harm", "length": 800, "tail": 32, "label": name, "layer": layer}
        choice = {"*": "dense", f"model.layers.{layer}.*": name}
        return figures.mean(self.rows.of(key, lambda: measured(calibration(), choice))["kl"])

    def answered(self, subject: Subject, held_bytes: float) -> dict[str, Any]:
        """The row of a subject's answers; of the uncompressed model where its scheme is "none"."""
        key = {"part": "tasks", **self.scope, "questions": self.options.questions, "label": subject.label}
        return self.rows.of(key, lambda: {"family": subject.family, "held": held_bytes, "tasks": self._tasks(subject)})

    def _tasks(self, subject: Subject) -> dict[str, tuple[int, int]]:
        text, found = corpus.heldout_text(), {}
        model = self.texts.model if subject.scheme == "none" else compiled(self.texts.model, subject.choice)[0]
        for task in TASKS:
            hits = trials = 0
            for seed in range(self.options.seeds):
                gc.collect()
                asked = tasks.examples(task, self.options.questions, self.length, text, seed=seed)
                if subject.scheme == "none":
                    score = evaluate.answers_by_forward(model, asked, batch_size=1)
                else:
                    score = evaluate.answers_by_decoding(model, asked, lambda: self.texts.cache(40), batch_size=self.options.questions)
                hits, trials = hits + score.hits, trials + score.trials
            found[task] = hits, trials
        return found


@functools.cache
def calibration() -> Texts:
    """Four short texts; with the default sizes none of the bytes decoded here is decoded in what is measured."""
    return Texts(800, 32, [[3_777, 19_777, 35_777, 51_777]])


def reference(study: Study) -> dict[str, Any]:
    """Bits per byte of the uncompressed model, as trained and stretched."""
    def told() -> dict[str, Any]:
        found = {}
        for name, stretched in (("trained", False), ("stretched", True)):
            texts = Texts(study.length, study.texts.tail, study.places, stretched)
            found[name] = figures.mean([bits for seed in range(len(texts.ids)) for bits in texts.bits(texts.reference[seed], seed)])
        return found

    return study.rows.of({"part": "reference", **study.scope, "label": "uncompressed"}, told)


def texts_part(study: Study, full: bool) -> None:
    """Fixed schemes, smartkv in their bytes, budgets of the source, and mixtures in the bytes of those."""
    fixed = [
        Subject("int4", "uniform"), Subject("kivi(bits=3)", "kivi"), Subject("kivi(bits=4)", "kivi"),
        Subject("kivi(bits=3,axis=token)", "uniform"), Subject("int4(granularity=token)", "uniform"),
        Subject("kivi(bits=2,axis=token)", "uniform"), Subject("kivi(bits=2)", "kivi"), Subject("int8", "uniform"),
    ]
    rows = [study.text(subject) for subject in (fixed if full else fixed[:2])]
    # Keys of 2 bits are needed for a budget of 0.2.
    own = [study.text(Subject(f"smartkv(budget=0.2,keys={WIDE})", f"smartkv, keys {WIDE}"))] if full else []
    own += [study.text(Subject(f"smartkv(budget={budget})", "smartkv")) for budget in ((0.25, 0.3, 0.4, 0.5, 0.6) if full else (0.25,))]
    for row in rows[:5] if full else rows:
        study.like(row["held"])
    for row in own[:4] if full else own[:1]:
        study.mixed(row["held"] * 1.005)
    if full:
        weighed = f"layer_weights={study.weights()}"
        study.like(rows[1]["held"], weighed, family="smartkv, layers weighed")
        study.like(own[1]["held"], weighed, family="smartkv, layers weighed")
        study.like(rows[0]["held"], "keys=4/8", 0.26, "smartkv, keys 4/8")
        # One width for keys and one for values: nothing is decided by attention, and new tokens have 8 bits as ever.
        for keys, values in ((3, 2), (3, 3), (4, 3)):
            study.text(Subject(f"smartkv(budget=0.9,keys={keys},values={values})", "smartkv, one width"))


CHANGES = (
    "recency=0", "head_share=0", "moved=0,checks=1,costs=0", "alpha=0.3", "alpha=0.8", "alpha=1.0", "interval=64", "tau=1e9,drift=1",
    "interval=64,tau=1e9,drift=1", "decay=0.99", "decay=0.999",
)
"""No recency, no head weights, no hysteresis; the concavity of worth; a slower clock, no look at drift, both; longer averages."""


def ablation(study: Study) -> None:
    """smartkv with one option changed, all with the budget at which it holds int4's bytes as it is."""
    fixed = study.text(Subject("int4", "uniform"), "ablation")
    spelled = study.smartkv(fixed["held"])
    assert spelled is not None
    for extra in ("", *CHANGES):
        study.text(Subject(spelled.replace(")", f",{extra})") if extra else spelled, "smartkv"), "ablation")


def tier2_part(study: Study) -> None:
    """smartkv of three budgets without promotions, and with them."""
    for budget in (0.25, 0.3, 0.4):
        for extra in ("", ",tier2=device"):
            study.text(Subject(f"smartkv(budget={budget}{extra})", "smartkv"), "tier2")


def tasks_part(study: Study) -> None:
    """Answers by the uncompressed model, fixed schemes, a mixture, and smartkv in the bytes of the mixture and of int4."""
    study.answered(Subject("uncompressed", "uncompressed", "none"), 1.0)
    two, four = study.text(Subject("kivi(bits=2)", "kivi")), study.text(Subject("int4", "uniform"))
    low = study.text(Subject("smartkv(budget=0.25)", "smartkv"))
    told = [low, two, study.mixed(low["held"] * 1.005), four, study.like(four["held"])]
    for row in filter(None, told):
        scheme = None
        if row["family"] == "kivi by layer":
            bits = row["label"].rpartition(" ")[2].split("/")
            scheme = study.policy(["int8" if each == "8" else f"kivi(bits={each})" for each in bits]).scheme
        study.answered(Subject(row["label"], row["family"], scheme), row["held"])


def printed(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Markdown tables of all rows."""
    told = [row for row in rows if row["part"] == "reference"]
    if told:
        yield "| prompt bytes | as trained | stretched |\n|---|---|---|\n" + "\n".join(
            f"| {row['length']:,} | {row['trained']:.3f} | {row['stretched']:.3f} |" for row in told
        )
    for part in ("texts", "ablation", "tier2", "tasks"):
        for length in sorted({row["length"] for row in rows if row["part"] == part}):
            some = [row for row in rows if (row["part"], row["length"]) == (part, length)]
            some = some if part == "ablation" else sorted(some, key=lambda row: row["held"])
            if part == "tier2":
                versus = {row["label"]: [row["label"].replace(",tier2=device", "")] for row in some if "tier2" in row["label"]}
            else:
                versus = figures.changes(some) if part == "ablation" else figures.pairs(some)
            table = figures.task_table(some) if part == "tasks" else figures.text_table(some, versus)
            yield f"\n{part}, {length:,} bytes of prompt\n\n{table}"


def main() -> int:
    """Measure what is asked for and print tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lengths", default="1600,4096,8192", help="bytes of a prompt")
    parser.add_argument("--parts", default="reference,texts,ablation,tasks")
    parser.add_argument("--seeds", type=int, default=3, help="draws of texts and questions")
    parser.add_argument("--texts", type=int, default=4, help="texts a seed")
    parser.add_argument("--tail", type=int, default=64, help="bytes decoded of each text")
    parser.add_argument("--far-texts", type=int, default=2, help="texts a seed with prompts beyond 2,048 bytes, and for the ablation")
    parser.add_argument("--far-tail", type=int, default=48, help="bytes decoded of those beyond 2,048 bytes")
    parser.add_argument("--ablation-tail", type=int, default=96, help="bytes decoded of each text for the ablation")
    parser.add_argument("--questions", type=int, default=8, help="questions a task and seed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="written as rows come; what it holds is not measured again")
    parser.add_argument("--plot", type=Path, help="draw KL against bytes held of the part texts")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()
    rows = Rows(options.json, {
        "command": " ".join(sys.argv[1:]), "commit": commit, "torch": torch.__version__, "transformers": transformers.__version__,
        "python": sys.version.split()[0], "threads": options.threads,
    })
    parts = options.parts.split(",")
    studies = [Study(rows, options, int(length), options.tail) for length in options.lengths.split(",")]
    for number, study in enumerate(studies):
        if "reference" in parts:
            reference(study)
        if "texts" in parts:
            texts_part(study, not number)
        if "ablation" in parts and not number:
            ablation(Study(rows, options, study.length, options.ablation_tail, options.far_texts))
        if "tier2" in parts and not number:
            tier2_part(Study(rows, options, study.length, options.ablation_tail, options.far_texts))
        if "tasks" in parts and not number:
            tasks_part(study)
    for text in printed(rows.rows):
        print(text)
    if options.plot:
        figures.draw([row for row in rows.rows if row["part"] == "texts"], options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
