"""The HTTP front: a process before Triton's HTTP port that bounds what a request may cost.

It imports neither torch nor Triton. `python -m smartspec_launch.front --help` runs it by itself.
"""
