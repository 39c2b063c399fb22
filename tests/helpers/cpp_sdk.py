"""Builds the C++ SDK, for the tests that need its examples."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import zmq

SDK = Path(__file__).parents[2] / "sdk" / "cpp"
LIBZMQ = next(Path(zmq.__file__).parents[1].glob("pyzmq.libs/libzmq*.so*"), None)
NEEDS_ZMQ = pytest.mark.skipif(LIBZMQ is None, reason="this pyzmq has no libzmq of its own to build with")
EXAMPLES = ("cartpole", "connect4", "hybrid", "owned_loop", "pendulum")
SCHEMES = ("tcp", pytest.param("zmq", marks=NEEDS_ZMQ))

# As a simulator's own project uses the SDK.
PROJECT = f"""cmake_minimum_required(VERSION 3.16)
project(programs CXX)
add_subdirectory("{SDK}" sdk)
add_executable(programs programs.cpp)
target_link_libraries(programs corral)
"""


def run(*command, timeout=280):
    """What a command prints; it must succeed."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def build(folder, *targets, source=SDK):
    """Build the programs named, or all, with zmq:// by the libzmq of the pyzmq wheel if there is one."""
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: the C++ SDK is not tested (apt-get install g++ cmake)")
    with_zmq = [] if LIBZMQ is None else ["-DCORRAL_ZMQ=ON", f"-DCORRAL_ZMQ_LIBRARY={LIBZMQ}"]
    run("cmake", "-S", source, "-B", folder, "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O0", *with_zmq)
    run("cmake", "--build", folder, "-j2", *(["--target", *targets] if targets else []))


def build_examples(folder):
    """The examples, `guess` and `state_driver`: one program of many names, as the header is most of the work."""
    files = {name: SDK / "examples" / f"{name}.cpp" for name in EXAMPLES}
    files |= {name: SDK / "tests" / f"{name}.cpp" for name in ("guess", "state_driver")}
    text = "".join(path.read_text() for path in files.values())
    lines = [*sorted(set(re.findall(r"^#include <.*>$", text, re.MULTILINE))), '#include "corral.hpp"']
    for name, path in files.items():
        lines += [f"namespace program_{name} {{", f'#include "{path}"', "}"]
    lines += ["int main(int argc, char** argv) {", "  std::string name = argv[0];"]
    lines += ["  name = name.substr(name.rfind('/') + 1);"]
    lines += [f'  if (name == "{name}") return program_{name}::main(argc, argv);' for name in files]
    (folder / "programs.cpp").write_text("\n".join([*lines, "  return 2;", "}", ""]))
    (folder / "CMakeLists.txt").write_text(PROJECT)
    build(folder / "build", "programs", source=folder)
    for name in files:
        (folder / name).symlink_to("build/programs")
    return folder
