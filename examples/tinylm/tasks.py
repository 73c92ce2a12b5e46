"""Retrieval tasks in real filler text, deterministic from a seed: those that `kvcompile eval` asks any model.

Training and evaluation build their questions with the same code, `kvcompile/tools/evaluation/tasks`. Statements are
planted on lines of their own at uniform depths of the filler, and the question stands at the very end: the model
answers by copying (needles), by following a chain of copies (variable tracking) or by counting.
"""

from kvcompile.tools.evaluation.tasks import (
    RULER,
    TASKS,
    Example,
    Filler,
    TaskPlan,
    common_words_plan,
    counting_plan,
    cut,
    digits,
    examples,
    frequent_words_plan,
    multiquery_plan,
    multivalue_plan,
    needle_plan,
    plant,
    tracking_plan,
    word,
)

__all__ = [
    "RULER",
    "TASKS",
    "Example",
    "Filler",
    "TaskPlan",
    "common_words_plan",
    "counting_plan",
    "cut",
    "digits",
    "examples",
    "frequent_words_plan",
    "multiquery_plan",
    "multivalue_plan",
    "needle_plan",
    "plant",
    "tracking_plan",
    "word",
]
