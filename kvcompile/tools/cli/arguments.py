"""Arguments of every command: choices, defaults and help texts. Imports no torch, so that --help and a wrong option are answered quickly.

A test checks that choices and defaults copied from other modules are still theirs.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from kvcompile.tools.cli import bench

DTYPES = ("bfloat16", "float16", "float32")
CACHES = ("dynamic", "static")
INNER = ("inductor", "aot_eager", "eager")
STAGES = ("captured", "normalised", "rewritten", "inductor", "triton", "ptx", "sass")
PASSES = ("capture", "match", "plan", "validate", "rewrite", "verify", "compile")
VARIANTS = ("past", "fresh")
CODES = ("int8", "fp8")
EXTENTS = ("tensor", "head")
GENERATIONS = ("sm_80", "sm_89", "sm_90", "sm_100")
ENGINES = ("vllm", "transformers")
TASKS = ("needle", "multikey", "variable", "counts", "multivalue", "multiquery", "common", "frequent")
STEPS, BATCH, RATE = 500, 32, 7e-4
"""Defaults of ``learn``: optimizer steps, sequences per step, and the learning rate."""
EVALUATED = "dense,int8,fp8,int4"
TRIED = "int8,int4,kivi(bits=4),kivi"
GB = 10**9
LIMIT = 0.01
TARGET_HELP = "hf:TYPE (a tiny random model of any transformers type), a local checkpoint folder, or file.py:factory"
PLANNED_HELP = (
    "a config.json, a checkpoint folder (its weights are not read), hf:TYPE (a type at its default sizes), or file.py:factory"
)

Commands = argparse._SubParsersAction  # the class of what add_subparsers returns; argparse has no public name for it


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. In its result, ``run`` names the function that runs the command, as ``module:name``."""
    made = argparse.ArgumentParser(prog="kvcompile", description="Compile models to attend over a compressed KV cache, and see how.")
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    for add in (
        _add_explain, _add_dump, bench.add, _add_plan, _add_sensitivity, _add_learn, _add_calibrate, _add_schemes, _add_eval, _add_survey,
        _add_demo,
    ):
        add(commands)
    return made


def _add_explain(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("explain", help="which attentions would be rewritten, how, and why not")
    _add_target(parser)
    parser.add_argument("--tokens", type=positive, default=4096, help="context length that bytes are given for (default 4096)")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 if any attention is refused")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print JSON instead of the report")
    shown.add_argument("--html", type=Path, metavar="FILE", help="write the report as one HTML page, with graphs and kernels")
    shown.add_argument("--stage", choices=(*PASSES, "list"), help="print the graph after one pass, or list the passes with their time")
    parser.add_argument("--graph", type=int, help="of --stage (default: the last one with an attention)")
    parser.set_defaults(run="kvcompile.tools.cli.inspection:explain")


def _add_dump(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("dump", help="one graph at any stage: as captured, matched, rewritten, generated, compiled")
    _add_target(parser)
    parser.add_argument("--stage", choices=STAGES, required=True, help="what to show")
    parser.add_argument("--graph", type=int, help="which graph, as explain numbers them (default: the last one with an attention)")
    parser.add_argument("--variant", choices=VARIANTS, help="over a filled cache (past) or into an empty one (fresh)")
    parser.add_argument("--arch", default="sm_90", help="GPU architecture for triton, ptx and sass: sm_80, sm_90 or sm_100 (default sm_90)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write to a file")
    parser.set_defaults(run="kvcompile.tools.cli.inspection:dump")


def _add_plan(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("plan", help="bytes of a model's cache under every scheme, what fits on a GPU, and what to choose")
    parser.add_argument("target", metavar="CONFIG_OR_MODEL", help=PLANNED_HELP)
    parser.add_argument("--gpu-memory", type=gigabytes, default=80 * GB, metavar="GB", help="of one device, 10^9 bytes (default 80)")
    parser.add_argument("--context", type=positive, default=4096, help="tokens of a request, prompt and answer (default 4096)")
    parser.add_argument("--batch", type=positive, default=1, help="requests at once (default 1)")
    parser.add_argument("--weights", default="native", help="native, fp8, int8, int4 (for linear layers and experts), or a number of GB")
    parser.add_argument("--overhead", type=gigabytes, default=2 * GB, metavar="GB", help="kept free (default 2)")
    parser.add_argument("--prefill", type=positive, metavar="TOKENS", help="of a prompt that one call takes (default: the context)")
    parser.add_argument("--prefill-rows", type=positive, default=1, help="prompts that one call takes (default 1)")
    parser.add_argument("--schemes", type=split, default=[], metavar="A,B", help="(default: all, and every setting that was measured)")
    parser.add_argument("--gpu", choices=GENERATIONS, default="sm_90", help="(default sm_90)")
    parser.add_argument("--engine", choices=ENGINES, help="plan for its blocks: the tokens that fit, and the command that serves")
    parser.add_argument("--damage", type=float, default=LIMIT, metavar="NATS", help=f"KL that more requests may cost (default {LIMIT})")
    parser.add_argument("--dtype", choices=DTYPES, help="of the model (default: the configuration's, else bfloat16)")
    parser.add_argument("--symbolic", action="store_true", help="print the formulas of the bytes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run="kvcompile.tools.cli.plan:run")


def _add_sensitivity(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("sensitivity", help="what every layer's keys and values lose to a scheme, and a policy for a budget")
    parser.add_argument("target", nargs="?", metavar="MODEL", help="tinylm (the default), smollm2, a checkpoint folder, or a GGUF file")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to decode (default: as eval's)")
    parser.add_argument("--schemes", type=split, default=split(TRIED), metavar="A,B", help=f"(default {TRIED})")
    parser.add_argument("--context", type=positive, default=600, help="tokens of a prompt (default 600)")
    parser.add_argument("--steps", type=positive, default=16, help="tokens decoded after it (default 16)")
    parser.add_argument("--rows", type=positive, default=4, help="texts (default 4)")
    parser.add_argument("--device", help="(default: cuda if there is one)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the damages as JSON, which kvcompile.fit reads")
    parser.add_argument("--read", type=Path, metavar="FILE", help="use the damages of an earlier run instead of measuring them")
    parser.add_argument("--memory", type=gigabytes, metavar="GB", help="of all caches: fit a policy to it, and measure that too")
    parser.add_argument("--fit-context", type=positive, metavar="TOKENS", help="the policy's (default: prompt and decoded tokens)")
    parser.add_argument("--fit-batch", type=positive, default=1, metavar="ROWS", help="(default 1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run="kvcompile.tools.cli.sensitivity:run")


def _add_learn(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("learn", help="learn a scheme's levels and thresholds for a model from text")
    _add_text(parser, "where the tables go, a .safetensors", 8192)
    parser.add_argument("--scheme", default="beyond", help="such as 'beyond(bits=3,group=64)' (default beyond)")
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"optimizer steps at most (default {STEPS})")
    parser.add_argument("--batch", type=positive, default=BATCH, help=f"sequences a step (default {BATCH})")
    parser.add_argument("--micro", type=positive, default=1, help="sequences at a time, whose gradients add up (default 1)")
    parser.add_argument("--validation", type=positive, help="sequences that are held out (default 150, of a small text a fifth)")
    parser.add_argument("--rate", type=float, default=RATE, help=f"of Adam (default {RATE:g})")
    parser.add_argument("--memory-budget", type=float, default=1.0, help="share of activations kept, 0 to 1; others are computed twice")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="log, checkpoints, pictures")
    parser.add_argument("--resume", action="store_true", help="go on from its checkpoint")
    parser.add_argument("--inner", choices=INNER, default="inductor", help="what compiles the graph")
    parser.set_defaults(run="kvcompile.tools.cli.learn:run", held_out=150)


def _add_calibrate(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("calibrate", help="measure static scales of int8 or fp8 for a model on text")
    _add_text(parser, "where the scales go, a .safetensors", 2048)
    parser.add_argument("--scheme", choices=CODES, default="int8", help="the codes (default int8)")
    parser.add_argument("--granularity", choices=EXTENTS, default="tensor", help="one scale for a layer, or each kv head")
    parser.add_argument("--percentile", type=float, default=100.0, help="how many of a hundred values a scale covers (default 100)")
    parser.add_argument("--margin", type=float, default=1.0, help="how many times that magnitude a scale covers (default 1)")
    parser.add_argument("--sequences", type=positive, default=512, help="at most, of those that the text gives (default 512)")
    parser.add_argument("--batch", type=positive, default=1, help="sequences at a time (default 1)")
    held = "sequences that are held out, to see what is clipped (default 16, of a small text a fifth)"
    parser.add_argument("--validation", type=positive, help=held)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run="kvcompile.tools.cli.calibrate:run", held_out=16)


def _add_schemes(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("schemes", help="all schemes with their options and bytes")
    parser.add_argument("--heads", type=positive, default=8, help="kv heads (default 8)")
    parser.add_argument("--head-dim", type=positive, default=128, help="channels a head (default 128)")
    parser.add_argument("--layers", type=positive, default=32, help="layers (default 32)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="the model's dtype (default bfloat16)")
    parser.add_argument("--tokens", type=positive, default=131072, help="context length for the last column (default 131072)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run="kvcompile.tools.cli.scheme_table:run")


def _add_eval(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("eval", help="quality of schemes on tinylm, smollm2 or a checkpoint, decoding through the compiled cache")
    parser.add_argument("target", nargs="?", metavar="MODEL", help="tinylm (the default), tinylm-16k, smollm2, a folder, a GGUF file")
    said = f"or .safetensors files (default {EVALUATED})"
    parser.add_argument("--schemes", type=split, default=split(EVALUATED), metavar="A,B", help=said)
    parser.add_argument("--tasks", type=split, metavar="A,B", help=f"among {', '.join(TASKS)} (default: trained ones, else RULER's)")
    texts = "text for prompts, each file a kind (default: tinylm's held-out text; else prose, code and a document of Python's own)"
    parser.add_argument("--data", nargs="+", type=Path, default=[], metavar="FILE", help=texts)
    parser.add_argument("--lengths", "--context", type=split, metavar="N,M", help="of prompts (default 2000; quick 600; checkpoint 4096)")
    parser.add_argument("--depths", type=split, metavar="A,B", help="shares of text before a statement (default 0,0.25,0.5,0.75,1)")
    parser.add_argument("--questions", type=positive, help="for each task and length (default 96; quick 16; checkpoint 20)")
    parser.add_argument("--tail", type=positive, help="tokens decoded after each text (default 128; quick 32; checkpoint 64)")
    parser.add_argument("--keys", type=positive, help="lines of multikey and multiquery that share a word of their keys (default 16)")
    parser.add_argument("--batch", type=positive, help="texts, and questions at a time (default 8; checkpoint 1)")
    parser.add_argument("--quick", action="store_true", help="small sizes and the ops' eager bodies: about a minute on two cores")
    parser.add_argument("--attention", action=argparse.BooleanOptionalAction, help="errors of attention by layer (quick: none)")
    parser.add_argument("--bytes", action="store_true", help="token ids are bytes, as tinylm's: a model without tokenizer files")
    parser.add_argument("--inner", choices=INNER, help="what compiles the rewritten graph")
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: a checkpoint's own; tinylm float32 on a cpu")
    parser.add_argument("--threads", type=positive, help="CPU threads (default: all cores; tinylm 1)")
    parser.add_argument("--jobs", type=positive, default=1, help="schemes measured side by side, each in a process of its own (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of questions and of bootstrap intervals")
    parser.add_argument("--beside", metavar="SCHEME", help="also compare the others with this one, on the same questions")
    parser.add_argument("--read", type=Path, metavar="DIR", help="print the run of an earlier --out instead of measuring")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write JSON, CSV, pictures, settings and machine into a folder")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw quality against bytes, and adaptive widths: a .png or a folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--heatmaps", action="store_true", help="also print right answers by depth and length, of each task and scheme")
    parser.add_argument("--telemetry", action="store_true", help="also print what certified attention did, bounds and fallbacks")
    parser.set_defaults(run="kvcompile.tools.cli.evaluate:run")


def _add_survey(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("survey", help="which architectures of transformers are rewritten, and what their logits lose")
    parser.add_argument("--archs", type=split, default=[], metavar="A,B", help="model types such as llama or bart+encoder (default: all)")
    parser.add_argument("--caches", type=split, default=["static", "dynamic"], help="kinds of cache (default static,dynamic)")
    parser.add_argument("--attention", type=split, default=["sdpa", "eager"], help="of transformers (default sdpa,eager)")
    parser.add_argument("--scheme", default="int8", help="tried in addition to dense (default int8)")
    parser.add_argument("--rows", type=split, default=["1", "3"], help="batch sizes; more than one row is left padded (default 1,3)")
    parser.add_argument("--steps", type=positive, default=16, help="decode steps after the prompt (default 16)")
    parser.add_argument("--layers", type=positive, default=2, help="layers of each model, and one of each kind (default 2)")
    parser.add_argument("--jobs", type=positive, default=1, help="architectures at a time (default 1)")
    parser.add_argument("--timeout", type=positive, default=900, help="seconds for an architecture (default 900)")
    parser.add_argument("--known", type=split, default=[], metavar="A,B", help="JSON of earlier runs, whose cases are not tried again")
    cases = "write every case as JSON; without FILE, print JSON instead of the table"
    parser.add_argument("--json", type=Path, nargs="?", const=True, metavar="FILE", help=cases)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table as CSV, and print how it was made")
    parser.set_defaults(run="kvcompile.tools.cli.survey_command:run")


def _add_demo(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("demo", help="a small model, stock, with a dense and with a compressed cache: texts, speed, bytes")
    parser.add_argument("--scheme", default="int4", help="of the compressed cache (default int4)")
    parser.add_argument("--prompt", type=positive, default=3000, help="bytes of both prompts (default 3000)")
    parser.add_argument("--tokens", type=positive, default=240, help="bytes to generate (default 240)")
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads (default 1: more slow so small a model down)")
    parser.set_defaults(run="kvcompile.tools.cli.demo:run")


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help=TARGET_HELP)
    parser.add_argument("--scheme", default="int8", help="for keys and values, such as int4 or 'int4(group=64)' (default int8)")
    parser.add_argument("--key-scheme", help="for keys, where they differ")
    parser.add_argument("--value-scheme", help="for values, where they differ")
    parser.add_argument(
        "--layer", action="append", default=[], metavar="GLOB=SCHEME",
        help="another scheme for these module paths, as 'model.layers.0.*=int8', or none to leave them out; may be repeated",
    )
    parser.add_argument("--cache", choices=CACHES, default="dynamic", help="of transformers (default dynamic)")
    parser.add_argument("--attention", help="transformers attention, such as sdpa or eager (default: the model's own)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: a checkpoint's own, bfloat16 for hf:")
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")


def _add_text(parser: argparse.ArgumentParser, out: str, length: int) -> None:
    """Add the arguments of a command that takes a model and text files; ``out``: help text of the file that it writes."""
    parser.add_argument("target", metavar="MODEL", help="a local checkpoint folder, hf:TYPE, or file.py:factory")
    parser.add_argument("--data", nargs="+", type=Path, required=True, metavar="FILE", help="text files, or .jsonl with a text a line")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=out)
    parser.add_argument("--length", type=positive, default=length, help=f"tokens a sequence (default {length})")
    parser.add_argument("--prefix", choices=("chat", "start", "none"), help="before a sequence (default: chat where there is a template)")
    parser.add_argument("--bytes", action="store_true", help="token ids are bytes: a model without tokenizer files")
    parser.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's own")
    parser.add_argument("--device", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=0, help="of the order of sequences")


def positive(text: str) -> int:
    """Return an argument as a positive int. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, found {text!r}")
    return int(text)


def gigabytes(text: str) -> int:
    """Return an argument in GB of 10^9 as bytes. Raises ArgumentTypeError."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1e9:
        raise argparse.ArgumentTypeError(f"expected gigabytes (10^9 bytes), found {text!r}")
    return int(found * GB)


HALVES = ("k=", "v=")
"""How the scheme of keys, or of values, begins in a list."""


def split(text: str) -> list[str]:
    """Return the parts of ``int8,int4(group=16,scale_dtype=float32),k=int8,v=int4`` between the commas outside of parentheses.

    ``k=SCHEME,v=SCHEME``, in either order, is one part.
    """
    parts, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    found: list[str] = []
    for part in (part.strip() for part in parts if part.strip()):
        half = part[:2] in HALVES and found and found[-1][:2] in HALVES and "," not in _outside(found[-1])
        if half and found[-1][:2] != part[:2]:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def _outside(text: str) -> str:
    """Return a text without its parts in parentheses."""
    return re.sub(r"\([^()]*\)", "", text)
