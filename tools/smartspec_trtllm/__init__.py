"""What is particular to TensorRT-LLM: its executor bindings as documented, and their check."""
