"""Handle: the tensor that a caller holds in place of a cache, and operations on it outside of compiled code."""

from kvcompile.runtime.handle import dispatch, tensor
from kvcompile.runtime.handle.views import ABOVE

ABOVE.answer, ABOVE.to_dense = dispatch.answer, tensor.to_dense
