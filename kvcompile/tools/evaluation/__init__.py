"""Evaluation: measures a scheme's effect on a model's predictions and answers, decoding through the compiled cache.

``subject`` is a model with its text, ``tasks`` builds questions, ``decoding`` answers them, ``bench`` and ``fidelity`` compare with the
uncompressed model, ``statistics`` tests differences, ``results`` is written to disk. No model family is named here.
"""
