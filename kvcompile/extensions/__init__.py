"""Extensions: schemes from papers, each in a folder with all its own code; the core finds them by name (``schemes.registry``)."""
