"""TensorRT and TensorRT-RTX: which SDK is here, what is written beside a built engine, how one is found and run."""
