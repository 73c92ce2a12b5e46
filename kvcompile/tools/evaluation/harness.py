"""Harness: a model with a compressed cache behind the interface of lm-evaluation-harness (`pip install 'kvcompile[lm-eval]'`).

    lm = harness_model(model, tokenizer, "int4", cache=lambda tokens: StaticCache(config=model.config, max_cache_len=tokens))
    lm_eval.simple_evaluate(model=lm, tasks=["hellaswag", "gsm8k"])

A request's context is prefilled through the compiled model into an empty cache; its continuation is decoded token by token: the true tokens
for a likelihood, the likeliest for an answer. Requests run one at a time. Contexts have many lengths: from the second one on, Dynamo's
graph of a prompt accepts any.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kvcompile.backend import Backend, backend
from kvcompile.errors import BadEvaluation
from kvcompile.tools.evaluation.decoding import forced, last_only, packed, prefill

MAX_GENERATED = 256
"""Tokens of an answer if a request sets no limit."""


class CompressedModel:
    """The harness's three kinds of request, answered through a compressed cache; ``harness_model`` adds the harness's base class.

    ``backend``: the backend of the compiled model, whose report lists the rewritten sites and bytes.

    Making one resets the compiler. Raises BadEvaluation without a maximal length, and for a tokenizer without start and end tokens.
    """

    def __init__(
        self, model: Any, tokenizer: Any, scheme: object, *, cache: Callable[[int], Any], max_length: int | None = None,
        inner: str = "inductor", add_bos_token: bool = False,
    ) -> None:
        super().__init__()
        found = max_length or getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if not isinstance(found, int) or found < 2:
            raise BadEvaluation(
                setting="max_length", expected="the most tokens of a context and its continuation", found=found,
                todo="pass it to harness_model",
            )
        prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if prefix is None:
            raise BadEvaluation(
                setting="the tokenizer", expected="one with a start or an end token, which replaces an empty context", found="neither",
                todo="set tokenizer.bos_token",
            )
        self.model, self.tokenizer, self.max_length, self.prefix, self.new_cache = model, tokenizer, found, int(prefix), cache
        self.start = (self.prefix,) if add_bos_token else ()
        self.options = last_only(model)
        self.place = next(iter(model.parameters())).device
        torch.compiler.reset()
        self.backend: Backend = backend(scheme, inner=inner)
        self.compiled = torch.compile(model, backend=self.backend)

    # --- the harness's interface -------------------------------------------------------------------

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return, for each (context, continuation), the continuation's log-probability and whether greedy decoding gives it.

        Raises BadEvaluation for a continuation of more than ``max_length`` tokens.
        """
        return [self._scored(*self._pair(*request.args)) for request in requests]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return, for each (text,), its log-probability after the start token, in windows of ``max_length`` that predict a token once."""
        return [
            sum(self._scored(context, part)[0] for context, part in windows(self._encode(request.args[0]), self.prefix, self.max_length))
            for request in requests
        ]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return, for each (context, options), the greedy text up to one of ``until``, the end token, or ``max_gen_toks`` tokens."""
        return [self._said(*request.args) for request in requests]

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, by which the harness keys its stored requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as text, by the tokenizer's template."""
        more = {"tokenize": False, "add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return str(self.tokenizer.apply_chat_template(chat_history, **more))

    # --- what it is made of ------------------------------------------------------------------------

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of a context and of its continuation, encoded together, then split.

        Spaces between the two go to the continuation.
        """
        kept = context.rstrip()
        if not kept:
            return [self.prefix], self._encode(context + continuation)
        first, whole = self._encode(kept), self._encode(context + continuation)
        return [*self.start, *first], whole[len(first) :]

    def _scored(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Return the continuation's log-probability, and whether its tokens are the likeliest; (0, True) for an empty one.

        A context that is too long loses its beginning. Raises BadEvaluation for a continuation of more than ``max_length`` tokens.
        """
        if not continuation:
            return 0.0, True
        if len(continuation) > self.max_length:
            raise BadEvaluation(
                setting="max_length", expected=f"{len(continuation)} tokens at least, a continuation of this task", found=self.max_length,
                todo="pass a larger one to harness_model, or leave the task out",
            )
        context = context[-(self.max_length + 1 - len(continuation)) :]
        ids = torch.tensor([[*context, *continuation]], device=self.place)
        total, greedy = 0.0, True
        steps = forced(self.compiled, ids, len(context), self.new_cache(self.max_length), self.options)
        for token, logits in zip(continuation, steps, strict=True):
            total += float(logits[0].double().log_softmax(-1)[token])
            greedy = greedy and int(logits[0].argmax()) == token
        return total, greedy

    @torch.no_grad()
    def _said(self, context: str, options: dict[str, Any]) -> str:
        """Return the greedy continuation of a context as text.

        Raises BadEvaluation if the options ask for sampling.
        """
        if options.get("do_sample") and options.get("temperature", 1.0) > 0:
            expected = "False: answers are decoded greedily"
            raise BadEvaluation(setting="do_sample", expected=expected, found=True, todo="change the task's settings")
        asked = options.get("until") or []
        until = [asked] if isinstance(asked, str) else list(asked)
        most = min(int(options.get("max_gen_toks", MAX_GENERATED)), self.max_length - 1)
        prompt = [*self.start, *self._encode(context)] or [self.prefix]
        ids, cache = torch.tensor([prompt[-(self.max_length - most) :]], device=self.place), self.new_cache(self.max_length)
        prefill(self.compiled, ids, cache, self.options)
        inputs = packed(ids[:, -1:])
        said: list[int] = []
        text = ""
        while len(said) < most and not any(stop in text for stop in until):
            logits = self.compiled(input_ids=inputs, past_key_values=cache, use_cache=True, **self.options).logits
            inputs = logits[:, -1:].argmax(-1)
            if int(inputs) == self.tokenizer.eos_token_id:
                break
            said.append(int(inputs))
            text = str(self.tokenizer.decode(said, skip_special_tokens=True))
        return text[: min((text.index(stop) for stop in until if stop in text), default=len(text))]


def windows(tokens: Sequence[int], prefix: int, length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (context, part) for each part of ``tokens``: at most ``length`` tokens to predict, and the tokens that come before them.

    A model reads both but for the last token, so ``length`` tokens at most. The first context is the start token ``prefix``; later ones are
    the token before the part, and for the last part as many tokens as fit.
    """
    if tokens:
        yield [prefix], list(tokens[:length])
    for at in range(length, len(tokens), length):
        end = min(at + length, len(tokens))
        yield list(tokens[end - length - 1 : at]), list(tokens[at:end])


def harness_model(model: Any, tokenizer: Any, scheme: object = "int8", **settings: Any) -> Any:
    """Return a ``CompressedModel`` for the installed lm_eval's ``simple_evaluate(model=...)``; ``settings``: those of the class.

    Raises BadEvaluation without lm_eval.
    """
    try:
        base = importlib.import_module("lm_eval.api.model").LM
    except ImportError as error:
        raise BadEvaluation(
            setting="lm_eval", expected="installed", found=f"none ({error})", todo="run pip install 'kvcompile[lm-eval]'"
        ) from error
    joined = type("CompressedHarnessModel", (CompressedModel, base), {})
    return joined(model, tokenizer, scheme, **settings)
