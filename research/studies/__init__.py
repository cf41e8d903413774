"""Studies whose tables are in docs/results; run one by `scripts/study NAME`."""
