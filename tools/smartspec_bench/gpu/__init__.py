"""`scripts/bench --gpu`: what speculation brings on a CUDA device, in one command of eight minutes.

It needs this checkout, torch and transformers: no Triton, no network, no installation. The shipped
pair is expanded on the device itself to what a model of 7 B parameters costs, and served in this
process by the loop that Triton's backend runs. `--dry-run` does the same on a CPU with small
models, so that tests can hold every part; on a CUDA device it has not been run yet.
"""
