"""Leadout: speculative decoding you can deploy."""
