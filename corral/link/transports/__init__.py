"""What carries the link's messages: TCP, ZeroMQ, gRPC, and JSON over ZeroMQ."""
