"""Transports of the link's messages: TCP, ZeroMQ, gRPC, and JSON over ZeroMQ."""
