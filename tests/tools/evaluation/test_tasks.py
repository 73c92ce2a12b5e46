"""Laws of questions: deterministic, exactly as long as asked, answered by their prompts, statements where the depth says."""

from __future__ import annotations

import hashlib
import random
import re

import numpy as np
import pytest
from question_solver import solve
from tinylm import corpus
from tinylm import tasks as shipped

from kvcompile.errors import QuestionTooLong
from kvcompile.tools.evaluation.tasks import BYTES, RULER, SNAP, TASKS, TaskPlan, examples, multiquery_plan, plant, posed
from kvcompile.tools.evaluation.tasks.plans import zeta_counts

FILLER = corpus.heldout_text()
STATEMENT = re.compile(rb"\n(# (Note|Words|Coded|Seen): [^\n]*|\w+ = \w+)\n")

TRAINED = {
    "needle": "e95c5f57190b3834 b1d55ba355dbdca3 f8faa6b2c987663e", "multikey": "9958366f2a4cf811 49e86a85ce987d52 56ff190287285294",
    "variable": "9be53e0f04601bf3 3a8e0cc7c604d30c 5c76408b42459f3c", "counts": "e611c9afbac89e1f 97494dbd72cee8f5 0ff7f2f5cf8ace81",
}
"""Hashes of questions of 256, 1,000 and 4,090 bytes, as the module made them that the shipped tinylm was trained with."""


@pytest.mark.parametrize("task", TRAINED)
def test_questions_that_tinylm_was_trained_on_are_unchanged(task: str) -> None:
    for length, known in zip((256, 1000, 4090), TRAINED[task].split(), strict=True):
        digest = hashlib.sha256()
        for item in shipped.examples(task, 12, length, FILLER, seed=1):
            digest.update(item.prompt_bytes + b"|" + item.answer_bytes + b"|" + repr(round(item.depth, 9)).encode())
        assert digest.hexdigest()[:16] == known


def test_training_and_evaluation_share_one_definition() -> None:
    assert shipped.examples is examples and shipped.TASKS is TASKS
    assert set(RULER) <= set(TASKS) and len(RULER) == 7


@pytest.mark.parametrize("depth", [None, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("length", [200, 600, 2000, 4000])
@pytest.mark.parametrize("task", TASKS)
def test_prompts_hold_their_answers(task: str, length: int, depth: float | None) -> None:
    found = examples(task, 8, length, FILLER, seed=3, depth=depth)
    assert found == examples(task, 8, length, FILLER, seed=3, depth=depth)
    assert found != examples(task, 8, length, FILLER, seed=4, depth=depth)
    for item in found:
        assert len(item.prompt_bytes) == length and item.answer_bytes.endswith(b"\n")
        answer = item.answer_bytes.decode().strip()
        assert solve(item.prompt_bytes.decode()) == answer
        parts = TASKS[task].parts(item.answer_bytes)
        assert parts and all(part.decode() in answer for part in parts)


@pytest.mark.parametrize("depth", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("task", TASKS)
def test_depth_is_the_share_of_filler_before_the_first_statement(task: str, depth: float) -> None:
    rng = random.Random(task)
    plan = TASKS[task].plan(rng, 3000)
    body, where = plant(rng, TaskPlan(plan.groups[:1], ()), FILLER, 3000, depth)
    room = 3000 - sum(len(line) + 2 for line in plan.groups[0])
    first = body.index(plan.groups[0][0]) - 1
    assert 0 <= first - int(depth * room) < SNAP
    assert where == pytest.approx(first / 3000)
    # Other lines of the group stand behind its first, in order.
    places = [body.index(b"\n" + line + b"\n") for line in dict.fromkeys(plan.groups[0])]
    assert places == sorted(places)


def test_statements_stand_elsewhere_at_another_depth() -> None:
    early, late = (examples("multivalue", 5, 2000, FILLER, depth=depth) for depth in (0.1, 0.9))
    for one, two in zip(early, late, strict=True):
        assert one.answer_bytes == two.answer_bytes and one.depth < two.depth
        assert sorted(STATEMENT.findall(one.prompt_bytes)) == sorted(STATEMENT.findall(two.prompt_bytes))


@pytest.mark.parametrize("task", ["multikey", "multivalue", "multiquery"])
def test_keys_share_halves(task: str) -> None:
    for item in examples(task, 10, 2000, FILLER):
        keys = set(re.findall(rb"# Note: the \w+ of (\w+-\w+) is", item.prompt_bytes))
        halves = [half for key in keys for half in key.split(b"-")]
        assert len(keys) >= 3 and len(set(halves)) < len(halves)


def test_several_queries_of_one_text_ask_for_keys_of_their_own() -> None:
    plan = multiquery_plan(random.Random(0), keys=7, asked=3, questions=2)
    answers = [set(re.findall(rb"(\w+-\w+) is", answer)) for _, answer in plan.questions]
    assert [len(keys) for keys in answers] == [3, 3] and not answers[0] & answers[1]


def test_zeta_counts() -> None:
    # 1, 1/4, 1/9, ... over their sum to 40 terms, 1.620: 24.7, 6.2, 2.7, 1.5, 0.99, and ones until 40 are reached.
    assert zeta_counts(40, 2.0) == [25, 6, 3, 2, 1, 1, 1, 1]
    assert sum(zeta_counts(97, 1.3)) == 97


def test_lengths_and_fillers_that_do_not_suffice() -> None:
    with pytest.raises(QuestionTooLong, match=r"do not fit.*bytes.*raise"):
        examples("frequent", 1, 60, FILLER)
    with pytest.raises(QuestionTooLong, match="filler"):
        examples("needle", 1, 400, b"")
    short = examples("needle", 1, 400, b"a short filler\n")[0]
    assert len(short.prompt_bytes) == 400 and solve(short.prompt_bytes.decode()) == short.answer_bytes.decode().strip()


def test_fillers_of_bytes_and_arrays_are_one() -> None:
    assert examples("common", 3, 900, np.frombuffer(FILLER, np.uint8)) == examples("common", 3, 900, FILLER)


def test_room_says_for_how_many_bytes_statements_are_made() -> None:
    wide, narrow = (posed("multikey", 0, 3000, BYTES, FILLER, room=room) for room in (3000, 400))
    assert wide.prompt.count(b"# Note") == 16 and narrow.prompt.count(b"# Note") == 3
