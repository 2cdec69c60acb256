"""How models that other exporters wrote become a bundle. Needs no PyTorch."""
