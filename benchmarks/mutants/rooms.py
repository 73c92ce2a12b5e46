"""Rooms: the parts of the package that mutants are drawn from, and the tests that may notice them, the quickest first."""

from __future__ import annotations

from dataclasses import dataclass

PROGRAMS = "tests/validation/test_known_programs.py"
"""A hundred programs with their outcomes, of which the first few notice most changes that a compilation meets."""
MODELS = ("tests/e2e/test_e2e_modules.py", "tests/e2e/test_e2e_odd.py", "tests/e2e/test_e2e_functional.py", "tests/e2e/test_composed.py")


@dataclass(frozen=True)
class Room:
    """Files by glob, how many mutants are drawn from them, and files of tests in the order in which they are run."""

    globs: tuple[str, ...]
    count: int
    tests: tuple[str, ...]


ROOMS = {
    "matcher": Room(
        ("kvcompile/passes/match/**/*.py", "kvcompile/passes/graph/*.py"), 36,
        (
            PROGRAMS, "tests/passes", "tests/validation", "tests/runtime/test_sliding.py", "tests/runtime/test_paged.py", *MODELS,
            "tests/e2e/test_latent.py", "tests/e2e/test_rope.py", "tests/e2e/test_e2e_spellings.py",
        ),
    ),
    "rewrite": Room(
        ("kvcompile/passes/rewrite/*.py", "kvcompile/passes/verify.py", "kvcompile/passes/capture/*.py"), 18,
        (PROGRAMS, "tests/passes", "tests/validation", "tests/runtime", *MODELS, "tests/e2e/test_latent.py", "tests/e2e/test_rope.py"),
    ),
    "trial": Room(("kvcompile/validation/*.py",), 18, (PROGRAMS, "tests/validation", "tests/passes", *MODELS, "tests/e2e/test_rope.py")),
    "planner": Room(
        ("kvcompile/passes/plan/*.py", "kvcompile/tools/planner/*.py"), 14,
        ("tests/tools/planner", "tests/tools/cli/test_plan.py", "tests/passes", "tests/e2e/test_errors.py", "tests/schemes"),
    ),
    "runtime": Room(
        ("kvcompile/runtime/**/*.py",), 36,
        (PROGRAMS, "tests/runtime", "tests/passes", *MODELS, "tests/e2e/test_errors.py", "tests/e2e/test_rope.py"),
    ),
    "kernels": Room(
        (
            "kvcompile/lowering/append/*.py", "kvcompile/lowering/decode/*", "kvcompile/lowering/prefill/*", "kvcompile/lowering/cpu/*",
            "kvcompile/lowering/gluon/*.py", "kvcompile/lowering/ops/*.py", "kvcompile/lowering/codegen/*.py",
        ), 28,
        ("tests/lowering", "tests/schemes/test_conformance.py"),
    ),
}
