"""Pictures of a run: loss by step, and the distance of learned levels and thresholds from uniform ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvcompile.errors import BadTables
from kvcompile.extensions.beyond.scheme import Beyond
from kvcompile.extensions.beyond.tables import ModelTables, uniform_levels, uniform_thresholds
from kvcompile.types import Role


def draw_loss(losses: Sequence[tuple[int, float]], validations: Sequence[tuple[int, float]], to: Path) -> None:
    """Draw the loss of steps and of validations, in nats per token, into the file ``to``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for points, style, label in ((losses, "-", "training"), (validations, "o-", "validation")):
        if points:
            axes.plot([step for step, _ in points], [loss for _, loss in points], style, label=label, markersize=3, linewidth=1)
    axes.set(xlabel="optimizer step", ylabel="nats a token")
    axes.legend()
    figure.savefig(to, dpi=120)


def draw_levels(scheme: Beyond, to: Path) -> None:
    """Draw the mean distance of each layer's levels and thresholds from uniform ones, in units of scales, for keys and values.

    Raises BadTables for a scheme without a model's tables.
    """
    from matplotlib.figure import Figure

    if not isinstance(scheme.tables, ModelTables):
        raise BadTables(expected="a scheme with the tables of a model", found=scheme.spec(), todo="pass what kvcompile.learn returned")
    figure = Figure(figsize=(10, 6), layout="constrained")
    grid = figure.subplots(2, 2, squeeze=False)
    sites = list(scheme.tables.sites.values())
    for row, role in enumerate(Role):
        for column, (name, uniform) in enumerate((("levels", uniform_levels), ("thresholds", uniform_thresholds))):
            shifts = [(getattr(site.for_role(role), name) - uniform(scheme.bits)).mean((0, 1)).tolist() for site in sites]
            most = max(1e-06, *(abs(value) for shift in shifts for value in shift))
            image = grid[row][column].imshow(shifts, aspect="auto", cmap="RdBu", vmin=-most, vmax=most)
            grid[row][column].set(title=f"{role.value}: {name} less uniform, in scales", xlabel=name[:-1], ylabel="layer")
            figure.colorbar(image, ax=grid[row][column])
    figure.savefig(to, dpi=120)
