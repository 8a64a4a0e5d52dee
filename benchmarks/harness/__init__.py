"""The benchmark harness: one state, every system in turn, figures and bars.

`benchmarks/stall.py` is the entry. Nothing here is part of the distribution, and nothing in the
distribution imports it.
"""
