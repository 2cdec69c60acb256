"""How graphs are changed: tidied, packed, given another attention, other numbers. Needs no PyTorch."""
