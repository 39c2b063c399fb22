"""A run's policy as ONNX or TorchScript."""
