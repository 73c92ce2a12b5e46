"""Verdicts of validation that outlast the process: only of equal programs, only for the same sources, only where Inductor keeps its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._inductor import config

import kvcompile
from kvcompile.lowering import persistent_keys
from kvcompile.lowering.persistent_keys import PersistentKeys
from kvcompile.validation import SiteOutcome, Verdict
from kvcompile.validation.verdict_cache import VerdictCache

CONTAINS = PersistentKeys.__contains__
EQUAL, DIFFERENT = Verdict(SiteOutcome.EQUAL), Verdict(SiteOutcome.DIFFERENT, "it differs")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of the test's own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(persistent_keys, "cache_dir", lambda: str(tmp_path))
    # All other tests go without what is kept on disk.
    monkeypatch.setattr(PersistentKeys, "__contains__", CONTAINS)


def test_only_equal_programs_are_kept() -> None:
    first = VerdictCache(PersistentKeys("tests"))
    first["a"], first["b"] = EQUAL, DIFFERENT
    assert first["b"] is DIFFERENT
    second = VerdictCache(PersistentKeys("tests"))
    assert "a" in second
    assert second["a"] == EQUAL
    assert "b" not in second
    assert "a" not in VerdictCache(PersistentKeys("others"))
    assert "a" not in VerdictCache()


def test_other_sources_and_versions_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = PersistentKeys("tests")
    keys.add("a")
    assert "a" in keys
    with monkeypatch.context() as patched:
        patched.setattr(persistent_keys, "sources_hash", lambda names: "other")
        assert "a" not in keys
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert "a" not in keys


@pytest.mark.parametrize("off", [{"force_disable_caches": True}, {"fx_graph_cache": False}])
def test_nothing_is_kept_where_inductor_keeps_nothing(off: dict[str, bool]) -> None:
    keys = PersistentKeys("tests")
    with config.patch(off):
        keys.add("a")
        assert "a" not in keys
    assert "a" not in keys
    keys.add("a")
    with config.patch(off):
        assert "a" not in keys


def test_the_sources_counted_are_all_that_a_verdict_depends_on() -> None:
    package = Path(kvcompile.__file__).parent
    assert all((package / name).exists() for name in persistent_keys.SOURCES)
    assert {"passes", "runtime", "validation", "schemes"} <= set(persistent_keys.SOURCES)


def test_only_inductor_backends_keep_verdicts() -> None:
    assert kvcompile.backend("int8").memory.verdicts.persistent is not None  # type: ignore[attr-defined]
    assert kvcompile.backend("int8", inner="eager").memory.verdicts.persistent is None  # type: ignore[attr-defined]
