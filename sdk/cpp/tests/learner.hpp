// A learner of a few lines, and a simulator within the test's process to ask.
#pragma once
#include "check.hpp"

namespace test {

using namespace corral::detail;

inline uint16_t operator|(StatusCode a, int b) { return static_cast<uint16_t>(int(a) | b); }

template <class T>
std::string column(std::initializer_list<T> values) {
  return std::string(reinterpret_cast<const char*>(values.begin()), values.size() * sizeof(T));
}
inline std::string slots(std::initializer_list<uint32_t> values) { return column(values); }
inline std::string u64(std::initializer_list<uint64_t> values) { return column(values); }
inline std::string i64(std::initializer_list<int64_t> values) { return column(values); }

// What a learner may say in the handshake.
struct Manners {
  std::string token;
  uint32_t knock = 0, session = 77;
  bool resumed = false;
  Limits limits;
  unsigned version = 1;
};

class Learner {
 public:
  Learner() = default;
  Learner(const Learner&) = delete;
  Learner& operator=(const Learner&) = delete;
  ~Learner() { cut(); }

  void dial(const std::string& url) {
    cut();
    for (int i = 0; i < 100 && fd_ < 0; ++i) {
      fd_ = corral::detail::dial(*Address::parse(url), -1);
      if (fd_ < 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    CHECK(fd_ >= 0);
    adopt(fd_);
  }
  void adopt(int fd) {
    fd_ = fd;
    int on = 1;
    ::setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    reader_ = FrameReader();
    reader_.most_bytes = kMostMessage;
  }
  // The connection breaks, as far as the simulator can see.
  void cut() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  bool is_cut() const { return fd_ < 0; }

  // KNOCK to READY. False when the simulator refuses; `last` says how.
  bool shake(const Manners& manners, bool knock = true) {
    if (knock) {
      Packer meta;
      meta.map(3).text("versions").array(1).array(2).uint(1).uint(0).text("role").text("learner").text("session").uint(manners.knock);
      post(KNOCK, 0, 0, 0, {}, meta.bytes());
    }
    if (!next(hello_) || hello_.op != HELLO) return false;
    std::string nonce = "0123456789abcdef", theirs(hello_.meta["nonce"].string());
    Packer meta;
    meta.map(8).text("version").array(2).uint(manners.version).uint(0).text("session").uint(manners.session);
    meta.text("resumed").boolean(manners.resumed).text("nonce").bin(nonce);
    meta.text("proof").bin(prove(manners.token, "corral-learner", theirs, nonce)).text("window").uint(manners.limits.window);
    meta.text("limits").map(5).text("message").uint(manners.limits.message).text("batch").uint(manners.limits.batch);
    meta.text("slots").uint(manners.limits.slots).text("meta").uint(manners.limits.meta).text("info").uint(manners.limits.info);
    meta.text("snapshots").map(2).text("bytes").uint(manners.limits.snapshot_bytes).text("count").uint(manners.limits.snapshots);
    post(WELCOME, 0, 0, 0, {}, meta.bytes());
    if (!next(last) || last.op != READY) return false;
    CHECK(last.meta["proof"].string() == prove(manners.token, "corral-simulator", theirs, nonce));
    session = manners.session;
    return true;
  }
  const Message& hello() const { return hello_; }

  uint64_t post(uint8_t op, uint32_t batch, uint16_t flags, uint64_t seq, const std::vector<std::string>& payload, const std::string& meta = "") {
    Packet packet(op, flags);
    packet.head.seq = seq, packet.head.session = op < RESET ? 0 : session, packet.head.layout = op < RESET ? 0 : layout;
    packet.head.batch = batch, packet.head.aux = 30000, packet.meta = meta;
    for (const std::string& frame : payload) packet.payload.emplace_back(frame);
    put(packet.seal());
    return seq;
  }
  void put(const Packet& packet) {
    std::string bytes;
    for (size_t i = 0; i <= packet.frames; ++i) bytes.append(static_cast<const char*>(packet.parts[i].iov_base), packet.parts[i].iov_len);
    write(bytes.data(), bytes.size());
  }
  void write(const void* data, size_t size) {
    const char* at = static_cast<const char*>(data);
    while (size > 0 && fd_ >= 0) {
      ssize_t sent = ::send(fd_, at, size, MSG_NOSIGNAL);
      pollfd one{fd_, POLLOUT, 0};
      if (sent < 0 && errno == EAGAIN && ::poll(&one, 1, 10000) == 1) continue;
      if (sent < 0) return;
      at += sent, size -= static_cast<size_t>(sent);
    }
  }
  // False when the simulator has closed the connection, or says nothing for so long.
  bool next(Message& message, int timeout_ms = 10000) {
    Frames frames;
    while (fd_ >= 0 && !reader_.next(frames)) {
      pollfd one{fd_, POLLIN, 0};
      if (::poll(&one, 1, timeout_ms) != 1) return false;
      auto [at, size] = reader_.room();
      ssize_t got = ::recv(fd_, at, size, 0);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (got <= 0) {
        cut();
        return false;
      }
      reader_.took(static_cast<size_t>(got));
    }
    if (fd_ < 0) return false;
    message = Message::read(std::move(frames), kMostMessage);
    return true;
  }
  // Asks, and waits for the answer, which `last` keeps.
  const Message& ask(uint8_t op, uint32_t batch, const std::vector<std::string>& payload, uint16_t flags = 0, const std::string& meta = "") {
    uint64_t seq = post(op, batch, flags, ++numbers, payload, meta);
    do {
      CHECK(next(last));
    } while (last.op != ERROR && last.op != CLOSE && last.seq != seq);
    return last;
  }
  std::string words(size_t row) const { return std::string(last.meta["rows"][std::to_string(row)].string()); }

  Message last;
  uint32_t session = 77, layout = 0;
  uint64_t numbers = 0;

 private:
  int fd_ = -1;
  FrameReader reader_;
  Message hello_;
};

// A simulator that listens at a free port of this machine.
template <class Env>
class Simulator {
 public:
  explicit Simulator(unsigned threads = 1, const std::string& token = "", unsigned envs = 16, double keep_s = 30, double reading_s = 30)
      : model(Model::of<Env>()), server(model, options(threads, token, envs, keep_s, reading_s)) {
    server.start();
  }
  ~Simulator() { server.stop(0); }
  static Options options(unsigned threads, const std::string& token, unsigned envs, double keep_s, double reading_s) {
    Options o;
    o.bind = Address::parse("tcp://127.0.0.1:0"), o.threads = threads, o.token = token, o.envs = envs;
    o.keep_s = keep_s, o.reading_s = reading_s;
    return o;
  }
  // A learner that has come as far as READY.
  std::unique_ptr<Learner> learner(const Manners& manners = {}) {
    auto one = std::make_unique<Learner>();
    one->layout = model.layout;
    one->dial(server.url());
    CHECK(one->shake(manners));
    return one;
  }
  Model model;
  Server server;
};

// A reply's rows and observations.
struct Reply {
  Reply(const Message& m, const corral::Spec& spec, size_t first = 0)
      : rows(spec.players, m.batch, const_cast<char*>(m.payload(first).data())) {
    CHECK_EQ(rows.size, m.payload(first).size());
    if (m.payloads() > first + 1) obs = reinterpret_cast<const float*>(m.payload(first + 1).data());
    if (m.payloads() > first + 2) final = reinterpret_cast<const float*>(m.payload(first + 2).data());
  }
  Rows rows;
  const float *obs = nullptr, *final = nullptr;
};

}  // namespace test
