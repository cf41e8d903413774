"""Tools for TensorRT-LLM: the documented executor bindings, their check, and engine builds."""
