"""The report as a page: well-formed, loads nothing, escapes everything, says what text and JSON say, and keeps nothing alive."""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import subprocess
import sys
import weakref
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import kvcompile
from kvcompile.backend import Backend
from kvcompile.explain import explain, observe
from kvcompile.report import Pass, Report
from kvcompile.report.notices import notices
from kvcompile.tools.cli.main import main
from kvcompile.tools.cli.targets import TargetOptions, resolve

VOID = {"meta", "br"}
NASTY = "<script>alert(1)</script>&\"'"


class Page(HTMLParser):
    """Reads a page: refuses a tag that does not close the last one opened, collects texts, tags and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes another tag, line {self.getpos()[0]}"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def words(self) -> str:
        """All text, with single spaces."""
        return " ".join(" ".join(self.texts).split())


def read(text: str) -> Page:
    """The page, checked: closed tags, no script, no link, nothing that a browser would load."""
    found = Page(text)
    names = {tag for tag, _ in found.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "a", "form"}
    attributes = {name for _, given in found.tags for name in given}
    assert not {name for name in attributes if name.startswith("on")} | attributes & {"src", "href", "srcset"}
    style = text.partition("<style>")[2].partition("</style>")[0]
    assert not re.search(r"url\(|@import|https?:", style)
    assert "prefers-color-scheme: dark" in style
    return found


class Peeking(nn.Module):
    """A cache that is also read by a mean, in a module of an awkward name; ``also``: reads it."""

    def __init__(self, also: bool) -> None:
        super().__init__()
        self.also = also
        self.register_buffer("k", torch.zeros(1, 2, 32, 64))
        self.register_buffer("v", torch.zeros(1, 2, 32, 64))

    def forward(self, q: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        self.k[:, :, pos] = q
        self.v[:, :, pos] = q
        out = sdpa(q, self.k, self.v, attn_mask=torch.arange(32) <= pos[:, None])  # <b>&
        return out + self.k.mean() if self.also else out


class Both(nn.Module):
    """One module that can be rewritten beside one that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.good = Peeking(also=False)
        self.add_module(NASTY, type("Evil<i>", (Peeking,), {})(also=True))

    def forward(self, q: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        return self._modules[NASTY](self.good(q, pos), pos)  # type: ignore[misc, no-any-return]


INPUTS = (torch.randn(1, 2, 4, 64, generator=torch.Generator().manual_seed(0)), torch.arange(4))


@pytest.fixture(scope="module")
def two_schemes() -> Report:
    torch._dynamo.reset()
    target = resolve("hf:llama", TargetOptions())
    return explain(target.model, target.inputs, {"*": "int4", "model.layers.1.*": "k=int8,v=int4"}, tokens=8192)


@pytest.fixture(scope="module")
def served() -> tuple[Backend, object]:
    torch._dynamo.reset()
    target = resolve("hf:llama", TargetOptions())
    owner = kvcompile.backend("int4", inner="eager")
    return owner, observe(target.model, target.inputs, owner)


def test_a_policy_of_two_schemes(two_schemes: Report) -> None:
    text = two_schemes.html()
    found = read(text)
    assert "keys int8, values int4" in found.words and "int4, 4.50 bits a value" in found.words
    assert "rewritten, validated" in found.words and "refused, stays" not in found.words
    assert "cache at 8,192 tokens dense 4 MiB stored 1.12 MiB, 28.1%" in found.words
    assert re.search(r"sdpa_attention\.py:\d+ attn_output = torch\.nn\.functional\.scaled_dot_product_attention", found.words)
    assert "site-packages" not in text
    assert all(given.get("open", "") is not None for tag, given in found.tags if tag == "details"), "all are folded"


def test_graphs_before_and_after_and_kernels(two_schemes: Report) -> None:
    source = two_schemes.source()
    assert source is not None
    fresh = source.detail(0)
    assert fresh is not None
    for site in fresh.sites:
        assert [line.call.partition("(")[0] for line in site.after[0].lines if line.kind.value in {"attention", "write"}].count(
            "aten.scaled_dot_product_attention") == 1, "over an empty cache the model's own attention stays"
    detail = source.detail(1)
    assert detail is not None and len(detail.sites) == 2
    for site in detail.sites:
        before, (after,) = site.before.lines, site.after
        assert [line.call.partition("(")[0] for line in before if line.kind.value == "attention"] == ["aten.scaled_dot_product_attention"]
        assert sum(line.kind.value == "write" for line in before) == 2
        assert all(line.shape.startswith("bfloat16[1, ") for line in before if line.kind.value == "cache")
        assert [line.call.partition("(")[0] for line in after.lines if line.call.startswith("kvcompile")] == [
            "kvcompile.append", "kvcompile.append", "kvcompile.attend",
        ]
        assert next(line for line in after.lines if "attend" in line.call).shape == "bfloat16[1, 4, 1, 64]"
    assert [kernel.paths for kernel in detail.kernels] == [("model.layers.0.self_attn",), ("model.layers.1.self_attn",)]
    assert all("@triton.jit" in kernel.source for kernel in detail.kernels)
    assert '<span class="k">def</span>' in two_schemes.html()


def test_a_refused_site_says_why_and_where_and_names_are_escaped() -> None:
    torch._dynamo.reset()
    report = explain(Both(), INPUTS, "int8")
    assert [site.path for site in report.graphs[0].sites] == ["good"] and len(report.refusals) == 1
    text = report.html()
    found = read(text)
    assert NASTY not in text and "<b>&" not in text, "names and source lines are escaped"
    assert NASTY in found.words or report.refusals[0].path in found.words
    assert "refused, stays as it was" in found.words and report.refusals[0].reason in found.words
    assert report.refusals[0].nearest in found.words and report.refusals[0].advice in found.words
    assert "out = sdpa(q, self.k, self.v, attn_mask=torch.arange(32) <= pos[:, None]) # <b>&" in found.words
    assert "test_report_page.py:" in found.words


def test_the_page_says_what_text_and_json_say(served: tuple[Backend, object]) -> None:
    report = served[0].report()
    words, text = read(report.html()).words, " ".join(str(report).split())
    for notice in notices(report):
        assert notice.line in words and notice.line in text
    for name in ("held now", "a dense cache of this length", "the caller's own tensors", "most held at once"):
        assert name in words
    assert report.plain()["allocated"] == report.allocated and "source" not in json.dumps(report.plain())


def test_a_page_leaves_the_served_model_as_it_was(served: tuple[Backend, object]) -> None:
    owner = served[0]
    first = owner.report().html()
    variants = owner.records[1].variants
    assert variants is not None
    env = variants.captured.fake_mode.shape_env

    def held() -> tuple[object, ...]:
        return list(variants.made), len(env.guards), len(env.replacements), len(env.var_to_range), len(owner.records)

    before = held()
    assert owner.report().html() == first and held() == before


def test_a_report_keeps_neither_backend_nor_model() -> None:
    torch._dynamo.reset()
    owner, model = kvcompile.backend("int8", inner="eager"), Both()
    observe(model, INPUTS, owner)
    report, gone = owner.report(), [weakref.ref(owner), weakref.ref(model)]
    explained = explain(model, INPUTS, "int8")
    del owner, model
    torch._dynamo.reset()
    gc.collect()
    assert [item() for item in gone] == [None, None]
    assert "the backend, or its record of this graph, is gone" in read(report.html()).words
    assert "kvcompile.attend" in explained.html()


def test_a_report_can_be_pickled_and_an_empty_one_is_a_page(two_schemes: Report) -> None:
    again = pickle.loads(pickle.dumps(two_schemes))
    assert again == two_schemes and "is gone" in read(again.html()).words
    assert "no graph was compiled" in read(Report().html()).words


def test_recompiles_are_counted(two_schemes: Report) -> None:
    assert two_schemes.recompiles == 0, "prompt and step differ in their new tokens"
    assert Report(graphs=[two_schemes.graphs[1], two_schemes.graphs[1]]).recompiles == 1


def test_telemetry_of_certified_attention_is_on_the_page() -> None:
    torch._dynamo.reset()
    target = resolve("hf:llama", TargetOptions())
    owner = kvcompile.backend("certified", inner="eager")
    kept = observe(target.model, target.inputs, owner)
    assert kept is not None and "head-steps" in read(owner.report().html()).words


# --- the command ---------------------------------------------------------------------------------


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    assert main(["explain", "hf:llama", "--scheme", "int4", "--tokens", "8192", "--html", str(tmp_path / "out.html")]) == 0
    out, err = capsys.readouterr()
    assert not out and "2 graphs, 4 attentions rewritten" in err
    assert "and 1 more like it" in read((tmp_path / "out.html").read_text()).words


@pytest.mark.parametrize(("name", "expected"), [
    ("list", "rewrite"), ("capture", "aten.scaled_dot_product_attention"), ("match", "spelled as sdpa"), ("plan", "stored as"),
    ("validate", "stored as"), ("rewrite", "kvcompile.attend"), ("verify", "# verified"),
])
def test_every_pass_can_be_shown(name: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    assert main(["explain", "hf:llama", "--scheme", "int4", "--stage", name]) == 0
    out, _ = capsys.readouterr()
    assert expected in out
    assert ("stored as" in out) == (name in {"plan", "validate"})
    if name == "list":
        listed = [line.split() for line in out.splitlines() if line.split()[:1] and line.split()[0] in {item.value for item in Pass}]
        assert {row[0] for row in listed} >= {"capture", "match", "plan", "validate", "rewrite", "compile"}
        assert all(float(value.replace(",", "")) >= 0 for row in listed for value in row[1:])


TRACED = """
import torch, kvcompile
from kvcompile.explain import observe
from kvcompile.tools.cli.targets import TargetOptions, resolve
target = resolve("hf:llama", TargetOptions())
observe(target.model, target.inputs, kvcompile.backend("int4", inner="eager"))
"""


def test_torchs_trace_has_the_graphs_and_the_report(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRACED], env={**os.environ, "TORCH_TRACE": str(tmp_path)}, capture_output=True, text=True, timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.glob("*.log")
    found: dict[str, str] = {}
    entries = re.split(r"^(?=V\d{4} )", log.read_text(), flags=re.MULTILINE)
    for entry in entries:
        head, _, payload = entry.partition("\n")
        if '"artifact"' in head and "kvcompile_graph" in head:
            data = json.loads(head[head.index("{"):])
            assert "stack" not in data and ("frame_id" in data or "after" in data["artifact"]["name"])
            found[data["artifact"]["name"]] = "\n".join(line.removeprefix("\t") for line in payload.splitlines())
    assert set(found) == {f"kvcompile_graph_{index}_{name}" for index, name in [
        (0, "before"), (0, "after_fresh"), (0, "report"), (1, "before"), (1, "after_past"), (1, "report"),
    ]}
    assert "scaled_dot_product_attention" in found["kvcompile_graph_1_before"]
    assert "torch.ops.kvcompile.attend.default(" in found["kvcompile_graph_1_after_past"]
    report = json.loads(found["kvcompile_graph_1_report"])
    assert report["sites"] == 2 and report["graphs"][0]["sites"][0]["scheme"] == "int4"
