"""Handle: the tensor that a caller holds in place of a cache, and what code that is not compiled does to it."""

from kvcompile.runtime.handle import dispatch, tensor
from kvcompile.runtime.handle.views import ABOVE

ABOVE.answer, ABOVE.to_dense = dispatch.answer, tensor.to_dense
