// A client of a state server that a test drives: state_driver URL TOKEN_FILE TIMEOUT_S. It reads requests and writes
// replies, each a kind of one byte and fields of a 32-bit length and bytes; tests/helpers/cpp_state_client.py is the other side.
#include <cstdio>

#include "corral.hpp"

namespace {

std::string field() {
  uint32_t size = 0;
  if (std::fread(&size, 4, 1, stdin) != 1) std::exit(0);
  std::string bytes(size, '\0');
  if (size && std::fread(bytes.data(), size, 1, stdin) != 1) std::exit(1);
  return bytes;
}

void reply(char kind, const std::vector<std::string>& fields = {}) {
  uint32_t count = static_cast<uint32_t>(fields.size());
  std::fputc(kind, stdout);
  std::fwrite(&count, 4, 1, stdout);
  for (const std::string& bytes : fields) {
    uint32_t size = static_cast<uint32_t>(bytes.size());
    std::fwrite(&size, 4, 1, stdout);
    std::fwrite(bytes.data(), 1, size, stdout);
  }
  std::fflush(stdout);
}

void carry_out(corral::StateClient& states, int kind) {
  if (kind == 'p') {
    std::string name = field(), state = field();
    states.put(name, state);
    reply('+');
  } else if (kind == 'g') {
    std::optional<std::string> state = states.get(field());
    state ? reply('+', {*state}) : reply('+');
  } else if (kind == 'd') {
    states.drop(field()) ? reply('+', {""}) : reply('+');
  } else if (kind == 'n') {
    reply('+', states.names(field()));
  } else {
    reply('+', {std::to_string(states.nbytes())});
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  try {
    corral::StateClient states(argv[1], argv[2], std::atof(argv[3]));
    for (int kind; (kind = std::fgetc(stdin)) != EOF;) {
      try {
        carry_out(states, kind);
      } catch (const corral::StatesFull& full) {
        reply('f', {full.what()});
      } catch (const corral::StateError& error) {
        reply('-', {error.what()});
      }
    }
  } catch (const corral::StateError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
