"""The process in front of Triton: its HTTP and gRPC routes and the OpenAI routes, with limits.

Triton's own HTTP and gRPC ports listen on loopback only. `python -m smartspec_gateway` runs it.
"""
