"""Which proposed tokens are kept: pure functions of laws and randomness, whoever proposed."""
