"""Times a layer of routed experts; `scripts/bench_moe.py` is its command line."""
