// Simulators that only answer, for `python -m benchmarks link`. CORRAL_NOOP sets the observation: f4, f84 or image.
//   link_noop --connect tcp://127.0.0.1:5555   over the link, with corral.hpp
//   link_noop json tcp://127.0.0.1:5555        a REP socket with JSON messages for one environment each
//   link_noop bytes PORT IN OUT                receives IN bytes and sends OUT bytes, repeatedly
#include "corral.hpp"

static std::string kind() {
  const char* text = std::getenv("CORRAL_NOOP");
  return text ? text : "f4";
}

struct Noop {
  uint32_t t = 0;
  static corral::Spec spec() {
    corral::Spec s("noop", 1);
    if (kind() == "image") s.obs.box("obs", corral::U8, {4, 84, 84}, 0, 255);
    else s.obs.box("obs", corral::F32, {kind() == "f84" ? 84u : 4u}, -1e9, 1e9);
    s.act.discrete("action", 2);
    return s;
  }
  void reset(uint64_t, corral::Out& o) { t = 0, observe(o); }
  void step(const corral::In& a, corral::Out& o) { t += 1 + static_cast<uint32_t>(a.i("action")), o.reward = 1, observe(o); }
  void observe(corral::Out& o) {
    static const std::string kind = ::kind();
    if (kind == "image") return void(std::memset(o.u8("obs"), static_cast<int>(t & 255), 4 * 84 * 84));
    std::fill_n(o.f32("obs"), kind == "f84" ? 84 : 4, static_cast<float>(t));
  }
};

static int bytes(const char* port, size_t in, size_t out) {
  int fd = ::socket(AF_INET, SOCK_STREAM, 0), on = 1;
  sockaddr_in to{};
  to.sin_family = AF_INET, to.sin_port = htons(static_cast<uint16_t>(std::atoi(port))), to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) < 0) return 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  std::string room(std::max(in, out), 'x');
  while (true) {
    for (size_t got = 0; got < in;) {
      ssize_t size = ::recv(fd, &room[got], in - got, 0);
      if (size <= 0) return 0;
      got += static_cast<size_t>(size);
    }
    for (size_t sent = 0; sent < out;) {
      ssize_t size = ::send(fd, &room[sent], out - sent, MSG_NOSIGNAL);
      if (size <= 0) return 0;
      sent += static_cast<size_t>(size);
    }
  }
}

#ifdef CORRAL_ZMQ
static int json(const char* url) {
  void* socket = zmq_socket(zmq_ctx_new(), 4);  // REP
  int alone_ms = 600000;
  zmq_setsockopt(socket, 27, &alone_ms, sizeof alone_ms);  // RCVTIMEO: ends when requests cease
  if (zmq_bind(socket, url) != 0) return 1;
  std::vector<uint32_t> t(65536);
  for (zmq_msg_t message;;) {
    zmq_msg_init(&message);
    if (zmq_msg_recv(&message, socket, 0) < 0) return 0;
    std::string text(static_cast<char*>(zmq_msg_data(&message)), zmq_msg_size(&message));
    zmq_msg_close(&message);
    auto number = [&](const char* key) {
      size_t at = text.find(key);
      return at == text.npos ? 0l : std::atol(text.c_str() + at + std::strlen(key));
    };
    uint32_t& now = t[static_cast<size_t>(number("\"env\":")) & 65535];
    now += 1 + static_cast<uint32_t>(number("\"action\":"));
    char answer[256];
    double x = now;
    int size = std::snprintf(answer, sizeof answer, "{\"obs\": [%.9g, %.9g, %.9g, %.9g], \"reward\": 1.0, \"terminated\": false, \"truncated\": false}", x, x, x, x);
    zmq_send(socket, answer, static_cast<size_t>(size), 0);
  }
}
#endif

int main(int argc, char** argv) {
  std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "bytes" && argc == 5) return bytes(argv[2], std::stoul(argv[3]), std::stoul(argv[4]));
#ifdef CORRAL_ZMQ
  if (mode == "json" && argc == 3) return json(argv[2]);
#endif
  return corral::serve<Noop>(argc, argv);
}
