"""The HTTP front: a proxy process for Triton's HTTP port that limits the cost of a request.

It imports neither torch nor Triton. `python -m smartspec_launch.front` runs it alone.
"""
