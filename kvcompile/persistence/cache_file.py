"""Cache file: save a compressed cache as a file of safetensors, and load it in another process.

The file holds the planes as they are in memory, by the names of their tensors in the cache (``layers.0.keys/0/codes``). Its metadata holds
the cache's structure, the schemes' texts, the model's fingerprint and a hash of each row's tokens. If any of these differs from the
arguments of ``load_cache``, nothing is loaded.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from kvcompile.errors import CacheUnfit, FileUnfit
from kvcompile.files.declared import as_plain
from kvcompile.files.json_file import parsed
from kvcompile.files.tensor_file import Entry
from kvcompile.passes.plan.policy import policy_of
from kvcompile.persistence.cache_records import StoredCache, planes_of
from kvcompile.persistence.cache_tree import CacheTensors, planted
from kvcompile.persistence.token_hashes import TokenHashes, Tokens, hashed
from kvcompile.schemes.model_file import ModelFile, fingerprint

AGAIN = "run the prompt again and call kvcompile.save_cache"
FILE = ModelFile("kvcompile-cache-1", "a compressed cache", CacheUnfit, AGAIN)


def save_cache(cache: Any, path: str | Path, *, tokens: Tokens | None = None, model: torch.nn.Module | None = None) -> None:
    """Save a compressed cache as a file of safetensors, codes unchanged; the file appears whole or not at all. Waits for the device.

    ``cache``: a cache of transformers, or lists, tuples and dicts of tensors and numbers; dense tensors in it are saved too. ``tokens``:
    the ids [B, T] of the cache's tokens, optionally with later ones, such as the result of ``generate``. ``model``: the model that computed
    them. The file keeps hashes of ``tokens`` and ``model`` if they are given; ``load_cache`` must then get the same ones. Raises CacheUnfit
    for a cache that a file cannot hold.
    """
    found = CacheTensors()
    tree = found.tree(cache)
    if not found.compressed:
        raise CacheUnfit(
            expected="a cache with compressed tensors", found=f"{len(found.dense)} dense tensors",
            todo="call the compiled model with it first (backend.report() says what stayed dense and why), or use torch.save",
        )
    stored = {name: StoredCache.of(handle, name) for name, handle in found.compressed.items()}
    planes = {key: plane for name, handle in found.compressed.items() for key, plane in planes_of(handle, name)}
    # A sliding window that another tensor's length goes beyond may count from its own first token.
    whole = [item for item in stored.values() if item.slots is None] or list(stored.values())
    known = None if tokens is None else hashed(tokens, ((item.rows, item.length) for item in whole))
    metadata = {
        "sites": list(stored), "caches": as_plain(stored), "tree": tree, "tokens": as_plain(known),
        "tensors": {name: [tensor.dim(), as_plain(tensor.dtype), str(tensor.device)] for name, tensor in found.dense.items()},
        "packages": {name: importlib.metadata.version(name) for name in sorted(found.packages)},
    }
    texts = {name: json.dumps(value) for name, value in metadata.items()}
    FILE.write(path, _apart({**planes, **found.dense}), {**texts, "fingerprint": "" if model is None else fingerprint(model)})


def load_cache(
    path: str | Path, *, tokens: Tokens | None = None, model: torch.nn.Module | None = None, scheme: object = None,
    device: str | torch.device | None = None,
) -> Any:
    """Return the cache in a file that ``save_cache`` wrote, for a compiled model to continue.

    Raises CacheUnfit if an argument does not match it.

    ``tokens``, ``model``: as given to ``save_cache``; each must be given if it was given there, and only then. ``tokens`` may be longer
    than the cache: its first ones are compared. ``scheme``: the argument ``scheme`` of ``kvcompile.backend``, or the backend itself;
    required for schemes with learned tables or measured scales, and compared with the file's scheme otherwise. ``device``: the device to
    load to; None for the devices that the tensors were saved from.
    """
    path, stored, dense = Path(path), dict[str, StoredCache](), dict[str, tuple[int, torch.dtype, str]]()
    policy = None if scheme is None else policy_of(getattr(scheme, "policy", scheme))

    def declared(metadata: Mapping[str, str], sites: list[str]) -> dict[str, Entry]:
        stored.update(parsed(metadata.get("caches", ""), dict[str, StoredCache], "caches"))
        dense.update(parsed(metadata.get("tensors", ""), dict[str, tuple[int, torch.dtype, str]], "tensors"))
        if sites != list(stored):
            raise FileUnfit(where="caches", expected=f"the tensors {sites}", found=list(stored))
        entries = {name: Entry((None,) * dims, dtype, any_bits=True) for name, (dims, dtype, _) in dense.items()}
        for name, item in stored.items():
            entries.update(item.entries(name))
        return entries

    tensors, metadata = FILE.read(path, declared)
    try:
        packages = parsed(metadata.get("packages", ""), dict[str, str], "packages")
        known = parsed(metadata.get("tokens", ""), TokenHashes | None, "tokens")
        tree = parsed(metadata.get("tree", ""), Any, "tree")
        _check_packages(path, packages)
        _check_model(path, metadata["fingerprint"], model)
        _check_tokens(path, known, tokens)
        target = None if device is None else torch.device(device)
        held = {item.device for item in stored.values()} | {where for _, _, where in dense.values()}
        _check_devices(path, held if target is None else {str(target)})
        made: dict[str, torch.Tensor] = {name: item.tensor(name, tensors, policy, target, path) for name, item in stored.items()}
        for name, (_, _, where) in dense.items():
            # Copies: the tensors of a file are views of its memory.
            made[name] = tensors[name].to(target or torch.device(where), copy=True)
        return planted(tree, made, target)
    except FileUnfit as error:
        raise FILE.refused(path, error) from error


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors, with a copy of each that shares memory with an earlier one (forks do): safetensors forbids sharing."""
    seen, found = set[int](), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor
        seen |= {place} if tensor.numel() else set()
    return found


def _check_packages(path: Path, packages: Mapping[str, str]) -> None:
    """Raise CacheUnfit if a package is installed in another minor version than that of the file's objects: attributes may differ."""
    for name, held in packages.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found.split(".")[:2] != held.split(".")[:2]:
            raise CacheUnfit(
                expected=f"{name} {held}, whose objects {path} holds", found=f"{name} {found}",
                todo=f"install {name} {held}, or {AGAIN}; lists of a cache's tensors depend on no package",
            )


def _check_devices(path: Path, devices: Iterable[str]) -> None:
    """Raise CacheUnfit if this process lacks one of ``devices``, the devices to which the file ``path`` is loaded."""
    for device in sorted(devices):
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise CacheUnfit(
                expected=f"the device {device}, to load {path} to", found=str(error).partition("\n")[0],
                todo="pass device= with one that this process has",
            ) from error


def _check_model(path: Path, held: str, model: torch.nn.Module | None) -> None:
    """Raise CacheUnfit unless the file's fingerprint ``held`` is that of ``model``, or the file has none and no model is given."""
    if model is None and held:
        raise CacheUnfit(
            expected=f"model=, as {path} has the fingerprint {held} of a model", found="none",
            todo="pass the model that goes on with the cache",
        )
    if model is not None and not held:
        raise CacheUnfit(
            expected=f"the fingerprint of a model in {path}", found="none",
            todo="pass model= to kvcompile.save_cache too, or leave it out of kvcompile.load_cache",
        )
    if model is not None:
        FILE.require_model(path, held, model)


def _check_tokens(path: Path, held: TokenHashes | None, tokens: Tokens | None) -> None:
    """Raise CacheUnfit unless ``tokens`` begin with the tokens whose hashes the file has (``held``), or both are None."""
    if held is None:
        if tokens is not None:
            raise CacheUnfit(
                expected=f"hashes of tokens in {path}", found="none",
                todo="pass tokens= to kvcompile.save_cache too, or leave them out of kvcompile.load_cache",
            )
        return
    expected = f"the {held.length} tokens of {len(held.rows)} rows that {path} was saved with, and maybe more behind them"
    found = "none" if tokens is None else held.differing(tokens)
    if found:
        raise CacheUnfit(expected=expected, found=found, todo=f"pass the ids of the conversation as tokens=, or {AGAIN}")
