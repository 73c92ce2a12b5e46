"""Errors of kvcompile, one class per kind, with a message of the expected and the found value, the place and the remedy.

Each class holds its message template, so that all messages can be read here and a caller catches a kind of error instead of parsing text.
"""

from __future__ import annotations

import warnings

FORMER = {"HalvesDiffer": "PairedSchemesDiffer", "UnknownHalf": "UnknownKeyOrValue"}
"""Names of version 0.1, with the present ones."""


def __getattr__(name: str) -> type[KvcompileError]:
    if name not in FORMER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"kvcompile.errors.{name} is {FORMER[name]} now; the former name goes in 0.3", DeprecationWarning, stacklevel=2)
    found: type[KvcompileError] = globals()[FORMER[name]]
    return found


class KvcompileError(Exception):
    """Base of all errors of this package. ``template`` is formatted with the keyword arguments, which stay in ``facts``."""

    template = "{detail}"

    def __init__(self, **facts: object) -> None:
        self.facts = facts
        super().__init__(self.template.format(**facts))


class FileUnfit(KvcompileError, ValueError):
    """Raised by the readers of ``kvcompile.files``; their callers turn it into the error of their own kind of file, which adds advice."""

    template = "expected {expected} in {where}, found {found}; restore the file or create it again"

    @property
    def fact(self) -> str:
        """The message without advice, to which callers add their own."""
        return str(self).rpartition("; ")[0]


class SchemeError(KvcompileError, ValueError):
    """Base of the errors in the choice or the options of a scheme; raised before anything is compiled."""


class UnknownScheme(SchemeError):
    template = "expected one of the schemes {known}, found {name!r}; pass one of these names or a Scheme object{hint}"


class UnknownOption(SchemeError):
    template = "scheme {scheme!r} has the options {known}, found {option!r}; remove it or correct its name"


class BadOption(SchemeError):
    template = "scheme {scheme!r} expects {option} to be {expected}, found {found!r}; {todo}"


class BadScheme(SchemeError):
    template = "kvcompile.register expects {expected}, found {found}; see examples/add_a_scheme.py for a whole scheme"


class NoScheme(SchemeError):
    template = (
        "expected a file that defines a class derived from kvcompile.Scheme, or one of the schemes {known}, found {found}; pass a file as "
        "examples/add_a_scheme.py is one"
    )


class OtherFormat(KvcompileError):
    template = (
        "expected a pickled compressed cache of format {expected}, found format {found}; load it with the version of kvcompile that "
        "wrote it, read it there with kvcompile.decoded, and keep the dense tensors"
    )


class CacheUnfit(KvcompileError, ValueError):
    template = "a cache cannot be saved, loaded or forked so: expected {expected}, found {found}; {todo}"


class HeadDimNotDivisible(SchemeError):
    template = (
        "scheme {scheme!r} needs a head dim that {what} divides, found head dim {head_dim} and {what} {by}; "
        "choose {what} among the divisors of {head_dim}, or another scheme for this layer"
    )


class NotPaged(SchemeError):
    template = (
        "expected a scheme whose codes of a token depend on that token alone, found {scheme!r}: {reason}; a pool of blocks takes dense, "
        "int8, fp8, int4, nf4, gauss, beyond and static scales, without window= and sinks="
    )


class BadBlock(KvcompileError, ValueError):
    template = "a paged pool expects {what} to be {expected}, found {found}; correct it, docs/SERVING.md has every operand"


class EngineUnfit(KvcompileError, ValueError):
    template = "{engine} over codes expects {expected}, found {found}; {todo}"


class BadTables(SchemeError):
    template = "learned tables do not fit: expected {expected}, found {found}; {todo}"


class TablesMissing(SchemeError):
    template = (
        "expected learned tables for the attention at {path}, found {known}; pass the scheme that kvcompile.learn or "
        "kvcompile.load_tables returned for this model, or a scheme that needs none for this layer"
    )


class BadScales(SchemeError):
    template = "static scales do not fit: expected {expected}, found {found}; {todo}"


class ScalesMissing(SchemeError):
    template = (
        "expected static scales for the attention at {path}, found {known}; pass the scheme that kvcompile.calibrate, "
        "kvcompile.load_scales or kvcompile.read_scales returned for this model, or a scheme that needs none for this layer"
    )


class BadBatch(KvcompileError):
    template = "a batch to learn from does not fit: expected {expected}, found {found}; {todo}"


class BadLearnSetting(KvcompileError, ValueError):
    template = "kvcompile.learn expects {setting} to be {expected}, found {found!r}; pass one of these or leave it out"


class BadCalibration(KvcompileError, ValueError):
    template = "kvcompile.calibrate expects {setting} to be {expected}, found {found!r}; pass such a value or leave it out"


class NothingToLearn(KvcompileError):
    template = "expected an attention whose keys and values a cache would hold, found none in the graphs of this model{why}; {todo}"


class ServedOtherwise(KvcompileError):
    template = (
        "expected the training graph and the compiled cache of {model} to differ by at most {expected} of the change by quantization, "
        "found {found} over {sites} attentions: the model caches other values than it attends to, so tables would be learned for the wrong "
        "values; {todo}"
    )


class BadRun(KvcompileError):
    template = "expected {expected} in the run folder {folder}, found {found}; {todo}"


class QuestionTooLong(KvcompileError, ValueError):
    template = "the statements of a question do not fit: expected room for {needed} {unit}, found {found}; {todo}"


class BadEvaluation(KvcompileError, ValueError):
    template = "kvcompile eval expects {setting} to be {expected}, found {found}; {todo}"


class ResultsUnread(KvcompileError):
    template = "expected the results of kvcompile eval in {path}, found {found}; measure again, or name the results.json of a run"


class Tier2Missing(KvcompileError):
    template = (
        "attention with a certificate needs full-precision copies of all {expected} pages of codes, found {found} pages of {what}; make "
        "room in tier 2 before the step, or use a scheme without certificates"
    )


class HostMemoryFull(KvcompileError):
    template = (
        "expected {expected} bytes of pinned host memory for full-precision keys and values, found {found}; make the cache or the batch "
        "smaller, raise the limit of locked memory, or choose tier2=device"
    )


class PairedSchemesDiffer(SchemeError):
    template = (
        "expected keys and values of one attention both in the scheme {scheme!r}, found {keys!r} and {values!r} for {path!r}; choose it "
        "for both, with the same options, since its attention handles keys and values together"
    )


class NotBounded(SchemeError):
    template = (
        "expected a scheme whose decode error is bounded by what it stores, for a certificate, found {scheme!r}, whose error is not; "
        "choose another scheme, or leave the certificate out"
    )


class NoOriginals(SchemeError):
    template = (
        "expected a scheme that keeps full-precision copies, for certify= with fallback='dense', found {scheme!r}, which keeps none to "
        "fall back to; pass Certify(..., fallback='report'), which counts heads beyond their budget, or choose a scheme that keeps "
        "full-precision copies"
    )


class NotReported(SchemeError):
    template = (
        "expected keys and values that are cached in token order and in the form that attention reads, for a report of their error, found "
        "{found}; leave certify= out, or keep {path!r} apart: compile that part of the model with a backend of its own"
    )


class LatentNotHeld(SchemeError):
    template = (
        "expected keys and values that are cached in the form that attention reads, for the scheme {scheme!r}, found ones that are made "
        "from a cached latent; give {path!r} a scheme such as 'int8' in a per-layer policy"
    )


class OrderNotKnown(SchemeError):
    template = (
        "scheme {scheme!r} (policy path {path!r}) expects tokens in order, written by the call that attends to them; found {found}; use a "
        "scheme that encodes each token separately for this layer"
    )


class DeviceUnsupported(SchemeError):
    template = (
        "scheme {scheme!r} (policy path {path!r}) expects a cache on {known}, found one on {device}, for which it has no kernels yet; use "
        "another scheme for this layer"
    )


class WindowOnlyRead(SchemeError):
    template = (
        "expected a scheme without a window of newest tokens for a cache that is only read here, found a window of {window} tokens; "
        "give {path!r} a scheme such as 'int8' in a per-layer policy"
    )


class WindowReadLate(SchemeError):
    template = (
        "expected a scheme without a window of newest tokens for a cache that is written after its attention, found a window of {window} "
        "tokens, which is a step's own; give {path!r} a scheme such as 'int8' in a per-layer policy, or write first, then attend"
    )


class BadPolicy(SchemeError):
    template = (
        "a per-layer policy maps module-path globs to schemes and needs at least one entry, found {found!r}; "
        "write for example {{'*': 'int4', 'model.layers.0.*': 'int8'}}"
    )


class UnknownKeyOrValue(SchemeError):
    template = (
        "expected a scheme for the keys 'k' and one for the values 'v' of an attention, found {found}{hint}; write dict(k=..., v=...) "
        "or 'k=int8,v=int4'"
    )


class LayerByNumber(SchemeError):
    template = (
        "expected module-path globs as keys of a per-layer policy, found {found!r}; write the path for a layer's number, for example "
        "'model.layers.{found}.*' (kvcompile explain and the report list the paths of a model)"
    )


class NotInPolicy(SchemeError):
    template = (
        "no entry of the per-layer policy matches the module path {path!r}; add a '*' entry to cover every layer; the scheme None leaves a "
        "layer as it is"
    )


class EntryUnmatched(SchemeError):
    template = (
        "expected each entry of the per-layer policy to match a module of the model, found {glob!r}, which matches none of its {count} "
        "modules; attentions are at {paths}, ...: correct or remove the entry, or give a model with other names a backend of its own"
    )


class UnsupportedDtype(SchemeError):
    template = "expected a cache of dtype {known}, found {dtype}; cast the model to one of these dtypes"


class SlidingNeedsTokens(SchemeError):
    template = (
        "expected a scheme that encodes each token separately for a cache that keeps its newest {slots} tokens, found {scheme!r}, which "
        "{why}; use dense, int8, int4 or fp8 for this layer, without a window or sinks"
    )


class PagedNeedsTokens(SchemeError):
    template = (
        "expected a scheme that encodes each token separately for a cache that is read through a gather, found {scheme!r}, which {why}; "
        "use dense, int8, fp8, int4, nf4, gauss, beyond or static scales for this layer, without a window or sinks"
    )


class BadSetting(KvcompileError, ValueError):
    template = "kvcompile.backend expects {setting} to be {expected}, found {found!r}; pass one of these or leave it out"


class UnknownSetting(KvcompileError, ValueError):
    template = (
        "the backend 'kvcompile' expects in options= the arguments of kvcompile.backend ({known}), found {name!r}; correct its name, or "
        "pass options of Inductor as a dict named 'options'{hint}"
    )


class CompileError(KvcompileError):
    """Base of the errors while a graph is compiled."""


class SiteRefused(CompileError):
    template = (
        "strict=True and {count} attention site(s) cannot be rewritten:\n{refusals}\nchange the model as said, leave the layer out by "
        "giving its path None in a per-layer policy, or pass strict=False to leave it as it was"
    )


class NotCompiled(CompileError):
    template = (
        "expected a rewritten graph that the inner compiler takes, found {error}; please report this model with the output of "
        "TORCH_LOGS=+kvcompile"
    )


class OwnFault(NotCompiled):
    template = (
        "expected kvcompile to prepare a rewritten graph for the inner compiler, found {error} (at {where}): this is a fault of kvcompile, "
        "not of the model; please report this model with the output of TORCH_LOGS=+kvcompile"
    )


class DamagedCache(NotCompiled):
    template = (
        "expected an entry of Inductor's cache that loads, found {path}, which does not ({error}) and could not be replaced; delete "
        "this file, or the whole folder, and start again"
    )


class VerificationFailed(NotCompiled):
    template = (
        "expected of the rewritten graph: {fact}; found {found} (at {where}); this is a bug in kvcompile: please report it with the output "
        "of `kvcompile dump --stage rewritten`"
    )


class SizesFixed(NotCompiled):
    template = (
        "expected compiled code ({variant}) that is valid for every size, found an operation that specialises on sizes ({sizes}) after the "
        "guards were fixed; compile without dynamic=True, or report this model with the output of TORCH_LOGS=+dynamic"
    )


class CallRefused(KvcompileError):
    """Base of the errors for a call that only a dense cache can serve: raised before any write with ``strict``, else a warning."""


class SchemeChanged(CallRefused):
    template = (
        "expected a cache that holds {expected}, found one compressed as {found} (at {where}); a live cache cannot "
        "change its scheme because codes are written once: start a new cache, or compile with the same scheme"
    )


class CachesSwapped(SchemeChanged):
    template = (
        "expected the cache of {expected}, found one that was filled as {found} (at {where}); the scheme {scheme} stores the two "
        "differently and codes are written once: pass every call the same tensors for keys and for values, or start a new cache"
    )


class ForeignBackend(KvcompileError):
    template = (
        "expected that graphs which use a compressed cache are compiled by kvcompile, found one of {shape} in a graph of another "
        "backend; compile this function with kvcompile.backend(...), or pass kvcompile.decoded(cache) to it"
    )


class CacheStale(KvcompileError):
    template = (
        "expected the newest state of a compressed cache, found a state of {length} tokens whose tokens were overwritten "
        "after a rollback; copy.deepcopy the cache before branching from it"
    )


class CacheBranched(CacheStale, CallRefused):
    template = (
        "expected the newest state of a compressed cache, found an earlier tensor of {length} tokens, after which more tokens were "
        "written; copy.deepcopy the cache before branching from it"
    )


class WindowPassed(CallRefused):
    template = (
        "expected to continue from a length whose last block is still in full precision, found {wanted}: {scheme} keeps {window} of "
        "{length} tokens in full precision, and length {wanted} ends inside a block of {block} whose first tokens are stored as codes "
        "only; crop by at most {most} tokens, to a multiple of {block} tokens, or copy.deepcopy the cache before going on"
    )


class TokensOutOfOrder(KvcompileError):
    template = (
        "expected {expected} of row {row}, found {found} (at {where}); {scheme} needs the tokens of a row in order, and a decode step on a "
        "GPU cannot check this: its attention returns NaN for such a row from that call on, until the row's tokens start again at position "
        "0. Write each row's tokens at consecutive positions, roll back with the model's own counter or by cropping the cache, or give "
        "this layer a scheme without a window"
    )


class AnglesChanged(CallRefused):
    template = (
        "expected the rotary embedding's angles to be unchanged for the {length} tokens that are cached, found different ones (at "
        "{where}); keys are stored before RoPE, so frequencies may not change while a cache lives: start a new cache, or leave pre_rope out"
    )


class AnglesUnknown(KvcompileError):
    template = (
        "expected the rotary angles of a cache that stores its keys before RoPE, found none for its {length} keys, as no compiled call has "
        "used it since it was loaded; call the compiled model with this cache before reading its values"
    )


class LengthsDiffer(CallRefused):
    template = (
        "expected the key and the value cache of one attention to hold the same number of tokens, found {keys} keys and "
        "{values} values (at {where}); reset or rebuild the cache so that both are written together"
    )


class CacheFull(CallRefused):
    template = (
        "expected room for {needed} tokens, found a static cache of capacity {capacity} (at {where}); make the cache "
        "larger, as the uncompiled model would fail here too"
    )


class PositionsUnknown(KvcompileError):
    template = "expected write positions in [0, {capacity}), found {found} (at {where}); pass positions of slots in the cache"


class PositionsNegative(PositionsUnknown, CallRefused):
    """Write positions that count from the end of the cache, which only dense tensors support."""


class Unsupported(KvcompileError):
    template = "expected {expected}, found {found} (at {where}); {todo}"


class NotServed(Unsupported, CallRefused):
    """A call that no variant of a rewritten graph can serve; the captured graph without its rewrite can."""


class TokensForgotten(Unsupported):
    """Tokens that follow others which a scheme with a window dropped when an earlier call went back."""


class TargetError(KvcompileError):
    template = "expected a target like hf:llama, a local checkpoint folder or file.py:factory, found {found!r}: {why}"


class NotPlanned(KvcompileError):
    template = (
        "expected {expected}, to count the bytes of {name}, found {found}; compile the model and read backend.report(), or plan for a part "
        "of it with a factory: file.py:factory"
    )


class SensitivityUnread(KvcompileError):
    template = "expected a file that kvcompile sensitivity wrote, found {found} ({path}); measure the model with kvcompile sensitivity"


class BudgetTooSmall(SchemeError):
    template = (
        "expected a budget of at least {least} bytes for {batch} x {context} tokens, with the schemes that were measured, found {memory}; "
        "raise the memory, make the context or the batch smaller, or measure smaller schemes with kvcompile sensitivity --schemes"
    )


class NothingToDump(KvcompileError):
    template = "expected {expected}, found {found}; {todo}"


class NothingToMeasure(KvcompileError):
    template = "expected {expected} to measure, found {found}; {todo}"


class LawBroken(KvcompileError, AssertionError):
    """Raised by a law of ``kvcompile.testing`` that a scheme does not hold; ``facts`` has the law's name."""

    template = "the scheme {scheme} does not hold the law {law!r}: expected {expected}, found {found}; {todo}"


class NotConforming(KvcompileError, AssertionError):
    """Raised by ``kvcompile.testing.conformance`` with all laws that a scheme does not hold, in ``broken``."""

    template = (
        "expected the scheme {scheme!r} to hold every law, found {count} of {tried} that it does not hold:\n{broken}\n"
        "correct the scheme as said, and call kvcompile.testing.conformance again"
    )
