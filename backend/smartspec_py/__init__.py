"""SmartSpec: speculative decoding that decides its draft length by goodput."""

__version__ = "0.1.0"
