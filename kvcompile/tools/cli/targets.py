"""Targets: the models that commands take, resolved to a module and the inputs of its first call.

    hf:llama            a tiny, randomly initialized model of any transformers type, built without the network
    ./my-checkpoint     a local folder that AutoModelForCausalLM can load
    smollm2             a model that a package ships, and model.gguf: any file that transformers reads with gguf_file=
    file.py:factory     a function that returns a module, or (module, inputs)

transformers is imported only when such a target is used.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kvcompile.errors import TargetError
from kvcompile.passes.graph.dynamo import tree_map
from kvcompile.spelling import nearest
from kvcompile.tools.cli.packaged import gguf_file, require_readers
from kvcompile.tools.cli.shrink import tiny_config

PROMPT_TOKENS = 24
CAPACITY = 64


class CacheKind(enum.Enum):
    """The transformers cache that the model is called with."""

    DYNAMIC = "dynamic"
    STATIC = "static"


@dataclass(frozen=True)
class TargetOptions:
    """Options for building a target: cache, attention implementation, dtype and device.

    ``attention``: implementation in transformers; None for its default. ``dtype``: None keeps a checkpoint's own and makes new models
    bfloat16.
    """

    cache: CacheKind = CacheKind.DYNAMIC
    attention: str | None = None
    dtype: torch.dtype | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Target:
    """A module in evaluation mode, and the inputs of its first call: a mapping, a sequence or one tensor."""

    name: str
    model: torch.nn.Module
    inputs: Any


def resolve(text: str, options: TargetOptions) -> Target:
    """Return the target that ``text`` names. Raises TargetError."""
    if text.startswith("hf:"):
        return _tiny(text, options)
    if (file := gguf_file(text)) is not None:
        return _gguf(text, file, options)
    path, colon, factory = text.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_file(text, Path(path), factory, options)
    if Path(text).is_dir():
        return _checkpoint(text, options)
    if text.endswith(".py"):
        raise TargetError(found=text, why="name the function that makes the model after a colon, as in model.py:make")
    raise TargetError(found=text, why="there is no such folder")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within the context, suppress transformers' progress bars and warnings, which would interrupt a report."""
    from transformers.utils import logging as hub

    hub.disable_progress_bar()
    level = hub.get_verbosity()
    hub.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hub.set_verbosity(level)
        hub.enable_progress_bar()


def require_transformers(text: str) -> None:
    """Raise TargetError unless transformers is installed."""
    if importlib.util.find_spec("transformers") is None:
        raise TargetError(found=text, why="this kind of target needs transformers: pip install 'kvcompile[hf]'")


def _tiny(text: str, options: TargetOptions) -> Target:
    require_transformers(text)
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    name = text.removeprefix("hf:")
    if name not in CONFIG_MAPPING:
        near = nearest(name, list(CONFIG_MAPPING), 3)
        hint = f", did you mean {' or '.join(f'hf:{item}' for item in near)}?" if near else ""
        raise TargetError(found=text, why=f"transformers has no model type {name!r}{hint}")
    torch.manual_seed(0)
    try:
        with quiet():
            config = tiny_config(CONFIG_MAPPING[name]().get_text_config(decoder=True))
            model = AutoModelForCausalLM.from_config(config, dtype=options.dtype or torch.bfloat16, attn_implementation=options.attention)
    except Exception as error:
        why = f"a tiny causal model of this type could not be built ({type(error).__name__}: {_first_line(error)})"
        raise TargetError(found=text, why=f"{why}; write a factory instead") from error
    return _language_model(text, model, options)


def _checkpoint(text: str, options: TargetOptions) -> Target:
    require_transformers(text)
    from transformers import AutoModelForCausalLM

    if not (Path(text) / "config.json").is_file():
        raise TargetError(found=text, why="the folder has no config.json, so it is no transformers checkpoint")
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                text, dtype=options.dtype or "auto", attn_implementation=options.attention, local_files_only=True
            )
    except Exception as error:
        raise TargetError(found=text, why=f"it could not be loaded ({type(error).__name__}: {_first_line(error)})") from error
    return _language_model(text, model, options)


def _gguf(text: str, file: Path, options: TargetOptions) -> Target:
    """Return a GGUF file's model as a target; weights are decoded to float32 unless a dtype is given. Raises TargetError."""
    require_transformers(text)
    require_readers(text)
    from transformers import AutoModelForCausalLM

    if not file.is_file():
        raise TargetError(found=text, why="there is no such file")
    try:
        with quiet(), silent_bars():
            model = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=options.dtype or torch.float32, attn_implementation=options.attention,
                local_files_only=True,
            )
    except Exception as error:
        raise TargetError(found=text, why=f"it could not be loaded ({type(error).__name__}: {_first_line(error)})") from error
    return _language_model(text, model, options)


@contextlib.contextmanager
def silent_bars() -> Iterator[None]:
    """Within the context, suppress the progress bar that transformers draws while it decodes a GGUF file, whatever its verbosity."""
    with mock.patch("transformers.modeling_gguf_pytorch_utils.tqdm", lambda items, **named: items, create=True):
        yield


def _language_model(text: str, model: Any, options: TargetOptions) -> Target:
    """Return a transformers model as a target with a prompt of random tokens and, if requested, a static cache."""
    model = model.eval().to(options.device)
    vocab = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(3, vocab - 1), vocab, (1, PROMPT_TOKENS), generator=generator, device="cpu").to(options.device)
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": True}
    if options.cache is CacheKind.STATIC:
        inputs["past_key_values"] = static_cache(model, CAPACITY)
    return Target(text, model, inputs)


def static_cache(model: Any, capacity: int) -> Any:
    """Return an empty transformers StaticCache of ``capacity`` tokens for ``model``."""
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=capacity)


def _from_file(text: str, path: Path, factory: str, options: TargetOptions) -> Target:
    if not path.is_file():
        raise TargetError(found=text, why=f"there is no file {path}")
    make = _function(text, path, factory)
    try:
        made = make()
    except Exception as error:
        raise TargetError(found=text, why=f"{factory}() raised {type(error).__name__}: {_first_line(error)}") from error
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module):
        model, inputs = made[0].eval().to(options.device), made[1]
        moved = tree_map(lambda x: x.to(options.device) if isinstance(x, torch.Tensor) else x, inputs)
        return Target(text, model, moved)
    if isinstance(made, torch.nn.Module) and hasattr(getattr(made, "config", None), "get_text_config"):
        return _language_model(text, made, options)
    if isinstance(made, torch.nn.Module):
        why = f"{factory}() returned a module alone, and nothing says how to call it: return (module, inputs) instead"
        raise TargetError(found=text, why=why)
    raise TargetError(found=text, why=f"{factory}() returned {type(made).__name__}, expected a module or (module, inputs)")


def _function(text: str, path: Path, name: str) -> Callable[[], Any]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TargetError(found=text, why=f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    # Lets the file import its neighbours, as it could if it were run.
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise TargetError(found=text, why=f"importing {path} raised {type(error).__name__}: {_first_line(error)}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    found = getattr(module, name, None)
    if callable(found):
        return found
    functions = [key for key, value in vars(module).items() if callable(value) and getattr(value, "__module__", "") == path.stem]
    near = nearest(name, functions)
    raise TargetError(found=text, why=f"{path} has no function {name!r}{f', did you mean {near[0]!r}?' if near else ''}")


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "no message"
