"""The command line: explain, dump, bench, plan, sensitivity, schemes, eval, survey. Reads and prints; what it shows is made elsewhere.

    kvcompile explain hf:llama --scheme int4
    kvcompile dump model.py:make --scheme int8 --stage rewritten
"""
