"""The entry point of group ``vllm.general_plugins``, which vLLM calls in each of its processes before it makes an engine."""

from __future__ import annotations

import logging
import os

from kvcompile.serving.vllm_plugin.settings import VARIABLE, schemes
from kvcompile.serving.vllm_plugin.versions import require_known

log = logging.getLogger(__name__)
BACKEND = "kvcompile.serving.vllm_plugin.backend.CodesBackend"
CPU_BACKEND = "kvcompile.serving.vllm_plugin.backend.CpuCodesBackend"


def register() -> None:
    """Register the backend ``CUSTOM`` with vLLM if ``KVCOMPILE_SCHEME`` is set; otherwise do nothing.

    Raises EngineUnfit for a version of vLLM with which the plugin was never tried, and a SchemeError for a text that names no scheme. vLLM
    calls this once a process. The backend is registered before the text is read: otherwise an engine started again after a SchemeError
    would run without codes.
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
