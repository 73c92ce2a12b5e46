"""``kvcompile.serving.install``: make a transformers model's continuous batching store its cache as codes of a scheme.

One attribute of the model is replaced, ``init_continuous_batching``, which ``generate_batch``, the context manager and ``transformers
serve`` all call. Outside of continuous batching the model attends as before. Tables in transformers' own modules are changed while a cache
is built, and restored afterwards.
"""

from __future__ import annotations

import copy
import functools
import logging
import types
from collections.abc import Iterator
from typing import Any

import torch

from kvcompile.errors import EngineUnfit
from kvcompile.schemes import Scheme, parse
from kvcompile.schemes.pairs import parse_pair
from kvcompile.serving.block_layout import LEAST_PAGE, MOST_PAGE, BlockLayout, capacity, token_line
from kvcompile.serving.continuous_batching.attention import attend_codes, require_plain
from kvcompile.serving.continuous_batching.memory import ServedLayers
from kvcompile.serving.continuous_batching.versions import ENGINE, CallNames, arguments_of

log = logging.getLogger(__name__)
SERVED = "_kvcompile_served"
"""The attribute of a model with its ServedLayers."""
ENTRY = "init_continuous_batching"


def install(model: Any, scheme: Scheme | str = "int4", values: Scheme | str | None = None) -> None:
    """Let a model's continuous batching (``model.generate_batch``) store codes of ``scheme``, or of ``values`` for its values.

    Raises NotPaged for a scheme that blocks cannot hold, and EngineUnfit for a model that the engine cannot serve with codes, or for a
    version of transformers that was never tried. A second call replaces the scheme; ``remove`` restores the model.
    """
    import transformers

    arguments = arguments_of(transformers.__version__)
    _require_servable(model)
    served = ServedLayers(dict(_schemes(model, *_pair(scheme, values))))
    config = model.config.get_text_config()
    _require_layers(config, served, model.dtype)
    transformers.AttentionInterface.register(arguments.name, functools.partial(_attention, arguments))
    remove(model)
    # One that was kept has a cache of the engine's own.
    model.destroy_cached_continuous_batching_manager()
    model.__dict__[SERVED] = served
    model.__dict__[ENTRY] = types.MethodType(functools.partial(_init_continuous_batching, name=arguments.name), model)


def remove(model: Any) -> None:
    """Restore dense caches in a model's continuous batching; do nothing for a model that was not changed by ``install``.

    The manager that the model kept for its next session is destroyed, since its cache holds codes.
    """
    if SERVED in model.__dict__:
        model.destroy_cached_continuous_batching_manager()
        del model.__dict__[SERVED], model.__dict__[ENTRY]


def _init_continuous_batching(
    model: Any, generation_config: Any = None, continuous_batching_config: Any = None, workload_hints: Any = None, *, name: str,
) -> Any:
    """Return transformers' manager, changed to attend by our function and to build its cache from codes; see the method of this name there.

    Raises EngineUnfit for a page size that blocks do not support.
    """
    page = 256 if continuous_batching_config is None else continuous_batching_config.page_size
    if not LEAST_PAGE <= page <= MOST_PAGE:
        raise EngineUnfit(
            engine=ENGINE, expected=f"page_size from {LEAST_PAGE} to {MOST_PAGE}", found=page, todo="pass another ContinuousBatchingConfig"
        )
    configs = {id(config): config for config in (model.config, model.config.get_text_config())}.values()
    former = model.config._attn_implementation
    for config in configs:
        config._attn_implementation_internal = name
    try:
        manager = type(model).init_continuous_batching(model, generation_config, continuous_batching_config, workload_hints)
    except BaseException:
        for config in configs:
            config._attn_implementation_internal = former
        raise
    # Stopping the manager gives the model this function back.
    manager._original_attn_impl = former
    if not hasattr(manager, "kvcompile_served"):
        _build_of_codes(manager, getattr(model, SERVED))
        _allow_decode_path(manager, model.config.get_text_config(), continuous_batching_config, workload_hints)
    return manager


def _build_of_codes(manager: Any, served: ServedLayers) -> None:
    """Change a manager, in place, so that it builds its cache from codes (``allocators.building``) and logs the cache's size."""
    from kvcompile.serving.continuous_batching.allocators import building

    build = manager._create_batch_processor

    def create_batch_processor() -> Any:
        if manager.batch_processor is not None:
            return build()
        with building(served):
            processor = build()
        log.info("kvcompile: %s", _told(processor.cache))
        for warning in {scheme.warning for pair in served.schemes.values() for scheme in pair} - {None}:
            log.warning("kvcompile: %s", warning)
        _look_once(processor, manager.continuous_batching_config)
        return processor

    manager.kvcompile_served = served
    manager._create_batch_processor = create_batch_processor


def _look_once(processor: Any, settings: Any) -> None:
    """Change a processor, in place, to raise EngineUnfit after its first step if a layer did not attend by our function.

    Such a layer would have read an empty cache. Does nothing for a compiled step, in which calls cannot be observed.
    """
    if settings.varlen_compile_config is not None or settings.decode_compile_config is not None:
        return
    step = processor._generation_step

    def first_step(model: Any) -> None:
        step(model)
        del processor._generation_step
        for allocator in processor.cache.cache_allocators.values():
            absent = set(allocator.layer_indices) - allocator.called
            if absent:
                raise EngineUnfit(
                    engine=ENGINE, expected="attentions that call the function which the config names",
                    found=f"others in layers {sorted(absent)}", todo="serve this model without kvcompile.serving.install",
                )

    processor._generation_step = first_step


def _told(cache: Any) -> str:
    """Return the text logged when a cache was built: schemes, bytes of a token, tokens that fit, and how many would fit dense."""
    pools = [pool for allocator in cache.cache_allocators.values() for pool in allocator.pools.values()]
    layout = pools[0].layout
    token = sum(pool.layout.token_bytes for pool in pools)
    dense = sum(pool.layout.heads * (pool.layout.head_dim + pool.layout.value_dim) * pool.layout.dtype.itemsize for pool in pools)
    size = cache.num_sectors * cache.bytes_per_sector
    held = capacity(int(size // token), size, dense, layout.dtype)
    return f"{token_line(layout.keys, layout.values, token)}, {held}"


def _allow_decode_path(manager: Any, config: Any, asked: Any, hints: Any) -> None:
    """Enable the engine's decode path, with block tables, in ``manager``: the engine enables it for FlashAttention only.

    Does nothing for models with other layers than full attention.
    """
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching import initialization
    from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

    wished = ContinuousBatchingConfig() if asked is None else copy.deepcopy(asked)
    if set(group_layers_by_attn_type(config)) != {"full_attention"}:
        return
    initialization.resolve_using_hints(wished, hints)
    initialization.resolve_without_hints(wished)
    resolved = manager.continuous_batching_config
    resolved.max_blocks_per_request = wished.max_blocks_per_request
    if wished.max_blocks_per_request:
        resolved.decode_compile_config = wished.decode_compile_config


def _attention(
    arguments: CallNames, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None, cache: Any = None, **passed: Any,
) -> tuple[torch.Tensor, None]:
    """Write a step's keys and values into a layer's pool; return (attention over its codes, None), as transformers' attention functions do.

    ``attention_mask`` is not needed: attention is causal, and lengths separate the requests.
    """
    require_plain(cache, getattr(module, "layer_idx", None), passed)
    return attend_codes(arguments, module, query, key, value, scaling, cache, passed), None


def _pair(scheme: Scheme | str, values: Scheme | str | None) -> tuple[Scheme, Scheme]:
    """Return the schemes of keys and of values, each given as an object or a text, or both in one text (``k=int8,v=int4``).

    ``values`` None: ``scheme`` for both. Raises a SchemeError for a text that names no scheme.
    """
    if values is None:
        return parse_pair(scheme) if isinstance(scheme, str) else (scheme, scheme)
    key, value = (parse(each) if isinstance(each, str) else each for each in (scheme, values))
    return key, value


def _schemes(model: Any, key: Scheme, value: Scheme) -> Iterator[tuple[int, tuple[Scheme, Scheme]]]:
    """Yield (index of an attention layer, its schemes of keys and values with the tables of its module) for each attention layer.

    Raises a SchemeError if a scheme has no tables for a layer.
    """
    for path, module in model.named_modules():
        if isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "head_dim"):
            yield module.layer_idx, (key.for_module(path), value.for_module(path))


def _require_servable(model: Any) -> None:
    """Raise EngineUnfit unless a model has continuous batching and attends by the function that its config names."""
    if not hasattr(model, ENTRY) or not hasattr(model, "config"):
        raise EngineUnfit(
            engine=ENGINE, expected="a model of transformers with generate_batch", found=type(model).__name__,
            todo="pass the model itself, neither compiled nor wrapped",
        )
    if not model._can_set_attn_implementation():
        raise EngineUnfit(
            engine=ENGINE, expected="a model that attends through transformers' AttentionInterface", found=type(model).__name__,
            todo="serve this model without kvcompile.serving.install",
        )


def _require_layers(config: Any, served: ServedLayers, dtype: torch.dtype) -> None:
    """Raise EngineUnfit, NotPaged or BadBlock unless blocks of codes can hold the cache of every layer."""
    from transformers.generation.continuous_batching.utils import find_head_dim, find_num_key_value_heads

    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds or getattr(config, "kv_lora_rank", None) is not None:
        raise EngineUnfit(
            engine=ENGINE, expected="layers of full or sliding attention over keys and values of one size",
            found=", ".join(sorted(kinds)) or "latent attention (kv_lora_rank)", todo="serve this model without kvcompile.serving.install",
        )
    if set(served.schemes) != set(range(config.num_hidden_layers)):
        raise EngineUnfit(
            engine=ENGINE, expected=f"{config.num_hidden_layers} attention modules with layer_idx and head_dim, one a layer",
            found=f"layers {sorted(served.schemes)}", todo="serve this model without kvcompile.serving.install",
        )
    for keys, values in served.schemes.values():
        BlockLayout.of(keys, find_num_key_value_heads(config), find_head_dim(config), values=values, dtype=dtype)
