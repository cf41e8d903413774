"""Fakes of engines, proposers and executors, and a server without Triton."""
