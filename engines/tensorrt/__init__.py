"""TensorRT and TensorRT-RTX: engines built for one device, run without PyTorch."""
