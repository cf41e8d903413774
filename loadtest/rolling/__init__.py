"""The parts of rolling_restart.py: HAProxy, the servers, the load and the report."""
