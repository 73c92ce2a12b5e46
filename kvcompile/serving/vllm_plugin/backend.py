"""vLLM's classes of an attention backend, for a cache of codes; only the engine imports them, by the names that ``plugin`` registers.

The engine's cache of a layer is [blocks, K, page, cells], in which a head's block is contiguous (layout LBHNC). Its bytes are used as our
pool, with a head's planes one after another in the head's block. The engine's slot mapping, block table and lengths are passed to our
operations unchanged.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from kvcompile.errors import EngineUnfit
from kvcompile.schemes import Scheme
from kvcompile.serving.block_layout import LEAST_PAGE, capacity, token_line
from kvcompile.serving.pools import Pool
from kvcompile.serving.vllm_plugin.settings import VARIABLE, bytes_of_token, layout_of_blocks, schemes
from kvcompile.serving.vllm_plugin.versions import ENGINE

log = logging.getLogger("vllm.kvcompile")
"""A child of vLLM's logger, so that vLLM's handlers print its messages."""


@dataclasses.dataclass
class CodesMetadata(AttentionMetadata):
    """The operands of ``kvcompile.serving.operations`` that all layers of a group have in common in one step."""

    block_table: torch.Tensor
    lengths: torch.Tensor
    query_start: torch.Tensor
    max_queries: int
    max_length: int
    tokens: int


class CodesBackend(AttentionBackend):
    """vLLM's description of attention over blocks of codes: the methods by which the engine learns page sizes, layouts and features."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Return the backend's name in vLLM's registry."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CodesImpl]:
        """Return the class that computes a layer's attention, CodesImpl."""
        return CodesImpl

    @staticmethod
    def get_builder_cls() -> type[CodesBuilder]:
        """Return the class that makes a step's operands, CodesBuilder."""
        return CodesBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:  # noqa: ARG004 - the engine calls it so
        """Return the supported page sizes: multiples of 16 tokens, so that no byte of a plane is lost to alignment."""
        return [MultipleOf(LEAST_PAGE)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return (LBHNC,), the layout in which a head's block is contiguous."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return a layer's spec with the number of bytes that codes take per token and head; unchanged if it has that number already.

        Raises EngineUnfit if the environment names no scheme, and NotPaged for a scheme that blocks cannot hold.
        """
        if spec.state_content_bytes is not None:
            return spec
        keys, values = asked()
        content = bytes_of_token(keys, values, spec.head_size, spec.head_size_v, spec.dtype)
        return dataclasses.replace(spec, state_content_bytes=content)

    @classmethod
    def supports_sink(cls) -> bool:
        """Return True: attention takes learned sinks."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True: attention takes a window, and does not read blocks before it, which the engine may have freed."""
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Return False: connectors identify the contents of blocks by the name of a dtype, which does not include our scheme."""
        return False


class CpuCodesBackend(CodesBackend):
    """CodesBackend under the name CPU_ATTN, the only attention backend that vLLM uses on a CPU."""

    @staticmethod
    def get_name() -> str:
        """Return the backend's name in vLLM's registry."""
        return "CPU_ATTN"


class CodesBuilder(AttentionMetadataBuilder[CodesMetadata]):
    """Builder that makes a step's operands from the engine's metadata; it logs once the schemes and the number of tokens that fit."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        require_plain(vllm_config)
        self.page = kv_cache_spec.block_size
        log.info("kvcompile: %s", told(kv_cache_spec, len(layer_names), vllm_config.cache_config.num_gpu_blocks))
        for warning in {scheme.warning for scheme in asked()} - {None}:
            log.warning("kvcompile: %s", warning)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> CodesMetadata:
        """Return a step's operands, without reading values from the device. Raises EngineUnfit unless attention is causal."""
        common = common_attn_metadata
        if common.causal is not True:
            raise EngineUnfit(
                engine=ENGINE, expected="causal attention", found=f"causal={common.causal!r}", todo=f"unset {VARIABLE} for this model"
            )
        return CodesMetadata(
            common.block_table_tensor, common.seq_lens, common.query_start_loc, common.max_query_len, common.max_seq_len,
            common.num_actual_tokens,
        )


class CodesImpl(AttentionImpl[CodesMetadata]):
    """One layer's attention: it writes new tokens into the layer's pool as codes, and attends over the codes."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None, alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None, kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None, sinks: torch.Tensor | None = None,
        **others: object,
    ) -> None:
        refuse(alibi_slopes is not None, "an attention without alibi", "alibi_slopes")
        refuse(attn_type != AttentionType.DECODER, "attention of a decoder", str(attn_type))
        refuse(kv_sharing_target_layer_name is not None, "a cache for each layer", f"a layer that reads {kv_sharing_target_layer_name}")
        refuse(kv_cache_dtype not in CodesBackend.supported_kv_cache_dtypes, "--kv-cache-dtype auto", kv_cache_dtype)
        given = sorted(name for name, value in others.items() if value is not None)
        refuse(bool(given), "no further arguments of an attention", ", ".join(given))
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.window = 0 if sliding_window is None else sliding_window
        self.softcap = float(logits_soft_cap or 0.0)
        self.sinks = sinks
        self.pool: Pool | None = None
        self.source: torch.Tensor | None = None

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor,
    ) -> None:
        """Encode new keys [T, K, D] and values [T, K, Dv] and write them into their slots of ``kv_cache``."""
        tokens = slot_mapping.shape[0]
        self.pool_of(kv_cache, key.dtype, value.shape[-1]).append(key[:tokens], value[:tokens], slot_mapping)

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: CodesMetadata | None, output: torch.Tensor, output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with queries [T, H, D] over the codes of their requests; write the result into ``output`` [T, H, Dv] and return it.

        Without ``attn_metadata`` the result is zeros. Raises EngineUnfit for a quantized output.
        """
        refuse(output_scale is not None or output_block_scale is not None, "results in the model's dtype", "a quantized output")
        if attn_metadata is None:
            return output.zero_()
        step, dim = attn_metadata, output.shape[-1]
        q = query.view(-1, self.num_heads, self.head_size)[: step.tokens]
        pool = self.pool_of(kv_cache, query.dtype, dim)
        attended, _ = pool.attend(
            q, step.block_table, step.lengths, step.query_start, step.max_queries, scale=self.scale, softcap=self.softcap,
            window=self.window, sinks=self.sinks, max_length=step.max_length,
        )
        output.view(-1, self.num_heads, dim)[: step.tokens].copy_(attended)
        return output

    def pool_of(self, kv_cache: torch.Tensor, dtype: torch.dtype, value_dim: int) -> Pool:
        """Return a view of the engine's cache of this layer as a Pool; kept until another cache is passed.

        ``dtype``: that of the model's keys; ``value_dim``: channels of a value. Raises EngineUnfit if the environment names no scheme, and
        NotPaged for a scheme that blocks cannot hold.
        """
        if self.pool is None or self.source is not kv_cache:
            _, heads, page, _ = kv_cache.shape
            layout = layout_of_blocks(*asked(), heads, self.head_size, value_dim, page, dtype)
            data = kv_cache.view(torch.uint8).flatten(2)[..., : layout.head_bytes]
            self.pool, self.source = Pool(layout, data, *layout.tables(kv_cache.device)), kv_cache
        return self.pool


def asked() -> tuple[Scheme, Scheme]:
    """Return the schemes of keys and values that the environment names. Raises EngineUnfit if it names none."""
    found = schemes()
    if found is None:
        raise EngineUnfit(engine=ENGINE, expected=f"a scheme in {VARIABLE}", found="none", todo=f"start the engine with {VARIABLE}=int4")
    return found


def refuse(applies: bool, expected: str, found: str) -> None:
    """Raise EngineUnfit, with the expected and the found value, if ``applies`` is true."""
    if applies:
        raise EngineUnfit(engine=ENGINE, expected=expected, found=found, todo=f"unset {VARIABLE} for this model")


def require_plain(config: Any) -> None:
    """Raise EngineUnfit for engine settings that were never tried with codes: context parallelism, speculative decoding, connectors."""
    parallel = config.parallel_config
    refuse(parallel.decode_context_parallel_size > 1, "decode_context_parallel_size=1", str(parallel.decode_context_parallel_size))
    refuse(config.speculative_config is not None, "no speculative decoding", "a speculative_config")
    refuse(config.kv_transfer_config is not None, "no connector: its blocks do not say their scheme", "a kv_transfer_config")


def told(spec: Any, layers: int, blocks: int | None) -> str:
    """Return the text logged for a group of ``layers`` layers: schemes, bytes of a token, tokens that fit in ``blocks`` blocks.

    The text also says how many tokens would fit dense; without ``blocks`` it states neither number. Raises EngineUnfit if the environment
    names no scheme.
    """
    keys, values = asked()
    token = layers * spec.page_size_bytes // spec.block_size
    dense = layers * spec.num_kv_heads * (spec.head_size + spec.head_size_v) * spec.dtype.itemsize
    line = token_line(keys, values, token, layers)
    if not blocks:
        return line
    tokens = blocks * spec.block_size
    return f"{line}, {capacity(tokens, tokens * token, dense, spec.dtype)}"
