"""Static scales from a checkpoint, by the tensor names of other serving systems.

==============================================  ========================  ==================================================
name of the tensor                              slots                     system that writes it
==============================================  ========================  ==================================================
``<attention>.k_scale``, ``.attn.k_scale``      keys (v: values)          vLLM's names: one number, or one per kv head
``<attention>.k_proj.k_scale``                  keys (v: values)          NVIDIA ModelOpt
``<attention>.qkv_proj.k_scale``                keys (v: values)          llm-compressor, for models with fused projections
``<attention>.k_proj.output_scale``             keys (v: values)          older compressed-tensors, AMD Quark
``<attention>.kv_scale``                        both                      AutoFP8; vLLM too copies it to both
``layers.N.attention.kv_cache_scaling_factor``  both, of layer N          TensorRT-LLM
==============================================  ========================  ==================================================

All of them mean value = code * scale. vLLM writes ``k / k_scale`` and clips to e4m3's 448, and TensorRT-LLM calls its factor the scale
from quantized to original. A scale of amax / 448 covers amax; scales from calibrations that used amax / 240, or less of the range, are
taken unchanged. Refused: scales of channels or tokens, zero points other than 0, scales that are not above zero (vLLM writes -1 for none),
scales of keys without values or the reverse, two different scales for one slot, dynamic or asymmetric caches, and a checkpoint whose
configuration names other codes.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from kvcompile.errors import BadScales, FileUnfit
from kvcompile.extensions.static_scales.scales import ModelScales, Scales, SiteScales
from kvcompile.extensions.static_scales.scheme import Calibrated, static_of, with_scales
from kvcompile.extensions.static_scales.storage import FILE
from kvcompile.files.declared import unfit
from kvcompile.files.json_file import read_json
from kvcompile.schemes.model_file import fingerprint, plain_name
from kvcompile.types import Role

Source = Mapping[str, torch.Tensor]

BOTH = (Role.KEY, Role.VALUE)
FUSED = r"(?:qkv_proj|qkv|Wqkv|query_key_value|c_attn|attn_qkv|kv_proj|in_proj)"
"""Names of projections that compute queries, keys and values together, or keys and values."""
SPELLINGS: tuple[tuple[str, tuple[Role, ...]], ...] = (
    (rf"(?P<path>.+)\.{FUSED}\.k_scale", (Role.KEY,)), (rf"(?P<path>.+)\.{FUSED}\.v_scale", (Role.VALUE,)),
    (r"(?P<path>.+)\.k_proj\.(k_scale|output_scale)", (Role.KEY,)), (r"(?P<path>.+)\.v_proj\.(v_scale|output_scale)", (Role.VALUE,)),
    (r"(?P<path>.+attn|.+attention)\.attn\.k_scale", (Role.KEY,)), (r"(?P<path>.+attn|.+attention)\.attn\.v_scale", (Role.VALUE,)),
    (r"(?P<path>.+attn|.+attention)\.attn\.kv_scale", BOTH),
    (r"(?P<path>.+)\.k_scale", (Role.KEY,)), (r"(?P<path>.+)\.v_scale", (Role.VALUE,)), (r"(?P<path>.+)\.kv_scale", BOTH),
    (r"(?:.+\.)?(?P<path>layers\.\d+)\.attention\.kv_cache_scaling_factor", BOTH),
)
"""Patterns of tensor names, of which the first match counts, with the module path of the attention, and the roles that the scale is for."""

ZERO_POINTS = re.compile(r".+\.(k_zero_point|v_zero_point|[kv]_proj\.output_zero_point)")
STRATEGIES = {"tensor", "attn_head"}
"""Names in compressed-tensors of one scale per slot, and one per kv head."""

REMEDY = "calibrate the model with kvcompile.calibrate"


def read_scales(source: str | Path | Source, model: torch.nn.Module, scheme: str | None = None) -> Calibrated:
    """Return the scheme with the static scales of a checkpoint of ``model``.

    Raises BadScales if there are none for the scheme or they do not fit it.

    ``source``: a folder with safetensors, or a state dict. ``scheme``: int8 or fp8; None takes the codes that the folder's configuration
    states for its KV cache, else fp8.
    """
    if isinstance(source, Mapping):
        where, tensors, said = "the state dict", {name: value for name, value in source.items() if _interesting(name)}, None
    else:
        where, tensors, said = str(source), _of_folder(Path(source)), _said(Path(source))
    chosen = scheme or said or "fp8"
    kind = static_of(chosen)
    if kind is None:
        raise BadScales(expected="a scheme with static scales, int8 or fp8", found=chosen, todo="pass one of them")
    if said is not None and static_of(said) is not kind:
        raise BadScales(expected=f"scales for {said}, as {where} says", found=f"scheme={chosen!r}", todo="leave scheme out")
    sites = _sites(tensors, where)
    FILE.require_sites(where, sites, model)
    return with_scales(kind, ModelScales(sites, fingerprint(model)))


def _interesting(name: object) -> bool:
    """Return whether a tensor of this name is a scale or a zero point of a cache."""
    return isinstance(name, str) and (_spelling(name) is not None or ZERO_POINTS.fullmatch(name) is not None)


def _spelling(name: str) -> tuple[str, tuple[Role, ...]] | None:
    """Return (module path, roles) from the name of a tensor of scales; None for the name of any other tensor."""
    for pattern, roles in SPELLINGS:
        if (found := re.fullmatch(pattern, name)) is not None:
            return plain_name(found["path"]), roles
    return None


def _sites(tensors: Source, where: str) -> dict[str, SiteScales]:
    """Return the scales of each module path. Raises BadScales if keys or values have none, or codes have zero points."""
    named = {name: _tensor(name, value, where) for name, value in sorted(tensors.items())}
    for name, value in named.items():
        if _spelling(name) is None and bool(value.to(torch.float32).any()):
            raise BadScales(expected="symmetric codes, without zero points", found=f"{name} in {where}", todo=REMEDY)
    both, one = _held(named, len(BOTH), where), _held(named, 1, where)
    # A scale of keys or values overrides one of both, as in vLLM.
    held = {path: both.get(path, {}) | one.get(path, {}) for path in {**both, **one}}
    if not held:
        raise BadScales(expected="k_scale and v_scale, or another name that is known", found=f"none in {where}", todo=REMEDY)
    for path, by_role in held.items():
        if len(by_role) < len(Role):
            missing = next(role.value for role in Role if role not in by_role)
            needed = f"a scale for keys and one for values at {path}"
            raise BadScales(expected=needed, found=f"none of its {missing}s in {where}", todo=REMEDY)
    return {path: SiteScales(by_role[Role.KEY], by_role[Role.VALUE]) for path, by_role in held.items()}


def _held(named: Source, by_role: int, where: str) -> dict[str, dict[Role, Scales]]:
    """Return scales by module path and role, from the tensors ``named``; ``by_role``: number of roles, 1 or 2, of a name to be read.

    Raises BadScales if two tensors give different scales for one role.
    """
    found: dict[str, dict[Role, Scales]] = {}
    for name, value in named.items():
        path, roles = _spelling(name) or ("", ())
        if len(roles) != by_role:
            continue
        scales = _scales(name, value, where)
        for role in roles:
            if found.setdefault(path, {}).setdefault(role, scales) != scales:
                raise BadScales(
                    expected=f"one scale for the {role.value}s of {path}", found=f"another one in {name} of {where}",
                    todo="leave the one out that the model was not calibrated with",
                )
    return found


def _tensor(name: str, value: Any, where: str) -> torch.Tensor:
    """Return ``value`` if it is a tensor that can hold scales or zero points. Raises BadScales if it is not."""
    if isinstance(value, torch.Tensor) and value.dtype != torch.bool and not value.is_complex():
        return value
    found = str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
    raise BadScales(expected=f"{name} as a tensor of numbers", found=f"{found} in {where}", todo=REMEDY)


def _scales(name: str, value: torch.Tensor, where: str) -> Scales:
    """Return the scales in a tensor of one number or of one per head, with any further axes of size one.

    Raises BadScales for other shapes and for integers.
    """
    if sum(size > 1 for size in value.shape) > 1:
        raise BadScales(expected=f"{name} of one scale, or one for each kv head", found=f"{tuple(value.shape)} in {where}", todo=REMEDY)
    if not value.is_floating_point():
        raise BadScales(expected=f"{name} as floats", found=f"{value.dtype} in {where}", todo=REMEDY)
    return Scales(value.detach().to("cpu", torch.float32).reshape(-1).clone())


def _of_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Return the scales and zero points of a folder's safetensors. Raises BadScales without files, or if they are damaged or disagree."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, torch.Tensor] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadScales(expected="a folder with safetensors", found=f"none in {folder}", todo="pass the folder of the checkpoint")
    for file in files:
        try:
            with safe_open(str(file), "pt") as opened:
                held = {name: opened.get_tensor(name) for name in list(opened.keys()) if _interesting(name)}
        except (OSError, SafetensorError) as error:
            raise BadScales(expected="whole safetensors", found=f"{file} ({error})", todo="fetch the checkpoint again") from error
        for name in held.keys() & found.keys():
            if not torch.equal(held[name], found[name]):
                todo = "remove the file that is not of this checkpoint"
                raise BadScales(expected=f"{name} in one file of {folder}", found=f"another value in {file.name}", todo=todo)
        found |= held
    return found


def _said(folder: Path) -> str | None:
    """Return the codes of the KV cache, ``int8`` or ``fp8``, that a checkpoint's configuration names; None if it names none.

    Raises BadScales for a configuration that is not JSON, or names a cache that is not supported.
    """
    for name, read in (("config.json", _of_config), ("hf_quant_config.json", _of_modelopt)):
        path = folder / name
        if not path.is_file():
            continue
        try:
            found = list(read(read_json(path, dict[str, Any]), path))
        except FileUnfit as error:
            todo = "fetch the checkpoint again"
            raise BadScales(expected="a configuration in JSON", found=f"{path} ({error.fact})", todo=todo) from error
        if found:
            return found[0]
    return None


def _of_config(config: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Yield the codes that compressed-tensors' ``kv_cache_scheme`` names, if the configuration has one.

    Raises BadScales for unsupported ones.
    """
    given = _entry(_entry(config, "quantization_config"), "kv_cache_scheme")
    if not given:
        return
    kind = {"float 8": "fp8", "int 8": "int8"}.get(f"{given.get('type')} {given.get('num_bits')}")
    if kind is None or given.get("dynamic") or given.get("symmetric") is False or str(given.get("strategy", "tensor")) not in STRATEGIES:
        expected = "a kv_cache_scheme of 8 bits, static and symmetric, per tensor or head"
        raise BadScales(expected=expected, found=f"{reprlib.repr(dict(given))} in {path}", todo=REMEDY)
    yield kind


def _of_modelopt(config: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Yield the codes that ModelOpt's ``kv_cache_quant_algo`` names, if the configuration has one.

    Raises BadScales for unsupported ones.
    """
    given = _entry(config, "quantization").get("kv_cache_quant_algo")
    if given is None:
        return
    if str(given).upper() not in {"FP8", "INT8"}:
        raise BadScales(expected="kv_cache_quant_algo FP8 or INT8", found=f"{given} in {path}", todo=REMEDY)
    yield str(given).lower()


def _entry(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the mapping under a name of a configuration; empty if absent or null. Raises FileUnfit for anything else."""
    found = config.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise unfit(name, "a mapping", found)
    return found or {}
