export PYTHONPATH=. PYTHONUNBUFFERED=1
timeout 100 python3 -m pytest -q --maxfail=40 -n 14 tests/test_gpu_attend.py -k "equals_eager and (kivi or rotary or recent or lookup)" 2>&1 | grep "^FAILED\|passed\|failed\|^E .*error " | cut -c1-250
timeout 110 python3 benchmarks/attention.py --quick --schemes "int4;kivi(bits=4);kivi(bits=2);table" --json $OUT/quick.json 2>&1 | tail -20
timeout 150 python3 sweep2.py 2>&1 | tail -80
