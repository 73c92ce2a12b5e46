"""The run folder: configuration, log, the best tables, a checkpoint to resume from, and pictures if matplotlib is installed.

    config.json   scheme, settings, the model's fingerprint     log.jsonl   a line for every step and validation
    best.safetensors   tables of the lowest validation           checkpoint.safetensors   parameters, Adam's state, and progress
    loss.png, levels.png
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any

import torch

from kvcompile.errors import BadRun, FileUnfit
from kvcompile.extensions.beyond.learning.parameters import Parameters
from kvcompile.extensions.beyond.learning.trainer import Trainer
from kvcompile.extensions.beyond.scheme import Beyond
from kvcompile.extensions.beyond.storage import save_tables
from kvcompile.files.declared import Range, Whole
from kvcompile.files.json_file import parsed, read_json
from kvcompile.files.tensor_file import Entry, follow_umask, read_tensors

STATE = ("exp_avg", "exp_avg_sq", "step")
Count = Annotated[int, Range(0)]
Loss = Annotated[float, Range()]


@dataclasses.dataclass
class Progress:
    """Progress of one run: pieces used, (step, loss) of validations and of steps, the best validation and its step.

    ``rises``: how many of the last validations in a row were worse than the one before.
    """

    pieces: Count = 0
    validations: list[tuple[Count, Loss]] = dataclasses.field(default_factory=list)
    losses: list[tuple[Count, Loss]] = dataclasses.field(default_factory=list)
    best: Loss | None = None
    best_step: Count = 0
    rises: Count = 0


class RunFolder:
    """The folder of one run; making one creates the folder and writes ``config.json``, or, to resume, reads and checks it.

    ``config``: settings that a resumed run must share; ``writes`` False: the folder is only read. Raises BadRun if the folder holds a run
    and ``resume`` is False, or if it holds none with these settings and ``resume`` is True.
    """

    def __init__(self, folder: Path, config: dict[str, Any], resume: bool, writes: bool = True) -> None:
        self.folder, self.config, self.writes = folder, config, writes
        known = folder / "config.json"
        if resume:
            self._check(known)
        elif not writes:
            return
        elif known.exists():
            raise BadRun(expected="nothing", folder=folder, found="another run", todo="resume it, or name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        if not resume:
            known.write_text(json.dumps(config, indent=1) + "\n")

    def _check(self, known: Path) -> None:
        try:
            found = read_json(known, dict[str, Any])
        except FileUnfit as error:
            found = f"none that can be read ({error.fact})"
            raise BadRun(expected="config.json", folder=self.folder, found=found, todo="begin anew") from error
        changed = [name for name in {*found, *self.config} if found.get(name) != self.config.get(name)]
        if changed:
            name = min(changed)
            raise BadRun(
                expected=f"{name} {self.config.get(name)!r}", folder=self.folder, found=repr(found.get(name)),
                todo="resume with the model and settings of the run, or name a new folder",
            )

    def log(self, **line: Any) -> None:
        """Append the fields ``line`` to the log as a line of JSON; does nothing, like all writing methods, if the folder is only read."""
        if not self.writes:
            return
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def keep_best(self, scheme: Beyond) -> None:
        """Write the tables of ``scheme`` to ``best.safetensors`` in the folder; does nothing if the folder is only read.

        Raises BadTables for a scheme without a model's tables.
        """
        if not self.writes:
            return
        save_tables(scheme, self.folder / "best.safetensors")

    # --- checkpoints -----------------------------------------------------------------------------

    def save(self, trainer: Trainer, progress: Progress, best: Beyond) -> None:
        """Write a checkpoint of ``trainer`` and ``progress``, whole or not at all, and the tables of ``best``."""
        from safetensors.torch import save_file

        if not self.writes:
            return
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _named(trainer.parameters).items()}
        named = {id(tensor): name for name, tensor in _named(trainer.parameters).items()}
        for tensor, state in ({} if trainer.adam is None else trainer.adam.state).items():
            for key in STATE:
                tensors[f"adam.{named[id(tensor)]}.{key}"] = torch.as_tensor(state[key]).detach().cpu().clone()
        unfinished = self.folder / ".checkpoint"
        save_file(tensors, str(unfinished), {"steps": str(trainer.steps), "progress": json.dumps(dataclasses.asdict(progress))})
        self.keep_best(best)
        follow_umask(unfinished)
        unfinished.replace(self.folder / "checkpoint.safetensors")

    def load(self, trainer: Trainer) -> Progress:
        """Restore ``trainer`` from the checkpoint, in place, and return the run's progress.

        The trainer must have found its attentions already (``meet``). Raises BadRun, and then changes nothing.
        """
        named = _named(trainer.parameters)
        try:
            tensors, metadata = read_tensors(
                self.folder / "checkpoint.safetensors", lambda metadata, names: _declared(named, names)
            )
            steps = parsed(metadata.get("steps", ""), Count, "steps")
            progress: Progress = parsed(metadata.get("progress", ""), Annotated[Progress, Whole()], "progress")
        except FileUnfit as error:
            raise BadRun(
                expected="a whole checkpoint.safetensors", folder=self.folder, found=f"another one ({error.fact})", todo="begin anew",
            ) from error
        with torch.no_grad():
            for name, tensor in named.items():
                tensor.copy_(tensors[name])
                if trainer.adam is not None and f"adam.{name}.step" in tensors:
                    state = {key: tensors[f"adam.{name}.{key}"] for key in STATE}
                    trainer.adam.state[tensor] = {key: value if key == "step" else value.to(tensor.device) for key, value in state.items()}
        trainer.steps = steps
        return progress

    # --- pictures --------------------------------------------------------------------------------

    def draw(self, progress: Progress, scheme: Beyond) -> None:
        """Draw the losses of ``progress`` and the levels of ``scheme`` into the folder; nothing without matplotlib, or if it is only read.

        Raises BadTables for a scheme without a model's tables.
        """
        if not self.writes or importlib.util.find_spec("matplotlib") is None:
            return
        from kvcompile.extensions.beyond.learning.pictures import draw_levels, draw_loss

        draw_loss(progress.losses, progress.validations, self.folder / "loss.png")
        draw_levels(scheme, self.folder / "levels.png")


def _named(parameters: Parameters) -> dict[str, torch.Tensor]:
    """Return the learned tensors by their names in a file."""
    return {
        f"{path}.{role.value}.{name}": tensor
        for (path, role), slot in parameters.slots.items() for name, tensor in (("levels", slot.levels), ("thresholds", slot.thresholds))
    }


def _declared(named: dict[str, torch.Tensor], names: frozenset[str]) -> dict[str, Entry]:
    """Return the tensors that a checkpoint must hold, by name, with shape, dtype and range.

    ``named``: the learned tensors by name. ``names``: the tensors in the file; a learned tensor with a step count there has Adam's state.
    """
    found = {name: Entry(tuple(tensor.shape), tensor.dtype, rising=name.endswith("thresholds")) for name, tensor in named.items()}
    for name, tensor in named.items():
        if f"adam.{name}.step" in names:
            shape = tuple(tensor.shape)
            found |= {
                f"adam.{name}.exp_avg": Entry(shape, tensor.dtype), f"adam.{name}.exp_avg_sq": Entry(shape, tensor.dtype, least=0.0),
                f"adam.{name}.step": Entry((), least=0.0),
            }
    return found
