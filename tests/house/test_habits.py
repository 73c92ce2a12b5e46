"""Files beside the code say the same as it: versions, ranges, commands, forms."""

from __future__ import annotations

import datetime as dt
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvcompile

ROOT = Path(__file__).resolve().parents[2]
SETTINGS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = SETTINGS["project"]
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
INPUTS = {"input", "textarea", "dropdown", "checkboxes"}


def read(path: str | Path) -> Any:
    """A YAML file's content."""
    return yaml.safe_load((ROOT / path).read_text())


def test_one_version_everywhere() -> None:
    assert PROJECT["version"] == kvcompile.__version__ == read("CITATION.cff")["version"]


def test_the_citation_has_what_the_format_asks_for() -> None:
    cited = read("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= cited.keys() and cited["authors"]
    assert (cited["title"], cited["license"]) == (PROJECT["name"], PROJECT["license"])


def number(version: str) -> tuple[int, ...]:
    """A version as numbers that can be compared."""
    return tuple(map(int, version.split(".")))


def test_the_changelog_has_this_version_and_what_comes() -> None:
    heads = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == "[Unreleased]"
    released = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)", head) for head in heads[1:]]
    assert released and all(released), heads
    versions = [found[1] for found in released if found]
    dates = [dt.date.fromisoformat(found[2]) for found in released if found]
    assert versions[0] == PROJECT["version"]
    assert sorted(versions, key=number, reverse=True) == versions and sorted(dates, reverse=True) == dates


def test_the_changelog_has_the_kinds_of_changes_that_its_form_has() -> None:
    kinds = re.findall(r"^### (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert kinds and set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def supported(name: str) -> str:
    """The minor versions that pyproject.toml admits of a package, as documents write them: ``2.11 to 2.13``."""
    asked = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["hf"]]
    found = [re.fullmatch(rf"{name}>=(\d+)\.(\d+),<(\d+)\.(\d+)", item) for item in asked]
    (limits,) = [list(map(int, item.groups())) for item in found if item]
    assert limits[0] == limits[2]
    return f"{limits[0]}.{limits[1]} to {limits[2]}.{limits[3] - 1}"


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_documents_say_the_versions_that_are_admitted(name: str) -> None:
    assert f"| {name} | {supported(name)} |" in (ROOT / "docs/VERSIONS.md").read_text()
    assert f"{name} {supported(name)}" in (ROOT / "README.md").read_text()
    assert f"{name} {supported(name)}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("name", ["SECURITY.md", "docs/VERSIONS.md", ".github/PULL_REQUEST_TEMPLATE.md"])
def test_files_that_habits_name_exist(name: str) -> None:
    named = re.findall(r"`([\w.-]+/[\w./-]*|[\w-]+\.(?:md|cff|toml))`", (ROOT / name).read_text())
    missing = [place for place in named if not any((folder / place).exists() for folder in (ROOT, ROOT / "kvcompile"))]
    assert named and [place for place in missing if place != "kvcompile/"] == []


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_one_that_can_be_filled_in(path: Path) -> None:
    form = read(path)
    assert form["name"] and form["description"] and isinstance(form["labels"], list)
    assert {item["type"] for item in form["body"]} <= INPUTS | {"markdown"}
    asked = [item for item in form["body"] if item["type"] in INPUTS]
    assert len({item["id"] for item in asked}) == len(asked) and len({item["attributes"]["label"] for item in asked}) == len(asked)
    assert any(item.get("validations", {}).get("required") for item in asked)
    assert all(item["attributes"]["options"] for item in asked if item["type"] == "dropdown")
    assert all(item["attributes"]["value"] for item in form["body"] if item["type"] == "markdown")


def test_there_is_a_form_for_bugs_and_one_for_ideas() -> None:
    assert [path.stem for path in FORMS] == ["bug", "idea"]
    bug = next(path for path in FORMS if path.stem == "bug").read_text()
    assert "kvcompile explain" in bug and "Versions" in bug and "SECURITY.md" in bug


def recipe(target: str) -> list[str]:
    """The commands of a target of the Makefile."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found, f"the Makefile has no {target}"
    return [line.removeprefix("\t").replace("$(BIN)", ".venv/bin") for line in found[1].splitlines()]


def test_hooks_are_ours_and_run_what_lint_runs() -> None:
    repositories = read(".pre-commit-config.yaml")["repos"]
    assert [item["repo"] for item in repositories] == ["local"]
    entries = {hook["id"]: hook["entry"] for hook in repositories[0]["hooks"]}
    linted = {Path(line.split()[0]).name: line.removesuffix(" .") for line in recipe("lint")}
    assert linted.keys() == entries.keys() - {"subject"}
    assert all(entries[name].startswith(command) for name, command in linted.items())


def test_the_hook_of_subjects_refuses_more_than_72_characters() -> None:
    (hook,) = (item for item in read(".pre-commit-config.yaml")["repos"][0]["hooks"] if item["id"] == "subject")
    refused = re.compile(hook["entry"], re.MULTILINE)
    assert not refused.search("x" * 72 + "\n\n" + "y" * 100) and refused.search("x" * 73 + "\n")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_of_the_makefile(path: Path) -> None:
    jobs = read(path)["jobs"].values()
    ran = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert ran and {command.removeprefix("make ") for command in ran} <= set(targets.split())
    assert all(job["timeout-minutes"] <= 360 for job in jobs)
    # Beyond the host's own actions, the one that trusted publishing is defined by.
    known = r"actions/[\w-]+@v\d+|pypa/gh-action-pypi-publish@release/v1"
    assert all("run" in step or re.fullmatch(known, step["uses"]) for job in jobs for step in job["steps"])


def test_ci_runs_the_suite_the_slow_tests_and_the_oldest_versions() -> None:
    assert WORKFLOWS
    text = "\n".join(path.read_text() for path in WORKFLOWS)
    assert {"make test", "make slow", "make oldest", "make wheel"} <= set(re.findall(r"make \w+", text))
