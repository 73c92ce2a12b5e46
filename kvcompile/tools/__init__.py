"""Tools: the command line, evaluation and the planner, which use the package as its users do."""
