"""Documents and benchmarks: what a document names is in the tree or listed with a commit, and counts on pages are those of tables."""

from __future__ import annotations

import csv
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.accept.table import count_table, read_csv
from kvcompile.tools.cli import survey_table, trial

ROOT = Path(__file__).resolve().parents[2]
STUDIES = ROOT / "benchmarks/STUDIES.md"
PAGES = sorted(path for folder in (".", "docs", "benchmarks") for path in (ROOT / folder).glob("**/*.md" if folder != "." else "*.md"))
SCRIPT = re.compile(r"\bbenchmarks/((?:\w+/)*\w+\.(?:py|json|csv|md))")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def rows_of_studies() -> list[list[str]]:
    """The cells of each study: name, what it measured, commit, command, figures."""
    lines = [line for line in STUDIES.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[1:]]


def kept_by_tag() -> set[str]:
    """Names of the scripts in the commands of studies."""
    return {name for row in rows_of_studies() for name in re.findall(r"(\w+)\.py", row[3])}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_benchmarks_that_a_page_names_are_in_the_tree_or_at_the_tag(page: Path) -> None:
    text = page.read_text()
    gone = {name for name in SCRIPT.findall(text) if not (ROOT / "benchmarks" / name).exists()}
    assert {Path(name).stem for name in gone} <= kept_by_tag(), gone
    # Whoever meets the command of a study reads where it runs.
    assert not gone or "studies-2026-11" in text, gone


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not missing


def test_studies_are_at_the_commits_that_are_named() -> None:
    rows = rows_of_studies()
    assert len(rows) > 15 and len({row[0] for row in rows}) == len(rows) and all(all(row) for row in rows)
    for name, _, commit, command, _ in rows:
        script = re.search(r"(?:B |E |benchmarks/)((?:\w+/)*\w+\.py)", command)
        assert script is not None, name
        listed = subprocess.run(
            ["git", "ls-tree", "-r", "--name-only", commit, "benchmarks"], check=False, cwd=ROOT, capture_output=True, text=True
        )
        if listed.returncode:
            pytest.skip("the commits of the studies are not in this clone")
        assert re.search(rf"(?m)^benchmarks/(extensions/)?{script[1]}$", listed.stdout), (name, commit)
        assert not list((ROOT / "benchmarks").rglob(Path(script[1]).name)), f"{name} is in the tree"


def test_counts_of_acceptance_runs_are_those_of_their_tables() -> None:
    page = (ROOT / "benchmarks/TABLES.md").read_text()
    paths = [ROOT / "benchmarks" / f"accept_{card}.csv" for card in ("h100", "h200")]
    assert count_table(paths) in page
    for path in paths:
        names = [row["case"] for row in read_csv(path)]
        assert names == sorted(set(names))


def test_counts_of_the_survey_are_those_of_its_table() -> None:
    with (ROOT / "benchmarks/survey.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == survey_table.FIELDS
    said = survey_table.in_words(Counter(trial.CaseOutcome(row["outcome"]) for row in rows))
    assert f"\n{said}.\n" in (ROOT / "benchmarks/TABLES.md").read_text()
