"""The entry point of group ``vllm.general_plugins``: vLLM calls it in each of its processes, before the engine."""

from __future__ import annotations

import logging
import os

from kvcompile.serving.vllm_plugin.settings import VARIABLE, schemes
from kvcompile.serving.vllm_plugin.versions import require_known

log = logging.getLogger(__name__)
BACKEND = "kvcompile.serving.vllm_plugin.backend.CodesBackend"
CPU_BACKEND = "kvcompile.serving.vllm_plugin.backend.CpuCodesBackend"


def register() -> None:
    """Register the backend ``CUSTOM`` if ``KVCOMPILE_SCHEME`` is set; else do nothing.

    Raises EngineUnfit for a version of vLLM that the plugin was never tried in, and a SchemeError for a text that names no scheme. The
    engine calls this once a process: the backend is registered ahead of the latter, or a second start would go on without codes.
    """
    if not os.environ.get(VARIABLE, "").strip():
        return
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    require_known(vllm.__version__)
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if current_platform.is_cpu():
        # A CPU takes this one whatever is asked for.
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    else:
        log.info("kvcompile: %s is set: start the engine with --attention-backend CUSTOM", VARIABLE)
    schemes()
