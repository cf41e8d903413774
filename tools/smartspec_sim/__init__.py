"""Load and its simulation: arrivals, workloads, hardware, and the server's own loop on a virtual
clock. docs/evaluate/simulator.md says what is modelled and what is not."""
