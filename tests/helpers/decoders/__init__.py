"""Every decoder of the link, as a function of bytes that raises only on a bug, and valid bytes to start from.

The fuzzers share them: test_fuzz.py (a million each in `make fuzz`), test_fuzz_hypothesis.py, and fuzz_atheris.py.
"""

from helpers.decoders.json_loop import JsonLoop, decode_json, good_json, good_loops
from helpers.decoders.plain import (
    decode_frames,
    decode_grpc,
    decode_meta,
    decode_space,
    decode_url,
    decode_value,
    good_metas,
    good_spaces,
    good_values,
)  # fmt: skip
from helpers.decoders.simulator import ExportedState, Planner, Simulator, good_answers, good_requests
from helpers.decoders.state_store import StateClient, StateServing, good_state_answers, good_state_requests
from helpers.decoders.wires import VECTORS

# name: what makes the decoder, and what makes valid bytes for it
DECODERS = {
    "frames": (lambda: decode_frames, lambda: VECTORS),
    "grpc": (lambda: decode_grpc, lambda: VECTORS),
    "meta": (lambda: decode_meta, good_metas),
    "space": (lambda: decode_space, good_spaces),
    "value": (lambda: decode_value, good_values),
    "exported": (ExportedState, lambda: [ExportedState().good()]),
    "url": (
        lambda: decode_url,
        lambda: [b"tcp://127.0.0.1:5555", b"zmq+json://[::1]:0/", b"grpc://*:80", b"zmq://a.b-c:1"],
    ),
    "json": (lambda: decode_json, good_json),
    "json_loop": (JsonLoop, good_loops),
    "simulator": (Simulator, good_requests),
    "planner": (Planner, good_answers),
    "state_server": (StateServing, good_state_requests),
    "state_client": (StateClient, good_state_answers),
}
