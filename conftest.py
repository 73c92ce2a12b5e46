"""Options of the tests. They stand here since pytest, given ``--scheme examples/file.py``, looks for options above ``examples``."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; ``tests/conftest.py`` says what they do."""
    parser.addoption("--accept", action="store_true", default=False, help="write the golden files instead of comparing with them")
    parser.addoption("--unpatched", action="store_true", default=False, help="replace no part of torch by a faster one")
    parser.addoption(
        "--scheme", action="append", default=[], metavar="FILE",
        help="run what takes a scheme, for those that this file defines alone, or for a registered one by its name",
    )
    parser.addoption(
        "--seconds", type=float, default=0.0, metavar="N", help="start no test after N seconds; skip the others, with that as the reason",
    )
    parser.addoption("--turn", default="", metavar="TEXT", help="put the tests into an order drawn by this text, a commit's name say")
    parser.addoption("--module", default="", metavar="NAME", help="run a module of tests/support/models/e2e_models.py under every scheme")
