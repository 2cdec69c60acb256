"""How a bundle's models become TensorRT engines. Needs no PyTorch."""
