"""Reports of benchmarks: blocks, their rendering, and what each document's report says."""
