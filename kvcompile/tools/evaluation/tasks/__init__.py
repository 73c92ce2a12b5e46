"""Retrieval tasks after RULER: statements planted in real text with a question at its end, deterministic from a seed.

The training of tinylm and the evaluation of any model share this definition. ``plans`` draws statements and questions, ``planting`` inserts
the statements, ``questions`` names the tasks and makes prompts of an exact length, in bytes or in tokens.
"""

from kvcompile.tools.evaluation.tasks.plans import (
    TaskPlan,
    code,
    common_words_plan,
    counting_plan,
    digits,
    frequent_words_plan,
    multiquery_plan,
    multivalue_plan,
    needle_plan,
    tracking_plan,
    word,
)
from kvcompile.tools.evaluation.tasks.planting import BYTES, SNAP, BytesWriting, Filler, Writing, cut, plant
from kvcompile.tools.evaluation.tasks.questions import KEYED, RULER, TASKS, Example, Posed, Task, examples, posed

__all__ = [
    "BYTES", "KEYED", "RULER", "SNAP", "TASKS", "BytesWriting", "Example", "Filler", "Posed", "Task", "TaskPlan", "Writing", "code",
    "common_words_plan", "counting_plan", "cut", "digits", "examples", "frequent_words_plan", "multiquery_plan", "multivalue_plan",
    "needle_plan", "plant", "posed", "tracking_plan", "word",
]
