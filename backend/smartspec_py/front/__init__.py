"""The HTTP front: a process before Triton's HTTP port that bounds what a request may cost.

It imports neither torch nor Triton. `python -m smartspec_py.front --help` runs it by itself.
"""
