"""Files of static scales: exact, of one model, whole; and scales that checkpoints bring under other systems' names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from learned_tables import llama_paths
from safetensors.torch import save_file
from static_scales import random_scales

import kvcompile
from kvcompile.errors import BadScales
from kvcompile.extensions.static_scales.scales import ModelScales
from kvcompile.extensions.static_scales.scheme import StaticFp8, StaticInt8
from kvcompile.schemes.model_file import fingerprint
from kvcompile.tools.cli.targets import TargetOptions, resolve
from kvcompile.types import Role

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

PATHS = llama_paths(2)


@pytest.fixture(name="model", scope="module")
def tiny_llama() -> torch.nn.Module:
    """A Llama of two layers with two kv heads, in float32."""
    return resolve("hf:llama", TargetOptions(dtype=torch.float32)).model


def held(scheme: Any) -> list[tuple[float, ...]]:
    """All scales of a scheme, keys before values, layer by layer."""
    assert isinstance(scheme.scales, ModelScales)
    return [tuple(scheme.scales.for_module(path).for_role(role).values.tolist()) for path in PATHS for role in Role]


def spelled(key: str, value: str, kind: Any = lambda number: torch.tensor(number)) -> dict[str, torch.Tensor]:
    """A state dict with scales 1/8 to 1/2 under names that are formatted with the layer's path and number."""
    return {
        name.format(path=path, layer=at): kind((1 + 2 * at + half) / 8)
        for at, path in enumerate(PATHS) for half, name in enumerate((key, value))
    }


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_a_file_gives_back_what_was_saved(model: torch.nn.Module, tmp_path: Path, name: str, granularity: str) -> None:
    words = torch.randint(1, 60, (2, 21), generator=torch.Generator().manual_seed(0))
    scheme = kvcompile.calibrate(model, [words], name, granularity=granularity)
    kvcompile.save_scales(scheme, tmp_path / "s.safetensors", {"data": "random"})
    assert kvcompile.load_scales(tmp_path / "s.safetensors", model) == scheme
    assert kvcompile.load_scales(tmp_path / "s.safetensors", torch.compile(model)) == scheme
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"]


def test_a_file_of_another_model_or_another_kind_is_refused(model: torch.nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    kvcompile.save_scales(random_scales(PATHS), path)
    with pytest.raises(BadScales, match="expected static scales for this model"):
        kvcompile.load_scales(path, model)
    save_file({"a": torch.ones(1)}, str(path))
    with pytest.raises(BadScales, match="expected a file of static scales"):
        kvcompile.load_scales(path, model)
    path.write_bytes(b"no file of this kind")
    with pytest.raises(BadScales, match="expected a whole file of static scales"):
        kvcompile.load_scales(path, model)
    with pytest.raises(BadScales, match="expected a scheme with the scales of a model"):
        kvcompile.save_scales(StaticInt8(), path)


def test_a_file_with_a_half_missing_or_another_scheme_is_refused(model: torch.nn.Module, tmp_path: Path) -> None:
    path, metadata = tmp_path / "s.safetensors", {"format": "kvcompile-scales-1", "fingerprint": fingerprint(model), "sites": '["a"]'}
    save_file({"a.key": torch.ones(1)}, str(path), {**metadata, "scheme": "int8-static"})
    with pytest.raises(BadScales, match="expected a whole file"):
        kvcompile.load_scales(path, model)
    save_file({"a.key": torch.ones(1), "a.value": torch.ones(1)}, str(path), {**metadata, "scheme": "int4"})
    with pytest.raises(BadScales, match="scales of a scheme that has static ones, found int4"):
        kvcompile.load_scales(path, model)


@pytest.mark.parametrize("names", [
    ("{path}.k_scale", "{path}.v_scale"), ("{path}.attn.k_scale", "{path}.attn.v_scale"),
    ("{path}.k_proj.k_scale", "{path}.v_proj.v_scale"), ("{path}.qkv_proj.k_scale", "{path}.qkv_proj.v_scale"),
    ("{path}.query_key_value.k_scale", "{path}.query_key_value.v_scale"), ("{path}.k_proj.output_scale", "{path}.v_proj.output_scale"),
    ("module.{path}.k_scale", "module.{path}.v_scale"), ("language_{path}.k_scale", "language_{path}.v_scale"),
], ids=lambda names: names[0])
@pytest.mark.parametrize("kind", [torch.tensor, lambda number: torch.tensor([number]), lambda number: torch.tensor([number]).bfloat16()])
def test_names_of_other_systems_are_read_exactly(model: torch.nn.Module, names: tuple[str, str], kind: Any) -> None:
    """One number a half and layer: x = code * scale in all of them."""
    if names[0].startswith("language_"):
        with pytest.raises(BadScales, match="static scales by the module paths of this model"):
            kvcompile.read_scales(spelled(*names, kind), model)
        return
    scheme = kvcompile.read_scales(spelled(*names, kind), model)
    assert isinstance(scheme, StaticFp8) and held(scheme) == [(0.125,), (0.25,), (0.375,), (0.5,)]
    assert scheme.scales.fingerprint == fingerprint(model)  # type: ignore[union-attr]
    x = torch.tensor([0.125 * 3, -0.125 * 448, 0.125 * 500, 0.0]).expand(1, 2, 1, 4)
    own = scheme.for_module(PATHS[0])
    given = own.scales.for_role(Role.KEY).values[None, None, :, None, None]  # type: ignore[union-attr]
    codes = own.encode(x, given)[0].view(torch.float8_e4m3fn).float()
    assert codes[0, 0, 0].tolist() == [3.0, -448.0, 448.0, 0.0]


def test_scales_of_heads_are_read(model: torch.nn.Module) -> None:
    given = spelled("{path}.k_scale", "{path}.v_scale", lambda number: torch.tensor([number, 2 * number]).reshape(2, 1, 1))
    assert held(kvcompile.read_scales(given, model))[3] == (0.5, 1.0)


def test_one_scale_for_both_halves_gives_way_to_one_of_a_half(model: torch.nn.Module) -> None:
    both = {f"{path}.kv_scale": torch.tensor(0.25) for path in PATHS}
    assert held(kvcompile.read_scales(both, model)) == [(0.25,)] * 4
    assert held(kvcompile.read_scales({**both, f"{PATHS[1]}.v_scale": torch.tensor(3.0)}, model)) == [(0.25,), (0.25,), (0.25,), (3.0,)]
    layers = {f"transformer.layers.{at}.attention.kv_cache_scaling_factor": torch.tensor([at + 1.0]) for at in range(2)}
    scheme = kvcompile.read_scales(layers, model, "int8")
    assert isinstance(scheme, StaticInt8) and held(scheme) == [(1.0,), (1.0,), (2.0,), (2.0,)]


@pytest.mark.parametrize(("change", "sentence"), [
    ({f"{PATHS[0]}.k_scale": torch.tensor(-1.0)}, "expected finite scales above zero"),
    ({f"{PATHS[0]}.k_scale": torch.tensor(float("nan"))}, "expected finite scales above zero"),
    ({f"{PATHS[0]}.k_scale": torch.ones(2, 3)}, r"of one scale, or one for each kv head, found \(2, 3\)"),
    ({f"{PATHS[0]}.k_scale": "0.5"}, "k_scale as a tensor of numbers, found str"),
    ({f"{PATHS[0]}.k_scale": torch.tensor(True)}, "k_scale as a tensor of numbers, found torch.bool"),
    ({f"{PATHS[0]}.k_scale": torch.tensor(2)}, "k_scale as floats, found torch.int64"),
    ({f"{PATHS[0]}.k_scale": torch.tensor(1e-45)}, "expected finite scales above zero"),
    ({f"{PATHS[0]}.k_scale": torch.tensor(3e38)}, "expected finite scales above zero"),
    ({f"{PATHS[0]}.attn.k_scale": torch.tensor(0.9)}, "one scale for the keys of model.layers.0.self_attn, found another one in"),
    ({f"{PATHS[0]}.k_zero_point": torch.tensor(3)}, "symmetric codes, without zero points"),
    ({f"{PATHS[0]}.k_scale": None}, "expected a scale for keys and one for values at model.layers.0.self_attn, found none of its keys"),
    ({"model.layers.7.self_attn.kv_scale": torch.tensor(1.0)}, "expected static scales by the module paths of this model, found 1 others"),
])
def test_scales_that_cannot_serve_are_refused(model: torch.nn.Module, change: Mapping[str, Any], sentence: str) -> None:
    given = {**spelled("{path}.k_scale", "{path}.v_scale"), f"{PATHS[0]}.k_zero_point": torch.tensor(0), **change}
    with pytest.raises(BadScales, match=sentence):
        kvcompile.read_scales({name: value for name, value in given.items() if value is not None}, model)


def test_a_checkpoint_without_scales_is_refused(model: torch.nn.Module, tmp_path: Path) -> None:
    with pytest.raises(BadScales, match="expected k_scale and v_scale, or another name that is known, found none in the state dict"):
        kvcompile.read_scales(model.state_dict(), model)
    with pytest.raises(BadScales, match="expected a folder with safetensors"):
        kvcompile.read_scales(tmp_path, model)
    (tmp_path / "a.safetensors").write_bytes(b"broken")
    with pytest.raises(BadScales, match="expected whole safetensors"):
        kvcompile.read_scales(tmp_path, model)
    with pytest.raises(BadScales, match="int8 or fp8, found int4"):
        kvcompile.read_scales({}, model, "int4")


def test_scales_that_do_not_fit_the_heads_are_refused_where_they_would_serve(model: torch.nn.Module) -> None:
    from kvcompile.types import SlotSpec

    scheme = kvcompile.read_scales(spelled("{path}.k_scale", "{path}.v_scale", lambda number: torch.full((4,), number)), model).for_module(
        PATHS[0]
    )
    with pytest.raises(BadScales, match="one for each of 2 kv heads, for the keys, found 4 scales"):
        scheme.check(SlotSpec(2, 16, torch.float32, Role.KEY))


@pytest.mark.parametrize(("file", "content", "found"), [
    ("config.json", {"quantization_config": {"kv_cache_scheme": {"type": "int", "num_bits": 8, "strategy": "tensor"}}}, StaticInt8),
    ("config.json", {"quantization_config": {"kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False}}}, StaticFp8),
    ("config.json", {"quantization_config": {"kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": True}}}, "static"),
    ("config.json", {"quantization_config": {"kv_cache_scheme": {"type": "int", "num_bits": 8, "symmetric": False}}}, "symmetric"),
    ("config.json", {"quantization_config": {"kv_cache_scheme": {"type": "int", "num_bits": 4}}}, "a kv_cache_scheme of 8 bits"),
    ("config.json", {"quantization_config": {}}, StaticFp8),
    ("hf_quant_config.json", {"quantization": {"kv_cache_quant_algo": "FP8"}}, StaticFp8),
    ("hf_quant_config.json", {"quantization": {"kv_cache_quant_algo": "INT8"}}, StaticInt8),
    ("hf_quant_config.json", {"quantization": {"kv_cache_quant_algo": "NVFP4"}}, "kv_cache_quant_algo FP8 or INT8"),
    ("config.json", "{", "expected a configuration in JSON"),
    *(("config.json", text, "expected a configuration in JSON") for text in ("[]", "1", "null", '"x"', "[" * 100_000)),
    ("config.json", {"quantization_config": []}, "expected a configuration in JSON"),
    ("config.json", {"quantization_config": {"kv_cache_scheme": "fp8"}}, "expected a configuration in JSON"),
    ("config.json", {"quantization_config": {"kv_cache_scheme": {"type": "int", "num_bits": 8, "strategy": []}}}, "per tensor or head"),
    ("config.json", {"quantization_config": None}, StaticFp8),
])
def test_a_folder_says_which_codes_its_scales_are_for(
    model: torch.nn.Module, tmp_path: Path, file: str, content: Any, found: type | str
) -> None:
    given = spelled("{path}.k_scale", "{path}.v_scale")
    first, *rest = given.items()
    save_file({**dict([first]), "lm_head.weight": torch.ones(3)}, str(tmp_path / "model-1.safetensors"))
    save_file(dict(rest), str(tmp_path / "model-2.safetensors"))
    (tmp_path / file).write_text(content if isinstance(content, str) else json.dumps(content))
    if isinstance(found, str):
        with pytest.raises(BadScales, match=found):
            kvcompile.read_scales(tmp_path, model)
        return
    assert isinstance(kvcompile.read_scales(tmp_path, model), found)
    assert held(kvcompile.read_scales(tmp_path, model)) == [(0.125,), (0.25,), (0.375,), (0.5,)]
    if content not in ({"quantization_config": {}}, {"quantization_config": None}):
        other = "fp8" if found is StaticInt8 else "int8"
        with pytest.raises(BadScales, match=f"found scheme='{other}'"):
            kvcompile.read_scales(tmp_path, model, other)


def test_one_scale_in_two_files_is_one_or_refused(model: torch.nn.Module, tmp_path: Path) -> None:
    """A folder's files are read in the order of their names; of two values the later was taken."""
    given = spelled("{path}.k_scale", "{path}.v_scale")
    name = next(iter(given))
    save_file(given, str(tmp_path / "model-1.safetensors"))
    save_file({name: given[name]}, str(tmp_path / "model-2.safetensors"))
    assert held(kvcompile.read_scales(tmp_path, model)) == [(0.125,), (0.25,), (0.375,), (0.5,)]
    save_file({name: torch.tensor(0.9)}, str(tmp_path / "model-2.safetensors"))
    with pytest.raises(BadScales, match=f"expected {name} in one file of .*, found another value in model-2.safetensors"):
        kvcompile.read_scales(tmp_path, model)
