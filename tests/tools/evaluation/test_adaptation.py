"""Widths and importance of tokens are read between decode steps, written as JSON, and drawn."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcompile.schemes import Churn, StoredTokens
from kvcompile.tools.cli.main import main
from kvcompile.tools.cli.subjects import tinylm
from kvcompile.tools.evaluation import adaptation
from kvcompile.tools.evaluation.adaptation import Adaptation, Watch
from kvcompile.tools.evaluation.bench import QUICK, Bench
from kvcompile.tools.evaluation.results import Results
from kvcompile.tools.evaluation.width_plots import constant, rows_of
from kvcompile.types import Role

SMALL = ("--questions", "1", "--tail", "8", "--batch", "2", "--lengths", "300", "--tasks", "needle", "--device", "cpu", "--quick")


@dataclass
class Ranks:
    """Hooks of an adaptive scheme that is not one of ours: bits by position, importance by position and row."""

    at: int = 0

    def token_bits(self, planes: Any, slot: Any, first: int, count: int) -> torch.Tensor:
        return 1 + torch.arange(count).expand(2, -1) % 16

    def attended(self, planes: Any, slot: Any, count: int) -> torch.Tensor | None:
        return torch.arange(float(count)).expand(2, -1) * torch.tensor([[1.0], [100.0]]) if slot.role is Role.KEY else None


class Owner:
    """A backend with two layers, whose caches have a token more at every look."""

    def __init__(self, count: int) -> None:
        self.count, self.churn = count, Churn()

    def stored_tokens(self) -> list[StoredTokens]:
        """Keys and values of two layers; the second one's attention gives twice as much."""
        return [
            StoredTokens(Ranks(), (), SimpleNamespace(role=role), 0, self.count, f"layers.{layer}", self.churn)  # type: ignore[arg-type]
            for layer in range(2) for role in Role
        ]


def test_what_is_seen_of_any_adaptive_scheme() -> None:
    owner = Owner(500)
    watch = Watch(owner, 500, 500, 100)  # type: ignore[arg-type]

    def steps() -> Any:
        for number in range(1, 101):
            owner.count += 1
            if number in {1, 30}:
                owner.churn = owner.churn + Churn(1)
            yield number

    assert list(watch.over(steps())) == list(range(1, 101))
    found = watch.adaptation()
    assert found is not None
    assert found.layers == ("layers.0", "layers.1") and found.span == 3
    assert found.steps == (1, *range(2, 101, 2)) and found.decided == (1, 30)
    assert found.keys == found.values == ("".join("123456789abcdefg"[at % 16] for at in range(600)),) * 2
    assert found.bits("keys")[1][:17] == [*range(1, 17), 1]
    assert found.histogram["values"] == {str(bits): 4 * len(range(bits - 1, 600, 16)) for bits in range(1, 17)}
    # Of the first row alone; the last span of 501 tokens is whole, that of 502 has one token.
    assert [len(row) for row in found.importance[:2]] == [167, 168]
    assert found.importance[0][:2] == (1.0, 4.0) and found.importance[1][-1] == 501.0
    assert Watch(SimpleNamespace(stored_tokens=list), 5, 5, 5).adaptation() is None  # type: ignore[arg-type]


def test_widths_are_those_of_the_stores(one_thread: None, fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept histogram and widths equal those of the report and of the stores after the last step."""
    reports, stored = [], []

    class KeyStatistics(Watch):
        def adaptation(self) -> Adaptation | None:
            reports.append(self.owner.report())
            stored.extend((item.path, item.role, item.bits[0].tolist()) for item in self.owner.stored_tokens())
            return super().adaptation()

    monkeypatch.setattr("kvcompile.tools.evaluation.bench.Watch", KeyStatistics)
    bench = Bench(tinylm(), replace(QUICK, lengths=(300,), tail=6, questions=1, tasks=("needle",), batch=2))
    (found,) = bench.measure("smartkv(budget=0.45)").adaptation
    for name, role in (("keys", Role.KEY), ("values", Role.VALUE)):
        assert found.histogram[name] == {str(bits): count for bits, count in reports[0].widths[role].items()}
        assert len(found.histogram[name]) >= 3
        assert dict(zip(found.layers, found.bits(name), strict=True)) == {path: row for path, half, row in stored if half is role}
    assert found.layers == tuple(f"model.layers.{layer}.self_attn" for layer in range(6))
    assert found.steps == (1, 2, 3, 4, 5, 6) and found.decided == (1,)
    # Means over positions of one: importance is told in means of all tokens. Twice rounded, and layers are blended of two halves.
    last = [value for value in found.importance[-1] for _ in range(found.span)][: len(found.keys[0])]
    assert sum(last) / len(last) == pytest.approx(1, abs=0.02)
    assert bench.measure("int8").adaptation == ()


def test_the_command_draws_and_a_run_is_drawn_again(tmp_path: Path, fresh_dynamo: None, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "run", tmp_path / "new" / "widths.png"
    asked = ("eval", "tinylm", "--schemes", "smartkv(budget=0.45),int8", *SMALL)
    assert main([*asked, "--out", str(out), "--plot", str(picture)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("drawn in") == 2 and (tmp_path / "new" / "widths.bytes.png").stat().st_size > 10_000
    results = Results.load(out / "results.json")
    assert [scheme for scheme, _ in rows_of(results)] == ["smartkv(budget=0.45)"] and constant(results) == ["int8"]
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and (out / "widths.png").stat().st_size == picture.stat().st_size > 20_000
    assert main(["eval", "--read", str(out), "--plot", str(tmp_path)]) == 0
    assert (tmp_path / "widths.png").stat().st_size == picture.stat().st_size
    assert (tmp_path / "bytes.png").exists()
    # Results from before there was such data are read, and have quality against bytes alone, as schemes of constant bits have.
    (out / "results.json").write_text((out / "results.json").read_text().replace('"adaptation"', '"other"'))
    assert main(["eval", "--read", str(out), "--plot", str(tmp_path / "none.png")]) == 0
    assert "drawn in" in capsys.readouterr().out and (tmp_path / "none.png").stat().st_size == (tmp_path / "bytes.png").stat().st_size


@pytest.mark.parametrize(("argv", "says"), [
    (["--schemes", "smartkv", "--plot", "x.jpeg"], "a folder or a file of .png"),
    (["--read", "no_such_run"], "expected the results of kvcompile eval in no_such_run"),
])
def test_errors_come_before_anything_is_measured(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["eval", "--quick", *argv]) == 2
    caught = capsys.readouterr()
    assert says in caught.err and not caught.out


def test_without_matplotlib_a_picture_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["eval", "--quick", "--schemes", "smartkv", "--plot", "x.png"]) == 2
    assert "pip install 'kvcompile[plots]'" in capsys.readouterr().err


def test_no_scheme_is_named_in_evaluation() -> None:
    folder = Path(adaptation.__file__).parent
    assert not [path.name for path in folder.rglob("*.py") if "smartkv" in path.read_text().lower()]
