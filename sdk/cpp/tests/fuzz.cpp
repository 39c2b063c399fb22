// Random and mutated bytes into every decoder: they are refused or understood, and nothing else happens.
//   test_fuzz [iterations] [seed]        or, to write inputs that are good to begin with: test_fuzz --seeds FOLDER
// With clang and cmake -DCORRAL_LIBFUZZER=ON it is also what libFuzzer runs: libfuzzer FOLDER ... -max_total_time=600
#include <fstream>

#include "envs.hpp"

using namespace test;

namespace {

struct Alone : Crew {
  void spread(size_t count, double, const std::function<void(size_t)>& work) override {
    for (size_t i = 0; i < count; ++i) work(i);
  }
};

struct Kit {
  Kit() : model(Model::of<Saver>()), trivial(Model::of<Tricky>()), snapshots(model), others(trivial) {
    limits.batch = 64, limits.message = 1 << 16, limits.snapshots = 1000;
    engine = std::make_unique<Engine>(model, limits, 16, alone);
  }
  Model model, trivial;
  Snapshots snapshots, others;
  Alone alone;
  Limits limits;
  std::unique_ptr<Engine> engine;
};
Kit& kit() {
  static Kit one;
  return one;
}

// Looks at all that a decoder understood, so that sanitizers see whether it is there.
void look(const Value& value, int depth = 0) {
  volatile size_t sum = value.string().size() + value.uint().value_or(0) + value.is_true();
  for (char byte : value.string()) sum = sum + static_cast<size_t>(byte);
  if (depth < 3 && value.kind() == Value::List)
    for (size_t i = 0; i < std::min<size_t>(value.size(), 8); ++i) look(value[i], depth + 1);
  if (depth < 3 && value.kind() == Value::Map)
    for (const char* key : {"versions", "session", "limits", "message", "rows", "", "steps"}) look(value[key], depth + 1);
}

template <class F>
void refused_or_good(F&& decode) {
  try {
    decode();
  } catch (const BadMessage&) {
  } catch (const BadRequest&) {
  } catch (const std::out_of_range&) {
  }
}

// The same for states, which are given to an environment: what its author throws is a refusal as well.
void state(const Snapshots& snapshots, std::string_view bytes) {
  refused_or_good([&] {
    try {
      snapshots.unpack(bytes);
    } catch (const std::runtime_error& error) {
      if (std::string(error.what()) != "not mine") throw;
    }
  });
}

#ifndef CORRAL_LIBFUZZER
void requests(std::string_view stream) {
  refused_or_good([&] {
    FrameReader reader;
    reader.most_bytes = 1 << 16;
    size_t piece = 1 + stream.size() % 100;
    while (!stream.empty()) {
      auto [at, size] = reader.room();
      size_t some = std::min({size, piece, stream.size()});
      std::memcpy(at, stream.data(), some);
      reader.took(some);
      stream.remove_prefix(some);
      for (Frames frames; reader.next(frames);) {
        Message message = Message::read(std::move(frames));
        look(message.meta);
        refused_or_good([&] {
          kit().engine->check(message);
          if (Engine::takes_slots(message.op) && message.batch > 1) return;  // a session sees to it that slots differ
          Packet reply(message.op, REPLY);
          kit().engine->carry_out(message, reply);
          reply.seal();
        });
      }
    }
  });
}

#endif

std::string knock_meta() {
  return Packer().map(2).text("versions").array(1).array(2).uint(1).uint(0).text("role").text("learner").bytes();
}
std::string welcome_meta() {
  Packer meta;
  meta.map(8).text("version").array(2).uint(1).uint(0).text("session").uint(77).text("resumed").boolean(false);
  meta.text("nonce").bin("0123456789abcdef").text("proof").bin("").text("window").uint(16);
  meta.text("limits").map(5).text("message").uint(1 << 16).text("batch").uint(64).text("slots").uint(16).text("meta").uint(4096);
  meta.text("info").uint(100).text("snapshots").map(2).text("bytes").uint(1 << 20).text("count").uint(100);
  return meta.bytes();
}

#ifdef CORRAL_LIBFUZZER
// A learner that only takes.
struct Ear : Wire {
  explicit Ear(FrameReader& reader) : Wire(20, false, "a fuzzer"), reader(reader) {}
  void send(PacketPtr) override {}
  void flush() override {}
  void close(bool) override { closed = true; }
  void allow(size_t most) override { reader.most_bytes = std::min<size_t>(most, 1 << 20); }
  FrameReader& reader;
  bool closed = false;
};

Frames frames_of(const Packet& packet) {
  std::vector<size_t> lengths;
  for (size_t i = 1; i <= packet.frames; ++i) lengths.push_back(packet.parts[i].iov_len);
  Frames frames(lengths);
  for (size_t i = 0; i < lengths.size(); ++i) std::memcpy(frames.data(i), packet.parts[i + 1].iov_base, lengths[i]);
  return frames;
}

// Into a whole simulator without sockets or threads, made for this input alone, so that what is found happens again.
// Bytes that do not begin with a handshake come after one, with an episode in slot 0 and a state 1.
void simulator(std::string_view stream) {
  Options options;
  options.envs = 16;
  Server server(kit().model, options);
  FrameReader reader;
  auto wire = std::make_shared<Ear>(reader);
  server.opened(wire);
  auto give = [&](Frames frames) {
    server.took(wire, std::move(frames));
    server.pool.work();
  };
  auto send = [&](uint8_t op, const std::vector<std::string>& payload, const std::string& meta = "") {
    Packet packet(op);
    packet.meta = meta, packet.head.batch = 1, packet.head.seq = op;
    if (op >= RESET) packet.head.session = 77, packet.head.layout = kit().model.layout;
    for (const std::string& frame : payload) packet.payload.emplace_back(frame);
    give(frames_of(packet.seal()));
  };
  auto greet = [&] {
    send(KNOCK, {}, knock_meta()), send(WELCOME, {}, welcome_meta());
    send(RESET, {slots({0}), u64({1})}), send(SAVE, {slots({0}), u64({1})});
    CHECK(wire->session && wire->session->engine->store.get(1));  // or all that follows is refused, and nothing is fuzzed
  };
  refused_or_good([&] {
    for (bool first = true; !stream.empty() && !wire->closed;) {
      auto [at, size] = reader.room();
      size_t some = std::min(size, stream.size());
      std::memcpy(at, stream.data(), some);
      reader.took(some);
      stream.remove_prefix(some);
      for (Frames frames; !wire->closed && reader.next(frames); first = false) {
        if (frames.frame[0].size() == sizeof(Header)) {  // past the checks of session and layout
          uint8_t op = static_cast<uint8_t>(frames.data(0)[3]);
          if (first && op >= RESET) greet();
          if (wire->session) std::memcpy(frames.data(0) + 16, &wire->session->number, 4);
          if (op >= RESET) std::memcpy(frames.data(0) + 20, &kit().model.layout, 4);
        }
        give(std::move(frames));
      }
    }
  });
  server.lost(wire);
}
#endif

// The same bytes with the length and the checksum that a state of them would have.
std::string as_state(std::string bytes) {
  constexpr size_t kCrc = 21, kBody = 33;
  if (bytes.size() < kBody) return bytes;
  uint64_t size = bytes.size() - kBody;
  uint32_t crc = crc32(std::string_view(bytes).substr(kBody));
  std::memcpy(&bytes[kCrc], &crc, 4), std::memcpy(&bytes[kCrc + 4], &size, 8);
  return bytes;
}

int run(const uint8_t* data, size_t size) {
  std::string heap(reinterpret_cast<const char*>(data), size);  // exactly as long, so that reading beyond it is seen
  std::string_view bytes(heap);
  refused_or_good([&] { look(Value::read(bytes)); });
#ifdef CORRAL_LIBFUZZER
  simulator(bytes);
#else
  requests(bytes);
#endif
  for (const std::string& one : {heap, as_state(heap)}) state(kit().snapshots, one), state(kit().others, one);
  refused_or_good([&] {
    corral::View view(bytes);
    std::vector<double> values;
    std::string text;
    view.get(text), view.get(values), view.get<uint64_t>();
  });
  if (auto address = Address::parse(heap)) CHECK(!address->url().empty());
  CHECK(is_utf8(clean_text(bytes, 50)) && clean_text(bytes, 50).size() <= 50);
  return 0;
}

#ifndef CORRAL_LIBFUZZER
std::string message(uint8_t op, uint32_t batch, const std::vector<std::string>& payload, const std::string& meta = "", uint16_t flags = 0) {
  Packet packet(op, flags);
  packet.head.batch = batch, packet.head.seq = 5, packet.meta = meta;
  for (const std::string& frame : payload) packet.payload.emplace_back(frame);
  packet.seal();
  std::string out;
  for (size_t i = 0; i <= packet.frames; ++i) out.append(static_cast<const char*>(packet.parts[i].iov_base), packet.parts[i].iov_len);
  return out;
}

std::vector<std::string> good_inputs() {
  std::vector<std::string> all;
  all.push_back(message(RESET, 1, {slots({0}), u64({1})}));
  all.push_back(message(STEP, 1, {slots({0}), i64({ADD})}));
  for (int64_t action : {END, THROW, NOT_A_NUMBER, LOSE_LIFE, CUT_OFF}) all.push_back(message(STEP, 1, {slots({0}), i64({action})}, "", AUTORESET));
  all.push_back(message(SAVE, 1, {slots({0}), u64({1})}));
  all.push_back(message(LOAD, 1, {slots({1}), u64({1})}));
  all.push_back(message(LOAD, 1, {slots({0}), u64({1})}, "", WANT_OBS));
  all.push_back(message(EXPAND, 2, {u64({1, 1}), i64({ADD, END}), u64({2, 0})}));
  all.push_back(message(EXPAND, 1, {u64({1}), i64({ADD}), u64({2}), u64({3})}));
  all.push_back(message(ROLLOUT, 2, {u64({1, 1}), i64({ADD, ADD, ADD, ADD})}, Packer().map(1).text("steps").uint(2).bytes()));
  all.push_back(message(DROP, 2, {u64({1, 2})}));
  all.push_back(message(DROP, 0, {}, Packer().map(1).text("generation").uint(0).bytes()));
  all.push_back(message(EXPORT, 1, {u64({1})}));
  all.push_back(message(STATS, 0, {}));
  requests(message(RESET, 1, {slots({0}), u64({1})})), requests(message(SAVE, 1, {slots({0}), u64({1})}));  // so that there is a state
  std::string state = kit().snapshots.pack(*kit().engine->store.get(1));
  all.push_back(state);
  all.push_back(message(IMPORT, 1, {u64({3}), u64({state.size()}), state}));
  all.push_back(welcome_meta());
  all.push_back(message(KNOCK, 0, {}, knock_meta()));
  all.push_back(message(WELCOME, 0, {}, welcome_meta()));
  all.push_back("tcp://[::1]:5555/");
  size_t singles = all.size();
  for (size_t i = 0; i + 1 < singles; ++i) all.push_back(all[i] + all[i + 1]);
  return all;
}

std::string mutate(std::string text, corral::Rng& rng, const std::vector<std::string>& all) {
  static const uint64_t odd[] = {0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, ~uint64_t(0)};
  for (int64_t i = 0, times = 1 + rng.below(4); i < times; ++i) {
    size_t at = text.empty() ? 0 : static_cast<size_t>(rng.below(static_cast<int64_t>(text.size())));
    switch (rng.below(7)) {
      case 0: if (!text.empty()) text[at] = static_cast<char>(rng.next()); break;
      case 1: if (!text.empty()) text[at] ^= static_cast<char>(1 << rng.below(8)); break;
      case 2: text.resize(at); break;
      case 3: text.insert(at, std::string(static_cast<size_t>(rng.below(9)), static_cast<char>(rng.next()))); break;
      case 4: text.erase(at, static_cast<size_t>(rng.below(9))); break;
      case 5: {
        size_t size = size_t(1) << rng.below(4);
        if (text.size() >= at + size) std::memcpy(&text[at], &odd[rng.below(11)], size);
        break;
      }
      default: {
        const std::string& other = all[static_cast<size_t>(rng.below(static_cast<int64_t>(all.size())))];
        text = text.substr(0, at) + other.substr(std::min(at, other.size()));
      }
    }
  }
  return text;
}

// The same into a whole simulator: it answers, closes, or waits, and goes on serving others.
void over_the_wire(int64_t iterations, corral::Rng& rng, const std::vector<std::string>& all) {
  Simulator<Tricky> sim(2);
  Manners other;
  other.session = 1;
  auto witness = sim.learner(other);
  witness->ask(RESET, 1, {slots({0}), u64({1})});
  float count = 0;
  for (int64_t i = 0; i < iterations; ++i) {
    Learner learner;
    learner.layout = sim.model.layout;
    learner.dial(sim.server.url());
    if (rng.below(4) && !learner.shake({})) continue;
    std::string bytes = mutate(all[static_cast<size_t>(rng.below(static_cast<int64_t>(all.size())))], rng, all);
    if (bytes.size() > 60 && rng.below(2)) {  // past the checks of session and layout
      size_t frames = static_cast<uint8_t>(bytes[4]);
      if (frames >= 1 && frames <= 8 && bytes.size() > 8 + 4 * frames + 24) {
        std::memcpy(&bytes[8 + 4 * frames + 16], &learner.session, 4);
        std::memcpy(&bytes[8 + 4 * frames + 20], &learner.layout, 4);
      }
    }
    learner.write(bytes.data(), bytes.size());
    if (rng.below(2)) learner.next(learner.last, 5);
    Reply step(witness->ask(STEP, 1, {slots({0}), i64({ADD})}), sim.model.spec);
    CHECK_EQ(step.obs[0], ++count);
  }
}

int write_seeds(const std::string& folder) {
  size_t number = 0;
  for (const std::string& one : good_inputs()) std::ofstream(folder + "/good_" + std::to_string(number++), std::ios::binary) << one;
  return number ? 0 : 1;
}

int run_all(int64_t iterations, uint64_t seed) {
  corral::Rng rng(seed);
  std::vector<std::string> all = good_inputs();
  for (const std::string& one : all) run(reinterpret_cast<const uint8_t*>(one.data()), one.size());
  for (int64_t i = 0; i < iterations; ++i) {
    std::string bytes;
    if (rng.below(4) == 0)
      for (int64_t k = rng.below(200); k > 0; --k) bytes.push_back(static_cast<char>(rng.next()));
    else
      bytes = mutate(all[static_cast<size_t>(rng.below(static_cast<int64_t>(all.size())))], rng, all);
    run(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  }
  over_the_wire(iterations / 100, rng, all);
  return 0;
}
#endif

}  // namespace

#ifdef CORRAL_LIBFUZZER
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) { return run(data, size); }
#else
int main(int argc, char** argv) {
  if (argc > 2 && std::string(argv[1]) == "--seeds") return write_seeds(argv[2]);
  int64_t iterations = argc > 1 ? std::atoll(argv[1]) : 20000;
  uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  try {
    return run_all(iterations, seed);
  } catch (const Failed&) {
    std::fprintf(stderr, "failed with iterations %ld, seed %lu\n", static_cast<long>(iterations), static_cast<unsigned long>(seed));
    return 1;
  }
}
#endif
