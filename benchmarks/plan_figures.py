"""The figures that ``kvcompile plan`` recommends by, gathered from measurements into ``kvcompile/planner/figures.json``.

    for c in 600 2000 4000; do kvcompile eval --quick --context $c --schemes SCHEMES --json > eval_$c.json; done
    python benchmarks/plan_figures.py --quality eval_600.json,eval_2000.json,eval_4000.json --speed benchmarks/attention_h200.json

Nothing is measured here and nothing is changed: counts and times are those of the files, with the settings that they were made with.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "kvcompile" / "planner" / "figures.json"
TASKS = ("needle", "multikey", "variable")


def quality(path: Path) -> dict[str, object]:
    """One run of ``kvcompile eval``: KL, equal next bytes, and answers over all three tasks, by scheme."""
    run = json.loads(path.read_text())
    rows = {}
    for row in run["schemes"]:
        rows[row["scheme"]] = {
            "kl": row["kl"], "same": row["agreement"]["hits"], "predictions": row["agreement"]["trials"],
            "answers": sum(row[task]["hits"] for task in TASKS), "questions": sum(row[task]["trials"] for task in TASKS),
        }
    config, machine = run["config"], run["machine"]
    (length,) = config["lengths"]
    command = f"kvcompile eval --quick --context {length} --questions {config['questions']}"
    return {"context": length, "device": machine["device"], "torch": machine["versions"]["torch"], "command": command, "rows": rows}


def speed(path: Path) -> dict[str, object]:
    """One run of ``benchmarks/attention.py``: milliseconds of one layer's attention by scheme, batch and tokens."""
    run = json.loads(path.read_text())
    rows = [{name: row[name] for name in ("scheme", "batch", "tokens", "ms")} for row in run["rows"]]
    return {"device": run["device"], "torch": run["torch"], "file": f"benchmarks/{path.name}", "rows": rows}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Gather the figures that kvcompile plan recommends by.")
    parser.add_argument("--quality", required=True, help="JSON files of kvcompile eval, separated by commas")
    parser.add_argument("--speed", type=Path, required=True, help="JSON of benchmarks/attention.py")
    arguments = parser.parse_args()
    runs = [quality(Path(item)) for item in arguments.quality.split(",")]
    made = {"quality": sorted(runs, key=lambda run: run["context"]), "speed": speed(arguments.speed)}
    TARGET.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
