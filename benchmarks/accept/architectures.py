"""Architectures of the acceptance run, by family: transformers types whose tiny random models are built, and hand-written modules."""

from __future__ import annotations

from benchmarks.accept.axes import Architecture, Family, Trait


def _of(family: Family, names: str, *traits: Trait, attention: str = "sdpa") -> tuple[Architecture, ...]:
    return tuple(Architecture(name, family, attention, frozenset(traits)) for name in names.split())


ARCHITECTURES: tuple[Architecture, ...] = (
    *_of(Family.GROUPED, "llama qwen2 qwen3 phi3 granite olmo2 cohere glm"),
    *_of(Family.UNGROUPED, "gpt2 opt gpt_neox phi biogpt"),
    *_of(Family.LATENT, "deepseek_v2 deepseek_v3 glm4_moe_lite", Trait.LATENT, Trait.EXPERTS),
    *_of(Family.PRODUCTS, "gptj codegen", attention="eager"), *_of(Family.PRODUCTS, "gpt_neo", Trait.FROM_THE_END, attention="eager"),
    *_of(Family.PRODUCTS, "roformer", Trait.NO_STATIC, attention="eager"),
    *_of(Family.PRODUCTS, "xglm", Trait.FLOAT32, attention="eager"),
    *_of(Family.GROUPED_PRODUCTS, "llama stablelm nemotron", attention="eager"),
    *_of(Family.SINKS, "gpt_oss", Trait.SLIDING, Trait.EXPERTS, attention="eager"),
    *_of(Family.SINKS, "mimo_v2_flash", Trait.SLIDING, Trait.EXPERTS, attention="eager"),
    *_of(Family.BIAS, "bloom", Trait.NO_STATIC, attention="eager"),
    *_of(Family.BIAS, "mpt", Trait.SPLIT_STATIC, Trait.HALF_MASK, attention="eager"),
    *_of(Family.BIAS, "falcon"),
    *_of(Family.SOFTCAP, "gemma2", Trait.SLIDING, attention="eager"),
    *_of(Family.SLIDING, "gemma3_text mistral cohere2 exaone4 olmo3", Trait.SLIDING),
    *_of(Family.HYBRID, "lfm2 bamba falcon_h1", Trait.HYBRID),
    *_of(Family.ENCODER, "bart+encoder marian+encoder", Trait.CROSS),
    *_of(Family.ENCODER, "t5+encoder", Trait.CROSS, attention="eager"),
    *_of(Family.EXPERTS, "mixtral qwen3_moe olmoe", Trait.EXPERTS),
    *_of(Family.BUFFER, "gpt-fast index-copy einsum combined", Trait.MODULE, Trait.NO_DYNAMIC),
    *_of(Family.BUFFER, "per-row", Trait.MODULE, Trait.NO_DYNAMIC, Trait.STEPS_BACK),
    *_of(Family.BUFFER, "slice-assign", Trait.MODULE, Trait.NO_DYNAMIC, Trait.FLOAT32),
    *_of(Family.CONCAT, "nano-gpt time-first", Trait.MODULE, Trait.NO_STATIC),
    *_of(Family.PAGED, "block-table slot-mapping", Trait.MODULE, Trait.PAGED, Trait.NO_DYNAMIC),
)
