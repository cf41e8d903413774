"""The APIs: what each reads and writes, and the work that they share."""
