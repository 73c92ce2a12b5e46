"""Tools: the command line, the evaluation and the planner. They use the package as its users do."""
