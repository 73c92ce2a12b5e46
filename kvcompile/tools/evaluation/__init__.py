"""Evaluation: what a scheme does to a model's predictions and answers, measured by decoding through the compiled cache.

``tasks`` builds questions, ``decoding`` answers them, ``prediction`` and ``fidelity`` compare numbers, ``statistics`` says what differs
beyond chance, ``results`` is what is written. No model family is known here: models and tokenizers come in through ``subject``.
"""
