"""How two models write a text: the decoding loop and the interface for users. Needs no torch, names no runtime."""
