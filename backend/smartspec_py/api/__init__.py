"""The table of tensors: what a request may say, and what it is answered."""
