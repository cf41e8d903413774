"""An OpenAI-compatible HTTP endpoint in front of Triton. It imports no engine."""
