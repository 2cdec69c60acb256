"""What may draft beside a target: a model of its own, fewer bits, fewer tokens, other tokens, a head."""
