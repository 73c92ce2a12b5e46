"""Host: how kernels are launched, and what is asked of Inductor's buffers."""
