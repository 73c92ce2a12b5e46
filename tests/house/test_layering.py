"""The direction of imports, read from the sources: one way from types to the command line, nothing sideways.

What may import what is one table. A module that is imported inside a function counts too: laziness is about
time, not about direction.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kvcompile"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(path for folder in ("kvcompile", "examples", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py"))

SOFT, HARD = 300, 500
"""Lines of a module: above the first it is named in a warning, above the second refused."""

FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "tools"}
COMMAND_LINE = {"kvcompile.tools.cli", "kvcompile.tools.cli.targets"}
"""The modules that may know model families; plus whatever stands in a ``kvcompile.tools.cli`` package."""
ADAPTERS = {"transformers": "kvcompile.serving.continuous_batching", "vllm": "kvcompile.serving.vllm_plugin"}
"""The rooms that know an engine that serves, by the package that they import."""


def dotted(path: Path) -> str:
    """``kvcompile/passes/match/match.py`` is ``kvcompile.passes.match.match``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imports(path: Path) -> tuple[tuple[str, int], ...]:
    """Every module that a source imports, ours resolved to the module where ``from kvcompile.x import y`` names one."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                place = ROOT.joinpath(*f"{node.module}.{alias.name}".split("."))
                ours = place.with_suffix(".py").exists() or place.is_dir()
                yield f"{node.module}.{alias.name}" if ours else node.module or "", node.lineno


def within(name: str, *roots: str) -> bool:
    """Whether a dotted name is one of ``roots`` or stands below one."""
    return any(name == root or name.startswith(root + ".") for root in roots)


CODES = ("kvcompile.types", "kvcompile.errors", "kvcompile.schemes")
KERNELS_OF = ("kvcompile.lowering.ops", "kvcompile.lowering.host", "kvcompile.lowering.attention_plugins", "kvcompile.lowering.append")
TRAINERS = (
    "kvcompile.files", "kvcompile.settings", "kvcompile.progress", "kvcompile.passes", "kvcompile.report", "kvcompile.backend",
    "kvcompile.extensions.model_runs",
)
"""What extensions may import: all of them codes, those with kernels what these stand on, those with trainers what captures a model."""

ALLOWED = {
    "kvcompile.types": (),
    "kvcompile.errors": (),
    "kvcompile.settings": ("kvcompile.errors",),
    "kvcompile.progress": (),
    "kvcompile.spelling": (),
    "kvcompile.files": ("kvcompile.errors", "kvcompile.files"),
    "kvcompile.schemes": ("kvcompile.types", "kvcompile.errors", "kvcompile.spelling", "kvcompile.files", "kvcompile.schemes"),
    "kvcompile.passes": ("kvcompile.types", "kvcompile.errors", "kvcompile.schemes", "kvcompile.passes"),
    "kvcompile.lowering": ("kvcompile.types", "kvcompile.errors", "kvcompile.settings", "kvcompile.schemes", "kvcompile.lowering"),
    "kvcompile.serving": ("kvcompile.types", "kvcompile.errors", "kvcompile.schemes", "kvcompile.lowering", "kvcompile.serving"),
    "kvcompile.runtime": (
        "kvcompile.types", "kvcompile.errors", "kvcompile.schemes", "kvcompile.passes", "kvcompile.lowering.ops", "kvcompile.runtime",
    ),
    "kvcompile.validation": ("kvcompile.types", "kvcompile.errors", "kvcompile.passes", "kvcompile.runtime", "kvcompile.validation"),
    "kvcompile.extensions.model_runs": (),
    "kvcompile.extensions.beyond": (*CODES, *KERNELS_OF, *TRAINERS, "kvcompile.extensions.beyond"),
    "kvcompile.extensions.certified": (
        *CODES, *KERNELS_OF, "kvcompile.lowering.certificate", "kvcompile.lowering.decode.offline", "kvcompile.extensions.certified",
    ),
    "kvcompile.extensions.smartkv": (*CODES, *KERNELS_OF, "kvcompile.lowering.codegen", "kvcompile.extensions.smartkv"),
    "kvcompile.extensions.squat": (*CODES, "kvcompile.extensions.squat"),
    "kvcompile.extensions.static_scales": (*CODES, *KERNELS_OF, *TRAINERS, "kvcompile.extensions.static_scales"),
    "kvcompile.tools.planner": (
        "kvcompile.types", "kvcompile.errors", "kvcompile.files", "kvcompile.schemes", "kvcompile.passes",
        "kvcompile.lowering.attention_plugins", "kvcompile.runtime", "kvcompile.report", "kvcompile.explain", "kvcompile.backend",
        "kvcompile.serving.block_layout", "kvcompile.serving.vllm_plugin.settings", "kvcompile.tools.planner",
    ),
    "kvcompile.tools.evaluation": (
        "kvcompile.types", "kvcompile.errors", "kvcompile.files", "kvcompile.schemes", "kvcompile.settings",
        "kvcompile.passes.graph.dynamo",
        "kvcompile.lowering.certificate.telemetry", "kvcompile.report", "kvcompile.backend", "kvcompile.tools.evaluation",
    ),
    "kvcompile.persistence": (
        "kvcompile.types", "kvcompile.errors", "kvcompile.files", "kvcompile.schemes", "kvcompile.passes.match.sites",
        "kvcompile.passes.plan.policy", "kvcompile.runtime", "kvcompile.persistence",
    ),
    "kvcompile.report": ("kvcompile.types", "kvcompile.passes", "kvcompile.schemes", "kvcompile.report"),
}
"""What a layer may import of ours. What is not listed (backend, explain, the command line) stands on top of all."""

ROOMS = {
    "kvcompile.passes.graph": (),
    "kvcompile.passes.capture": ("graph",),
    "kvcompile.passes.match.sites": ("match.paged_places", "match.slot_kinds"),
    "kvcompile.passes.match.slot_kinds": (),
    "kvcompile.passes.match.paged_places": (),
    "kvcompile.passes.match.soundness": ("graph", "match.sites"),
    "kvcompile.passes.match.attention": ("graph", "match.sites"),
    "kvcompile.passes.match.cache": ("graph", "match.sites", "match.slot_kinds", "match.paged_places"),
    "kvcompile.passes.match.rope": ("graph", "match.sites"),
    "kvcompile.passes.match.unmatched": ("graph", "capture", "match.attention", "match.cache", "match.sites"),
    "kvcompile.passes.match.mask": ("graph", "match.sites", "match.soundness", "match.attention", "match.cache"),
    "kvcompile.passes.match.latent": ("graph", "match.sites", "match.unmatched", "match.attention", "match.cache"),
    "kvcompile.passes.match": ("graph", "capture"),
    "kvcompile.passes.plan": ("graph", "match"),
    "kvcompile.passes.rewrite": ("graph", "capture", "match", "plan"),
    "kvcompile.runtime.store": (),
    "kvcompile.runtime.handle": ("store",),
    "kvcompile.runtime.forms": ("store", "handle"),
    "kvcompile.tools.evaluation.tasks": (),
    "kvcompile.lowering.ops": (),
    "kvcompile.lowering.codegen": (),
    "kvcompile.lowering.host": (),
    "kvcompile.lowering.attention_plugins": ("host",),
    "kvcompile.lowering.append": ("ops", "host", "attention_plugins"),
    "kvcompile.lowering.certificate": ("ops",),
    "kvcompile.lowering.cpu": ("ops", "codegen", "host"),
    "kvcompile.lowering.decode": ("ops", "codegen", "host"),
    "kvcompile.lowering.gluon": ("ops", "codegen", "host"),
    "kvcompile.lowering.paged": ("ops", "codegen", "host", "attention_plugins", "append", "decode", "prefill"),
    "kvcompile.lowering.prefill": ("ops", "codegen", "host", "decode"),
}
"""The rooms of its layer that a room may import; the first row that a module stands in counts, a module in no row may import all."""


def may_import(layer: str, imported: str) -> bool:
    """Whether a layer may import one of our modules, or a package that holds only what it may import."""
    return any(within(imported, root) or root.startswith(imported + ".") for root in ALLOWED[layer])


def test_attention_plugins() -> None:
    wrong, empty = [], set(ROOMS)
    for path in MODULES:
        name = dotted(path)
        room = next((room for room in ROOMS if within(name, room)), None)
        if room is None:
            continue
        empty.discard(room)
        layer = ".".join(room.split(".")[:2])
        allowed = (room, *(f"{layer}.{other}" for other in ROOMS[room]))
        for imported, line in imports(path):
            if within(imported, layer) and not within(imported, *allowed):
                wrong.append(f"{name}:{line} imports {imported}: {room} may import {ROOMS[room]}")
    assert not empty, f"rooms without a module: {empty}"
    assert not wrong, "\n".join(wrong)


def test_modules_import_one_another_in_no_circle() -> None:
    """Nor by an import inside a function, or one for types alone: what is understood together stands together."""
    graph = nx.DiGraph()
    for path in MODULES:
        name = dotted(path)
        graph.add_edges_from((name, imported) for imported, _ in imports(path) if within(imported, "kvcompile") and imported != name)
    circles = [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1]
    assert graph.number_of_edges() > 1000 and not circles, circles


def importers(*allowed: str, of: tuple[str, ...]) -> list[str]:
    """List the imports of some libraries in our modules, except in those that stand in ``allowed``."""
    return [
        f"{dotted(path)}:{line} imports {imported}" for path in MODULES if not within(dotted(path), *allowed)
        for imported, line in imports(path) if within(imported, *of)
    ]


def layer_of(name: str) -> str | None:
    """The layer of a module, None for those on top."""
    return next((layer for layer in ALLOWED if within(name, layer)), None)


def test_direction() -> None:
    wrong = []
    for path in MODULES:
        name, layer = dotted(path), layer_of(dotted(path))
        for imported, line in imports(path) if layer else ():
            if imported == "kvcompile":
                wrong.append(f"{name}:{line} imports the whole package")
            elif within(imported, "kvcompile") and not may_import(layer, imported):
                wrong.append(f"{name}:{line} imports {imported}: {layer} may import {ALLOWED[layer]}")
    assert not wrong, "\n".join(wrong)


FACE = "kvcompile"
"""The package's own module, which imports public names where they are and is imported by no layer."""


def test_nothing_imports_an_extension_but_tools_and_the_face() -> None:
    """The registry has their places as text."""
    found = importers("kvcompile.extensions", "kvcompile.tools", of=("kvcompile.extensions",))
    assert not [line for line in found if line.split(":")[0] != FACE]


def test_nothing_imports_a_tool_but_the_command_and_the_face() -> None:
    found = importers("kvcompile.tools", "kvcompile.__main__", of=("kvcompile.tools",))
    assert not [line for line in found if line.split(":")[0] != FACE]


def test_nothing_imports_the_laws() -> None:
    """They stand on top of all, and cost a user nothing."""
    assert not importers("kvcompile.testing", of=("kvcompile.testing",))


def test_nothing_imports_serving_but_the_face_and_plans_of_engines() -> None:
    found = importers("kvcompile.serving", of=("kvcompile.serving",))
    plans = ("kvcompile.tools.planner.engines", "kvcompile.tools.cli.plan_engine")
    assert not [line for line in found if line.split(":")[0] not in (FACE, *plans)]


def test_nothing_imports_persistence_but_the_face() -> None:
    found = importers("kvcompile.persistence", of=("kvcompile.persistence",))
    assert found and not [line for line in found if line.split(":")[0] != FACE]


def test_every_extension_has_a_row_of_its_own() -> None:
    folders = {f"kvcompile.extensions.{path.parent.name}" for path in (PACKAGE / "extensions").glob("*/__init__.py")}
    rows = {layer for layer in ALLOWED if layer.startswith("kvcompile.extensions.")}
    assert folders and rows == folders | {"kvcompile.extensions.model_runs"}


def test_only_lowering_touches_inductor_and_triton() -> None:
    wrong = importers("kvcompile.lowering", "kvcompile.extensions", of=("torch._inductor", "triton"))
    assert not wrong, "only kvcompile.lowering and kernels of extensions may:\n" + "\n".join(wrong)


DOORS = (
    "kvcompile.passes.graph.dynamo", "kvcompile.lowering.host.torch_api", "kvcompile.lowering.host.inductor_api",
    "kvcompile.lowering.host.inductor_entry",
    "kvcompile.lowering.host.triton_api", "kvcompile.lowering.host.gluon_api",
)
"""The only modules that know private names of torch, or Triton beyond its language."""


def private(path: Path) -> Iterator[str]:
    """Find the names that a source imports, or reads off ``torch``, from behind an underscore; and Triton's other than its language."""
    for node in ast.walk(ast.parse(path.read_text())):
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if re.match(r"torch\.((fx|utils)\.)?_[^_]", text):
            yield f"{dotted(path)}:{node.lineno} {text}"
    for imported, line in imports(path):
        inner = within(imported, "torch") and any(part.startswith("_") for part in imported.split("."))
        if inner or (within(imported, "triton") and imported != "triton" and not within(imported, "triton.language")):
            yield f"{dotted(path)}:{line} imports {imported}"


def test_private_names_of_torch_come_through_one_door() -> None:
    wrong = [
        found for path in MODULES if not within(dotted(path), *DOORS) for found in private(path)
    ]
    assert not wrong, f"name it in one of {DOORS}, with why:\n" + "\n".join(wrong)


def test_only_the_command_line_and_an_adapter_know_transformers() -> None:
    wrong = importers(*COMMAND_LINE, ADAPTERS["transformers"], of=("transformers",))
    assert not wrong, "no model families in the library:\n" + "\n".join(wrong)


def test_only_its_plugin_knows_vllm() -> None:
    wrong = importers(ADAPTERS["vllm"], of=("vllm",))
    assert not wrong and importers(of=("vllm",)), "\n".join(wrong)


def test_no_model_family_is_named_in_the_passes() -> None:
    families = ("llama", "mistral", "gemma", "qwen", "gpt2", "bloom", "falcon", "mixtral")
    passes = [path for path in MODULES if within(dotted(path), "kvcompile.passes")]
    wrong = [f"{dotted(path)} names {family}" for path in passes for family in families if family in path.read_text().lower()]
    assert passes and not wrong, "recognisers are about graphs:\n" + "\n".join(wrong)


def test_no_scheme_is_named_outside_its_room() -> None:
    layers = ("kvcompile.lowering", "kvcompile.passes", "kvcompile.runtime", "kvcompile.validation")
    found = {
        dotted(path): {name.lower() for name in re.findall(r"(?i)(?<![a-z])(certified|squat|kivi|smartkv)(?![a-z])", path.read_text())}
        for path in MODULES if within(dotted(path), *layers)
    }
    wrong = {module: names for module, names in found.items() if names}
    assert not wrong, f"a scheme brings what others need to know of it (kvcompile/lowering/attention_plugins.py): {wrong}"
    assert found


def test_names_and_sizes() -> None:
    wrong, large = [], []
    for path in SOURCES:
        name, lines = str(path.relative_to(ROOT)), len(path.read_text().splitlines())
        if path.stem in FORBIDDEN_NAMES:
            wrong.append(f"{name} says nothing about what is in it")
        if lines > (HARD if ROOT / "tests" not in path.parents else HARD + SOFT):
            wrong.append(f"{name} has {lines} lines: split it")
        elif PACKAGE in path.parents and lines > SOFT:
            large.append(f"{name} has {lines}")
    if large:
        warnings.warn(f"above the soft cap of {SOFT} lines: {', '.join(large)}", stacklevel=1)
    assert not wrong, "\n".join(wrong)


def loaded(statements: str) -> set[str]:
    """The modules that a process has when it has run these statements."""
    look = f"{statements}\nimport sys; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", look], check=True, capture_output=True, text=True, cwd=ROOT).stdout.split())


INDUCTOR = {"torch._inductor.lowering", "torch._inductor.select_algorithm", "torch._inductor.codegen.triton", "torch._inductor.ir"}
"""Modules of Inductor that lower and generate; importing one takes a second and more."""
LIBRARIES = {"transformers", "matplotlib", "safetensors"}


def imports_at_once(path: Path) -> set[str]:
    """The modules that a source imports as soon as it is imported itself, from other packages."""
    found = set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


KERNELS = {dotted(path) for path in MODULES if "triton" in {name.split(".")[0] for name in imports_at_once(path)}}
"""Our modules of kernels: they cannot be imported without Triton."""


def test_importing_the_package_loads_torch_and_next_to_nothing_of_ours() -> None:
    found = loaded("import kvcompile")
    ours = {name for name in found if within(name, "kvcompile") and not name.startswith("kvcompile.schemes.")}
    assert "torch" in found and "kvcompile.files.pickled" in ours, "nothing was looked at"
    assert not found & (INDUCTOR | KERNELS | LIBRARIES | {"triton", "torch._dynamo", "torch._inductor"})
    absent = ("lowering", "extensions", "tools", "passes", "serving", "persistence")
    assert not [name for name in ours if within(name, *(f"kvcompile.{room}" for room in absent))]


def test_a_backend_loads_its_scheme_and_no_kernel_or_lowering_before_it_compiles() -> None:
    for scheme, extensions in (("int4", set()), ("kivi(bits=4)", set()), ("squat-paper", {"squat"}), ("beyond", {"beyond"})):
        found = loaded(f"import kvcompile; kvcompile.backend({scheme!r})")
        assert "kvcompile.lowering.compile" in found, "no backend was made"
        assert not found & (INDUCTOR | KERNELS | LIBRARIES), scheme
        assert {name.split(".")[2] for name in found if name.startswith("kvcompile.extensions.")} == extensions
        assert not [name for name in found if within(name, "kvcompile.tools", "kvcompile.serving")]


def test_the_modules_that_are_looked_for_have_these_names() -> None:
    """Else the two tests above would hold whatever is imported."""
    assert len(KERNELS) > 20 and {name.split(".")[1] for name in KERNELS} == {"lowering", "extensions"}
    names = "; ".join(f"import {name}" for name in sorted(KERNELS | LIBRARIES))
    assert loaded(f"import kvcompile.lowering.inductor; {names}") >= INDUCTOR | KERNELS | LIBRARIES | {"triton"}
