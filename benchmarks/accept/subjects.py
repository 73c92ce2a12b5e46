"""Subjects: tiny random transformers models with chosen head dim and dtype, and how one request is sent through them.

A request is a batch of token ids that the caller fixes, so that every model compared sees the same tokens at every step.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.accept.axes import Case
from kvcompile.tools.cli import architectures

WINDOW = 24
"""Tokens that sliding layers keep, and go around in."""
LONG, SHORT, STEPS = 37, 13, 40
"""Tokens of a prompt that is longer than the window, of one that leaves it to be filled step by step, and decode steps behind it."""
ROOM = 96
"""Capacity of static caches; no multiple of anything that a kernel tiles by would show less."""
LAYERS = 2
START = 1
"""The first token of every decoder that has an encoder."""
WINDOWS = ("sliding_window", "attention_window_size", "sliding_window_size", "local_attention", "attention_chunk_size")
WIDTHS = ("hidden_size", "n_embd", "d_model")

Call = Callable[..., Any]


@dataclass(frozen=True)
class Request:
    """Token ids [B, prompt + steps], their padding mask or None, and how many of them are the prompt."""

    words: torch.Tensor
    mask: torch.Tensor | None
    prompt: int

    @property
    def steps(self) -> int:
        """Return the number of tokens behind the prompt."""
        return self.words.shape[1] - self.prompt


def settings(case: Case) -> Callable[[Any], dict[str, Any]]:
    """Return a function from a default configuration to the sizes that give the case's head dim and short windows."""

    def sizes(config: Any) -> dict[str, Any]:
        known, dim = config.to_dict(), int(case.head_dim)
        given: dict[str, Any] = {name: WINDOW for name in WINDOWS if isinstance(known.get(name), int)}
        if "attention_multiplier" in known:
            # As Granite's checkpoints have it. With the default, 1, one key takes all weight and the logits depend on rounding.
            given["attention_multiplier"] = 1 / dim
        if "kv_lora_rank" in known:
            return given | {"kv_lora_rank": dim, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64}
        if "d_kv" in known:
            return given | {"d_kv": dim}
        if "head_dim" in known:
            extra = {"v_head_dim": dim} if "v_head_dim" in known else {}
            return given | {"head_dim": dim} | extra
        return given | {name: 4 * dim for name in (*WIDTHS, "word_embed_proj_dim") if isinstance(known.get(name), int)}

    return sizes


class Words:
    """A transformers model that maps token ids to logits."""

    def __init__(self, case: Case, inner: architectures.TinyModel, device: torch.device) -> None:
        self.case, self.inner, self.device, self.model = case, inner, device, inner.model

    @classmethod
    def build(cls, case: Case, device: torch.device, layers: int = LAYERS) -> Words:
        """Return the model of a case, its weights rounded to the case's dtype; raises whatever its classes raise."""
        with quiet():
            inner = architectures.build(case.architecture.name, case.architecture.attention, layers, settings(case))
        inner.model.requires_grad_(False)
        cast(inner.model, getattr(torch, case.dtype.value))
        inner.model.to(device)
        config = inner.model.generation_config
        if config is not None:
            config.eos_token_id = config.forced_eos_token_id = config.forced_bos_token_id = None
            config.pad_token_id, config.decoder_start_token_id = 0, START
            config.use_cache = True
        return cls(case, inner, device)

    def copied(self, dtype: torch.dtype | None = None) -> Words:
        """Return the same model with memory of its own, cast to ``dtype``."""
        model = copy.deepcopy(self.model)
        if dtype is not None:
            cast(model, dtype)
        return Words(self.case, architectures.TinyModel(self.inner.name, model, self.inner.encoded), self.device)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""
        return next(parameter.dtype for parameter in self.model.parameters() if parameter.is_floating_point())

    def request(self, seed: int, prompt: int = LONG, steps: int = STEPS) -> Request:
        """Return random words, left-padded as the case says."""
        generator = torch.Generator().manual_seed(seed)
        pads, total = self.case.batch.pads, prompt + steps
        words = torch.randint(3, self.inner.vocabulary, (len(pads), total), generator=generator)
        if self.inner.encoded:
            # generate puts the start token in front of a prompt that does not begin with it.
            words[:, 0] = START
        mask = None
        if any(pads):
            mask = torch.ones(len(pads), total, dtype=torch.long)
            for row, count in enumerate(pads):
                mask[row, :count] = 0
        return Request(words.to(self.device), None if mask is None else mask.to(self.device), prompt)

    def _inputs(self, words: torch.Tensor, mask: torch.Tensor | None) -> dict[str, Any]:
        given = self.inner.inputs(words, mask)
        states = given.get("encoder_outputs")
        if states is not None:
            states.last_hidden_state = states.last_hidden_state.to(self.device, getattr(torch, self.case.dtype.value)).to(self.dtype)
        return given

    def cache(self) -> Any:
        """Return an empty cache of the case's kind; None where the model makes the right one by itself."""
        return self.inner.dynamic_cache() if self.case.caching.grows else self.inner.static_cache(ROOM)

    @torch.no_grad()
    def logits(self, request: Request, first: Call, call: Call) -> list[torch.Tensor]:
        """Return the last logits of the prompt, which ``first`` runs, and of each step, float32 or wider [B, V]."""
        past, found, start = self.cache(), [], 0
        for stop in range(request.prompt, request.words.shape[1] + 1):
            seen = None if request.mask is None else request.mask[:, :stop]
            run = call if start else first
            out = run(**self._inputs(request.words[:, start:stop], seen), past_key_values=past, use_cache=True)
            past, start = out.past_key_values, stop
            # A CUDA graph's next replay overwrites its outputs.
            found.append(wide(out.logits[:, -1]))
        return found

    @torch.no_grad()
    def generated(self, request: Request, *, forced: bool = False) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the logits of ``model.generate`` and all token ids; ``forced`` makes it take the request's own tokens."""
        from transformers import LogitsProcessorList

        prompt = request.words[:, : request.prompt]
        given = self._inputs(prompt, None if request.mask is None else request.mask[:, : request.prompt])
        past = self.cache()
        out = self.model.generate(
            **given, **({} if past is None else {"past_key_values": past}), max_new_tokens=request.steps, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
            logits_processor=LogitsProcessorList([Forced(request.words)] if forced else []),
            # Stock compilation of a static cache's steps, which generate adds by itself on a GPU, is no reference.
            **({"disable_compile": True} if forced else {}),
        )
        return [wide(item) for item in out.logits], out.sequences


class Forced:
    """A logits processor under which generate takes given tokens."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = torch.full_like(scores, float("-inf"))
        return chosen.scatter_(1, self.words[:, ids.shape[1], None], 0.0)


def wide(logits: torch.Tensor) -> torch.Tensor:
    """Return a copy of logits that later calls do not overwrite, in float32 or float64."""
    return logits.clone() if logits.dtype == torch.float64 else logits.float().clone()


def cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast weights and saved buffers; what a model computes at its start keeps its precision, as with from_pretrained."""
    kept = model.state_dict().keys()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for name, buffer in model.named_buffers():
        if name in kept and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
    if getattr(model, "config", None) is not None:
        model.config.dtype = dtype


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what transformers says of tiny and odd configurations off the screen."""
    from transformers.utils import logging as hub

    hub.set_verbosity(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
