"""The benchmark under load: what is sent, what came back, what it proves, and its document."""
