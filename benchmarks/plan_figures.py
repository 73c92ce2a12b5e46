"""The figures that ``kvcompile plan`` recommends by, gathered from measurements into ``kvcompile/tools/planner/figures.json``.

    for c in 600 2000 4000; do kvcompile eval --quick --context $c --schemes SCHEMES --json > eval_$c.json; done
    python benchmarks/plan_figures.py --quality eval_600.json,eval_2000.json,eval_4000.json --speed benchmarks/attention_h200.json
    python benchmarks/plan_figures.py --run DIR

The first two gather anew, the last adds a run of ``kvcompile eval --out DIR`` of another model, length by length.

Nothing is measured here and nothing is changed: counts and times are those of the files, with the settings that they were made with.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvcompile.tools.evaluation.results import Results

TARGET = Path(__file__).resolve().parent.parent / "kvcompile" / "tools" / "planner" / "figures.json"
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
    about = {"context": length, "model": "tinylm", "device": machine["device"], "torch": machine["versions"]["torch"]}
    return {**about, "command": command, "rows": rows}


def by_length(folder: Path) -> list[dict[str, object]]:
    """The run of ``kvcompile eval --out FOLDER``: for each length what ``quality`` gives of a run, over the tasks that were asked."""
    results = Results.load(folder / "results.json")
    config, machine = results.config, results.machine
    asked = f"--device {config['device']} --keys {config['keys']} --tasks {','.join(config['tasks'])} --questions {config['questions']}"
    runs: dict[int, dict[str, dict[str, Any]]] = {length: {} for length in results.lengths}
    for row in results.summary_rows():
        if row["scheme"] == results.reference.scheme:
            continue
        counts = {name: row[name] for name in ("kl", "same", "predictions")}
        held = runs[row["length"]].setdefault(row["scheme"], {**counts, "answers": 0, "questions": 0})
        held["answers"] += row["right"]
        held["questions"] += row["questions"]
    about = {"model": config["model"], "device": machine["device"], "torch": machine["versions"]["torch"]}
    return [
        {"context": length, **about, "command": f"kvcompile eval {config['model']} --lengths {length} {asked}", "rows": rows}
        for length, rows in runs.items()
    ]


def speed(path: Path) -> dict[str, object]:
    """One run of ``benchmarks/attention.py``: milliseconds of one layer's attention by scheme, batch and tokens."""
    run = json.loads(path.read_text())
    rows = [{name: row[name] for name in ("scheme", "batch", "tokens", "ms")} for row in run["rows"]]
    return {"device": run["device"], "torch": run["torch"], "file": f"benchmarks/{path.name}", "rows": rows}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Gather the figures that kvcompile plan recommends by.")
    parser.add_argument("--quality", default="", help="JSON files of kvcompile eval --json, separated by commas, in place of all runs")
    parser.add_argument("--speed", type=Path, help="JSON of benchmarks/attention.py, in place of the one before")
    parser.add_argument("--run", type=Path, help="a folder of kvcompile eval --out, in place of the runs of its model")
    arguments = parser.parse_args()
    made = json.loads(TARGET.read_text())
    if arguments.quality:
        made["quality"] = [quality(Path(item)) for item in arguments.quality.split(",")]
    if arguments.speed:
        made["speed"] = speed(arguments.speed)
    if arguments.run:
        runs = by_length(arguments.run)
        made["quality"] = [run for run in made["quality"] if run["model"] != runs[0]["model"]] + runs
    made["quality"].sort(key=lambda run: (run["context"], max(row["questions"] for row in run["rows"].values())))
    TARGET.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
