"""Subjects: prompts of a tokenizer's ids are as long as asked and hold their answers; answers are judged; errors say what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from question_solver import solve

from kvcompile.errors import BadEvaluation, TargetError
from kvcompile.tools.cli.subjects import TINYLM, tinylm
from kvcompile.tools.cli.subjects import checkpoint as read_checkpoint
from kvcompile.tools.evaluation.bench import QUICK, Bench, Effort
from kvcompile.tools.evaluation.subject import AnswerRule, Subject
from kvcompile.tools.evaluation.tasks import TASKS


@pytest.fixture(scope="module")
def subject(checkpoint: Path, book: Path) -> Subject:
    return read_checkpoint(str(checkpoint), [book])


@pytest.fixture(scope="module")
def shipped() -> Subject:
    return tinylm()


@pytest.mark.parametrize("length", [256, 700, 1500])
@pytest.mark.parametrize("task", TASKS)
def test_prompts_of_tokens(task: str, length: int, subject: Subject) -> None:
    found = subject.questions(task, 6, length, (0.0, 0.4, 1.0), seed=1)
    assert found == subject.questions(task, 6, length, (0.0, 0.4, 1.0), seed=1)
    assert len({item.name for item in found}) == 6 and [item.depth for item in found[:3]] == [0.0, 0.4, 1.0]
    for item in found:
        assert len(item.prompt) == len(subject.start) + length
        # Ids that go on from the filler's to a statement's are those of whole lines, so the text reads as the statements do.
        assert solve(subject.text(item.prompt)) == item.expected
        assert not subject.text(item.prompt).endswith(" "), "a tokenizer puts a space in front of the next word"
        assert len(subject.writing.write((item.expected + "\n").encode())) <= item.answer_tokens


def test_prompts_of_bytes(shipped: Subject) -> None:
    (item,) = shipped.questions("multiquery", 1, 900, (None,), seed=0)
    assert len(item.prompt) == 901 and item.depth == round(item.depth, 1)
    assert solve(shipped.text(item.prompt)) == item.expected


def test_texts_lie_apart_and_bytes_are_counted(subject: Subject, shipped: Subject) -> None:
    ids = subject.texts(100, 20, 3)
    assert ids.shape == (3, len(subject.start) + 120) and len({tuple(row) for row in ids.tolist()}) == 3
    for row in ids.tolist():
        assert subject.count_bytes(row, 20) == len(subject.text(row[-20:]).encode())
    assert shipped.count_bytes(shipped.texts(100, 20, 1)[0].tolist(), 20) == 20
    with pytest.raises(BadEvaluation, match=r"the text.*--data"):
        subject.texts(10**6, 1, 1)


@pytest.mark.parametrize(("rule", "task", "expected", "said", "right", "score"), [
    (AnswerRule.LINE, "needle", "123", "123\nmore", True, 1.0), (AnswerRule.LINE, "needle", "123", "1234\n", False, 1.0),
    (AnswerRule.LINE, "needle", "123", "123", False, 1.0), (AnswerRule.LINE, "multivalue", "1, 2", "2, 1\n", False, 1.0),
    (AnswerRule.LINE, "common", "ba, du", "du, ba\n", True, 1.0), (AnswerRule.LINE, "common", "ba, du", "du, ki\n", False, 0.5),
    (AnswerRule.LINE, "variable", "b = a = 48", "b = a = 47\n", False, 2 / 3),
    (AnswerRule.PARTS, "needle", "Kiba", " it is kiba, I think", True, 1.0),
    (AnswerRule.PARTS, "multivalue", "17, 29, 38", "38 and 17", False, 2 / 3),
    (AnswerRule.PARTS, "multiquery", "a-b is 17, c-d is 29", "29\n17", True, 1.0),
])
def test_judging(rule: AnswerRule, task: str, expected: str, said: str, right: bool, score: float) -> None:
    assert rule.judge(task, expected, said) == (right, pytest.approx(score))


@pytest.mark.parametrize(("change", "says"), [
    ({"tasks": ("neddle",)}, r"--tasks.*needle.*neddle"), ({"depths": (0.5, 50.0)}, r"--depths.*between 0 and 1.*50"),
])
def test_efforts_that_make_no_sense(change: dict[str, object], says: str) -> None:
    with pytest.raises(BadEvaluation, match=says):
        replace(QUICK, **change)


def test_prompts_beyond_the_model_are_refused(subject: Subject) -> None:
    with pytest.raises(BadEvaluation, match=r"--lengths.*1,024 positions.*smaller"):
        Bench(subject, Effort(lengths=(1020,), questions=1, tail=16, batch=1))


def test_targets_that_cannot_be_evaluated(checkpoint: Path, book: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="random weights"):
        read_checkpoint("hf:llama", [book])
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((checkpoint / name).read_bytes())
    with pytest.raises(TargetError, match="--bytes"):
        read_checkpoint(str(bare), [book])
    assert torch.is_tensor(read_checkpoint(str(checkpoint), [book]).texts(8, 2, 1))


def test_a_model_of_bytes_in_a_folder(shipped: Subject, book: Path) -> None:
    """tinylm's own folder as a checkpoint: it has no tokenizer, which --bytes is for; its text may be another."""
    with pytest.raises(TargetError, match="--bytes"):
        read_checkpoint(str(TINYLM), [book])
    other = tinylm(folder=TINYLM, data=[book])
    assert other.filler == book.read_bytes() and other.start == shipped.start
    (item,) = other.questions("needle", 1, 300, (0.5,), seed=0)
    assert solve(other.text(item.prompt)) == item.expected and b"trace the of code" in bytes(item.prompt[1:])
