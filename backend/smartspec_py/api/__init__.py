"""The table of tensors: fields of requests and of responses."""
