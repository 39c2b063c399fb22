// corral.hpp: turns an environment struct into a simulator that speaks CLP/1 (docs/link.md).
//
// C++17, Linux, no dependencies; -DCORRAL_ZMQ adds zmq://, for which any libzmq is linked. Authors need Spec, In, Out,
// Rng and serve<Env>() below, or Client if they own the main loop; StateClient is for states that others should have.
// corral::detail is not for them. See README.md.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "corral.hpp writes numbers as they are in memory, and the protocol is little-endian"
#endif

#if defined(CORRAL_ZMQ) && !defined(ZMQ_VERSION)  // what is used of libzmq, whose ABI is stable: no zmq.h is needed
extern "C" {
struct zmq_msg_t {
  alignas(8) unsigned char bytes[64];
};
void *zmq_ctx_new(void), *zmq_socket(void*, int), *zmq_msg_data(zmq_msg_t*);
int zmq_ctx_term(void*), zmq_close(void*), zmq_bind(void*, const char*), zmq_connect(void*, const char*), zmq_errno(void);
int zmq_setsockopt(void*, int, const void*, size_t), zmq_getsockopt(void*, int, void*, size_t*);
int zmq_socket_monitor(void*, const char*, int), zmq_send(void*, const void*, size_t, int);
int zmq_msg_init(zmq_msg_t*), zmq_msg_recv(zmq_msg_t*, void*, int), zmq_msg_close(zmq_msg_t*);
int zmq_msg_more(const zmq_msg_t*), zmq_msg_get(const zmq_msg_t*, int);
size_t zmq_msg_size(const zmq_msg_t*);
const char* zmq_strerror(int);
}
#endif

namespace corral {

// == bytes ==============================================================================================================

// Bytes to write to: what save() and get_key_state() fill.
class Buf {
 public:
  void put(const void* data, size_t size) { bytes_.append(static_cast<const char*>(data), size); }
  template <class T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable<T>::value, "write its members one by one");
    put(&value, sizeof value);
  }
  template <class T>
  void put(const std::vector<T>& values) {
    static_assert(std::is_trivially_copyable<T>::value, "write its elements one by one");
    put(static_cast<uint64_t>(values.size()));
    put(values.data(), values.size() * sizeof(T));
  }
  void put(const std::string& text) {
    put(static_cast<uint64_t>(text.size()));
    put(text.data(), text.size());
  }
  size_t size() const { return bytes_.size(); }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Bytes to read from, in the order they were written. Reading beyond their end throws.
class View {
 public:
  View(const void* data, size_t size) : at_(static_cast<const char*>(data)), left_(size) {}
  explicit View(std::string_view bytes) : View(bytes.data(), bytes.size()) {}

  const char* data() const { return at_; }
  size_t size() const { return left_; }
  std::string_view bytes(size_t size) {
    if (size > left_) throw std::out_of_range("the state ends too early");
    std::string_view some(at_, size);
    at_ += size, left_ -= size;
    return some;
  }
  void get(void* data, size_t size) {
    std::string_view some = bytes(size);
    if (size) std::memcpy(data, some.data(), size);
  }
  template <class T>
  void get(T& value) {
    static_assert(std::is_trivially_copyable<T>::value, "read its members one by one");
    get(&value, sizeof value);
  }
  template <class T>
  T get() {
    T value;
    get(value);
    return value;
  }
  template <class T>
  void get(std::vector<T>& values) {
    static_assert(std::is_trivially_copyable<T>::value, "read its elements one by one");
    uint64_t count = get<uint64_t>();
    if (count > left_ / sizeof(T)) throw std::out_of_range("the state ends too early");
    values.resize(count);
    get(values.data(), count * sizeof(T));
  }
  void get(std::string& text) { text = std::string(bytes(get<uint64_t>())); }

 private:
  const char* at_;
  size_t left_;
};

namespace detail {

// Memory that begins at a multiple of 64, as leaves do within it. Not initialised: it is received into, or zeroed.
class Bytes {
 public:
  Bytes() = default;
  explicit Bytes(size_t size) : data_(static_cast<char*>(::operator new(size, std::align_val_t(64)))), size_(size) {}
  explicit Bytes(std::string_view text) : Bytes(text.size()) {
    if (size_) std::memcpy(data(), text.data(), size_);
  }
  static Bytes zeros(size_t size) {
    Bytes bytes(size);
    std::memset(bytes.data(), 0, size);
    return bytes;
  }
  char* data() const { return data_.get(); }
  size_t size() const { return size_; }
  std::string_view text() const { return {data(), size_}; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data());
  }

 private:
  struct Free {
    void operator()(char* data) const { ::operator delete(data, std::align_val_t(64)); }
  };
  std::unique_ptr<char, Free> data_;
  size_t size_ = 0;
};

// How many bytes the UTF-8 character at the start of `text` has; 0 where there is none.
inline size_t utf8_length(std::string_view text) {
  auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  unsigned first = byte(0);
  size_t size = first < 0x80 ? 1 : first < 0xC2 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : first < 0xF5 ? 4 : 0;
  if (size > text.size()) return 0;
  for (size_t i = 1; i < size; ++i)
    if ((byte(i) & 0xC0) != 0x80) return 0;
  bool overlong = (first == 0xE0 && byte(1) < 0xA0) || (first == 0xF0 && byte(1) < 0x90);
  bool beyond = (first == 0xED && byte(1) > 0x9F) || (first == 0xF4 && byte(1) > 0x8F);
  return overlong || beyond ? 0 : size;
}

inline bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    size_t size = utf8_length(text);
    if (size == 0) return false;
    text.remove_prefix(size);
  }
  return true;
}

// Words that any receiver can read: what an author throws may be any bytes, of any length.
inline std::string clean_text(std::string_view text, size_t most) {
  std::string clean;
  while (!text.empty()) {
    size_t size = utf8_length(text);
    if (clean.size() + std::max<size_t>(size, 1) > most) break;
    size ? (void)clean.append(text.substr(0, size)) : clean.push_back('?');
    text.remove_prefix(std::max<size_t>(size, 1));
  }
  return clean;
}

template <class... Parts>
std::string say(const Parts&... parts) {
  struct Words {
    std::string text;
    void add(std::string_view part) { text += part; }
    void add(const std::string& part) { text += part; }
    void add(const char* part) { text += part; }
    void add(double number) {
      char room[32];
      std::snprintf(room, sizeof room, "%g", number);
      text += room;
    }
    void add(int number) { text += std::to_string(number); }
    void add(unsigned number) { text += std::to_string(number); }
    void add(long number) { text += std::to_string(number); }
    void add(unsigned long number) { text += std::to_string(number); }
  } words;
  (words.add(parts), ...);
  return words.text;
}

// == msgpack ============================================================================================================

// Bytes of a peer that are no message.
struct BadMessage : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Writes MessagePack. Whoever begins a map or an array writes as many entries as announced.
class Packer {
 public:
  Packer& nil() { return tag(0xC0); }
  Packer& boolean(bool value) { return tag(value ? 0xC3 : 0xC2); }
  Packer& uint(uint64_t value) {
    if (value < 0x80) return tag(static_cast<uint8_t>(value));
    if (value <= 0xFF) return tag(0xCC).big(value, 1);
    if (value <= 0xFFFF) return tag(0xCD).big(value, 2);
    return value <= 0xFFFFFFFF ? tag(0xCE).big(value, 4) : tag(0xCF).big(value, 8);
  }
  Packer& integer(int64_t value) {
    if (value >= 0) return uint(static_cast<uint64_t>(value));
    if (value >= -32) return tag(static_cast<uint8_t>(value));
    return tag(0xD3).big(static_cast<uint64_t>(value), 8);
  }
  Packer& real(double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, 8);
    return tag(0xCB).big(bits, 8);
  }
  Packer& text(std::string_view value) {
    size(value.size(), 0xA0, 32, 0xD9, 0xDA, 0xDB);
    bytes_ += value;
    return *this;
  }
  Packer& bin(std::string_view value) {
    size(value.size(), 0, 0, 0xC4, 0xC5, 0xC6);
    bytes_ += value;
    return *this;
  }
  Packer& array(size_t count) { return size(count, 0x90, 16, 0, 0xDC, 0xDD); }
  Packer& map(size_t count) { return size(count, 0x80, 16, 0, 0xDE, 0xDF); }
  const std::string& bytes() const { return bytes_; }

 private:
  Packer& tag(uint8_t byte) {
    bytes_.push_back(static_cast<char>(byte));
    return *this;
  }
  Packer& big(uint64_t value, int size) {
    while (size-- > 0) bytes_.push_back(static_cast<char>(value >> (8 * size)));
    return *this;
  }
  // The shortest of four forms; a form whose tag is 0 does not exist.
  Packer& size(size_t n, uint8_t fix, size_t below, uint8_t one, uint8_t two, uint8_t four) {
    if (n < below) return tag(static_cast<uint8_t>(fix | n));
    if (one && n <= 0xFF) return tag(one).big(n, 1);
    return n <= 0xFFFF ? tag(two).big(n, 2) : tag(four).big(n, 4);
  }
  std::string bytes_;
};

// A value within a meta frame that has been checked. It is never unpacked: lookups walk the bytes, so that a peer cannot
// make a small frame cost much memory, not even one that has not proven anything yet.
class Value {
 public:
  enum Kind { Absent, Null, Boolean, Whole, Real, Text, Bin, List, Map };

  Value() = default;
  // The map that a frame holds, checked to its last byte.
  static Value read(std::string_view frame) {
    const char* at = frame.data();
    const char* end = at + frame.size();
    if (!skip(at, end, 16) || at != end) throw BadMessage("a meta frame that cannot be read");
    Value value(frame.data(), end);
    if (value.token_.kind != Map) throw BadMessage("a meta frame that is not a map");
    return value;
  }

  Kind kind() const { return token_.kind; }
  size_t size() const { return token_.count; }
  Value operator[](std::string_view key) const {
    const char* at = body_;
    for (uint64_t i = 0; token_.kind == Map && i < token_.count; ++i) {
      Value name(at, end_);
      at = name.body_ + name.token_.count;
      if (name.string() == key) return Value(at, end_);
      skip(at, end_, 16);
    }
    return Value();
  }
  Value operator[](size_t index) const {
    if (token_.kind != List || index >= token_.count) return Value();
    const char* at = body_;
    while (index-- > 0) skip(at, end_, 16);
    return Value(at, end_);
  }
  // Calls `use` with each entry of a list.
  template <class F>
  void each(F&& use) const {
    const char* at = body_;
    for (uint64_t i = 0; token_.kind == List && i < token_.count; ++i, skip(at, end_, 16)) use(Value(at, end_));
  }
  bool is_true() const { return token_.kind == Boolean && token_.count; }
  // Text or bin; empty where it is something else.
  std::string_view string() const {
    return token_.kind == Text || token_.kind == Bin ? std::string_view(body_, token_.count) : std::string_view();
  }
  std::optional<uint64_t> uint() const {
    return token_.kind == Whole && !token_.negative ? std::optional<uint64_t>(token_.count) : std::nullopt;
  }

 private:
  struct Token {
    Kind kind = Absent;
    uint64_t count = 0;  // of bytes or entries; or the number itself
    bool negative = false;
  };

  Value(const char* at, const char* end) : body_(at), end_(end) { next(body_, end, token_); }

  static bool number(const char*& at, const char* end, int size, uint64_t& value) {
    if (end - at < size) return false;
    value = 0;
    while (size-- > 0) value = value << 8 | static_cast<uint8_t>(*at++);
    return true;
  }
  // The head of the value at `at`, which moves behind it.
  static bool next(const char*& at, const char* end, Token& token) {
    if (at == end) return false;
    uint8_t tag = static_cast<uint8_t>(*at++);
    auto is = [&](Kind kind, uint64_t count) {
      token.kind = kind, token.count = count;
      return true;
    };
    auto sized = [&](Kind kind, int size) { return token.kind = kind, number(at, end, size, token.count); };
    if (tag < 0x80) return is(Whole, tag);
    if (tag < 0x90) return is(Map, tag & 15);
    if (tag < 0xA0) return is(List, tag & 15);
    if (tag < 0xC0) return is(Text, tag & 31);
    if (tag >= 0xE0) return token.negative = true, is(Whole, static_cast<uint64_t>(static_cast<int8_t>(tag)));
    switch (tag) {
      case 0xC0: return is(Null, 0);
      case 0xC2: case 0xC3: return is(Boolean, tag & 1);
      case 0xC4: case 0xC5: case 0xC6: return sized(Bin, 1 << (tag - 0xC4));
      case 0xCB: return sized(Real, 8);
      case 0xCC: case 0xCD: case 0xCE: case 0xCF: return sized(Whole, 1 << (tag - 0xCC));
      case 0xD0: case 0xD1: case 0xD2: case 0xD3: return sized(Whole, 1 << (tag - 0xD0)) && sign(token, 1 << (tag - 0xD0));
      case 0xD9: case 0xDA: case 0xDB: return sized(Text, 1 << (tag - 0xD9));
      case 0xDC: case 0xDD: return sized(List, 2 << (tag - 0xDC));
      case 0xDE: case 0xDF: return sized(Map, 2 << (tag - 0xDE));
      default: return false;  // extensions and float 32 are not of this protocol
    }
  }
  static bool sign(Token& token, int size) {
    token.negative = token.count >> (8 * size - 1) & 1;
    return true;
  }
  static bool skip(const char*& at, const char* end, int depth) {
    Token token;
    if (!next(at, end, token)) return false;
    if (token.kind == Text || token.kind == Bin) {
      if (token.count > static_cast<uint64_t>(end - at)) return false;
      if (token.kind == Text && !is_utf8({at, token.count})) return false;
      at += token.count;
    }
    if (token.kind != List && token.kind != Map) return true;
    for (uint64_t i = 0; i < token.count; ++i) {
      if (depth == 0 || (token.kind == Map && !skip_key(at, end)) || !skip(at, end, depth - 1)) return false;
    }
    return depth > 0;
  }
  static bool skip_key(const char*& at, const char* end) {
    const char* start = at;
    Token token;
    return next(start, end, token) && token.kind == Text && skip(at, end, 0);
  }

  Token token_;
  const char* body_ = nullptr;
  const char* end_ = nullptr;
};

// == hashes =============================================================================================================

// CRC-32 as zlib computes it.
inline uint32_t crc32(std::string_view data) {
  static const auto table = [] {
    std::array<uint32_t, 256> t{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t c = i;
      for (int k = 0; k < 8; ++k) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
      t[i] = c;
    }
    return t;
  }();
  uint32_t crc = ~0u;
  for (char byte : data) crc = table[(crc ^ static_cast<uint8_t>(byte)) & 255] ^ (crc >> 8);
  return ~crc;
}

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  Sha256& add(std::string_view data) {
    for (char byte : data) {
      block_[filled_++] = static_cast<uint8_t>(byte);
      if (filled_ == 64) mix();
    }
    bits_ += data.size() * 8;
    return *this;
  }
  Digest digest() {
    uint64_t bits = bits_;
    add(std::string_view("\x80", 1));
    while (filled_ != 56) add(std::string_view("\0", 1));
    for (int i = 7; i >= 0; --i) block_[filled_++] = static_cast<uint8_t>(bits >> (8 * i));
    mix();
    Digest out;
    for (int i = 0; i < 32; ++i) out[i] = static_cast<uint8_t>(h_[i / 4] >> (24 - 8 * (i % 4)));
    return out;
  }

 private:
  static uint32_t turn(uint32_t x, int n) { return x >> n | x << (32 - n); }
  // The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
  static const uint32_t* constants() {
    static const uint32_t k[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
        0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
        0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
        0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
        0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
        0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    return k;
  }
  void mix() {
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; ++i)
      w[i] = static_cast<uint32_t>(block_[4 * i]) << 24 | static_cast<uint32_t>(block_[4 * i + 1]) << 16 |
             static_cast<uint32_t>(block_[4 * i + 2]) << 8 | block_[4 * i + 3];
    for (int i = 16; i < 64; ++i) {
      uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + w[i - 7] + (turn(a, 7) ^ turn(a, 18) ^ a >> 3) + (turn(b, 17) ^ turn(b, 19) ^ b >> 10);
    }
    std::copy(h_, h_ + 8, s);
    for (int i = 0; i < 64; ++i) {
      uint32_t e = s[4], a = s[0];
      uint32_t t1 = s[7] + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & s[5]) ^ (~e & s[6])) + constants()[i] + w[i];
      uint32_t t2 = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
      std::copy_backward(s, s + 7, s + 8);
      s[4] += t1, s[0] = t1 + t2;
    }
    for (int i = 0; i < 8; ++i) h_[i] += s[i];
    filled_ = 0;
  }

  uint32_t h_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t block_[64];
  size_t filled_ = 0;
  uint64_t bits_ = 0;
};

inline std::string_view text_of(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

inline Digest hmac_sha256(std::string_view key, std::string_view data) {
  std::string pad(64, '\0');
  if (key.size() > 64) {
    Digest shorter = Sha256().add(key).digest();
    std::copy(shorter.begin(), shorter.end(), pad.begin());
  } else {
    std::copy(key.begin(), key.end(), pad.begin());
  }
  for (char& byte : pad) byte ^= 0x36;
  Digest inner = Sha256().add(pad).add(data).digest();
  for (char& byte : pad) byte ^= 0x36 ^ 0x5C;
  return Sha256().add(pad).add(text_of(inner)).digest();
}

// Takes the same time wherever they differ, so that a proof cannot be guessed byte by byte.
inline bool same_secret(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  volatile unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference = difference | static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

inline uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

inline std::string random_bytes(size_t size) {
  std::random_device device;
  std::string bytes;
  while (bytes.size() < size) bytes.push_back(static_cast<char>(device()));
  return bytes;
}

}  // namespace detail

// == spaces =============================================================================================================

enum Dtype { U8, I8, U16, I16, I32, U32, I64, U64, F32, F64, BOOL };

// One bound for all elements, or one for each.
struct Bounds {
  Bounds(double all) : values{all} {}
  Bounds(std::vector<double> each) : values(std::move(each)) {}
  Bounds(std::initializer_list<double> each) : values(each) {}
  std::vector<double> values;
};

namespace detail {

struct DtypeInfo {
  const char* name;
  size_t size;
  double low, high;
};

inline const DtypeInfo& info(Dtype dtype) {
  static const double inf = std::numeric_limits<double>::infinity();
  static const DtypeInfo all[] = {
      {"uint8", 1, 0, 255}, {"int8", 1, -128, 127}, {"uint16", 2, 0, 65535}, {"int16", 2, -32768, 32767},
      {"int32", 4, -2147483648.0, 2147483647.0}, {"uint32", 4, 0, 4294967295.0},
      {"int64", 8, -9223372036854775808.0, 9223372036854775807.0}, {"uint64", 8, 0, 18446744073709551615.0},
      {"float32", 4, -inf, inf}, {"float64", 8, -inf, inf}, {"bool", 1, 0, 1}};
  return all[dtype];
}

inline bool is_float(Dtype dtype) { return dtype == F32 || dtype == F64; }

struct Leaf {
  enum Kind { Box, Discrete, MultiDiscrete, MultiBinary };
  std::string name;
  Kind kind;
  Dtype dtype;
  std::vector<uint32_t> shape;
  std::vector<double> low, high;  // of a box
  std::vector<int64_t> n, start;  // of what is chosen from so many
  size_t count = 1, bytes = 0;    // of one row
};

}  // namespace detail

// What an observation or an action is made of. One leaf alone describes that space itself, several a dict, in order.
class Space {
 public:
  Space& box(std::string name, Dtype dtype, std::vector<uint32_t> shape, Bounds low = -HUGE_VAL, Bounds high = HUGE_VAL) {
    detail::Leaf& leaf = add(std::move(name), detail::Leaf::Box, dtype, std::move(shape));
    leaf.low = fit(leaf, std::move(low)), leaf.high = fit(leaf, std::move(high));
    return *this;
  }
  Space& discrete(std::string name, int64_t n, int64_t start = 0) {
    detail::Leaf& leaf = add(std::move(name), detail::Leaf::Discrete, I64, {});
    leaf.n = {n}, leaf.start = {start};
    return require_choices(leaf);
  }
  Space& multi_discrete(std::string name, std::vector<int64_t> n, std::vector<int64_t> start = {}) {
    detail::Leaf& leaf = add(std::move(name), detail::Leaf::MultiDiscrete, I64, {static_cast<uint32_t>(n.size())});
    start.resize(n.size(), 0);
    leaf.n = std::move(n), leaf.start = std::move(start);
    return require_choices(leaf);
  }
  Space& multi_binary(std::string name, std::vector<uint32_t> shape) {
    add(std::move(name), detail::Leaf::MultiBinary, I8, std::move(shape));
    return *this;
  }
  Space& multi_binary(std::string name, int n) {
    return multi_binary(std::move(name), std::vector<uint32_t>{static_cast<uint32_t>(n)});
  }

  const std::vector<detail::Leaf>& leaves() const { return leaves_; }

 private:
  [[noreturn]] static void wrong(const std::string& name, const char* why) {
    throw std::invalid_argument("the leaf '" + name + "' " + why);
  }
  detail::Leaf& add(std::string name, detail::Leaf::Kind kind, Dtype dtype, std::vector<uint32_t> shape) {
    if (name.empty() || !detail::is_utf8(name)) wrong(name, "needs a name that is text");
    for (const auto& other : leaves_)
      if (other.name == name) wrong(name, "is there twice");
    if (leaves_.size() == 256) wrong(name, "is one too many: a space has at most 256");
    if (shape.size() > 16) wrong(name, "has more than 16 dimensions");
    detail::Leaf leaf{std::move(name), kind, dtype, std::move(shape), {}, {}, {}, {}};
    for (uint32_t size : leaf.shape) {
      leaf.count *= size;
      if (size == 0 || leaf.count > size_t(1) << 28) wrong(leaf.name, "has a shape that is empty or too large");
    }
    leaf.bytes = leaf.count * detail::info(dtype).size;
    if (leaf.bytes > size_t(1) << 28) wrong(leaf.name, "is larger than 256 MiB");
    leaves_.push_back(std::move(leaf));
    return leaves_.back();
  }
  static std::vector<double> fit(const detail::Leaf& leaf, Bounds bounds) {
    if (bounds.values.size() != 1 && bounds.values.size() != leaf.count)
      wrong(leaf.name, "needs one bound, or one for each element");
    const detail::DtypeInfo& limits = detail::info(leaf.dtype);
    for (double& value : bounds.values) {
      if (std::isnan(value)) wrong(leaf.name, "has a bound that is not a number");
      value = std::min(std::max(value, limits.low), limits.high);
      if (leaf.dtype == F32) value = static_cast<float>(value);  // as it will be compared with
    }
    return std::move(bounds.values);
  }
  Space& require_choices(const detail::Leaf& leaf) {
    for (size_t i = 0; i < leaf.n.size(); ++i)
      if (leaf.n[i] < 1 || leaf.start[i] > std::numeric_limits<int64_t>::max() - leaf.n[i])
        wrong(leaf.name, "has nothing to choose from");
    return *this;
  }
  std::vector<detail::Leaf> leaves_;
};

// What an environment is. Raise `version` when its states or its dynamics change.
struct Spec {
  explicit Spec(std::string name, int version = 1) : name(std::move(name)), version(version) {}
  std::string name;
  int version;
  Space obs, act;
  int players = 1;
  bool rng_in_state = false;  // a snapshot holds the random numbers to come: the same actions give the same again
};

namespace detail {

inline size_t align64(size_t size) { return (size + 63) / 64 * 64; }

// Leaves of some rows within one frame: each leaf [rows, *shape], at multiples of 64 bytes.
struct Group {
  Group(const Space& space, size_t rows, char* base = nullptr) : leaves(&space.leaves()), base(base) {
    size_t next = 0;
    for (const Leaf& leaf : *leaves) {
      at.push_back(next);
      size = next + rows * leaf.bytes;
      next = align64(size);
    }
  }
  char* cell(size_t leaf, size_t row) const { return base + at[leaf] + row * (*leaves)[leaf].bytes; }
  // Leaf after leaf of one row without gaps, which is how single observations and actions are kept.
  void read_row(size_t row, std::string& packed) const {
    packed.clear();
    for (size_t i = 0; i < leaves->size(); ++i) packed.append(cell(i, row), (*leaves)[i].bytes);
  }
  void write_row(size_t row, std::string_view packed) const {
    for (size_t i = 0; i < leaves->size(); ++i) {
      std::memcpy(cell(i, row), packed.data(), (*leaves)[i].bytes);
      packed.remove_prefix((*leaves)[i].bytes);
    }
  }
  void zero_row(size_t row) const {
    for (size_t i = 0; i < leaves->size(); ++i) std::memset(cell(i, row), 0, (*leaves)[i].bytes);
  }

  const std::vector<Leaf>* leaves;
  char* base;
  std::vector<size_t> at;
  size_t size = 0;
};

inline size_t row_bytes(const Space& space) {
  size_t bytes = 0;
  for (const Leaf& leaf : space.leaves()) bytes += leaf.bytes;
  return bytes;
}

// One row of a group, whose leaves are found by name.
class Row {
 public:
  Row(const Group& group, size_t row) : group_(&group), row_(row) {}

 protected:
  const Leaf& leaf(std::string_view name, size_t& index) const {
    const std::vector<Leaf>& leaves = *group_->leaves;
    for (index = 0; index < leaves.size(); ++index)
      if (leaves[index].name == name) return leaves[index];
    std::string names;
    for (const Leaf& other : leaves) names += (names.empty() ? "'" : ", '") + other.name + "'";
    throw std::invalid_argument(say("there is no leaf '", name, "'; there is ", names));
  }
  void* find(std::string_view name) const {
    size_t index;
    leaf(name, index);
    return group_->cell(index, row_);
  }
  template <class T>
  T* find(std::string_view name, Dtype dtype, Dtype or_else) const {
    size_t index;
    const Leaf& found = leaf(name, index);
    if (found.dtype != dtype && found.dtype != or_else)
      throw std::invalid_argument(say("the leaf '", name, "' is ", info(found.dtype).name, ", and not ", info(dtype).name));
    return reinterpret_cast<T*>(group_->cell(index, row_));
  }
  template <class F>
  void with_integer(std::string_view name, F&& take) const {
    size_t index;
    const Leaf& found = leaf(name, index);
    if (found.count != 1 || is_float(found.dtype))
      throw std::invalid_argument(say("the leaf '", name, "' is not one whole number"));
    char* cell = group_->cell(index, row_);
    switch (found.dtype) {
      case U8: case BOOL: return take(reinterpret_cast<uint8_t*>(cell));
      case I8: return take(reinterpret_cast<int8_t*>(cell));
      case U16: return take(reinterpret_cast<uint16_t*>(cell));
      case I16: return take(reinterpret_cast<int16_t*>(cell));
      case U32: return take(reinterpret_cast<uint32_t*>(cell));
      case I32: return take(reinterpret_cast<int32_t*>(cell));
      case U64: return take(reinterpret_cast<uint64_t*>(cell));
      default: return take(reinterpret_cast<int64_t*>(cell));
    }
  }
  const Group* group_;
  size_t row_;
};

}  // namespace detail

// The action of one environment.
class In : detail::Row {
 public:
  using Row::Row;
  // What a discrete leaf says.
  int64_t i(std::string_view name) const {
    int64_t value = 0;
    with_integer(name, [&](auto* cell) { value = static_cast<int64_t>(*cell); });
    return value;
  }
  // The elements of a leaf, in C order.
  const float* f32(std::string_view name) const { return find<float>(name, F32, F32); }
  const double* f64(std::string_view name) const { return find<double>(name, F64, F64); }
  const uint8_t* u8(std::string_view name) const { return find<uint8_t>(name, U8, BOOL); }
  const int8_t* i8(std::string_view name) const { return find<int8_t>(name, I8, I8); }
  const int32_t* i32(std::string_view name) const { return find<int32_t>(name, I32, I32); }
  const int64_t* i64(std::string_view name) const { return find<int64_t>(name, I64, I64); }
  const void* raw(std::string_view name) const { return find(name); }
};

// What a reset or a step gives. The observation consists of zeros until it is written; the rest is as below.
class Out : detail::Row {
 public:
  Out(const detail::Group& group, size_t row, double* rewards) : Row(group, row), reward(rewards[0]), rewards(rewards) {}

  double& reward;                    // of the first player
  double* rewards;                   // of each player
  std::optional<double> raw_reward;  // the game's own, of the first player, where `reward` is another
  bool terminated = false, truncated = false;
  bool life_lost = false;  // the episode ends for the learner, the game goes on: reset() is not called
  int to_play = 0;         // who moves next

  float* f32(std::string_view name) { return find<float>(name, F32, F32); }
  double* f64(std::string_view name) { return find<double>(name, F64, F64); }
  uint8_t* u8(std::string_view name) { return find<uint8_t>(name, U8, BOOL); }
  int8_t* i8(std::string_view name) { return find<int8_t>(name, I8, I8); }
  int32_t* i32(std::string_view name) { return find<int32_t>(name, I32, I32); }
  int64_t* i64(std::string_view name) { return find<int64_t>(name, I64, I64); }
  void* raw(std::string_view name) { return find(name); }
  // A discrete observation.
  void set(std::string_view name, int64_t value) {
    with_integer(name, [&](auto* cell) { *cell = static_cast<std::remove_reference_t<decltype(*cell)>>(value); });
  }
};

// Random numbers (xoshiro256++), the same on every machine. Part of a copy, like any member.
class Rng {
 public:
  explicit Rng(uint64_t seed = 0) {
    for (uint64_t& word : s_) word = seed = detail::splitmix64(seed);
  }
  uint64_t next() {
    uint64_t out = turn(s_[0] + s_[3], 23) + s_[0], t = s_[1] << 17;
    s_[2] ^= s_[0], s_[3] ^= s_[1], s_[1] ^= s_[2], s_[0] ^= s_[3], s_[2] ^= t;
    s_[3] = turn(s_[3], 45);
    return out;
  }
  double uni(double a = 0, double b = 1) { return a + (b - a) * (static_cast<double>(next() >> 11) * 0x1p-53); }
  // A whole number from 0 below n.
  int64_t below(int64_t n) { return std::min(n - 1, static_cast<int64_t>(uni() * static_cast<double>(n))); }
  double normal() { return std::sqrt(-2 * std::log(1 - uni())) * std::cos(6.283185307179586 * uni()); }

 private:
  static uint64_t turn(uint64_t x, int n) { return x << n | x >> (64 - n); }
  uint64_t s_[4];
};

namespace detail {

inline void pack_bound(Packer& pack, const Leaf& leaf, double value) {
  if (std::isinf(value)) return void(pack.text(value < 0 ? "-inf" : "inf"));
  if (is_float(leaf.dtype)) return void(pack.real(value));
  if (value >= 18446744073709551615.0) return void(pack.uint(~uint64_t(0)));  // a double has rounded it up
  if (value < 0) return void(pack.integer(static_cast<int64_t>(value)));
  pack.uint(leaf.dtype == I64 && value >= 9223372036854775807.0 ? ~uint64_t(0) >> 1 : static_cast<uint64_t>(value));
}

inline void pack_bounds(Packer& pack, const Leaf& leaf, const std::vector<double>& bounds) {
  if (bounds.size() == 1) return pack_bound(pack, leaf, bounds[0]);
  pack.array(bounds.size());
  for (double value : bounds) pack_bound(pack, leaf, value);
}

template <class T>
void pack_list(Packer& pack, const std::vector<T>& values) {
  pack.array(values.size());
  for (T value : values) pack.integer(value);
}

inline void pack_leaf(Packer& pack, const Leaf& leaf) {
  static const char* const kinds[] = {"box", "discrete", "multi_discrete", "multi_binary"};
  static const size_t entries[] = {5, 4, 5, 2};
  pack.map(entries[leaf.kind]).text("type").text(kinds[leaf.kind]);
  if (leaf.kind == Leaf::MultiBinary) {
    pack.text("n");
    if (leaf.shape.size() == 1) return void(pack.uint(leaf.shape[0]));
    return pack_list(pack, leaf.shape);
  }
  if (leaf.kind == Leaf::Discrete) pack.text("n").integer(leaf.n[0]).text("start").integer(leaf.start[0]);
  pack.text("dtype").text(info(leaf.dtype).name);
  if (leaf.kind == Leaf::Discrete) return;
  pack_list(pack.text("shape"), leaf.shape);
  if (leaf.kind == Leaf::MultiDiscrete) {
    pack_list(pack.text("nvec"), leaf.n);
    return pack_list(pack.text("start"), leaf.start);
  }
  pack_bounds(pack.text("low"), leaf, leaf.low);
  pack_bounds(pack.text("high"), leaf, leaf.high);
}

inline void pack_space(Packer& pack, const Space& space) {
  const std::vector<Leaf>& leaves = space.leaves();
  if (leaves.size() == 1) return pack_leaf(pack, leaves[0]);
  pack.map(2).text("type").text("dict").text("spaces").array(leaves.size());
  for (const Leaf& leaf : leaves) pack_leaf(pack.array(2).text(leaf.name), leaf);
}

// CRC-32 over both leaf tables, which every header carries.
inline uint32_t layout_hash(const Space& observation, const Space& action) {
  Buf table;
  for (const Space* space : {&observation, &action}) {
    for (const Leaf& leaf : space->leaves()) {
      if (space->leaves().size() > 1) table.put(leaf.name.data(), leaf.name.size());
      table.put('\0');
      table.put(info(leaf.dtype).name, std::strlen(info(leaf.dtype).name) + 1);
      table.put(static_cast<uint8_t>(leaf.shape.size()));
      for (uint32_t size : leaf.shape) table.put(size);
    }
    table.put('\xff');
  }
  return crc32(table.take());
}

// Whether all are numbers. By their bits, because -ffast-math makes isfinite() say yes.
template <class Bits, class Real>
bool all_finite(const Real* values, size_t count, Bits exponent) {
  Bits worst = 0;
  for (size_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, values + i, sizeof bits);
    bits &= exponent;
    worst = bits > worst ? bits : worst;
  }
  return worst != exponent;
}
inline bool is_finite(const float* values, size_t count) { return all_finite<uint32_t>(values, count, 0x7F800000u); }
inline bool is_finite(const double* values, size_t count) { return all_finite<uint64_t>(values, count, 0x7FF0000000000000u); }

// Whether a leaf of so many rows, or one row of it, consists of finite numbers.
inline bool is_finite(const Leaf& leaf, const char* cell, size_t rows = 1) {
  if (leaf.dtype == F32) return is_finite(reinterpret_cast<const float*>(cell), leaf.count * rows);
  return leaf.dtype != F64 || is_finite(reinterpret_cast<const double*>(cell), leaf.count * rows);
}

// The first of the elements of a discrete leaf, of so many rows, that is outside of its space; `leaf.count * rows` if none is.
inline size_t first_outside(const Leaf& leaf, const char* cells, size_t rows = 1) {
  size_t count = leaf.count * rows;
  if (!leaf.n.empty()) {
    const int64_t* values = reinterpret_cast<const int64_t*>(cells);
    for (size_t k = 0, each = 0; k < count; ++k, each = each + 1 == leaf.count ? 0 : each + 1)
      if (uint64_t(values[k]) - uint64_t(leaf.start[each]) >= uint64_t(leaf.n[each])) return k;
  } else if (leaf.kind == Leaf::MultiBinary || leaf.dtype == BOOL) {
    uint8_t most = 0;  // without a branch, because there may be many
    for (size_t k = 0; k < count; ++k) most |= static_cast<uint8_t>(cells[k]);
    if (most > 1)
      for (size_t k = 0; k < count; ++k)
        if (static_cast<uint8_t>(cells[k]) > 1) return k;
  }
  return count;
}

// == wire ===============================================================================================================

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

enum Op : uint8_t {
  KNOCK = 1, HELLO, WELCOME, READY,
  RESET = 16, STEP, SAVE, LOAD, EXPAND, ROLLOUT, DROP, EXPORT, IMPORT,
  HEARTBEAT = 32, STATS, LOG, CLOSE, ERROR,
  PUT = 48, GET, DROP_STATE, LIST
};
enum : uint16_t { REPLY = 1, FAILED = 2, META = 4, WANT_OBS = 8, AUTORESET = 16, NO_REPLY = 32, ALL_FLAGS = 63 };
enum : uint8_t { TERMINATED = 1, TRUNCATED = 2, FAULTY = 4, FIRST = 8, LIFE = 16 };
enum StatusCode : uint16_t {
  GOOD, E_BAD_REQUEST, E_UNSUPPORTED, E_TOO_LARGE, E_UNKNOWN_STATE, E_DEADLINE, E_SNAPSHOT_FULL, E_ENV, E_NOT_FINITE, E_NO_EPISODE,
  E_VERSION = 32, E_AUTH, E_SPACE_MISMATCH, E_PROTOCOL, E_FULL, E_SESSION
};
constexpr size_t kMostFrames = 8, kGreetingBytes = 1 << 20, kMostMessage = 1 << 30;

inline const char* op_name(uint8_t op) {
  static const char* const names[] = {"RESET", "STEP", "SAVE", "LOAD", "EXPAND", "ROLLOUT", "DROP", "EXPORT", "IMPORT"};
  return op >= RESET && op <= IMPORT ? names[op - RESET] : op == HEARTBEAT ? "HEARTBEAT" : op == STATS ? "STATS" : "a request";
}
inline bool is_op(uint8_t op) {
  return (op >= KNOCK && op <= READY) || (op >= RESET && op <= IMPORT) || (op >= HEARTBEAT && op <= ERROR) ||
         (op >= PUT && op <= LIST);
}

struct Header {
  char magic[2] = {'C', 'L'};
  uint8_t major = 1, op = 0;
  uint16_t flags = 0, status = 0;
  uint64_t seq = 0;
  uint32_t session = 0, layout = 0, batch = 0, aux = 0;
};
static_assert(sizeof(Header) == 32 && offsetof(Header, seq) == 8 && offsetof(Header, aux) == 28, "as on the wire");

// A request that cannot be carried out, found out before anything has changed.
struct BadRequest : std::runtime_error {
  explicit BadRequest(const std::string& text, StatusCode status = E_BAD_REQUEST) : runtime_error(text), status(status) {}
  StatusCode status;
};

// The frames of a message that came in, in memory of their own in which each begins at a multiple of 64.
struct Frames {
  Frames() = default;
  explicit Frames(const std::vector<size_t>& lengths) : count(lengths.size()) {
    size_t size = 0;
    for (size_t length : lengths) size += align64(length);
    memory = Bytes(size);
    char* at = memory.data();
    for (size_t i = 0; i < count; at += align64(lengths[i++])) frame[i] = {at, lengths[i]};
  }
  char* data(size_t i) const { return const_cast<char*>(frame[i].data()); }  // of our own memory
  Bytes memory;
  size_t count = 0;
  std::array<std::string_view, kMostFrames> frame;
};

struct Message : Header {
  Frames frames;
  Value meta;
  size_t first = 1;  // frame of the payload

  size_t payloads() const { return frames.count - first; }
  std::string_view payload(size_t i) const { return frames.frame[first + i]; }
  std::string text() const { return clean_text(meta["text"].string(), 500); }

  static Message read(Frames frames, size_t most_meta = kGreetingBytes) {
    Message message;
    if (frames.count == 0 || frames.frame[0].size() != sizeof(Header)) throw BadMessage("a header that is not 32 bytes long");
    std::memcpy(static_cast<Header*>(&message), frames.data(0), sizeof(Header));
    if (std::memcmp(message.magic, "CL", 2) != 0) throw BadMessage("a header without the magic CL");
    if (message.major != 1) throw BadMessage(say("version ", int(message.major), " of the protocol, expected 1"));
    if (!is_op(message.op)) throw BadMessage(say("the unknown op ", int(message.op)));
    if (message.flags & ~ALL_FLAGS) throw BadMessage(say("the unknown flags ", int(message.flags)));
    if (message.flags & META) {
      if (frames.count < 2) throw BadMessage("no meta frame where META says that there is one");
      if (frames.frame[1].size() > most_meta) throw BadMessage("a meta frame that is too large");
      message.meta = Value::read(frames.frame[1]);
      message.first = 2;
    }
    message.frames = std::move(frames);
    return message;
  }
};

// A message to send. It does not change after seal(), so it can be kept for a learner that asks again.
struct Packet {
  explicit Packet(uint8_t op, uint16_t flags = 0) { head.op = op, head.flags = flags; }

  Packet& seal() {
    if (!meta.empty()) head.flags |= META;
    uint32_t lengths[2 + kMostFrames], count = 0;
    auto add = [&](const void* data, size_t size) {
      parts[1 + count] = {const_cast<void*>(data), size};
      lengths[2 + count++] = static_cast<uint32_t>(size);
      size_ += size;
    };
    add(&head, sizeof head);
    if (!meta.empty()) add(meta.data(), meta.size());
    for (const Bytes& frame : payload) add(frame.data(), frame.size());
    std::memcpy(lengths, "CLP1", 4);
    lengths[1] = count;
    std::memcpy(prefix, lengths, 8 + 4 * count);
    parts[0] = {prefix, 8 + 4 * count};
    size_ += parts[0].iov_len, frames = count;
    return *this;
  }
  size_t size() const { return size_; }

  Header head;
  std::string meta;
  std::vector<Bytes> payload;
  size_t frames = 0;
  std::array<iovec, 1 + kMostFrames> parts;  // what says where each frame ends, then the frames

 private:
  char prefix[8 + 4 * kMostFrames];
  size_t size_ = 0;
};
using PacketPtr = std::shared_ptr<const Packet>;

// Takes the bytes of a stream as they come and gives messages. Large frames are received where they will be.
class FrameReader {
 public:
  size_t most_bytes = kGreetingBytes;

  std::pair<char*, size_t> room() {
    direct_ = in_body_ && begin_ == end_ && body_.frame[frame_].size() - filled_ >= kRoom / 4;
    if (direct_) return {body_.data(frame_) + filled_, body_.frame[frame_].size() - filled_};
    if (begin_ > 0) std::memmove(room_.get(), room_.get() + begin_, end_ - begin_);
    end_ -= begin_, begin_ = 0;
    return {room_.get() + end_, kRoom - end_};
  }
  void took(size_t size) { (direct_ ? filled_ : end_) += size; }

  // Whether a message is complete; BadMessage when what came is none.
  bool next(Frames& out) {
    if (!in_body_ && !begin_body()) return false;
    for (; frame_ < body_.count; ++frame_, filled_ = 0) {
      size_t size = body_.frame[frame_].size(), some = std::min(size - filled_, end_ - begin_);
      if (some) std::memcpy(body_.data(frame_) + filled_, room_.get() + begin_, some);
      begin_ += some, filled_ += some;
      if (filled_ < size) return false;
    }
    in_body_ = false;
    out = std::move(body_);
    return true;
  }

 private:
  static constexpr size_t kRoom = 1 << 16;

  bool begin_body() {
    const char* at = room_.get() + begin_;
    size_t size = end_ - begin_;
    if (std::memcmp(at, "CLP1", std::min<size_t>(size, 4)) != 0) throw BadMessage("bytes that are not of this protocol");
    if (size < 8) return false;
    uint32_t count, length;
    std::memcpy(&count, at + 4, 4);
    if (count < 1 || count > kMostFrames) throw BadMessage(say("a message of ", count, " frames"));
    if (size < 8 + 4 * count) return false;
    std::vector<size_t> lengths;
    size_t total = 0;
    for (uint32_t i = 0; i < count; ++i) {
      std::memcpy(&length, at + 8 + 4 * i, 4);
      lengths.push_back(length);
      total += length;
    }
    if (total > most_bytes) throw BadMessage(say("a message of ", total, " bytes, at most ", most_bytes, " are taken"));
    body_ = Frames(lengths);
    begin_ += 8 + 4 * count, frame_ = filled_ = 0;
    return in_body_ = true;
  }

  std::unique_ptr<char[]> room_{new char[kRoom]};
  size_t begin_ = 0, end_ = 0;
  Frames body_;
  bool in_body_ = false, direct_ = false;
  size_t frame_ = 0, filled_ = 0;
};

struct Session;

// A connection to one learner. Messages are delivered whole and in order, or the wire is lost.
struct Wire {
  Wire(uint64_t id, bool dialled, std::string peer) : id(id), dialled(dialled), peer(std::move(peer)) {}
  virtual ~Wire() = default;
  virtual void send(PacketPtr packet) = 0;
  // Sends what waits, as far as the learner takes it.
  virtual void flush() = 0;
  // Ends it: after what has been sent, or at once.
  virtual void close(bool at_once) = 0;
  virtual void allow(size_t most_bytes) = 0;

  const uint64_t id;
  const bool dialled;
  const std::string peer;
  // Below: how far the handshake is. Whoever reads the wire touches it, one thread at a time.
  enum { Greeted, SaidHello, Open, Doomed } stage = Greeted;
  std::string nonce = random_bytes(16);
  std::shared_ptr<Session> session, resumes;
  bool was_open = false;
  std::atomic<Clock::duration::rep> due{0};          // when this stage has taken too long; 0: never
  std::atomic<Clock::duration::rep> stuck_since{0};  // when the learner stopped reading; 0: it reads
};

// Milliseconds until then, at most so many.
inline int ms_until(Clock::time_point until, int most) {
  auto now = Clock::now();
  if (until <= now) return 0;
  return until - now > std::chrono::milliseconds(most)
             ? most
             : static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(until - now).count()) + 1;
}

inline Clock::duration::rep ticks(double from_now_s = 0) {
  return (Clock::now().time_since_epoch() + std::chrono::duration_cast<Clock::duration>(Seconds(from_now_s))).count();
}

// Never waited in; small messages go at once, and a machine that is gone is noticed within about 10 s.
inline void tune(int fd) {
  int on = 1, two = 2, four = 4;
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &two, sizeof two);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &two, sizeof two);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &four, sizeof four);
}

// What is left of a message to be sent over a socket, after `sent` bytes of it; how many parts that is.
inline size_t parts_after(const Packet& packet, size_t sent, iovec* parts) {
  size_t count = 0;
  for (size_t i = 0; i <= packet.frames; ++i) {
    iovec part = packet.parts[i];
    size_t some = std::min(sent, part.iov_len);
    sent -= some;
    if (part.iov_len > some) parts[count++] = {static_cast<char*>(part.iov_base) + some, part.iov_len - some};
  }
  return count;
}

class TcpWire : public Wire {
 public:
  TcpWire(uint64_t id, int fd, bool dialled, std::string peer) : Wire(id, dialled, std::move(peer)), fd(fd) { tune(fd); }
  ~TcpWire() override { ::close(fd); }

  void send(PacketPtr packet) override {
    std::lock_guard<std::mutex> lock(out_mutex_);
    if (closed_) return;
    if (out_.size() >= kMostWaiting) return shut(SHUT_RDWR);  // it asks and asks, and does not read
    out_.push_back(std::move(packet));
    if (out_.size() == 1) push();
  }
  void flush() override {
    std::lock_guard<std::mutex> lock(out_mutex_);
    push();
  }
  void close(bool at_once) override {
    std::lock_guard<std::mutex> lock(out_mutex_);
    if (at_once || !closed_) shut(at_once ? SHUT_RDWR : SHUT_WR);
  }
  void allow(size_t most_bytes) override { reader.most_bytes = most_bytes; }

  const int fd;
  FrameReader reader;
  std::mutex read_mutex;

 private:
  static constexpr size_t kMostWaiting = 4096;  // more than the widest window and its heartbeats

  // One gathered send for each message; what the kernel does not take waits for EPOLLOUT.
  void push() {
    while (!closed_ && !out_.empty()) {
      const Packet& packet = *out_.front();
      iovec parts[1 + kMostFrames];
      msghdr message{};
      message.msg_iov = parts, message.msg_iovlen = parts_after(packet, sent_, parts);
      ssize_t size = ::sendmsg(fd, &message, MSG_NOSIGNAL);
      if (size < 0 && errno == EINTR) continue;
      if (size < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return shut(SHUT_RDWR);
      if (size > 0) sent_ += static_cast<size_t>(size), stuck_since = 0;
      if (sent_ < packet.size()) {
        if (stuck_since == 0) stuck_since = ticks();
        if (size > 0) continue;
        return;
      }
      out_.pop_front();
      sent_ = 0;
    }
  }
  void shut(int how) {
    closed_ = true;
    out_.clear();
    stuck_since = 0;
    ::shutdown(fd, how);
  }

  std::mutex out_mutex_;
  std::deque<PacketPtr> out_;
  size_t sent_ = 0;
  bool closed_ = false;
};

// tcp://HOST:PORT
struct Address {
  std::string scheme, host, port;

  static std::optional<Address> parse(const std::string& url) {
    size_t slashes = url.find("://"), colon = url.rfind(':');
    if (slashes == std::string::npos || colon < slashes + 3) return std::nullopt;
    Address address{url.substr(0, slashes), url.substr(slashes + 3, colon - slashes - 3), url.substr(colon + 1)};
    if (!address.port.empty() && address.port.back() == '/') address.port.pop_back();
    std::string& host = address.host;
    if (host.size() > 1 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
    if (host.empty()) host = "127.0.0.1";
    const std::string& port = address.port;
    bool digits = !port.empty() && port.size() <= 5 && port.find_first_not_of("0123456789") == port.npos;
    return digits && std::stoi(port) <= 65535 ? std::optional<Address>(address) : std::nullopt;
  }
  std::string url(const char* as = nullptr) const {
    return say(as ? as : scheme.c_str(), "://", host.find(':') != host.npos ? say("[", host, "]") : host, ":", port);
  }
  bool everywhere() const { return host == "*" || host == "0.0.0.0" || host == "::"; }
  bool loopback() const {
    in_addr four;
    if (host == "localhost" || host == "::1") return true;
    return ::inet_pton(AF_INET, host.c_str(), &four) == 1 && ntohl(four.s_addr) >> 24 == 127;
  }
  // Where a process of this machine reaches who listens here.
  Address to_dial() const { return everywhere() ? Address{scheme, "127.0.0.1", port} : *this; }
};

// Calls `use` with each meaning of the address until it returns a socket; -1 and errno otherwise.
template <class F>
int with_address(const Address& address, bool to_listen, F&& use) {
  addrinfo hints{}, *all = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = to_listen ? AI_PASSIVE : 0;
  std::string host = address.host == "*" ? "0.0.0.0" : address.host;
  if (::getaddrinfo(host.c_str(), address.port.c_str(), &hints, &all) != 0) return errno = EADDRNOTAVAIL, -1;
  int fd = -1, error = 0;
  for (addrinfo* one = all; one && fd < 0; one = one->ai_next) {
    int made = ::socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (made >= 0 && use(made, one)) fd = made;
    else if (made >= 0) error = errno, ::close(made);
  }
  ::freeaddrinfo(all);
  errno = error;
  return fd;
}

inline int open_door(const Address& address) {
  return with_address(address, true, [](int fd, addrinfo* where) {
    int on = 1;
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    ::fcntl(fd, F_SETFL, O_NONBLOCK);
    return ::bind(fd, where->ai_addr, where->ai_addrlen) == 0 && ::listen(fd, 128) == 0;
  });
}

// A connection made within two seconds and before `until`, unless `wake` becomes readable.
inline int dial(const Address& address, int wake, Clock::time_point until = Clock::time_point::max()) {
  return with_address(address, false, [&](int fd, addrinfo* where) {
    ::fcntl(fd, F_SETFL, O_NONBLOCK);
    if (::connect(fd, where->ai_addr, where->ai_addrlen) == 0) return true;
    if (errno != EINPROGRESS) return false;
    pollfd both[2] = {{fd, POLLOUT, 0}, {wake, POLLIN, 0}};
    if (::poll(both, 2, ms_until(until, 2000)) <= 0 || both[1].revents) return errno = ETIMEDOUT, false;
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    sockaddr_storage ours{}, theirs{};
    socklen_t a = sizeof ours, b = sizeof theirs;
    if (error == 0 && ::getsockname(fd, reinterpret_cast<sockaddr*>(&ours), &a) == 0 &&
        ::getpeername(fd, reinterpret_cast<sockaddr*>(&theirs), &b) == 0 && a == b && std::memcmp(&ours, &theirs, a) == 0)
      error = ECONNREFUSED;  // who dials a free port of this machine again and again once gets connected to itself
    return (errno = error) == 0;
  });
}

// == states =============================================================================================================

// What a snapshot of an environment is. (No name here is one that X11 or curses has as a macro.)
enum class Kind : uint8_t { Off, Replay, Key, Saved, Copy };

template <class Env, class = void>
struct HasSave : std::false_type {};
template <class Env>
struct HasSave<Env, std::void_t<decltype(std::declval<const Env&>().save(std::declval<Buf&>())),
                                decltype(std::declval<Env&>().load(std::declval<View>()))>> : std::true_type {};
template <class Env, class = void>
struct HasKey : std::false_type {};
template <class Env>
struct HasKey<Env, std::void_t<decltype(std::declval<const Env&>().get_key_state(std::declval<Buf&>())),
                               decltype(std::declval<Env&>().set_key_state(std::declval<View>()))>> : std::true_type {};
template <class Env, class = void>
struct HasReseed : std::false_type {};
template <class Env>
struct HasReseed<Env, std::void_t<decltype(std::declval<Env&>().reseed(uint64_t()))>> : std::true_type {};
template <class Env, class = void>
struct HasBytes : std::false_type {};
template <class Env>
struct HasBytes<Env, std::void_t<decltype(size_t(std::declval<const Env&>().snapshot_bytes()))>> : std::true_type {};
template <class Env, class = void>
struct Wanted : std::true_type {};
template <class Env>
struct Wanted<Env, std::void_t<decltype(Env::corral_snapshots)>> : std::bool_constant<Env::corral_snapshots> {};

// Who writes get_key_state() says what a state is, even where the struct could be copied: it may hold pointers.
template <class Env>
constexpr Kind kind_of() {
  if (!Wanted<Env>::value) return Kind::Off;
  if (HasKey<Env>::value && !HasSave<Env>::value) return Kind::Key;
  if (std::is_copy_constructible<Env>::value) return Kind::Copy;
  return HasSave<Env>::value ? Kind::Saved : Kind::Replay;
}

// An author's environment behind virtual calls, so that all below is compiled once.
struct Body {
  virtual ~Body() = default;
  virtual void reset(uint64_t seed, Out& out) = 0;
  virtual void step(const In& in, Out& out) = 0;
  virtual void reseed(uint64_t) {}
  virtual std::unique_ptr<Body> copy() const { return nullptr; }
  virtual size_t bytes() const { return 0; }
  virtual void write(Buf&) const {}
  virtual void read(View) {}
};

template <class Env>
class BodyOf final : public Body {
 public:
  BodyOf() : env_() {}
  explicit BodyOf(const Env& env) : env_(env) {}

  void reset(uint64_t seed, Out& out) override { env_.reset(seed, out); }
  void step(const In& in, Out& out) override { env_.step(in, out); }
  void reseed([[maybe_unused]] uint64_t seed) override {
    if constexpr (HasReseed<Env>::value) env_.reseed(seed);
  }
  std::unique_ptr<Body> copy() const override {
    if constexpr (kind_of<Env>() == Kind::Copy) return std::make_unique<BodyOf>(env_);
    else return nullptr;
  }
  size_t bytes() const override {
    if constexpr (HasBytes<Env>::value) return env_.snapshot_bytes();
    else return sizeof(Env);
  }
  void write([[maybe_unused]] Buf& out) const override {
    if constexpr (HasSave<Env>::value) env_.save(out);
    else if constexpr (HasKey<Env>::value) env_.get_key_state(out);
    else if constexpr (std::is_trivially_copyable<Env>::value) out.put(env_);
  }
  void read([[maybe_unused]] View in) override {
    if constexpr (HasSave<Env>::value) env_.load(in);
    else if constexpr (HasKey<Env>::value) env_.set_key_state(in);
    else if constexpr (std::is_trivially_copyable<Env>::value) {
      if (in.size() != sizeof(Env)) throw BadRequest("the state has another size");
      in.get(env_);
    }
  }

 private:
  Env env_;
};

// All that is known about an environment before there is one.
struct Model {
  explicit Model(Spec s) : spec(std::move(s)) {
    if (spec.obs.leaves().empty() || spec.act.leaves().empty())
      throw std::invalid_argument("the spec needs observations and actions");
    if (spec.players < 1 || spec.players > 64) throw std::invalid_argument("the spec needs 1 to 64 players");
    if (!is_utf8(spec.name) || spec.name.size() > 1000) throw std::invalid_argument("the spec's name is not a short text");
    layout = layout_hash(spec.obs, spec.act);
    obs_bytes = row_bytes(spec.obs);
    Digest hash = Sha256().add(spec.name).digest();
    std::memcpy(&name_hash, hash.data(), 8);
  }
  template <class Env>
  static Model of() {
    Model model{Env::spec()};
    model.kind = kind_of<Env>();
    model.exports = model.kind == Kind::Key || model.kind == Kind::Saved ||
                    (model.kind == Kind::Copy && (HasSave<Env>::value || std::is_trivially_copyable<Env>::value));
    model.format = HasSave<Env>::value ? Kind::Saved : model.kind;
    model.reseeds = HasReseed<Env>::value && model.kind != Kind::Replay;
    model.make = []() -> std::unique_ptr<Body> { return std::make_unique<BodyOf<Env>>(); };
    return model;
  }
  int level() const { return kind == Kind::Off ? 0 : kind == Kind::Replay ? 1 : exports ? 4 : 3; }

  Spec spec;
  Kind kind = Kind::Off, format = Kind::Off;  // in memory, and as exported bytes
  bool exports = false, reseeds = false;
  std::unique_ptr<Body> (*make)() = nullptr;
  uint32_t layout;
  uint64_t name_hash;
  size_t obs_bytes;
};

// Where an environment is: a slot, or a place to step a copy of a state.
struct Place {
  std::unique_ptr<Body> body;
  std::string obs, actions;  // the last observation; with Kind::Replay all actions of the episode, unless it is too long
  uint64_t seed = 0;         // of the episode
  int8_t to_play = 0;
  bool playing = false, over = false, too_long = false;
};

// A snapshot. It never changes, so that any number of threads may start from it.
struct State {
  std::unique_ptr<Body> body;  // with Kind::Copy
  std::string bytes, obs;
  uint64_t seed = 0;
  int8_t to_play = 0;
  bool over = false;
  size_t size = 0;
};
using StatePtr = std::shared_ptr<const State>;

// Makes states from places and places from states.
class Snapshots {
 public:
  explicit Snapshots(const Model& model) : model_(model) {}

  // `last`: nobody needs the place any more, so there is no need to copy it.
  StatePtr capture(Place& place, bool last) const {
    auto state = std::make_shared<State>();
    state->obs = place.obs, state->seed = place.seed, state->to_play = place.to_play, state->over = place.over;
    if (model_.kind == Kind::Copy) {
      state->body = last ? std::move(place.body) : place.body->copy();
    } else if (model_.kind == Kind::Replay) {
      if (place.too_long) throw std::runtime_error("the episode is too long to be saved by repeating its actions");
      state->bytes = place.actions;
    } else {
      Buf out;
      place.body->write(out);
      state->bytes = out.take();
    }
    state->size = state->obs.size() + (state->body ? state->body->bytes() : state->bytes.size());
    return state;
  }
  // Puts `place` where `state` was. If the author's code throws, the place has no episode.
  void restore(const State& state, Place& place) const {
    place.playing = false;
    if (model_.kind == Kind::Copy) {
      place.body = state.body->copy();
    } else {
      if (!place.body) place.body = model_.make();
      std::unique_ptr<Body> body = std::move(place.body);  // does not come back from an exception
      if (model_.kind != Kind::Saved) replay(*body, state.seed, model_.kind == Kind::Replay ? state.bytes : std::string());
      if (model_.kind != Kind::Replay) body->read(View(state.bytes));
      place.body = std::move(body);
    }
    if (model_.kind == Kind::Replay) place.actions = state.bytes, place.too_long = false;
    place.obs = state.obs, place.seed = state.seed, place.to_play = state.to_play, place.over = state.over;
    place.playing = true;
  }
  // A state as bytes: what they are, then what they hold.
  std::string pack(const State& state) const {
    Buf body, out;
    body.put(state.seed), body.put(state.to_play), body.put(state.over), body.put(state.obs);
    if (state.body) state.body->write(body);
    else body.put(state.bytes.data(), state.bytes.size());
    std::string held = body.take();
    out.put("CST1", 4), out.put(model_.name_hash), out.put(model_.spec.version), out.put(model_.layout);
    out.put(model_.format), out.put(crc32(held)), out.put(held);
    return out.take();
  }
  // The state of these bytes; BadRequest when they are of something else, or damaged.
  StatePtr unpack(std::string_view bytes) const try {
    View in(bytes);
    if (in.bytes(4) != "CST1") throw BadRequest("these bytes are no state");
    if (in.get<uint64_t>() != model_.name_hash) throw BadRequest("the state is of another environment");
    int version = in.get<int>();
    if (version != model_.spec.version)
      throw BadRequest(say("the state is of version ", version, ", this is version ", model_.spec.version));
    if (in.get<uint32_t>() != model_.layout || in.get<uint8_t>() != uint8_t(model_.format))
      throw BadRequest("the state has another layout");
    uint32_t crc = in.get<uint32_t>();
    uint64_t size = in.get<uint64_t>();
    if (size != in.size() || crc32({in.data(), in.size()}) != crc) throw BadRequest("the state is damaged");
    auto state = std::make_shared<State>();
    state->seed = in.get<uint64_t>(), state->to_play = in.get<int8_t>(), state->over = in.get<uint8_t>() != 0;
    in.get(state->obs);
    if (state->obs.size() != model_.obs_bytes) throw BadRequest("the state has another observation");
    state->bytes = std::string(in.bytes(in.size()));
    return settle(std::move(state));
  } catch (const std::out_of_range&) {
    throw BadRequest("the state is damaged");
  }

 private:
  // Gives imported bytes to an environment, so that whatever is wrong with them shows now.
  StatePtr settle(std::shared_ptr<State> state) const {
    std::unique_ptr<Body> body = model_.make();
    if (model_.kind == Kind::Key) replay(*body, state->seed, {});
    body->read(View(state->bytes));
    if (model_.kind == Kind::Copy) state->body = std::move(body), state->bytes.clear();
    state->size = state->obs.size() + (state->body ? state->body->bytes() : state->bytes.size());
    return state;
  }
  // Starts the episode of `seed` and repeats these actions. What comes out is known already.
  void replay(Body& body, uint64_t seed, std::string_view actions) const {
    Bytes memory = Bytes::zeros(Group(model_.spec.obs, 1).size), action(Group(model_.spec.act, 1).size);
    Group obs(model_.spec.obs, 1, memory.data()), act(model_.spec.act, 1, action.data());
    std::vector<double> rewards(model_.spec.players);
    Out first(obs, 0, rewards.data());
    body.reset(seed, first);
    for (size_t size = row_bytes(model_.spec.act); !actions.empty(); actions.remove_prefix(size)) {
      act.write_row(0, actions);
      Out out(obs, 0, rewards.data());
      body.step(In(act, 0), out);
    }
  }
  const Model& model_;
};

// The states of a session by their ids. What does not fit is refused; nothing is evicted.
class Store {
 public:
  Store(uint64_t most_bytes, uint64_t most_count) : most_bytes_(most_bytes), most_count_(most_count) {}

  StatePtr get(uint64_t id) const {
    std::lock_guard<std::mutex> lock(mutex_);
    auto family = families_.find(id >> 40);
    if (family == families_.end()) return nullptr;
    auto found = family->second.find(id);
    return found == family->second.end() ? nullptr : found->second;
  }
  // Keeps a state, in place of the one that had this id; false when it does not fit.
  bool put(uint64_t id, StatePtr state) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto family = families_.find(id >> 40);
    StatePtr* old = nullptr;
    if (family != families_.end()) {
      auto found = family->second.find(id);
      if (found != family->second.end()) old = &found->second;
    }
    uint64_t bytes = bytes_ - (old ? (*old)->size : 0) + state->size;
    if (bytes > most_bytes_ || count_ + !old > most_count_) return false;
    bytes_ = bytes, count_ += !old;
    if (old) old->swap(state);
    else families_[id >> 40].emplace(id, std::move(state));
    return true;
  }
  void drop(const uint64_t* ids, size_t count) {
    std::vector<StatePtr> gone;  // freed after the lock: an author's destructor may take long
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < count; ++i) {
      auto family = families_.find(ids[i] >> 40);
      if (family == families_.end()) continue;
      auto found = family->second.find(ids[i]);
      if (found == family->second.end()) continue;
      bytes_ -= found->second->size, --count_;
      gone.push_back(std::move(found->second));
      family->second.erase(found);
      if (family->second.empty()) families_.erase(family);
    }
  }
  void drop_generation(uint64_t generation) {
    std::unordered_map<uint64_t, StatePtr> gone;
    std::lock_guard<std::mutex> lock(mutex_);
    auto family = families_.find(generation);
    if (family == families_.end()) return;
    gone.swap(family->second);
    families_.erase(family);
    for (const auto& entry : gone) bytes_ -= entry.second->size;
    count_ -= gone.size();
  }
  std::pair<uint64_t, uint64_t> count_and_bytes() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return {count_, bytes_};
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, std::unordered_map<uint64_t, StatePtr>> families_;  // by generation, then by id
  uint64_t most_bytes_, most_count_, bytes_ = 0, count_ = 0;
};

// == engine =============================================================================================================

// What a session may cost, as WELCOME says.
struct Limits {
  uint64_t message = 64 << 20, batch = 4096, slots = 65536, meta = 1 << 20, info = 4096, window = 16;
  uint64_t snapshot_bytes = 1 << 30, snapshots = 1000000;
};

// The leaves of the group `rows`.
struct Rows {
  Rows(int players, size_t rows, char* base = nullptr) : players(players) {
    size_t at = 0, end = 0;
    auto next = [&](size_t bytes) {
      char* here = base ? base + at : nullptr;
      end = at + bytes, at = align64(end);
      return here;
    };
    reward = reinterpret_cast<double*>(next(rows * players * 8));
    raw = reinterpret_cast<double*>(next(rows * players * 8));
    flags = reinterpret_cast<uint8_t*>(next(rows));
    status = reinterpret_cast<uint16_t*>(next(rows * 2));
    to_play = players > 1 ? reinterpret_cast<int8_t*>(next(rows)) : nullptr;
    size = end;
  }
  int players;
  double *reward, *raw;
  uint8_t* flags;
  uint16_t* status;
  int8_t* to_play;
  size_t size;
};

// Work that other threads may share if they are idle.
struct Crew {
  virtual ~Crew() = default;
  // Calls `work` for 0 to count - 1, in any order; `each_s` is how long one takes, as far as is known.
  virtual void spread(size_t count, double each_s, const std::function<void(size_t)>& work) = 0;
};

// The environments and states of one session, and what requests do to them. Requests that run at the same time have no
// slot in common, and those that touch states come one after the other; the session sees to that.
class Engine {
 public:
  Engine(const Model& model, const Limits& limits, size_t slots, Crew& crew)
      : store(limits.snapshot_bytes, limits.snapshots), model_(model), limits_(limits), places_(slots), snapshots_(model),
        crew_(crew) {}
  virtual ~Engine() = default;

  // Throws BadRequest when a request cannot be carried out. Nothing has changed then.
  void check(const Message& request) const;
  // Fills in the reply.
  void carry_out(const Message& request, Packet& reply);

  size_t slots() const { return places_.size(); }
  static bool takes_slots(uint8_t op) { return op == RESET || op == STEP || op == SAVE || op == LOAD; }
  static bool takes_states(uint8_t op) { return op >= SAVE && op <= IMPORT; }

  Store store;
  std::atomic<uint64_t> steps{0}, episodes{0}, faults{0}, work_us{0};

 protected:
  // A request that is being carried out.
  struct Batch {
    Batch(const Engine& engine, const Message& request, size_t obs_rows)
        : request(request), count(request.batch), memory(Bytes::zeros(Rows(engine.model_.spec.players, count).size)),
          obs_memory(Bytes::zeros(Group(engine.model_.spec.obs, obs_rows).size)),
          rows(engine.model_.spec.players, count, memory.data()), obs(engine.model_.spec.obs, obs_rows, obs_memory.data()) {}
    const uint64_t* u64(size_t frame) const { return reinterpret_cast<const uint64_t*>(request.payload(frame).data()); }
    const uint32_t* slots() const { return reinterpret_cast<const uint32_t*>(request.payload(0).data()); }

    const Message& request;
    size_t count;
    Bytes memory, obs_memory;
    Rows rows;
    Group obs;
    std::vector<uint64_t> seeds;  // of episodes to start, by row
    std::mutex mutex;
    std::map<size_t, std::string> words;  // of rows that went wrong
  };

  Place& place_of(const Batch& batch, size_t row) { return places_[batch.slots()[row]]; }

  // Calls reset() for each of these rows of the batch, or step().
  virtual void call_reset(Batch& batch, const std::vector<size_t>& rows) {
    spread(RESET, rows.size(), [&](size_t i) {
      size_t row = rows[i];
      Place& place = place_of(batch, row);
      std::vector<double> ignored(model_.spec.players);
      Out out(batch.obs, row, ignored.data());
      guard(batch, row, place, [&] {
        if (!place.body) place.body = model_.make();
        place.body->reset(batch.seeds[row], out);
        started(batch, row, place, out);
      });
    });
  }
  virtual void call_step(Batch& batch, const std::vector<size_t>& rows, const Group& actions) {
    spread(STEP, rows.size(), [&](size_t i) {
      Place& place = place_of(batch, rows[i]);
      step(batch, rows[i], place, In(actions, rows[i]), &actions, rows[i]);
    });
  }
  // What reset() gave.
  void started(Batch& batch, size_t row, Place& place, const Out& out) {
    place.playing = false;
    require_usable(batch, row);
    place.seed = batch.seeds[row], place.playing = true, place.over = false;
    place.actions.clear(), place.too_long = false;
    keep(batch, row, place, out);
    batch.rows.flags[row] |= FIRST;
    ++episodes;
  }
  // What step() gave.
  void stepped(Batch& batch, size_t row, Place& place, const Out& out) {
    require_usable(batch, row);
    double* reward = batch.rows.reward + row * model_.spec.players;
    double* raw = batch.rows.raw + row * model_.spec.players;
    std::copy(reward, reward + model_.spec.players, raw);
    if (out.raw_reward) raw[0] = *out.raw_reward;
    if (!is_finite(reward, model_.spec.players) || !is_finite(raw, model_.spec.players))
      throw NotFinite("the reward is not finite");
    bool life = out.life_lost && !out.terminated && !out.truncated;
    int flags = (out.terminated || life) * TERMINATED | out.truncated * TRUNCATED | life * LIFE;
    batch.rows.flags[row] = static_cast<uint8_t>(flags);
    place.over = flags != 0;
    keep(batch, row, place, out);
    ++steps;
  }
  // Runs author's code; what it throws makes the row faulty.
  template <class F>
  bool guard(Batch& batch, size_t row, Place& place, F&& run) {
    try {
      run();
      return true;
    } catch (const NotFinite& error) {
      fail(batch, row, place, E_NOT_FINITE, error.what());
    } catch (const std::exception& error) {
      place.body.reset();  // whatever state it is in
      fail(batch, row, place, E_ENV, error.what());
    } catch (...) {
      place.body.reset();
      fail(batch, row, place, E_ENV, "something was thrown that is no std::exception");
    }
    return false;
  }
  void fail(Batch& batch, size_t row, Place& place, StatusCode status, const std::string& text) {
    place.playing = false;
    batch.obs.zero_row(row);
    for (int player = 0; player < model_.spec.players; ++player)
      batch.rows.reward[row * model_.spec.players + player] = batch.rows.raw[row * model_.spec.players + player] = 0;
    batch.rows.flags[row] = FAULTY | TRUNCATED;
    note(batch, row, status, text);
    ++faults;
  }
  void note(Batch& batch, size_t row, StatusCode status, const std::string& text) {
    batch.rows.status[row] = status;
    std::lock_guard<std::mutex> lock(batch.mutex);
    batch.words[row] = text;
  }

  struct NotFinite : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  const Model& model_;
  const Limits limits_;
  std::vector<Place> places_;

 private:
  // What a policy can take: finite numbers, and of discrete leaves those in their space.
  void require_usable(const Batch& batch, size_t row) const {
    for (size_t i = 0; i < model_.spec.obs.leaves().size(); ++i) {
      const Leaf& leaf = model_.spec.obs.leaves()[i];
      const char* cells = batch.obs.cell(i, row);
      if (!is_finite(leaf, cells)) throw NotFinite(say("the observation's leaf '", leaf.name, "' is not finite"));
      size_t k = leaf.kind == Leaf::Box ? leaf.count : first_outside(leaf, cells);
      if (k == leaf.count) continue;
      bool binary = leaf.n.empty();
      int64_t low = binary ? 0 : leaf.start[k], high = binary ? 1 : low + leaf.n[k] - 1;
      int64_t value = binary ? static_cast<int8_t>(cells[k]) : reinterpret_cast<const int64_t*>(cells)[k];
      std::string where = leaf.count == 1 ? "" : say("[", k, "]");
      throw std::out_of_range(say("the observation's leaf '", leaf.name, "'", where, " is ", value, ", outside ", low, " to ", high));
    }
  }
  void keep(Batch& batch, size_t row, Place& place, const Out& out) {
    place.to_play = static_cast<int8_t>(out.to_play);
    if (batch.rows.to_play) batch.rows.to_play[row] = place.to_play;
    if (model_.kind != Kind::Off) batch.obs.read_row(row, place.obs);
  }
  // One step, with the action of row `action` of a group.
  bool step(Batch& batch, size_t row, Place& place, const In& in, const Group* actions, size_t action) {
    Out out(batch.obs, row, batch.rows.reward + row * model_.spec.players);
    return guard(batch, row, place, [&] {
      place.body->step(in, out);
      if (model_.kind == Kind::Replay) remember(place, *actions, action);
      stepped(batch, row, place, out);
    });
  }
  void remember(Place& place, const Group& actions, size_t row) const {
    constexpr size_t kMost = 1 << 20;
    for (size_t i = 0; i < actions.leaves->size() && !place.too_long; ++i)
      place.actions.append(actions.cell(i, row), (*actions.leaves)[i].bytes);
    if (place.actions.size() > kMost) place.too_long = true, std::string().swap(place.actions);
  }
  // Times the work, so that the next time it is known whether it is worth sharing.
  void spread(uint8_t op, size_t count, const std::function<void(size_t)>& work) {
    std::atomic<double>& each_s = row_s_[op - RESET];
    auto start = Clock::now();
    crew_.spread(count, each_s, work);
    double now_s = Seconds(Clock::now() - start).count() / static_cast<double>(std::max<size_t>(count, 1));
    each_s = each_s == 0 ? now_s : each_s + 0.1 * (now_s - each_s);
  }
  Group actions_of(const Message& request, size_t rows) const {
    return Group(model_.spec.act, rows, const_cast<char*>(request.payload(1).data()));
  }

  void check_sizes(const Message& request, std::initializer_list<size_t> sizes) const;
  void check_actions(const Message& request, size_t rows) const;
  void do_reset(Batch& batch);
  void do_step(Batch& batch, Packet& reply);
  void begin_again(Batch& batch, Packet& reply);
  Bytes rows_of(const Group& from, const std::vector<size_t>& rows) const;
  void do_save(Batch& batch);
  void do_load(Batch& batch);
  void do_expand(Batch& batch);
  void do_rollout(Batch& batch, Packet& reply);
  void do_export(Batch& batch, Packet& reply);
  void do_import(Batch& batch);
  void do_drop(const Message& request);
  void do_stats(Packet& reply) const;
  void put(Batch& batch, size_t row, uint64_t id, StatePtr state);
  bool expand_from(Batch& batch, size_t row, const StatePtr& parent, uint64_t id, Place& place);
  std::unique_ptr<Body> borrow();
  void give_back(std::unique_ptr<Body> body);
  void say_words(const Batch& batch, Packet& reply) const;

  Snapshots snapshots_;
  Crew& crew_;
  std::array<std::atomic<double>, IMPORT - RESET + 1> row_s_{};  // that a row of each op takes
  std::mutex spare_mutex_;
  std::vector<std::unique_ptr<Body>> spare_;  // to load states into, where making one may take long
};

inline void Engine::check_sizes(const Message& request, std::initializer_list<size_t> sizes) const {
  if (request.payloads() != sizes.size()) throw BadRequest(say(request.payloads(), " frames, expected ", sizes.size()));
  size_t i = 0;
  for (size_t size : sizes) {
    if (request.payload(i).size() != size)
      throw BadRequest(say("frame ", i, " has ", request.payload(i).size(), " bytes, expected ", size));
    ++i;
  }
}

// Actions are indices into somebody's memory, so what is out of range never gets to the author's code.
inline void Engine::check_actions(const Message& request, size_t rows) const {
  Group actions = actions_of(request, rows);
  for (size_t i = 0; i < actions.leaves->size(); ++i) {
    const Leaf& leaf = (*actions.leaves)[i];
    const char* cells = actions.cell(i, 0);
    bool good = is_finite(leaf, cells, rows) && first_outside(leaf, cells, rows) == rows * leaf.count;
    if (!good) throw BadRequest(say("the action's leaf '", leaf.name, "' has values outside of its space"));
  }
}

inline void Engine::check(const Message& request) const {
  uint8_t op = request.op;
  if (op == STATS) return check_sizes(request, {});
  if (op < RESET || op > IMPORT) throw BadRequest("it is no request", E_UNSUPPORTED);
  if (takes_states(op) && (model_.kind == Kind::Off || ((op == EXPORT || op == IMPORT) && !model_.exports)))
    throw BadRequest("this environment's states cannot be had", E_UNSUPPORTED);
  size_t rows = request.batch;
  if (op == DROP && request.payloads() == 0) return;
  if (op == DROP) return check_sizes(request, {8 * rows});
  if (rows < 1) throw BadRequest("no rows");
  if (rows > limits_.batch) throw BadRequest(say(rows, " rows, at most ", limits_.batch), E_TOO_LARGE);
  size_t reply = Rows(model_.spec.players, rows).size + 1024, obs = Group(model_.spec.obs, rows).size;
  size_t action = Group(model_.spec.act, rows).size, acting = op == STEP || op == EXPAND ? rows : 0;
  switch (op) {
    case RESET: case SAVE: case LOAD: check_sizes(request, {4 * rows, 8 * rows}); break;
    case STEP: check_sizes(request, {4 * rows, action}); break;
    case EXPAND:
      if (request.payloads() != 4) check_sizes(request, {8 * rows, action, 8 * rows});
      else if (!model_.reseeds) throw BadRequest("chance seeds, and this environment has no reseed()", E_UNSUPPORTED);
      else check_sizes(request, {8 * rows, action, 8 * rows, 8 * rows});
      break;
    case ROLLOUT: {
      uint64_t steps = request.meta["steps"].uint().value_or(0);
      uint64_t most = request.payloads() == 2 ? request.payload(1).size() / rows : 0;
      if (steps < 1 || steps > most) throw BadRequest("it needs meta {steps: K} and so many actions for each row");
      acting = rows * steps;
      check_sizes(request, {8 * rows, Group(model_.spec.act, acting).size});
      reply += 8 * acting + 4 * rows;
      break;
    }
    case EXPORT: check_sizes(request, {8 * rows}); break;
    case IMPORT: {
      if (request.payloads() == 3) check_sizes(request, {8 * rows, 8 * rows, request.payload(2).size()});
      else check_sizes(request, {8 * rows, 8 * rows, 0});
      const uint64_t* sizes = reinterpret_cast<const uint64_t*>(request.payload(1).data());
      size_t left = request.payload(2).size();
      for (size_t i = 0; i < rows; left -= sizes[i++])
        if (sizes[i] > left) throw BadRequest("the states are shorter than their sizes say");
      if (left) throw BadRequest("the states are longer than their sizes say");
    }
  }
  if (takes_slots(op)) {
    const uint32_t* slots = reinterpret_cast<const uint32_t*>(request.payload(0).data());
    for (size_t i = 0; i < rows; ++i)
      if (slots[i] >= places_.size()) throw BadRequest(say("slot ", slots[i], ", there are ", places_.size()));
  }
  if (acting) check_actions(request, acting);
  reply += op == STEP ? 2 * obs + 128 : op == SAVE || op == EXPORT || op == IMPORT ? 0 : obs;
  if (reply > limits_.message)
    throw BadRequest(say("its reply may have ", reply, " bytes, at most ", limits_.message), E_TOO_LARGE);
}

inline void Engine::carry_out(const Message& request, Packet& reply) {
  if (request.op == DROP) return do_drop(request);
  if (request.op == STATS) return do_stats(reply);
  bool observes = request.op != SAVE && request.op != EXPORT && request.op != IMPORT;
  Batch batch(*this, request, observes ? request.batch : 0);
  switch (request.op) {
    case RESET: do_reset(batch); break;
    case STEP: do_step(batch, reply); break;
    case SAVE: do_save(batch); break;
    case LOAD: do_load(batch); break;
    case EXPAND: do_expand(batch); break;
    case ROLLOUT: do_rollout(batch, reply); break;
    case EXPORT: do_export(batch, reply); break;
    case IMPORT: do_import(batch); break;
  }
  // What the op has put there already comes after the rows, but for a rollout's.
  ptrdiff_t at = request.op == ROLLOUT ? static_cast<ptrdiff_t>(reply.payload.size()) : 0;
  if (request.op == LOAD) observes = request.flags & WANT_OBS;
  if (observes) reply.payload.insert(reply.payload.begin() + at, std::move(batch.obs_memory));
  reply.payload.insert(reply.payload.begin() + at, std::move(batch.memory));
  if (!batch.words.empty()) say_words(batch, reply);
}

inline void Engine::do_reset(Batch& batch) {
  std::vector<size_t> all(batch.count);
  for (size_t i = 0; i < batch.count; ++i) all[i] = i;
  batch.seeds.assign(batch.u64(1), batch.u64(1) + batch.count);
  call_reset(batch, all);
}

inline void Engine::do_step(Batch& batch, Packet& reply) {
  std::vector<size_t> able;
  able.reserve(batch.count);
  for (size_t i = 0; i < batch.count; ++i) {
    const Place& place = places_[batch.slots()[i]];
    if (place.playing && !place.over) able.push_back(i);
    else note(batch, i, E_NO_EPISODE, say("slot ", batch.slots()[i], " has no episode; it needs RESET or LOAD"));
  }
  call_step(batch, able, actions_of(batch.request, batch.count));
  if (batch.request.flags & AUTORESET) begin_again(batch, reply);
}

// Where an episode has ended the next begins; the true last observations go to a frame of their own. An environment that
// cannot begin another gets one more chance, made anew: the episode that has ended well is not lost by that.
inline void Engine::begin_again(Batch& batch, Packet& reply) {
  std::vector<size_t> ended, dead, failed, good;
  for (size_t i = 0; i < batch.count; ++i) {
    uint8_t flags = batch.rows.flags[i];
    if (flags && !(flags & FAULTY)) ended.push_back(i);
    if (flags && !(flags & LIFE)) dead.push_back(i);
  }
  if (ended.empty() && dead.empty()) return;
  Bytes last = rows_of(batch.obs, ended), before(batch.memory.text());
  Rows was(model_.spec.players, batch.count, before.data());
  batch.seeds.resize(batch.count);
  for (size_t row : dead) {
    batch.seeds[row] = splitmix64(place_of(batch, row).seed);
    batch.obs.zero_row(row);
  }
  call_reset(batch, dead);
  for (size_t row : dead) {
    if (place_of(batch, row).playing) continue;
    failed.push_back(row);
    batch.seeds[row] = splitmix64(batch.seeds[row]);
  }
  if (!failed.empty()) call_reset(batch, failed);
  for (size_t row : failed) {
    if (!place_of(batch, row).playing || was.flags[row] & FAULTY) continue;
    batch.rows.flags[row] = was.flags[row] | FIRST;
    size_t players = model_.spec.players, at = row * players;
    std::copy_n(was.reward + at, players, batch.rows.reward + at);
    std::copy_n(was.raw + at, players, batch.rows.raw + at);
  }
  for (size_t k = 0; k < ended.size(); ++k) {
    uint8_t& flags = batch.rows.flags[ended[k]];
    if (flags & LIFE) flags |= FIRST, place_of(batch, ended[k]).over = false;
    if (!(flags & FAULTY)) good.push_back(k);
  }
  if (good.size() < ended.size()) last = rows_of(Group(model_.spec.obs, ended.size(), last.data()), good);
  if (!good.empty()) reply.payload.push_back(std::move(last));
}

// Some rows of observations, as a frame.
inline Bytes Engine::rows_of(const Group& from, const std::vector<size_t>& rows) const {
  Bytes memory = Bytes::zeros(Group(model_.spec.obs, rows.size()).size);
  Group group(model_.spec.obs, rows.size(), memory.data());
  for (size_t i = 0; i < group.leaves->size(); ++i)
    for (size_t k = 0; k < rows.size(); ++k)
      std::memcpy(group.cell(i, k), from.cell(i, rows[k]), (*group.leaves)[i].bytes);
  return memory;
}

inline void Engine::put(Batch& batch, size_t row, uint64_t id, StatePtr state) {
  if (!state) return;
  if (id == 0) return note(batch, row, E_BAD_REQUEST, "a state cannot have the id 0");
  if (store.put(id, std::move(state))) return;
  auto [count, bytes] = store.count_and_bytes();
  note(batch, row, E_SNAPSHOT_FULL, say(count, " states take ", bytes, " bytes, and another does not fit; drop some"));
}

inline void Engine::do_save(Batch& batch) {
  std::vector<StatePtr> states(batch.count);
  spread(batch.request.op, batch.count, [&](size_t row) {
    Place& place = place_of(batch, row);
    if (!place.playing) return note(batch, row, E_NO_EPISODE, say("slot ", batch.slots()[row], " has no episode"));
    try {
      states[row] = snapshots_.capture(place, false);
    } catch (const std::exception& error) {
      note(batch, row, E_ENV, error.what());
    }
  });
  for (size_t row = 0; row < batch.count; ++row) put(batch, row, batch.u64(1)[row], std::move(states[row]));
}

inline void Engine::do_load(Batch& batch) {
  spread(batch.request.op, batch.count, [&](size_t row) {
    Place& place = place_of(batch, row);
    StatePtr state = store.get(batch.u64(1)[row]);
    if (!state) return note(batch, row, E_UNKNOWN_STATE, say("there is no state ", batch.u64(1)[row]));
    if (!guard(batch, row, place, [&] { snapshots_.restore(*state, place); })) return;
    batch.obs.write_row(row, place.obs);
    if (batch.rows.to_play) batch.rows.to_play[row] = place.to_play;
  });
}

// Prepares a place in which the state `id` can be stepped.
inline bool Engine::expand_from(Batch& batch, size_t row, const StatePtr& parent, uint64_t id, Place& place) {
  if (!parent) return note(batch, row, E_UNKNOWN_STATE, say("there is no state ", id)), false;
  if (parent->over) return note(batch, row, E_NO_EPISODE, say("the episode of state ", id, " has ended")), false;
  if (model_.kind != Kind::Copy) place.body = borrow();
  return guard(batch, row, place, [&] { snapshots_.restore(*parent, place); });
}

inline void Engine::do_expand(Batch& batch) {
  const uint64_t *parents = batch.u64(0), *children = batch.u64(2);
  const uint64_t* seeds = batch.request.payloads() == 4 ? batch.u64(3) : nullptr;
  Group actions = actions_of(batch.request, batch.count);
  std::vector<StatePtr> from(batch.count), kept(batch.count);  // parents first: a child may take a parent's id
  for (size_t row = 0; row < batch.count; ++row) from[row] = store.get(parents[row]);
  spread(batch.request.op, batch.count, [&](size_t row) {
    Place place;
    if (!expand_from(batch, row, from[row], parents[row], place)) return;
    if (seeds && seeds[row] && !guard(batch, row, place, [&] { place.body->reseed(seeds[row]); })) return;
    if (!step(batch, row, place, In(actions, row), &actions, row)) return;
    try {
      if (children[row]) kept[row] = snapshots_.capture(place, true);
      give_back(std::move(place.body));
    } catch (const std::exception& error) {
      note(batch, row, E_ENV, error.what());
    }
  });
  for (size_t row = 0; row < batch.count; ++row) put(batch, row, children[row], std::move(kept[row]));
}

inline void Engine::do_rollout(Batch& batch, Packet& reply) {
  size_t steps = batch.request.meta["steps"].uint().value_or(1), players = model_.spec.players;
  Group actions = actions_of(batch.request, batch.count * steps);
  Bytes rewards = Bytes::zeros(8 * batch.count * steps), lengths = Bytes::zeros(4 * batch.count);
  spread(batch.request.op, batch.count, [&](size_t row) {
    Place place;
    if (!expand_from(batch, row, store.get(batch.u64(0)[row]), batch.u64(0)[row], place)) return;
    for (size_t k = 0; k < steps && !place.over; ++k) {
      batch.obs.zero_row(row);
      std::fill_n(batch.rows.reward + row * players, players, 0.0);
      if (!step(batch, row, place, In(actions, row * steps + k), &actions, row * steps + k)) return;
      rewards.as<double>()[row * steps + k] = batch.rows.reward[row * players];
      ++lengths.as<uint32_t>()[row];
    }
    give_back(std::move(place.body));
  });
  reply.payload.push_back(std::move(rewards));
  reply.payload.push_back(std::move(lengths));
}

inline void Engine::do_export(Batch& batch, Packet& reply) {
  std::vector<std::string> packed(batch.count);
  spread(batch.request.op, batch.count, [&](size_t row) {
    StatePtr state = store.get(batch.u64(0)[row]);
    if (!state) return note(batch, row, E_UNKNOWN_STATE, say("there is no state ", batch.u64(0)[row]));
    try {
      packed[row] = snapshots_.pack(*state);
    } catch (const std::exception& error) {
      note(batch, row, E_ENV, error.what());
    }
  });
  Bytes sizes(8 * batch.count);
  size_t total = 0;
  for (size_t row = 0; row < batch.count; ++row) total += sizes.as<uint64_t>()[row] = packed[row].size();
  if (total + batch.memory.size() + sizes.size() + 1024 > limits_.message)
    throw BadRequest(say("the states have ", total, " bytes, a message at most ", limits_.message), E_TOO_LARGE);
  Bytes all(total);
  char* at = all.data();
  for (const std::string& one : packed) at = std::copy(one.begin(), one.end(), at);
  reply.payload.push_back(std::move(sizes));
  reply.payload.push_back(std::move(all));
}

inline void Engine::do_import(Batch& batch) {
  std::vector<std::string_view> packed;
  std::string_view all = batch.request.payload(2);
  for (size_t row = 0; row < batch.count; ++row) {
    packed.push_back(all.substr(0, batch.u64(1)[row]));
    all.remove_prefix(packed[row].size());
  }
  std::vector<StatePtr> states(batch.count);
  spread(batch.request.op, batch.count, [&](size_t row) {
    try {
      states[row] = snapshots_.unpack(packed[row]);
    } catch (const BadRequest& error) {
      note(batch, row, E_BAD_REQUEST, error.what());
    } catch (const std::exception& error) {
      note(batch, row, E_ENV, error.what());
    }
  });
  for (size_t row = 0; row < batch.count; ++row) put(batch, row, batch.u64(0)[row], std::move(states[row]));
}

inline void Engine::do_drop(const Message& request) {
  if (request.payloads()) return store.drop(reinterpret_cast<const uint64_t*>(request.payload(0).data()), request.batch);
  if (auto generation = request.meta["generation"].uint()) store.drop_generation(*generation);
}

inline void Engine::do_stats(Packet& reply) const {
  auto [count, bytes] = store.count_and_bytes();
  long pages = 0;
  if (FILE* file = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(file, "%*s %ld", &pages) != 1) pages = 0;
    std::fclose(file);
  }
  Packer meta;
  meta.map(8).text("slots").uint(places_.size()).text("steps").uint(steps).text("episodes").uint(episodes);
  meta.text("faults").uint(faults).text("snapshots").uint(count).text("snapshot_bytes").uint(bytes);
  meta.text("rss").uint(static_cast<uint64_t>(pages) * 4096).text("work_us").uint(work_us);
  reply.meta = meta.bytes();
}

// Environments that states can be loaded into: one for each thread is enough.
inline std::unique_ptr<Body> Engine::borrow() {
  std::lock_guard<std::mutex> lock(spare_mutex_);
  if (spare_.empty()) return nullptr;
  std::unique_ptr<Body> body = std::move(spare_.back());
  spare_.pop_back();
  return body;
}
inline void Engine::give_back(std::unique_ptr<Body> body) {
  if (!body || model_.kind == Kind::Copy) return;
  std::lock_guard<std::mutex> lock(spare_mutex_);
  spare_.push_back(std::move(body));
}

inline void Engine::say_words(const Batch& batch, Packet& reply) const {
  std::vector<std::pair<std::string, std::string>> all;
  size_t room = std::min(limits_.meta, limits_.message / 8);
  for (const auto& [row, text] : batch.words) {
    all.emplace_back(std::to_string(row), clean_text(text, limits_.info));
    size_t size = all.back().first.size() + all.back().second.size() + 10;
    if (size + 64 > room) {
      all.pop_back();
      break;
    }
    room -= size;
  }
  Packer meta;
  meta.map(1).text("rows").map(all.size());
  for (const auto& [row, text] : all) meta.text(row).text(text);
  reply.meta = meta.bytes();
}

// == server =============================================================================================================

using Job = std::function<void()>;

// Threads that all wait for the network. Whoever reads a request carries it out, without handing it to anybody, while the
// others go on waiting for messages. There is one thread more than requests are carried out at once, so that somebody
// always reads.
class Pool : public Crew {
 public:
  static constexpr uint64_t kWake = 0;
  // `happened(id, events)` is called for what was given to `watch`, `tick()` when it is time: seconds until the next.
  Pool(unsigned limit, std::function<void(uint64_t, uint32_t)> happened, std::function<double()> tick)
      : limit_(limit), happened_(std::move(happened)), tick_(std::move(tick)), epoll_(::epoll_create1(EPOLL_CLOEXEC)),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (epoll_ < 0 || wake_ < 0) throw std::runtime_error("no more files can be opened");
    watch(wake_, kWake);
  }
  ~Pool() override {
    join();
    ::close(epoll_), ::close(wake_);
  }
  void join() {
    stop();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }
  void start() {
    sigset_t all, before;
    sigfillset(&all);
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGPROF}) sigdelset(&all, signal);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // the others are for the threads of the author
    for (unsigned i = 0; i <= limit_; ++i) threads_.emplace_back([this] { loop(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  void stop() {
    stopping_ = true;
    wake();
  }
  // Whether all threads have come to their end; waits for so long.
  bool ended(double most_s) {
    std::unique_lock<std::mutex> lock(mutex_);
    return gone_.wait_for(lock, Seconds(most_s), [&] { return ended_ == threads_.size(); });
  }
  unsigned limit() const { return limit_; }

  // Edges, not levels: each thing that happens wakes one thread, and nothing is armed again on the way.
  void watch(int fd, uint64_t id, uint32_t events = EPOLLIN, int how = EPOLL_CTL_ADD) {
    epoll_event event{events | EPOLLET, {}};
    event.data.u64 = id;
    ::epoll_ctl(epoll_, how, fd, &event);
  }
  void forget(int fd) { ::epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr); }
  void wake() {
    uint64_t one = 1;
    if (::write(wake_, &one, sizeof one) < 0) return;  // full: then somebody is awake
  }
  void push(Job job) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(job));
  }
  // Carries out what is in the queue, here as far as a thread more may work.
  void work() {
    Job job;
    while (take(job)) {
      job();
      job = nullptr;
      std::lock_guard<std::mutex> lock(mutex_);
      --running_;
    }
  }

  void spread(size_t count, double each_s, const std::function<void(size_t)>& work) override {
    constexpr double kWorthIt = 100e-6;  // waking a thread takes some of this
    unsigned idle = 0;
    if (limit_ > 1 && count > 1 && each_s * static_cast<double>(count) > kWorthIt) {
      std::lock_guard<std::mutex> lock(mutex_);
      idle = limit_ - std::min(running_, limit_);
    }
    if (idle == 0) {
      for (size_t i = 0; i < count; ++i) work(i);
      return;
    }
    auto share = std::make_shared<Share>(count, work, idle + 1);
    for (unsigned i = 0; i < idle; ++i) push([share] { share->help(); });
    wake();
    share->help();
    share->wait();
  }

 private:
  // Rows that several threads take from.
  struct Share {
    Share(size_t count, const std::function<void(size_t)>& work, unsigned threads)
        : count(count), chunk(std::max<size_t>(1, count / (4 * threads))), work(work) {}
    void help() {
      for (size_t from; (from = next.fetch_add(chunk)) < count;) {
        size_t to = std::min(count, from + chunk);
        std::exception_ptr caught;
        try {
          for (size_t i = from; i < to; ++i) work(i);
        } catch (...) {
          caught = std::current_exception();
        }
        std::lock_guard<std::mutex> lock(mutex);
        if (caught) error = caught;
        done += to - from;
        if (done == count) all.notify_all();
      }
    }
    void wait() {
      std::unique_lock<std::mutex> lock(mutex);
      all.wait(lock, [&] { return done == count; });
      if (error) std::rethrow_exception(error);
    }
    const size_t count, chunk;
    const std::function<void(size_t)>& work;  // not touched any more once all rows are taken
    std::atomic<size_t> next{0};
    std::mutex mutex;
    std::condition_variable all;
    size_t done = 0;
    std::exception_ptr error;
  };

  bool take(Job& job) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.empty() || running_ >= limit_ || stopping_) return false;
    job = std::move(queue_.front());
    queue_.pop_front();
    ++running_;
    if (!queue_.empty() && running_ < limit_) wake();  // for several edges only one thread may have woken
    return true;
  }
  // Waits for something to happen. While things happen soon, one thread stays awake for a moment before it sleeps, as being
  // woken costs 30 us and more; it leaves its core to whoever wants it.
  int wait(epoll_event& event, int wait_ms, bool& quick) {
    constexpr auto kSoon = std::chrono::microseconds(150);
    Clock::time_point start = Clock::now();
    int count = 0;
    if (quick && !awake_.exchange(true)) {
      while ((count = ::epoll_wait(epoll_, &event, 1, 0)) == 0 && Clock::now() - start < kSoon) {
        sched_yield();
#if defined(__x86_64__) || defined(__i386__)
        for (int i = 0; i < 40; ++i) __builtin_ia32_pause();  // and to the core's other thread
#endif
      }
      awake_ = false;
    }
    if (count == 0) {
      start = Clock::now();
      count = ::epoll_wait(epoll_, &event, 1, wait_ms);
    }
    quick = count == 1 && Clock::now() - start < kSoon;
    return count;
  }
  void loop() {
    bool quick = false;  // whether the last thing happened soon
    while (!stopping_) {
      work();
      Clock::duration::rep now = ticks(), due = due_;
      if (now >= due && due_.compare_exchange_strong(due, ticks(60))) {
        due_ = ticks(tick_());
        continue;
      }
      int wait_ms = static_cast<int>(std::min<Clock::duration::rep>((due - now) / 1000000 + 1, 250));
      epoll_event event;
      int count = wait(event, std::max(wait_ms, 0), quick);
      if (count == 1 && event.data.u64 != kWake) happened_(event.data.u64, event.events);
    }
    wake();  // the next one
    std::lock_guard<std::mutex> lock(mutex_);
    ++ended_;
    gone_.notify_all();
  }

  const unsigned limit_;
  std::function<void(uint64_t, uint32_t)> happened_;
  std::function<double()> tick_;
  int epoll_, wake_;
  std::atomic<bool> stopping_{false}, awake_{false};
  std::atomic<Clock::duration::rep> due_{0};
  std::mutex mutex_;
  std::condition_variable gone_;
  std::deque<Job> queue_;
  unsigned running_ = 0;
  size_t ended_ = 0;
  std::vector<std::thread> threads_;
};

using WirePtr = std::shared_ptr<Wire>;

// A request that has come in.
struct Work {
  Message request;
  Clock::time_point arrived = Clock::now();
};
using WorkPtr = std::shared_ptr<Work>;

// A learner: its environments, what it is told, what is under way for it, and what it was answered last.
struct Session {
  Session(uint32_t number, const Limits& limits, std::unique_ptr<Engine> engine)
      : number(number), limits(limits), engine(std::move(engine)), busy(this->engine->slots()) {}

  const uint32_t number;
  const Limits limits;
  const std::unique_ptr<Engine> engine;

  std::mutex mutex;  // for all below
  WirePtr wire;      // none while the connection is lost
  Clock::duration::rep detached_at = 0;
  std::atomic<bool> ended{false};
  std::vector<uint64_t> working;                      // numbers of requests under way
  std::deque<std::pair<uint64_t, PacketPtr>> replies;  // the last ones
  bool in_order = false;                              // a request that touches states is being carried out
  std::deque<WorkPtr> waiting;                        // others of that kind, in the order they came

  // Whether a request has come before. Numbers mostly rise, but DROPs, which are not numbered here, may overtake.
  bool has_seen(uint64_t seq) const {
    return seq <= floor || (seq <= highest && std::find(seen.begin(), seen.end(), seq) != seen.end());
  }
  void see(uint64_t seq) {
    highest = std::max(highest, seq);
    seen.push_back(seq);
    if (seen.size() > 4 * limits.window) floor = std::max(floor, seen.front()), seen.pop_front();
  }
  PacketPtr reply_to(uint64_t seq) const {
    for (const auto& [number, reply] : replies)
      if (number == seq) return reply;
    return nullptr;
  }
  void keep(uint64_t seq, PacketPtr reply) {
    replies.emplace_back(seq, std::move(reply));
    if (replies.size() > limits.window) replies.pop_front();
  }
  // Takes the slots of a request, which nobody else may touch until it is done.
  void claim(const Message& request) {
    if (!Engine::takes_slots(request.op)) return;
    const uint32_t* slots = reinterpret_cast<const uint32_t*>(request.payload(0).data());
    for (size_t i = 0; i < request.batch; ++i) {
      if (!busy[slots[i]]++) continue;
      for (size_t k = 0; k <= i; ++k) --busy[slots[k]];
      throw BadRequest(say("slot ", slots[i], " is named twice, or is in another request under way"));
    }
  }
  void release(const Message& request) {
    working.erase(std::find(working.begin(), working.end(), request.seq));
    if (!Engine::takes_slots(request.op)) return;
    const uint32_t* slots = reinterpret_cast<const uint32_t*>(request.payload(0).data());
    for (size_t i = 0; i < request.batch; ++i) --busy[slots[i]];
  }

 private:
  std::vector<uint8_t> busy;
  std::deque<uint64_t> seen;
  uint64_t highest = 0, floor = 0;
};
using SessionPtr = std::shared_ptr<Session>;

// What the command line says.
struct Options {
  std::optional<Address> connect, bind;
  unsigned envs = 1024, threads = 1;
  std::string token;
  double patience_s = 0;
  bool insecure = false;
  size_t learners = 64;                // at once
  double keep_s = 30, reading_s = 30;  // a session without a connection; a learner that does not read
};

class Server;

// What carries messages. It calls opened, took and lost of the server, for each wire one thread at a time.
struct Binding {
  virtual ~Binding() = default;
  virtual void happened(uint64_t id, uint32_t events) = 0;
  // Seconds until it wants to be called again.
  virtual double tick() = 0;
  virtual std::string url() const = 0;
};

// Sessions with learners over one binding: who they are, what they ask, and what they are answered.
class Server {
 public:
  using MakeEngine = std::function<std::unique_ptr<Engine>(const Limits&, size_t slots)>;

  Server(const Model& model, Options options);
  ~Server() {
    pool.join();
    for (const SessionPtr& session : sessions_) session->wire = nullptr;  // they hold each other
    ::close(signal_);
  }

  void set_engine(MakeEngine make) { make_engine_ = std::move(make); }
  void start();
  // Says goodbye and ends. The first code and words count.
  void stop(int code, const std::string& words = "");
  // Waits for the end; nothing if it has not come.
  std::optional<int> wait(double most_s) {
    std::unique_lock<std::mutex> lock(mutex_);
    over_.wait_for(lock, Seconds(most_s), [&] { return code_.has_value(); });
    return code_;
  }

  // For bindings.
  void opened(const WirePtr& wire);
  void took(const WirePtr& wire, Frames frames);
  void lost(const WirePtr& wire);
  void refuse(const WirePtr& wire, StatusCode status, const std::string& text);
  uint64_t new_id() { return ++ids_; }
  void log(const std::string& words) const { std::fprintf(stderr, "corral: %s\n", words.c_str()); }

  int signal_fd() const { return signal_; }
  std::string url() const { return binding_->url(); }

  const Options options;
  Pool pool;

 private:
  static constexpr uint64_t kSignal = 1;
  static constexpr double kKnockS = 10, kWelcomeS = 60, kPartingS = 2;
  static constexpr size_t kMostWires = 160, kMostDrops = 4096;

  double tick();
  void hello(const WirePtr& wire, uint64_t wanted);
  void handshake(const WirePtr& wire, Message& message);
  void welcomed(const WirePtr& wire, const Value& welcome);
  SessionPtr begin_session(const WirePtr& wire, uint32_t number, const Limits& limits);
  static bool is_forsaken(Session& session);
  void left(const WirePtr& wire, const Message& message);
  void in_session(const WirePtr& wire, Message& message);
  void admit(const WirePtr& wire, const SessionPtr& session, WorkPtr work);
  void perform(const SessionPtr& session, const WorkPtr& work);
  void finish(const SessionPtr& session, const WorkPtr& work, PacketPtr reply);
  void end(const SessionPtr& session);
  std::shared_ptr<Packet> packet(uint8_t op, uint16_t flags, const Session* session = nullptr, uint64_t seq = 0) const;
  PacketPtr failure(const Session& session, const Message& request, StatusCode status, const std::string& text) const;
  PacketPtr words(uint8_t op, StatusCode status, const char* key, const std::string& text, const Session* session) const;

  const Model& model_;
  MakeEngine make_engine_;
  const std::string instance_;
  std::unique_ptr<Binding> binding_;
  int signal_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);  // written to when the process is asked to end
  std::atomic<uint64_t> ids_{16};
  std::mutex mutex_;  // for all below
  std::condition_variable over_;
  std::optional<int> code_;
  std::map<uint64_t, WirePtr> wires_;
  std::vector<SessionPtr> sessions_;
  Clock::time_point last_learner_ = Clock::now();
};

inline std::string instance_of_process() {
  const char* given = std::getenv("CORRAL_INSTANCE");
  std::string hex = given ? given : "", bytes;
  if (hex.size() != 32 || hex.find_first_not_of("0123456789abcdefABCDEF") != hex.npos) return random_bytes(16);
  for (size_t i = 0; i < 32; i += 2) bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

inline std::string prove(const std::string& token, const char* role, std::string_view simulator, std::string_view learner) {
  if (token.empty()) return "";
  return std::string(text_of(hmac_sha256(token, say(role, simulator, learner))));
}

inline std::shared_ptr<Packet> Server::packet(uint8_t op, uint16_t flags, const Session* session, uint64_t seq) const {
  auto packet = std::make_shared<Packet>(op, flags);
  packet->head.seq = seq;
  if (session) packet->head.session = session->number, packet->head.layout = model_.layout;
  return packet;
}

inline PacketPtr Server::failure(const Session& session, const Message& request, StatusCode status, const std::string& text) const {
  auto reply = packet(request.op, REPLY | FAILED, &session, request.seq);
  reply->head.status = status, reply->head.batch = request.batch;
  std::string clean = clean_text(say(op_name(request.op), ": ", text), std::min<size_t>(session.limits.meta - 64, 4096));
  reply->meta = Packer().map(1).text("text").text(clean).bytes();
  reply->seal();
  return reply;
}

// CLOSE or ERROR.
inline PacketPtr Server::words(uint8_t op, StatusCode status, const char* key, const std::string& text, const Session* session) const {
  auto out = packet(op, NO_REPLY, session);
  out->head.status = status;
  out->meta = Packer().map(1).text(key).text(clean_text(text, 4096)).bytes();
  out->seal();
  return out;
}

inline void Server::stop(int code, const std::string& text) {
  std::vector<WirePtr> wires;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (code_) return;
    code_ = code;
    for (const auto& entry : wires_) wires.push_back(entry.second);
    for (const SessionPtr& session : sessions_) {
      std::lock_guard<std::mutex> inner(session->mutex);
      if (session->wire) session->wire->send(words(CLOSE, GOOD, "reason", "the simulator ends", session.get()));
    }
  }
  for (const WirePtr& wire : wires) wire->close(false);
  if (!text.empty()) log(text);
  over_.notify_all();
  pool.stop();
}

// What is due, whoever is idle; seconds until the next time.
inline double Server::tick() {
  Clock::duration::rep now = ticks();
  auto after = [&](Clock::duration::rep since, double s) { return Seconds(Clock::duration(now - since)).count() > s; };
  std::vector<WirePtr> wires;
  std::vector<SessionPtr> forgotten;
  bool lonely;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& entry : wires_) wires.push_back(entry.second);
    for (const SessionPtr& session : sessions_) {
      std::lock_guard<std::mutex> inner(session->mutex);
      if (!session->wire && after(session->detached_at, options.keep_s)) forgotten.push_back(session);
    }
    if (!sessions_.empty()) last_learner_ = Clock::now();
    lonely = options.patience_s > 0 && Seconds(Clock::now() - last_learner_).count() > options.patience_s;
  }
  for (const SessionPtr& session : forgotten) end(session);
  for (const WirePtr& wire : wires) {
    if (wire->due != 0 && now > wire->due) wire->close(true);
    if (wire->stuck_since != 0 && after(wire->stuck_since, options.reading_s)) {
      log(say(wire->peer, " has not read for ", options.reading_s, " s; closed"));
      wire->close(true);
    }
  }
  if (lonely) stop(1, say("no learner at ", url(), " for ", options.patience_s, " s; is it running, and can it be reached?"));
  return std::min(0.25, binding_->tick());
}

// -- handshake

inline void Server::opened(const WirePtr& wire) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (wires_.size() >= kMostWires || code_) return wire->close(true);
    wires_[wire->id] = wire;
  }
  wire->due = ticks(kKnockS);
  if (wire->dialled) hello(wire, 0);
}

inline void Server::took(const WirePtr& wire, Frames frames) {
  try {
    if (wire->stage == Wire::Doomed) return;
    Message message = Message::read(std::move(frames), wire->session ? wire->session->limits.meta : kGreetingBytes);
    if (message.op == CLOSE || message.op == ERROR) left(wire, message);
    else if (wire->stage == Wire::Open) in_session(wire, message);
    else handshake(wire, message);
  } catch (const BadMessage& error) {
    refuse(wire, E_PROTOCOL, say("the learner sent ", error.what()));
  }
}

inline void Server::lost(const WirePtr& wire) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    wires_.erase(wire->id);
  }
  wire->resumes = nullptr;
  SessionPtr session = std::move(wire->session);
  if (!session) return;
  std::lock_guard<std::mutex> lock(session->mutex);
  if (session->wire == wire) session->wire = nullptr, session->detached_at = ticks();
}

// A session error: says why, and closes. Of a session that broke the rules nothing is kept.
inline void Server::refuse(const WirePtr& wire, StatusCode status, const std::string& text) {
  if (wire->stage == Wire::Doomed) return;
  log(say(wire->peer, ": ", text, "; closed"));
  wire->send(words(ERROR, status, "text", text, wire->session.get()));
  if (wire->session) end(wire->session);
  wire->session = wire->resumes = nullptr;
  wire->stage = Wire::Doomed;
  wire->due = ticks(kPartingS);  // for the words to get there: who closes with bytes unread destroys them
  wire->close(false);
}

// CLOSE or ERROR has come.
inline void Server::left(const WirePtr& wire, const Message& message) {
  bool fatal = message.status == E_VERSION || message.status == E_AUTH || message.status == E_SPACE_MISMATCH;
  if (message.op == ERROR) log(say("the learner at ", wire->peer, " refused this simulator: ", message.text()));
  if (wire->session) end(wire->session);
  wire->session = wire->resumes = nullptr;
  wire->stage = Wire::Doomed;
  wire->close(true);
  if (!wire->dialled) return;
  if (message.op == CLOSE && message.meta["over"].is_true() && !options.bind) stop(0);  // who was told to listen stays
  if (message.op == ERROR && fatal) stop(1);
}

// Says what this is. A session to go on with is named, if it is clear which; whom this side dials is its only learner.
inline void Server::hello(const WirePtr& wire, uint64_t wanted) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t found = 0;
    for (const SessionPtr& session : sessions_)
      if (wire->dialled || session->number == wanted) wire->resumes = session, ++found;
    if (found != 1) wire->resumes = nullptr;
  }
  std::vector<const char*> can = {"raw_reward"};
  if (model_.reseeds) can.push_back("reseed");
  if (model_.spec.rng_in_state) can.push_back("rng_in_state");
  if (model_.kind == Kind::Key) can.push_back("key_state");
  if (model_.kind != Kind::Off) can.push_back("rollout");
  if (model_.exports) can.push_back("export");
  Packer meta;
  meta.map(15).text("versions").array(1).array(2).uint(1).uint(0).text("sdk").text("corral-cpp 1");
  meta.text("env").text(model_.spec.name).text("env_version").integer(model_.spec.version);
  meta.text("instance").bin(instance_).text("nonce").bin(wire->nonce);
  meta.text("session").uint(wire->resumes ? wire->resumes->number : 0);
  pack_space(meta.text("observation"), model_.spec.obs);
  pack_space(meta.text("action"), model_.spec.act);
  meta.text("players").integer(model_.spec.players).text("slots").uint(options.envs).text("threads").uint(pool.limit());
  meta.text("level").integer(model_.level()).text("exact").boolean(model_.kind != Kind::Key);
  meta.text("capabilities").array(can.size());
  for (const char* one : can) meta.text(one);
  auto out = packet(HELLO, 0);
  out->meta = meta.bytes();
  out->seal();
  wire->stage = Wire::SaidHello;
  wire->due = ticks(kWelcomeS);
  wire->send(out);
}

inline void Server::handshake(const WirePtr& wire, Message& message) {
  if (message.op == KNOCK && wire->stage == Wire::Greeted) return hello(wire, message.meta["session"].uint().value_or(0));
  if (message.op == WELCOME && wire->stage == Wire::SaidHello) return welcomed(wire, message.meta);
  throw BadMessage(say("op ", int(message.op), " where ", wire->stage == Wire::Greeted ? "KNOCK" : "WELCOME", " was expected"));
}

inline uint64_t number_in(const Value& map, const char* key, uint64_t least, uint64_t most) {
  std::optional<uint64_t> value = map[key].uint();
  if (!value || *value < least) throw BadMessage(say("a WELCOME in which ", key, " is not a number from ", least));
  return std::min(*value, most);
}

inline void Server::welcomed(const WirePtr& wire, const Value& welcome) {
  std::string_view nonce = welcome["nonce"].string();
  if (nonce.size() != 16) throw BadMessage("a WELCOME whose nonce is not 16 bytes long");
  std::string expected = prove(options.token, "corral-learner", wire->nonce, nonce);
  if (!options.token.empty() && !same_secret(welcome["proof"].string(), expected)) {
    refuse(wire, E_AUTH, say("the learner at ", wire->peer, " did not prove that it knows the token; give it the same file"));
    if (wire->dialled) stop(1);
    return;
  }
  if (welcome["version"][size_t(0)].uint() != 1u) return refuse(wire, E_VERSION, "another version than 1 was chosen");
  Limits limits;
  Value given = welcome["limits"], budget = welcome["snapshots"];
  limits.message = number_in(given, "message", 4096, kMostMessage), limits.batch = number_in(given, "batch", 1, 1 << 20);
  limits.slots = number_in(given, "slots", 1, 1 << 24), limits.meta = number_in(given, "meta", 256, kMostMessage);
  limits.info = number_in(given, "info", 0, 1 << 20), limits.window = number_in(welcome, "window", 1, 1024);
  limits.snapshot_bytes = number_in(budget, "bytes", 0, ~uint64_t(0));
  limits.snapshots = number_in(budget, "count", 0, ~uint64_t(0));
  uint32_t number = static_cast<uint32_t>(number_in(welcome, "session", 1, 0xFFFFFFFF));
  SessionPtr session = wire->resumes, old = wire->resumes;
  if (!welcome["resumed"].is_true()) {
    if (old && is_forsaken(*old)) end(old);  // the learner does not know it any more
    session = begin_session(wire, number, limits);
    if (!session) return;
  } else if (!session || session->number != number) {
    return refuse(wire, E_SESSION, say("session ", number, " is not known here"));
  }
  auto ready = packet(READY, 0);
  ready->meta = Packer().map(1).text("proof").bin(prove(options.token, "corral-simulator", wire->nonce, nonce)).bytes();
  ready->seal();
  wire->allow(session->limits.message);
  wire->stage = Wire::Open, wire->was_open = true;
  wire->due = 0;
  std::lock_guard<std::mutex> lock(session->mutex);
  if (session->ended) return wire->close(true);
  if (session->wire) session->wire->close(true);  // dead, but this side has not noticed yet
  wire->session = session;
  wire->resumes = nullptr;
  wire->send(ready);  // before any reply that is finished from now on
  session->wire = wire;
}

// Whether a session has no connection. Another learner may have one of the same number, so one that has is left alone.
inline bool Server::is_forsaken(Session& session) {
  std::lock_guard<std::mutex> lock(session.mutex);
  return !session.wire;
}

inline SessionPtr Server::begin_session(const WirePtr& wire, uint32_t number, const Limits& limits) {
  SessionPtr fresh, forsaken;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const SessionPtr& session : sessions_)  // where there is no place, one that nobody came back for makes it
      if (sessions_.size() >= options.learners && !forsaken && is_forsaken(*session)) forsaken = session;
    if (forsaken || sessions_.size() < options.learners) {
      size_t slots = std::min<uint64_t>(options.envs, limits.slots);
      fresh = std::make_shared<Session>(number, limits, make_engine_(limits, slots));
      sessions_.push_back(fresh);
    }
  }
  if (forsaken) end(forsaken);
  if (!fresh) refuse(wire, E_FULL, say("this simulator serves ", options.learners, " learners at once, and has them"));
  return fresh;
}

inline void Server::end(const SessionPtr& session) {
  std::deque<WorkPtr> waiting;
  {
    std::lock_guard<std::mutex> lock(session->mutex);
    session->ended = true;
    session->wire = nullptr;
    waiting.swap(session->waiting);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  sessions_.erase(std::remove(sessions_.begin(), sessions_.end(), session), sessions_.end());
}

// -- requests

inline void Server::in_session(const WirePtr& wire, Message& message) {
  const SessionPtr& session = wire->session;
  if (message.session != session->number)
    return refuse(wire, E_SESSION, say("session ", message.session, ", expected ", session->number));
  if (message.layout != model_.layout) throw BadMessage(say("layout ", message.layout, ", expected ", model_.layout));
  if (message.flags & REPLY || message.op == LOG) return;
  if (message.op < RESET) throw BadMessage("a handshake where there was one already");
  if (message.op == HEARTBEAT) {
    auto reply = packet(HEARTBEAT, REPLY, session.get(), message.seq);
    reply->seal();
    return wire->send(reply);
  }
  auto work = std::make_shared<Work>();
  work->request = std::move(message);
  admit(wire, session, std::move(work));
}

// Takes a request on, in the order in which they come, unless it was taken on before or cannot be carried out.
inline void Server::admit(const WirePtr& wire, const SessionPtr& session, WorkPtr work) {
  const Message& request = work->request;
  std::lock_guard<std::mutex> lock(session->mutex);
  if (session->wire != wire) return wire->close(true);  // the session goes on over another one
  try {
    if (request.op == DROP) {
      session->engine->check(request);
    } else if (session->has_seen(request.seq)) {
      if (PacketPtr reply = session->reply_to(request.seq)) return wire->send(reply);
      if (std::find(session->working.begin(), session->working.end(), request.seq) != session->working.end()) return;
      return wire->send(failure(*session, request, E_BAD_REQUEST, "it was answered long ago, and the answer is not kept"));
    } else {
      session->see(request.seq);
      if (session->working.size() >= session->limits.window)
        throw BadRequest(say("more than ", session->limits.window, " requests under way"), E_TOO_LARGE);
      session->engine->check(request);
      session->claim(request);
      session->working.push_back(request.seq);
    }
  } catch (const BadRequest& error) {
    if (request.op == DROP) return;
    PacketPtr reply = failure(*session, request, error.status, error.what());
    session->keep(request.seq, reply);
    return wire->send(reply);
  }
  if (Engine::takes_states(request.op) && session->in_order) {
    if (session->waiting.size() > session->limits.window + kMostDrops)
      throw BadMessage(say("more than ", kMostDrops, " DROPs at once"));
    return session->waiting.push_back(std::move(work));
  }
  if (Engine::takes_states(request.op)) session->in_order = true;
  pool.push([this, session, work] { perform(session, work); });
}

inline void Server::perform(const SessionPtr& session, const WorkPtr& work) {
  const Message& request = work->request;
  auto start = Clock::now();
  auto reply = packet(request.op, REPLY, session.get(), request.seq);
  reply->head.batch = request.batch;
  PacketPtr failed;
  try {
    if (session->ended) throw BadRequest("nobody waits for it");
    if (request.aux && Seconds(start - work->arrived).count() * 1000 > request.aux)
      throw BadRequest("its deadline passed while it waited for others", E_DEADLINE);
    session->engine->carry_out(request, *reply);
  } catch (const BadRequest& error) {
    failed = failure(*session, request, error.status, error.what());
  } catch (const std::exception& error) {
    failed = failure(*session, request, E_ENV, error.what());
  } catch (...) {
    failed = failure(*session, request, E_ENV, "something was thrown that is no std::exception");
  }
  double us = Seconds(Clock::now() - start).count() * 1e6;
  session->engine->work_us += static_cast<uint64_t>(us);
  reply->head.aux = static_cast<uint32_t>(std::min(us, 4294967295.0));
  reply->seal();
  finish(session, work, failed ? failed : PacketPtr(reply));
}

// The slots are free and the reply is kept before it is sent: the learner's next request may come at once.
inline void Server::finish(const SessionPtr& session, const WorkPtr& work, PacketPtr reply) {
  WirePtr wire;
  WorkPtr next;
  {
    std::lock_guard<std::mutex> lock(session->mutex);
    if (work->request.op != DROP) {
      session->release(work->request);
      session->keep(work->request.seq, reply);
      wire = session->wire;
    }
    if (Engine::takes_states(work->request.op)) {
      session->in_order = !session->waiting.empty();
      if (session->in_order) next = std::move(session->waiting.front()), session->waiting.pop_front();
    }
  }
  if (wire) wire->send(std::move(reply));
  if (next) pool.push([this, session, next] { perform(session, next); });
}

// -- tcp

// When to dial again: soon, then less and less often.
class Redial {
 public:
  double left_s() const { return std::max(0.0, Seconds(due_ - Clock::now()).count()); }
  void failed() {
    due_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(pause_s_ * (0.7 + 0.3 * rng_.uni())));
    pause_s_ = std::min(2 * pause_s_, 2.0);
  }
  void succeeded() { pause_s_ = 0.1; }

 private:
  Clock::time_point due_ = Clock::now();
  double pause_s_ = 0.1;
  Rng rng_{std::random_device{}()};
};

class TcpBinding : public Binding {
 public:
  TcpBinding(Server& server, const Address& address, bool listen)
      : server_(server), told_(address), listens_(listen), address_(address.to_dial()) {
    if (!listens_ || open()) return;
    if (errno != EADDRINUSE || address.port == "0")
      throw std::runtime_error(say("cannot listen at ", address.url(), " (", std::strerror(errno), ")"));
    server.log(say("somebody listens at ", address.url(), " already: dialling it"));
  }
  ~TcpBinding() override {
    if (door_ >= 0) ::close(door_);
  }

  std::string url() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return address_.url();
  }
  void happened(uint64_t id, uint32_t events) override {
    if (id == kDoor) return accept_all();
    std::shared_ptr<TcpWire> wire;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = wires_.find(id);
      if (found == wires_.end()) return;
      wire = found->second;
    }
    if (events & EPOLLOUT) wire->flush();
    if (events & ~EPOLLOUT) read(wire, events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR));
  }
  double tick() override {
    if (door_ >= 0) return accept_all(), 60.0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!wires_.empty()) return 60.0;
      if (redial_.left_s() > 0) return redial_.left_s();
    }
    if (listens_ && open()) return 60.0;  // the learner that was there first is gone
    int fd = dial(address_, server_.signal_fd());
    if (fd >= 0) {
      add(fd, true, address_.url());
      return 60.0;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    redial_.failed();
    return redial_.left_s();
  }

 private:
  static constexpr uint64_t kDoor = 2;
  static constexpr uint32_t kEvents = EPOLLIN | EPOLLOUT | EPOLLRDHUP;
  static constexpr int kMostReads = 64;  // before the others get their turn

  // Listens, unless somebody else does.
  bool open() {
    int door = open_door(told_);
    if (door < 0) return false;
    sockaddr_storage where{};
    socklen_t size = sizeof where;
    ::getsockname(door, reinterpret_cast<sockaddr*>(&where), &size);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      address_ = told_, address_.port = port_of(where);
    }
    server_.log(say("listening for learners at ", address_.url()));
    door_ = door;
    server_.pool.watch(door_, kDoor);
    return true;
  }
  static std::string port_of(const sockaddr_storage& where) {
    return std::to_string(ntohs(where.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(where).sin6_port
                                                            : reinterpret_cast<const sockaddr_in&>(where).sin_port));
  }
  void accept_all() {
    sockaddr_storage where{};
    char host[INET6_ADDRSTRLEN] = "?";
    for (socklen_t size = sizeof where;; size = sizeof where) {
      int fd = ::accept4(door_, reinterpret_cast<sockaddr*>(&where), &size, SOCK_CLOEXEC);
      if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
      if (fd < 0) return;  // nobody more, or no file left for them: the next tick tries again
      ::getnameinfo(reinterpret_cast<sockaddr*>(&where), size, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
      add(fd, false, say(host, ":", port_of(where)));
    }
  }
  void add(int fd, bool dialled, std::string peer) {
    auto wire = std::make_shared<TcpWire>(server_.new_id(), fd, dialled, std::move(peer));
    {
      std::lock_guard<std::mutex> lock(mutex_);
      wires_[wire->id] = wire;
    }
    server_.opened(wire);
    server_.pool.watch(fd, wire->id, kEvents);
  }
  // Takes what has come. With edges it must be all, and less than there was room for is all, unless the end is near.
  void read(const std::shared_ptr<TcpWire>& wire, bool to_the_end) {
    std::lock_guard<std::mutex> lock(wire->read_mutex);
    for (int i = 0; i < kMostReads; ++i) {
      auto [at, size] = wire->reader.room();
      ssize_t got = ::recv(wire->fd, at, size, 0);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (got <= 0) return remove(wire);
      if (wire->stage == Wire::Doomed) continue;
      wire->reader.took(static_cast<size_t>(got));
      try {
        for (Frames frames; wire->stage != Wire::Doomed && wire->reader.next(frames);) server_.took(wire, std::move(frames));
      } catch (const BadMessage& error) {
        server_.refuse(wire, E_PROTOCOL, say("the learner sent ", error.what()));
      } catch (const std::bad_alloc&) {
        server_.refuse(wire, E_FULL, "there is no memory for a message");
      }
      if (static_cast<size_t>(got) < size && !to_the_end) return;
    }
    server_.pool.watch(wire->fd, wire->id, kEvents, EPOLL_CTL_MOD);  // tells again what is there
  }
  void remove(const std::shared_ptr<TcpWire>& wire) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (wires_.erase(wire->id) == 0) return;
      server_.pool.forget(wire->fd);
      if (wire->dialled && wire->was_open) redial_.succeeded();
      if (wire->dialled) redial_.failed();
    }
    server_.lost(wire);
  }

  Server& server_;
  const Address told_;
  const bool listens_;  // or would, if nobody else did
  int door_ = -1;
  mutable std::mutex mutex_;  // for all below
  Address address_;           // where it listens, or whom it dials
  std::unordered_map<uint64_t, std::shared_ptr<TcpWire>> wires_;
  Redial redial_;
};

#ifdef CORRAL_ZMQ
// -- zmq

constexpr int kPair = 0, kDealer = 5, kRouter = 6, kDontWait = 1, kMore = 2;  // as zmq.h has them

// One frame of a message that came in.
struct ZmqPart {
  ZmqPart() { zmq_msg_init(&message); }
  ZmqPart(const ZmqPart&) = delete;
  ~ZmqPart() { zmq_msg_close(&message); }
  std::string_view text() { return {static_cast<char*>(zmq_msg_data(&message)), zmq_msg_size(&message)}; }
  zmq_msg_t message;
};

inline Frames frames_of(std::deque<ZmqPart>& parts, size_t most_bytes) {
  std::vector<size_t> lengths;
  size_t total = 0;
  for (ZmqPart& part : parts) lengths.push_back(part.text().size()), total += lengths.back();
  if (lengths.empty() || lengths.size() > kMostFrames) throw BadMessage(say("a message of ", lengths.size(), " frames"));
  if (total > most_bytes) throw BadMessage(say("a message of ", total, " bytes, at most ", most_bytes, " are taken"));
  Frames frames(lengths);
  for (size_t i = 0; i < parts.size(); ++i)
    if (lengths[i]) std::memcpy(frames.data(i), parts[i].text().data(), lengths[i]);
  return frames;
}

inline int zmq_option(void* socket, int name, int value) { return zmq_setsockopt(socket, name, &value, sizeof value); }

inline void zmq_tune(void* socket, const Address& address, int linger_ms) {
  int64_t most = kMostMessage;
  zmq_setsockopt(socket, 22, &most, sizeof most);                       // MAXMSGSIZE
  zmq_option(socket, 23, 18), zmq_option(socket, 24, 18);               // SNDHWM, RCVHWM: the usual window and two
  zmq_option(socket, 17, linger_ms);                                    // LINGER
  zmq_option(socket, 75, 2000), zmq_option(socket, 77, 10000);          // HEARTBEAT_IVL, HEARTBEAT_TIMEOUT
  zmq_option(socket, 76, 10000);                                        // HEARTBEAT_TTL
  zmq_option(socket, 18, 100), zmq_option(socket, 21, 2000);            // RECONNECT_IVL, RECONNECT_IVL_MAX
  zmq_option(socket, 42, address.host.find(':') != address.host.npos);  // IPV6
}

// What becomes readable when something changes for the socket.
inline int zmq_descriptor(void* socket) {
  int fd = -1;
  size_t size = sizeof fd;
  zmq_getsockopt(socket, 14, &fd, &size);  // FD
  return fd;
}

class ZmqBinding;

// One learner: an identity of a ROUTER, or all of a DEALER.
class ZmqWire : public Wire {
 public:
  ZmqWire(uint64_t id, bool dialled, std::string peer, ZmqBinding& binding, std::string identity, int fd)
      : Wire(id, dialled, std::move(peer)), identity(std::move(identity)), fd(fd), binding_(binding) {}
  void send(PacketPtr packet) override;
  void flush() override {}
  void close(bool at_once) override;
  void allow(size_t most) override { most_bytes = most; }

  const std::string identity;
  const int fd;
  size_t most_bytes = kGreetingBytes;
  std::atomic<bool> closed{false}, gone{false};  // by this side, by the other
  std::deque<PacketPtr> out;  // what the learner does not take yet

 private:
  ZmqBinding& binding_;
};

// libzmq's sockets are used by one thread at a time, and never waited in: its descriptor is watched like any other. That
// tells only once of each change, so whoever has used the socket looks whether something has come meanwhile.
class ZmqBinding : public Binding {
 public:
  ZmqBinding(Server& server, const Address& address, bool listen)
      : server_(server), told_(address), listens_(listen), context_(zmq_ctx_new()),
        nudge_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), address_(address.to_dial()) {
    server_.pool.watch(nudge_, kLine);
    if (listens_) {
      int error = answer();
      if (error == 0) return;
      if (error != EADDRINUSE || address.port == "0") {
        zmq_ctx_term(context_), ::close(nudge_);
        throw std::runtime_error(say("cannot listen at ", address.url(), " (", zmq_strerror(error), ")"));
      }
      server.log(say("somebody listens at ", address.url(), " already: dialling it"));
    }
    call();
  }
  ~ZmqBinding() override {
    shut();
    zmq_ctx_term(context_);  // waits for goodbyes, as long as LINGER says
    ::close(nudge_);
  }

  std::string url() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return address_.url();
  }
  void happened(uint64_t, uint32_t) override {
    std::lock_guard<std::mutex> reading(read_mutex_);
    while (read_message() || read_monitor()) {}
    bury();
  }
  double tick() override {
    happened(0, 0);
    std::lock_guard<std::mutex> lock(mutex_);
    if (listens_ && dialled_ && wires_.empty() && redial_.left_s() == 0) shut();  // who was there may be gone: look again
    if (!socket_ && redial_.left_s() > 0) return redial_.left_s();
    if (!socket_ && (!listens_ || answer() != 0)) call();
    double wait_s = 60;
    for (auto& [identity, wire] : wires_) {
      while (!wire->out.empty() && transmit(*wire, *wire->out.front())) wire->out.pop_front(), wire->stuck_since = 0;
      if (!wire->out.empty()) wait_s = 0.02;  // a ROUTER does not tell when a peer takes more
    }
    look();
    return wait_s;
  }
  void send(ZmqWire& wire, PacketPtr packet) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (wire.closed || !socket_) return;
    if (!wire.out.empty() || !transmit(wire, *packet)) {
      if (wire.stuck_since == 0) wire.stuck_since = ticks();
      wire.out.push_back(std::move(packet));
      if (wire.out.size() > 4096) wire.closed = true;
    }
    look();
  }
  void nudge() {
    uint64_t one = 1;
    if (::write(nudge_, &one, sizeof one) < 0) return;
  }

 private:
  static constexpr int kConnected = 1, kDisconnected = 0x200;
  static constexpr uint64_t kLine = 2;

  // Listens; or says why it cannot.
  int answer() {
    open(kRouter);
    std::string host = told_.host == "*" ? "0.0.0.0" : told_.host;
    if (zmq_bind(socket_, Address{"tcp", host, told_.port == "0" ? "*" : told_.port}.url().c_str()) != 0) {
      int error = zmq_errno();
      shut();
      return error;
    }
    char bound[256] = "";
    size_t size = sizeof bound;
    zmq_getsockopt(socket_, 32, bound, &size);  // LAST_ENDPOINT
    address_ = told_;
    if (auto real = Address::parse(bound)) address_.port = real->port;
    server_.log(say("listening for learners at ", address_.url()));
    return 0;
  }
  void call() {
    open(kDealer);
    zmq_connect(socket_, address_.url("tcp").c_str());
    if (listens_) redial_.failed();  // so far
  }
  void open(int kind) {
    dialled_ = kind == kDealer;
    socket_ = zmq_socket(context_, kind), monitor_ = zmq_socket(context_, kPair);
    zmq_tune(socket_, dialled_ ? address_ : told_, 500);
    zmq_option(monitor_, 17, 0);                // LINGER
    if (!dialled_) zmq_option(socket_, 33, 1);  // ROUTER_MANDATORY
    std::string name = say("inproc://monitor-", ++opened_);
    zmq_socket_monitor(socket_, name.c_str(), kConnected | kDisconnected);
    zmq_connect(monitor_, name.c_str());
    for (void* one : {socket_, monitor_}) server_.pool.watch(zmq_descriptor(one), kLine);
    nudge();  // for what has come before it was watched
  }
  void shut() {
    if (!socket_) return;
    for (void* one : {socket_, monitor_}) server_.pool.forget(zmq_descriptor(one));
    zmq_socket_monitor(socket_, nullptr, 0);
    zmq_close(socket_), zmq_close(monitor_);
    socket_ = monitor_ = nullptr;
  }
  // Whether something can be read; if so, somebody is woken to do it.
  void look() {
    for (void* one : {socket_, monitor_}) {
      int events = 0;
      size_t size = sizeof events;
      if (one && zmq_getsockopt(one, 15, &events, &size) == 0 && events & 1) nudge();  // EVENTS, POLLIN
    }
  }
  // False when the peer does not take more now. Only the first frame can be refused.
  bool transmit(ZmqWire& wire, const Packet& packet) {
    const std::string& to = wire.identity;
    if (!dialled_ && zmq_send(socket_, to.data(), to.size(), kDontWait | kMore) < 0) return refused(wire);
    for (size_t i = 1; i <= packet.frames; ++i) {
      int more = i < packet.frames ? kMore : 0;
      if (zmq_send(socket_, packet.parts[i].iov_base, packet.parts[i].iov_len, kDontWait | more) < 0) return refused(wire);
    }
    return true;
  }
  bool refused(ZmqWire& wire) {
    if (zmq_errno() == EAGAIN) return false;
    wire.closed = true;  // the peer of this identity is gone
    nudge();
    return true;
  }
  // Connections that were made and lost, as libzmq tells.
  bool read_monitor() {
    std::shared_ptr<ZmqWire> fresh;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      std::optional<int> event = next_event();
      if (!event) return false;
      if (*event == kConnected && dialled_ && wires_.empty())
        fresh = wires_[""] = std::make_shared<ZmqWire>(server_.new_id(), true, address_.url(), *this, "", -1);
    }
    if (fresh) server_.opened(fresh);
    return true;
  }
  std::optional<int> next_event() {
    ZmqPart event, where;
    if (!monitor_ || zmq_msg_recv(&event.message, monitor_, kDontWait) < 0) return std::nullopt;
    zmq_msg_recv(&where.message, monitor_, kDontWait);
    uint16_t what = 0;
    int32_t value = 0;
    if (event.text().size() >= 6) {
      std::memcpy(&what, event.text().data(), 2);
      std::memcpy(&value, event.text().data() + 2, 4);
    }
    if (what == kDisconnected)
      for (auto& [identity, wire] : wires_)
        if (dialled_ || wire->fd == value) wire->gone = true;  // after what it has said before
    return what;
  }
  bool read_message() {
    std::deque<ZmqPart> parts;
    std::shared_ptr<ZmqWire> wire;
    bool fresh = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      do {
        parts.emplace_back();
        if (!socket_ || zmq_msg_recv(&parts.back().message, socket_, kDontWait) < 0) {
          look();
          return false;
        }
      } while (zmq_msg_more(&parts.back().message));
      std::string identity = dialled_ ? "" : std::string(parts.front().text());
      auto found = wires_.find(identity);
      if (found != wires_.end()) wire = found->second;
      if (!wire && !dialled_ && parts.size() > 1) {
        while (next_event()) {}  // of who had the same descriptor before
        int fd = zmq_msg_get(&parts.back().message, 2);  // SRCFD
        uint64_t id = server_.new_id();
        wire = std::make_shared<ZmqWire>(id, false, say("learner ", id, " at ", address_.url()), *this, identity, fd);
        wires_[identity] = wire, fresh = true;
      }
      if (!dialled_) parts.pop_front();
    }
    if (fresh) server_.opened(wire);
    if (!wire || wire->closed) return true;
    try {
      server_.took(wire, frames_of(parts, wire->most_bytes));
    } catch (const BadMessage& error) {
      server_.refuse(wire, E_PROTOCOL, say("the learner sent ", error.what()));
    }
    return true;
  }
  // Wires that are closed leave. What a DEALER has not sent would go to whoever answers next, so it gets a new socket.
  void bury() {
    std::vector<std::shared_ptr<ZmqWire>> gone;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto at = wires_.begin(); at != wires_.end();) {
        if (!at->second->closed && !at->second->gone) { ++at; continue; }
        gone.push_back(at->second);
        at = wires_.erase(at);
      }
      if (dialled_ && !gone.empty()) {
        if (gone[0]->was_open) redial_.succeeded();
        redial_.failed();
        shut();
      }
    }
    for (const auto& wire : gone) server_.lost(wire);
  }

  Server& server_;
  const Address told_;
  const bool listens_;  // or would, if nobody else did
  void* const context_;
  const int nudge_;
  std::mutex read_mutex_;     // who reads; taken before the other
  mutable std::mutex mutex_;  // for all below
  Address address_;           // where it listens, or whom it dials
  void *socket_ = nullptr, *monitor_ = nullptr;
  bool dialled_ = false;
  int opened_ = 0;
  std::unordered_map<std::string, std::shared_ptr<ZmqWire>> wires_;
  Redial redial_;
};

inline void ZmqWire::send(PacketPtr packet) { binding_.send(*this, std::move(packet)); }
inline void ZmqWire::close(bool) {
  closed = true;
  binding_.nudge();
}
#endif

inline Server::Server(const Model& model, Options given)
    : options(std::move(given)),
      pool(options.threads, [this](uint64_t id, uint32_t events) { id == kSignal ? stop(0) : binding_->happened(id, events); },
           [this] { return tick(); }),
      model_(model), instance_(instance_of_process()) {
  make_engine_ = [this](const Limits& limits, size_t slots) { return std::make_unique<Engine>(model_, limits, slots, pool); };
}

inline void Server::start() {
  const Address& address = options.bind ? *options.bind : *options.connect;
#ifdef CORRAL_ZMQ
  if (address.scheme == "zmq") binding_ = std::make_unique<ZmqBinding>(*this, address, options.bind.has_value());
#endif
  if (!binding_) binding_ = std::make_unique<TcpBinding>(*this, address, options.bind.has_value());
  pool.watch(signal_, kSignal);
  pool.start();
}

// -- for who owns the main loop

// Rows of a request that the author's main loop carries out, and the place where it waits for that.
struct Offer {
  bool reset = false, done = false;
  std::vector<uint32_t> slots;
  std::vector<uint64_t> seeds;
  std::vector<In> ins;
  std::deque<Out> outs;
  std::vector<std::string> errors;
  std::vector<double> ignored;  // rewards of resets
};
struct Desk {
  std::mutex mutex;
  std::condition_variable posted, answered;
  std::deque<std::shared_ptr<Offer>> offers;
  bool closed = false;
};

// Slots whose environments are the author's; requests are put on the desk and waited for.
class OwnedEngine : public Engine {
 public:
  OwnedEngine(const Model& model, const Limits& limits, size_t slots, Crew& crew, Desk& desk)
      : Engine(model, limits, slots, crew), desk_(desk) {}

 protected:
  void call_reset(Batch& batch, const std::vector<size_t>& rows) override { offer(batch, rows, nullptr); }
  void call_step(Batch& batch, const std::vector<size_t>& rows, const Group& actions) override { offer(batch, rows, &actions); }

 private:
  void offer(Batch& batch, const std::vector<size_t>& rows, const Group* actions) {
    if (rows.empty()) return;
    auto offer = std::make_shared<Offer>();
    size_t players = model_.spec.players;
    offer->reset = !actions;
    offer->errors.resize(rows.size());
    offer->ignored.resize(rows.size() * players);
    for (size_t i = 0; i < rows.size(); ++i) {
      offer->slots.push_back(batch.slots()[rows[i]]);
      if (actions) offer->ins.emplace_back(*actions, rows[i]);
      else offer->seeds.push_back(batch.seeds[rows[i]]);
      double* rewards = actions ? batch.rows.reward + rows[i] * players : &offer->ignored[i * players];
      offer->outs.emplace_back(batch.obs, rows[i], rewards);
    }
    {
      std::unique_lock<std::mutex> lock(desk_.mutex);
      desk_.offers.push_back(offer);
      desk_.posted.notify_all();
      desk_.answered.wait(lock, [&] { return offer->done || desk_.closed; });
      if (!offer->done) throw BadRequest("the simulator ends");
    }
    for (size_t i = 0; i < rows.size(); ++i) {
      Place& place = place_of(batch, rows[i]);
      guard(batch, rows[i], place, [&] {
        if (!offer->errors[i].empty()) throw std::runtime_error(offer->errors[i]);
        offer->reset ? started(batch, rows[i], place, offer->outs[i]) : stepped(batch, rows[i], place, offer->outs[i]);
      });
    }
  }
  Desk& desk_;
};

// == main ===============================================================================================================

struct BadOption : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline std::string read_token(const std::string& path) {
  std::string token;
  FILE* file = std::fopen(path.c_str(), "rb");
  std::string advice = say("; make one by `openssl rand -hex 32 > ", path, "`");
  if (!file) throw BadOption(say("the token file ", path, " cannot be read", advice));
  for (int byte; token.size() < 65536 && (byte = std::fgetc(file)) != EOF;) token.push_back(static_cast<char>(byte));
  std::fclose(file);
  const char* white = " \t\n\r\v\f";
  size_t from = token.find_first_not_of(white);
  token = from == token.npos ? "" : token.substr(from, token.find_last_not_of(white) + 1 - from);
  if (token.size() < 16) throw BadOption(say("the token in ", path, " is too short to be a secret", advice));
  return token;
}

inline double number_option(const std::string& name, const std::string& text, double least, double most) {
  char* end = nullptr;
  double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end || !(value >= least && value <= most))
    throw BadOption(say(name, " ", text, " is not a number from ", least, " to ", most));
  return value;
}

inline Address address_option(const std::string& name, const std::string& text) {
  std::optional<Address> address = Address::parse(text);
  if (!address) throw BadOption(say(name, " ", text, " is not SCHEME://HOST:PORT, such as tcp://127.0.0.1:5555"));
  if (address->scheme == "tcp") return *address;
#ifdef CORRAL_ZMQ
  if (address->scheme == "zmq") return *address;
#else
  if (address->scheme == "zmq") throw BadOption("zmq:// is not built in; build with -DCORRAL_ZMQ, or use tcp://");
#endif
  throw BadOption(say(name, " ", text, ": ", address->scheme, ":// is not one of tcp:// and zmq://"));
}

inline const char* usage() {
  return "  --connect URL     dial the learner at URL, such as tcp://127.0.0.1:5555\n"
         "  --bind URL        listen for learners at URL; if somebody listens there already, dial it\n"
         "  --envs N          run at most N environments for each learner (1024)\n"
         "  --threads N       carry out requests on N threads (1)\n"
         "  --token-file FILE let in only learners that know the token in FILE, and prove to know it\n"
         "  --patience S      give up when there has been no learner for S seconds (0: never)\n"
         "  --insecure        listen beyond this machine without a token\n";
}

// Reads the command line; exits where there is nothing else to do.
inline Options read_options(int argc, char** argv, const Spec& spec) {
  Options options;
  try {
    for (int i = 1; i < argc; ++i) {
      std::string name = argv[i];
      if (name == "--help" || name == "-h") {
        std::printf("%s, a simulator for Corral.\n\nusage: %s --connect URL | --bind URL [options]\n\n%s", spec.name.c_str(),
                    argv[0], usage());
        std::exit(0);
      }
      if (name == "--insecure") {
        options.insecure = true;
        continue;
      }
      std::string text;
      size_t equals = name.find('=');
      if (equals != name.npos) text = name.substr(equals + 1), name = name.substr(0, equals);
      static const char* const known[] = {"--connect", "--bind", "--envs", "--threads", "--token-file", "--patience"};
      if (std::find(std::begin(known), std::end(known), name) == std::end(known))
        throw BadOption(say("the option ", name, " is not known; --help lists all"));
      if (equals == name.npos && i + 1 == argc) throw BadOption(say(name, " needs a value"));
      if (equals == std::string::npos) text = argv[++i];
      if (name == "--connect") options.connect = address_option(name, text);
      else if (name == "--bind") options.bind = address_option(name, text);
      else if (name == "--envs") options.envs = static_cast<unsigned>(number_option(name, text, 1, 1 << 24));
      else if (name == "--threads") options.threads = static_cast<unsigned>(number_option(name, text, 1, 1024));
      else if (name == "--patience") options.patience_s = number_option(name, text, 0, 1e9);
      else options.token = read_token(text);
    }
    if (options.connect.has_value() == options.bind.has_value())
      throw BadOption("say --connect URL or --bind URL; --help tells more");
    if (options.connect && (options.connect->everywhere() || options.connect->port == "0"))
      throw BadOption(say(options.connect->url(), " cannot be dialled: name the learner's host and port"));
    if (options.bind && !options.bind->loopback() && options.token.empty() && !options.insecure)
      throw BadOption(say(options.bind->url(), " can be reached from other machines: pass --token-file, listen on 127.0.0.1, "
                                               "or say --insecure"));
  } catch (const BadOption& error) {
    std::fprintf(stderr, "corral: %s.\n", error.what());
    std::exit(2);
  }
  return options;
}

// Ends the server when the process is asked to end.
inline std::atomic<int>& signal_fd() {
  static std::atomic<int> fd{-1};
  return fd;
}
inline void on_signal(int) {
  int kept = errno;
  uint64_t one = 1;
  if (::write(signal_fd(), &one, sizeof one) < 0) std::_Exit(1);
  errno = kept;
}
// While it lives, SIGTERM and SIGINT are written to a descriptor. Who owns the main loop may have handlers of its own.
class Signals {
 public:
  Signals(int fd, bool keep_others) {
    signal_fd() = fd;
    for (int signal : {SIGTERM, SIGINT}) {
      struct sigaction ours {}, before {};
      ours.sa_handler = on_signal;
      ours.sa_flags = static_cast<int>(SA_RESETHAND);  // who asks twice does not want to wait
      ::sigaction(signal, nullptr, &before);
      if (keep_others && before.sa_handler != SIG_DFL) continue;
      ::sigaction(signal, &ours, nullptr);
      caught_.push_back(signal);
    }
  }
  ~Signals() {
    for (int signal : caught_) ::signal(signal, SIG_DFL);
  }
  Signals(const Signals&) = delete;

 private:
  std::vector<int> caught_;
};

}  // namespace detail

// Serves environments of this kind to learners: the whole main() of a simulator. Returns the exit code.
template <class Env>
int serve(int argc, char** argv) {
  using namespace detail;
  int code = 1;
  try {
    Model model = Model::of<Env>();
    Server server(model, read_options(argc, argv, model.spec));
    Signals signals(server.signal_fd(), false);  // before anybody can be there to be left without a goodbye
    server.start();
    while (true)
      if (auto ended = server.wait(60)) {
        code = *ended;
        break;
      }
    if (!server.pool.ended(5)) std::_Exit(code);  // an environment is in the middle of a long step: do not wait for it
  } catch (const std::exception& error) {
    std::fprintf(stderr, "corral: %s.\n", error.what());
  }
  return code;
}

class Client;

// What a learner wants of some environments at once: that they all begin episodes, or all take a step.
class Request {
 public:
  size_t size() const { return offer_ ? offer_->slots.size() : 0; }
  bool empty() const { return size() == 0; }
  bool is_reset() const { return offer_ && offer_->reset; }
  bool is_step() const { return offer_ && !offer_->reset; }
  uint32_t slot(size_t i) const { return offer_->slots[i]; }
  uint64_t seed(size_t i) const { return offer_->seeds.at(i); }  // of a reset
  const In& in(size_t i) const { return offer_->ins.at(i); }     // of a step
  Out& out(size_t i) { return offer_->outs[i]; }
  // The environment failed; the learner is told why, and begins another episode.
  void fail(size_t i, const std::string& why) { offer_->errors[i] = why.empty() ? "it failed" : why; }

 private:
  friend class Client;
  std::shared_ptr<detail::Offer> offer_;
};

// For simulators that own their main loop: the network has threads of its own, the environments belong to the caller.
//   corral::Client client(spec, argc, argv);
//   corral::Request r;
//   while (client.poll(r, 10)) { for (size_t i = 0; i < r.size(); ++i) ...; client.reply(r); }
class Client {
 public:
  // Exits with a sentence when the command line is wrong, as serve() does.
  Client(Spec spec, int argc, char** argv)
      : model_(std::move(spec)), server_(model_, one_learner(detail::read_options(argc, argv, model_.spec))) {
    server_.set_engine([this](const detail::Limits& limits, size_t slots) {
      return std::make_unique<detail::OwnedEngine>(model_, limits, slots, server_.pool, desk_);
    });
    server_.start();
  }
  ~Client() { close(); }
  Client(const Client&) = delete;

  // Says goodbye to the learner; `poll` returns false from now on, in any thread.
  void close() {
    server_.stop(0);
    std::lock_guard<std::mutex> lock(desk_.mutex);
    desk_.closed = true;
    desk_.answered.notify_all();
  }
  std::string url() const { return server_.url(); }

  // Waits for a request, at most so long; it is empty then. False when the run is over.
  bool poll(Request& request, int timeout_ms) {
    reply(request);
    request.offer_ = nullptr;
    std::unique_lock<std::mutex> lock(desk_.mutex);
    auto until = detail::Clock::now() + std::chrono::milliseconds(std::max(timeout_ms, 0));
    while (desk_.offers.empty() && detail::Clock::now() < until) {
      lock.unlock();
      bool over = server_.wait(0).has_value();
      lock.lock();
      if (over) break;
      auto soon = std::min(until, detail::Clock::now() + std::chrono::milliseconds(100));  // to look whether it is over
      desk_.posted.wait_until(lock, soon, [&] { return !desk_.offers.empty(); });
    }
    if (!desk_.offers.empty()) {
      request.offer_ = desk_.offers.front();
      desk_.offers.pop_front();
    }
    lock.unlock();
    return !server_.wait(0).has_value();
  }
  void reply(Request& request) {
    std::lock_guard<std::mutex> lock(desk_.mutex);
    if (!request.offer_ || request.offer_->done) return;
    request.offer_->done = true;
    desk_.answered.notify_all();
  }
  // Once it is over: as serve() returns it.
  int exit_code() { return server_.wait(0).value_or(0); }

 private:
  static detail::Options one_learner(detail::Options options) {
    options.threads = 1, options.learners = 1;  // slots are the caller's, so two learners cannot both have them
    return options;
  }
  detail::Model model_;
  detail::Desk desk_;
  detail::Server server_;
  detail::Signals signals_{server_.signal_fd(), true};
};

// == state server =======================================================================================================

// A state server refused, or did not answer; what() says which, in a sentence.
struct StateError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The server's budget does not allow another state; nothing was changed, and nothing is ever evicted.
struct StatesFull : StateError {
  using StateError::StateError;
};

namespace detail {

constexpr size_t kMostState = size_t(256) << 20, kMostName = 512;

// A connection to a state server, of one thread that waits for what it asks for. False: it is lost, or `until` has come.
struct Line {
  virtual ~Line() = default;
  virtual bool send(const Packet& packet, Clock::time_point until) = 0;
  virtual bool receive(Frames& frames, Clock::time_point until) = 0;
  virtual void allow(size_t most_bytes) = 0;
};

class TcpLine : public Line {
 public:
  explicit TcpLine(int fd) : fd_(fd) { tune(fd); }
  ~TcpLine() override { ::close(fd_); }
  TcpLine(const TcpLine&) = delete;

  bool send(const Packet& packet, Clock::time_point until) override {
    for (size_t sent = 0; sent < packet.size();) {
      if (Clock::now() >= until) return false;
      iovec parts[1 + kMostFrames];
      msghdr message{};
      message.msg_iov = parts, message.msg_iovlen = parts_after(packet, sent, parts);
      ssize_t size = ::sendmsg(fd_, &message, MSG_NOSIGNAL);
      if (size >= 0) sent += static_cast<size_t>(size);
      else if (!is_patient(POLLOUT, until)) return false;
    }
    return true;
  }
  bool receive(Frames& frames, Clock::time_point until) override {
    while (!reader_.next(frames)) {
      if (Clock::now() >= until) return false;
      auto [at, room] = reader_.room();
      ssize_t size = ::recv(fd_, at, room, 0);
      if (size == 0 || (size < 0 && !is_patient(POLLIN, until))) return false;
      if (size > 0) reader_.took(static_cast<size_t>(size));
    }
    return true;
  }
  void allow(size_t most_bytes) override { reader_.most_bytes = most_bytes; }

 private:
  // Whether what failed just now can be tried again; waits until it is time to.
  bool is_patient(short event, Clock::time_point until) {
    if (errno == EINTR) return Clock::now() < until;
    if (errno != EAGAIN && errno != EWOULDBLOCK) return false;
    pollfd one{fd_, event, 0};
    while (Clock::now() < until) {
      int ready = ::poll(&one, 1, ms_until(until, 60000));
      if (ready > 0 || (ready < 0 && errno != EINTR)) return ready > 0;
    }
    return false;
  }

  const int fd_;
  FrameReader reader_;
};

#ifdef CORRAL_ZMQ
// libzmq connects again by itself, but to a server that has not been greeted: what was lost once is lost.
class ZmqLine : public Line {
 public:
  explicit ZmqLine(const Address& address)
      : context_(zmq_ctx_new()), socket_(zmq_socket(context_, kDealer)), monitor_(zmq_socket(context_, kPair)) {
    zmq_tune(socket_, address, 0);
    zmq_option(socket_, 39, 1);  // IMMEDIATE: nothing is sent before there is a connection
    zmq_option(monitor_, 17, 0);  // LINGER
    zmq_socket_monitor(socket_, "inproc://monitor", 0x200);  // DISCONNECTED
    zmq_connect(monitor_, "inproc://monitor");
    zmq_connect(socket_, address.url("tcp").c_str());
  }
  ~ZmqLine() override {
    zmq_socket_monitor(socket_, nullptr, 0);
    zmq_close(socket_), zmq_close(monitor_), zmq_ctx_term(context_);
  }
  ZmqLine(const ZmqLine&) = delete;

  bool send(const Packet& packet, Clock::time_point until) override {
    for (size_t i = 1; i <= packet.frames; ++i) {
      int how = kDontWait | (i < packet.frames ? kMore : 0);
      while (zmq_send(socket_, packet.parts[i].iov_base, packet.parts[i].iov_len, how) < 0)
        if (zmq_errno() != EAGAIN || !is_patient(until)) return false;
    }
    return true;
  }
  bool receive(Frames& frames, Clock::time_point until) override {
    std::deque<ZmqPart> parts;
    do {
      parts.emplace_back();
      while (zmq_msg_recv(&parts.back().message, socket_, kDontWait) < 0)
        if (zmq_errno() != EAGAIN || !is_patient(until)) return false;
    } while (zmq_msg_more(&parts.back().message));
    frames = frames_of(parts, most_bytes_);
    return true;
  }
  void allow(size_t most_bytes) override { most_bytes_ = most_bytes; }

 private:
  // Waits for something to happen; false when that is the end of the connection, or it is too late.
  bool is_patient(Clock::time_point until) {
    ZmqPart event;
    if (Clock::now() >= until || zmq_msg_recv(&event.message, monitor_, kDontWait) >= 0) return false;
    pollfd both[2] = {{zmq_descriptor(socket_), POLLIN, 0}, {zmq_descriptor(monitor_), POLLIN, 0}};
    ::poll(both, 2, ms_until(until, 20));  // these tell of changes, not of what is there: so never for long
    return true;
  }

  void *context_, *socket_, *monitor_;
  size_t most_bytes_ = kGreetingBytes;
};
#endif

}  // namespace detail

// States by name in a `corral state-server`, which simulators and planners share. Every call ends within `timeout_s`. A
// connection that is lost is made again, and what was under way is asked again: asking twice changes nothing. One thread
// at a time may use it. All it throws is a StateError.
//   corral::StateClient states("tcp://127.0.0.1:5560");
//   states.put("cartpole/left", bytes);
class StateClient {
 public:
  // Does not connect yet. `token_file` is that of the server, if it has one.
  explicit StateClient(const std::string& url, const std::string& token_file = "", double timeout_s = 30)
      : url_(url), timeout_s_(timeout_s > 0 ? std::min(timeout_s, 1e9) : 0) {
    try {
      address_ = detail::address_option("the state server", url);
      if (!token_file.empty()) token_ = detail::read_token(token_file);
    } catch (const detail::BadOption& error) {
      throw StateError(error.what());
    }
    if (address_.everywhere() || address_.port == "0")
      throw StateError(detail::say(url, " cannot be dialled: name the state server's host and port"));
  }

  // Keeps a state, in the place of one that has the name. StatesFull when it does not fit.
  void put(std::string_view name, std::string_view state) {
    if (state.size() > detail::kMostState)
      throw StateError(detail::say("a state of ", state.size(), " bytes, a state server takes at most ", detail::kMostState));
    ask(detail::PUT, named(name), &state);
  }
  // The state of this name, if there is one.
  std::optional<std::string> get(std::string_view name) {
    detail::Message reply = ask(detail::GET, named(name));
    if (reply.status == detail::E_UNKNOWN_STATE) return std::nullopt;
    return std::string(reply.payload(0));
  }
  // Forgets a state; whether there was one.
  bool drop(std::string_view name) { return ask(detail::DROP_STATE, named(name)).meta["dropped"].is_true(); }
  // All names that begin with `prefix`, sorted. They come a page at a time, and the deadline is that of a page.
  std::vector<std::string> names(std::string_view prefix = "") {
    std::vector<std::string> all;
    if (!detail::is_utf8(prefix)) return all;
    while (true) {
      detail::Packer meta;
      meta.map(2).text("prefix").text(prefix).text("after").text(all.empty() ? std::string_view() : all.back());
      detail::Message page = ask(detail::LIST, meta.bytes());
      detail::Value names = page.meta["names"];
      names.each([&](const detail::Value& name) { all.emplace_back(name.string()); });
      if (!page.meta["more"].is_true() || names.size() == 0) return all;
    }
  }
  // What all states there take.
  uint64_t nbytes() {
    return ask(detail::STATS, detail::Packer().map(0).bytes()).meta["snapshot_bytes"].uint().value_or(0);
  }

 private:
  // Which characters are printable is the server's to say; what would be no text at all never gets there.
  static std::string named(std::string_view name) {
    if (name.empty() || name.size() > detail::kMostName || !detail::is_utf8(name))
      throw StateError(detail::say("the name of a state is 1 to ", detail::kMostName, " bytes of printable text, got '",
                                   detail::clean_text(name, 80), "'"));
    return detail::Packer().map(1).text("name").text(name).bytes();
  }

  // Asks until there is an answer, over as many connections as it takes.
  detail::Message ask(uint8_t op, std::string meta, const std::string_view* state = nullptr) {
    detail::Packet request(op);
    request.head.seq = ++seq_;
    request.meta = std::move(meta);
    if (state) request.payload.emplace_back(*state);
    request.seal();
    auto until = detail::Clock::now() + std::chrono::duration_cast<detail::Clock::duration>(detail::Seconds(timeout_s_));
    do {
      std::optional<detail::Message> reply;
      try {
        reply = exchange(request, until);
      } catch (const detail::BadMessage& error) {
        line_ = nullptr;
        throw StateError(detail::say(url_, " is no state server: it sent ", error.what()));
      } catch (...) {
        line_ = nullptr;  // there may be half a message in it
        throw;
      }
      if (reply) return checked(std::move(*reply));
      if (line_) redial_.succeeded();
      line_ = nullptr;
      redial_.failed();
    } while (detail::Clock::now() < until);
    throw StateError(detail::say("the state server at ", url_, " did not answer within ", timeout_s_, " s; is it running?"));
  }
  // Nothing when the connection was lost, or could not be made.
  std::optional<detail::Message> exchange(const detail::Packet& request, detail::Clock::time_point until) {
    if (!line_) line_ = greeted(until);
    if (!line_ || !line_->send(request, until)) return std::nullopt;
    detail::Message reply;
    while (receive(*line_, reply, until)) {
      if (reply.seq != request.head.seq) continue;
      if (reply.op != request.head.op || !(reply.flags & detail::REPLY)) throw detail::BadMessage("something else than a reply");
      if (reply.op == detail::GET && !(reply.flags & detail::FAILED) && reply.payloads() != 1)
        throw detail::BadMessage(detail::say("a state in ", reply.payloads(), " frames"));
      return reply;
    }
    return std::nullopt;
  }
  bool receive(detail::Line& line, detail::Message& message, detail::Clock::time_point until) {
    detail::Frames frames;
    if (!line.receive(frames, until)) return false;
    message = detail::Message::read(std::move(frames));
    if (message.op == detail::ERROR) throw StateError(detail::say("the state server at ", url_, " refused: ", message.text()));
    return true;
  }
  // A connection whose both sides have proven what they should; dials when it is time to.
  std::unique_ptr<detail::Line> greeted(detail::Clock::time_point until) {
    std::this_thread::sleep_for(detail::Seconds(std::min(redial_.left_s(), detail::ms_until(until, 2000) / 1e3)));
    std::unique_ptr<detail::Line> line = opened(until);
    std::string ours = detail::random_bytes(16);
    detail::Packet knock(detail::KNOCK), ready(detail::READY);
    detail::Packer wish, proof;
    wish.map(3).text("versions").array(1).array(2).uint(1).uint(0).text("role").text("states").text("nonce").bin(ours);
    knock.meta = wish.bytes();
    detail::Message welcome;
    if (!line || !line->send(knock.seal(), until) || !receive(*line, welcome, until)) return nullptr;
    std::string_view theirs = welcome.meta["nonce"].string();
    if (welcome.op != detail::WELCOME || theirs.size() != 16) throw detail::BadMessage("something else than a WELCOME");
    std::string expected = detail::prove(token_, "corral-states", ours, theirs);
    if (!token_.empty() && !detail::same_secret(welcome.meta["proof"].string(), expected))
      throw StateError(detail::say("the server at ", url_, " did not prove that it knows the token; give it the same file"));
    proof.map(1).text("proof").bin(detail::prove(token_, "corral-client", ours, theirs));
    ready.meta = proof.bytes();
    line->allow(detail::kMostState + detail::kGreetingBytes);
    return line->send(ready.seal(), until) ? std::move(line) : nullptr;
  }
  std::unique_ptr<detail::Line> opened(detail::Clock::time_point until) const {
#ifdef CORRAL_ZMQ
    if (address_.scheme == "zmq") return std::make_unique<detail::ZmqLine>(address_);
#endif
    int fd = detail::dial(address_, -1, until);
    return fd < 0 ? nullptr : std::make_unique<detail::TcpLine>(fd);
  }
  static detail::Message checked(detail::Message reply) {
    if (!(reply.flags & detail::FAILED)) return reply;
    if (reply.status == detail::E_SNAPSHOT_FULL) throw StatesFull(reply.text());
    throw StateError(detail::say("the state server refused: ", reply.text()));
  }

  const std::string url_;
  const double timeout_s_;
  detail::Address address_;
  std::string token_;
  std::unique_ptr<detail::Line> line_;
  detail::Redial redial_;
  uint64_t seq_ = 0;
};

}  // namespace corral
