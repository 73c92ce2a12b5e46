"""The command line: explain, dump, bench, plan, sensitivity, learn, calibrate, schemes, eval, survey.

Commands parse arguments and print; the results are computed elsewhere.

    kvcompile explain hf:llama --scheme int4
    kvcompile dump model.py:make --scheme int8 --stage rewritten
"""
