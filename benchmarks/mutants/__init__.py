"""Mutants: small wrong changes of the package, each of which a named test must notice.

``python -m benchmarks.mutants`` makes each change of ``mutants.csv`` in a copy of the tree, and runs the test that is named for it there.
"""
