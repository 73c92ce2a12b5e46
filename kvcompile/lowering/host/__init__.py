"""Host: kernel launches, and queries to Inductor's buffers."""
