"""Targets of ``kvcompile plan``: a configuration, a checkpoint folder, a model type at its default sizes, or a factory.

No weights are read.

A transformers model is built on the meta device with phantom weights (``planner.phantom``), so that a model of any size is traced on any
machine. It is traced with a static cache, which shows sliding windows, latents and layers without a cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvcompile.errors import FileUnfit, TargetError
from kvcompile.files.json_file import read_json
from kvcompile.tools.cli.targets import TargetOptions, quiet, require_transformers, resolve
from kvcompile.tools.planner.model import Model, traced
from kvcompile.tools.planner.phantom import hollow

ODD = 7
"""Tokens added to the capacity of a traced static cache, so that it equals no other size of the model."""


def model_of(text: str, context: int, prompt: int, dtype: torch.dtype | None) -> Model:
    """Return the traced model that ``text`` names, for a prompt of ``prompt`` tokens in ``context``. Raises TargetError or NotPlanned."""
    if text.rpartition(":")[0].endswith(".py"):
        target = resolve(text, TargetOptions(dtype=dtype))
        with torch.no_grad():
            return traced(text, target.model, target.inputs)
    return _hollow(text, _configuration(text), context, prompt, dtype)


def _configuration(text: str) -> Any:
    """Return the transformers configuration for a path or ``hf:TYPE``. Raises TargetError."""
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
    # The model is built without weight quantization; --weights says how its weights are stored.
    settings.pop("quantization_config", None)
    try:
        with quiet():
            return CONFIG_MAPPING[kind].from_dict(settings).get_text_config(decoder=True)
    except Exception as error:
        raise TargetError(found=text, why=f"its configuration could not be read ({type(error).__name__}: {error})") from error


def _hollow(text: str, config: Any, context: int, prompt: int, dtype: torch.dtype | None) -> Model:
    """Return a model that is built from a configuration without weights and traced. Raises TargetError."""
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
