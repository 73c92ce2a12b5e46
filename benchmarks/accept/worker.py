"""Worker: a process that runs the cases it is sent, one after another, and sends back a result for each."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from typing import Any

import torch._dynamo
import torch._inductor.compile_fx  # noqa: F401 - imported once by the server that all workers are forked from
import transformers.models.auto.modeling_auto  # noqa: F401

from benchmarks.accept.cases import by_id
from benchmarks.accept.drive import run_case, run_stock
from benchmarks.accept.outcomes import Result
from benchmarks.accept.run import stacks_at
from benchmarks.accept.ten_lines import TEN_LINES, run_ten_lines


def serve(pipe: Any, log: str) -> None:
    """Run the tasks that come through ``pipe`` until it closes; what else is printed goes to the file ``log``."""
    stream = open(log, "a", buffering=1)  # noqa: PTH123, SIM115 - lives as long as the process
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    faulthandler.enable(sys.stderr)
    torch.set_num_threads(1)
    # What the backend warns of stands in the results.
    logging.getLogger("kvcompile").setLevel(logging.ERROR)
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        with stacks_at(task.until, sys.stderr):
            result = _result(task)
        pipe.send(result)


def _result(task: Any) -> Result:
    if task.case in TEN_LINES:
        return run_ten_lines(task.case)
    return (run_stock if task.stock else run_case)(by_id(task.case), task.layers)
