"""Runs a test's function in Triton's interpreter: each call in a process of its own, forked from one where torch is already imported.

The interpreter must be chosen before triton is imported, and what a case patches there must not reach the next.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

import numpy as np
import torch

STARTING = threading.Lock()


def interpreting() -> forkserver.ForkServer:
    """The server whose forks have the interpreter; what takes seconds to import is imported once for all of them.

    One thread at a time: of two that change the environment together the second puts back what the first had set, and from then on
    this process would define kernels for the interpreter.
    """
    with STARTING:
        return started()


@functools.cache
def started() -> forkserver.ForkServer:
    """A server of its own, which runs: the one of the process may have been started without the interpreter."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(["torch", "triton", "kvcompile"])
    paths = os.pathsep.join(filter(None, sys.path))
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=paths):
        server.ensure_running()
    return server


def start(process: BaseProcess) -> None:
    """Start a process as a fork of the server of the interpreter."""
    server = interpreting()
    with STARTING, mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
        process.start()


def patch_language_once_a_launch() -> None:
    """Let the interpreter patch ``triton.language`` once a launch and module, not at every call of a function of a kernel.

    Triton 3.6 and 3.7 look through the whole language at each such call, which is half of the time of a launch, and patch what is
    patched already.
    """
    from triton.runtime import interpreter

    patch_lang, scope_type = interpreter._patch_lang, interpreter._LangPatchScope
    patched: set[int] = set()

    class Launch(scope_type):  # type: ignore[misc, valid-type]
        """What one call patched; only the launch itself restores it."""

        def restore(self) -> None:
            patched.clear()
            super().restore()

    def patch_once(function: Callable[..., object]) -> Any:
        launch, module = Launch(), id(function.__globals__)
        if module not in patched:
            patched.add(module)
            launch._changes = patch_lang(function)._changes
        return launch

    interpreter._patch_lang = patch_once


def skip_what_nobody_reads() -> None:
    """Leave out what is computed and thrown away: a third of the time of a launch, and a table of types made at every operation.

    The interpreter computes every sum, difference and product again in int64 to find an overflow, and asserts only where it debugs.
    """
    from triton.runtime import interpreter

    builder, dtype_of = interpreter.interpreter_builder, interpreter._get_np_dtype
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    known: dict[str, Any] = {}

    def remembered(kind: Any) -> Any:
        name = str(kind.scalar)
        if name not in known:
            known[name] = dtype_of(kind.scalar)
        return known[name]

    interpreter._get_np_dtype = remembered


def combine_whole_slices() -> None:
    """Let reductions by a function of the kernel's own combine slices along the axis, in their order, instead of single elements.

    The interpreter calls the function for each element, which takes minutes a launch; such functions work on blocks as well.
    """
    from triton.runtime import interpreter

    def reduced(self: Any, given: Sequence[Any]) -> list[Any]:
        slices = [np.moveaxis(arg.handle.data, self.axis, 0) for arg in given]
        kinds = [arg.dtype for arg in given]
        found = tuple(map(self.to_tensor, (x[0] for x in slices), kinds))
        for at in range(1, slices[0].shape[0]):
            found = self.combine_fn.fn(*found, *map(self.to_tensor, (x[at] for x in slices), kinds))
            found = found if isinstance(found, tuple) else (found,)
        results = [x.handle.data.reshape(slices[0].shape[1:]) for x in found]
        if self.keep_dims:
            results = [np.expand_dims(x, self.axis) for x in results]
        return list(map(self.to_tensor, results, kinds))

    plain = interpreter.ReduceOps.generic_reduce
    interpreter.ReduceOps.generic_reduce = lambda self, given: plain(self, given) if self.axis is None else reduced(self, given)


class Guarded:
    """The interpreter's loads, stores and atomics, which raise where an address is in none of the launch's tensors.

    They would read whatever lies there, and a device ends the process.
    """

    def __init__(self, plain: Any) -> None:
        self.plain = plain
        self.starts = self.ends = np.zeros(0, np.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def admit(self, arguments: tuple[object, ...]) -> None:
        """Take the storages of a launch's tensors as what may be accessed."""
        found = sorted({(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in arguments if isinstance(x, torch.Tensor)})
        starts, sizes = np.array(found, np.int64).reshape(-1, 2).T
        self.starts, self.ends = starts, starts + sizes

    def check(self, addresses: np.ndarray, mask: np.ndarray, size: int) -> None:
        """Raise ``IndexError`` where an address that the mask keeps, or the end of its element, is in no storage."""
        used = addresses[np.broadcast_to(mask, addresses.shape).astype(bool)].astype(np.int64)
        place = np.searchsorted(self.starts, used, side="right") - 1
        inside = (place >= 0) & (used + size <= self.ends[place]) if self.starts.size else np.zeros(used.shape, bool)
        if not inside.all():
            raise IndexError(f"{np.count_nonzero(~inside)} of {used.size} addresses of an access are in none of the launch's tensors")

    def load(self, addresses: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: Any) -> Any:
        self.check(addresses, mask, np.dtype(dtype).itemsize)
        return self.plain.load(addresses, mask, other, dtype)

    def store(self, addresses: np.ndarray, value: np.ndarray, mask: np.ndarray) -> Any:
        self.check(addresses, mask, value.dtype.itemsize)
        return self.plain.store(addresses, value, mask)

    def atomic_rmw(self, operation: Any, addresses: np.ndarray, value: np.ndarray, mask: np.ndarray, order: Any) -> Any:
        self.check(addresses, mask, value.dtype.itemsize)
        return self.plain.atomic_rmw(operation, addresses, value, mask, order)


def guard_accesses() -> None:
    """Let every launch access its own tensors only."""
    from triton.runtime import interpreter

    guarded = Guarded(interpreter._interpreter)
    interpreter._interpreter = guarded
    prepare = interpreter.GridExecutor._init_args_hst

    def prepared(self: Any, arguments: Any, named: Any) -> Any:
        found = prepare(self, arguments, named)
        guarded.admit((*found[0], *found[1].values()))
        return found

    interpreter.GridExecutor._init_args_hst = prepared


def attempt(to: Connection, guarded: bool, function: Callable[..., object], *args: object) -> None:
    """In the process: how the call failed, or None."""
    from triton import knobs

    assert knobs.runtime.interpret, "a process that was started before the interpreter was chosen"
    patch_language_once_a_launch()
    skip_what_nobody_reads()
    combine_whole_slices()
    if guarded:
        guard_accesses()
    try:
        function(*args)
        to.send(None)
    except Exception:  # noqa: BLE001 - the test raises it again
        to.send(traceback.format_exc())


def interpreted(function: Callable[..., object], *args: object, guarded: bool = False) -> None:
    """Call a module's function, which asserts, in a process with the interpreter; its failure is the test's, and its end is this one's.

    ``guarded``: an access outside of a launch's tensors is a failure.
    """
    found, to = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("forkserver").Process(target=attempt, args=(to, guarded, function, *args), daemon=True)
    start(process)
    to.close()
    try:
        failure = found.recv()
    except EOFError:
        process.join()
        failure = f"ended with {process.exitcode} before it was done"
    finally:
        process.kill()
        process.join()
        found.close()
    assert failure is None, failure[-3000:]
