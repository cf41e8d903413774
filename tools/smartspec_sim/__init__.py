"""The simulator: arrivals, workloads, hardware, and the server's own step loop on a virtual clock.
docs/evaluate/simulator.md lists what it models and what it does not."""
