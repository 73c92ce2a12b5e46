"""Targets of ``kvcompile plan``: a configuration, a checkpoint folder, a model type at its default sizes, a factory. No weights are read.

A transformers model is built on the meta device and given phantoms for weights (``planner.phantom``), so that any size is traced on any
machine. It is traced with a static cache, which shows sliding windows, latents and layers without a cache as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvcompile.errors import FileUnfit, TargetError
from kvcompile.files.json_file import read_json
from kvcompile.tools.cli.targets import Options, quiet, require_transformers, resolve
from kvcompile.tools.planner.model import Model, traced
from kvcompile.tools.planner.phantom import hollow

ODD = 7
"""Places that a traced static cache has beyond all lengths asked for: its capacity is then no other size of the model."""


def model_of(text: str, context: int, prompt: int, dtype: torch.dtype | None) -> Model:
    """Trace the model that ``text`` names for prompts of ``prompt`` tokens in ``context``; raises TargetError or NotPlanned."""
    if text.rpartition(":")[0].endswith(".py"):
        target = resolve(text, Options(dtype=dtype))
        with torch.no_grad():
            return traced(text, target.model, target.inputs)
    return _hollow(text, _configuration(text), context, prompt, dtype)


def _configuration(text: str) -> Any:
    """The transformers configuration that a path or ``hf:TYPE`` names."""
    require_transformers(text)
    from transformers import CONFIG_MAPPING

    if text.startswith("hf:"):
        kind, settings = text.removeprefix("hf:"), {}
    else:
        path = Path(text) / "config.json" if Path(text).is_dir() else Path(text)
        if not path.is_file():
            raise TargetError(found=text, why="there is no such config.json, and no such folder with one")
        try:
            settings = read_json(path, dict[str, Any])
        except FileUnfit as error:
            raise TargetError(found=text, why=f"it is no configuration: {error.fact}") from error
        kind = settings.get("model_type", "")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise TargetError(found=text, why=f"transformers has no model type {kind!r}; plan for a factory, file.py:factory, instead")
    # Weights as a checkpoint stores them are not built; --weights says how they are stored.
    settings.pop("quantization_config", None)
    try:
        with quiet():
            return CONFIG_MAPPING[kind].from_dict(settings).get_text_config(decoder=True)
    except Exception as error:
        raise TargetError(found=text, why=f"its configuration could not be read ({type(error).__name__}: {error})") from error


def _hollow(text: str, config: Any, context: int, prompt: int, dtype: torch.dtype | None) -> Model:
    """Build a model of a configuration without weights, and trace it."""
    from transformers import AutoModelForCausalLM, StaticCache

    longest = getattr(config, "max_position_embeddings", None)
    longest = longest if isinstance(longest, int) else None
    capacity = max(context, longest or 0) + ODD
    own = getattr(config, "dtype", None)
    chosen = dtype or (own if isinstance(own, torch.dtype) else torch.bfloat16)
    try:
        with quiet(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=chosen).eval()
    except Exception as error:
        why = f"a causal model of it could not be built ({type(error).__name__}: {error}); plan for a factory, file.py:factory, instead"
        raise TargetError(found=text, why=why) from error
    hollow(model)
    inputs = {
        "input_ids": torch.zeros(1, prompt, dtype=torch.long, device="cpu"), "use_cache": True, "logits_to_keep": 1,
        "past_key_values": StaticCache(config=config, max_cache_len=capacity),
    }
    with torch.no_grad(), quiet():
        return traced(text, model, inputs, capacity, longest)
