"""Extensions: schemes of research, each a folder with its scheme, kernels and trainer; the core finds them by name (``schemes``)."""
