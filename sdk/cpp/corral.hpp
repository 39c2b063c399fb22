// corral.hpp: turns an environment struct into a simulator that speaks CLP/1 (docs/link.md).
//
// C++17, Linux, no dependencies; -DCORRAL_ZMQ adds zmq://, for which any libzmq is linked. Authors need Spec, In, Out,
// Rng and serve<Env>() below, or Client if they own the main loop; corral::detail is not for them. See README.md.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
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
  enum Kind { None, Nil, Bool, Int, Real, Text, Bin, Array, Map };

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
    if (token_.kind != Array || index >= token_.count) return Value();
    const char* at = body_;
    while (index-- > 0) skip(at, end_, 16);
    return Value(at, end_);
  }
  bool is_true() const { return token_.kind == Bool && token_.count; }
  // Text or bin; empty where it is something else.
  std::string_view string() const {
    return token_.kind == Text || token_.kind == Bin ? std::string_view(body_, token_.count) : std::string_view();
  }
  std::optional<uint64_t> uint() const {
    return token_.kind == Int && !token_.negative ? std::optional<uint64_t>(token_.count) : std::nullopt;
  }

 private:
  struct Token {
    Kind kind = None;
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
    if (tag < 0x80) return is(Int, tag);
    if (tag < 0x90) return is(Map, tag & 15);
    if (tag < 0xA0) return is(Array, tag & 15);
    if (tag < 0xC0) return is(Text, tag & 31);
    if (tag >= 0xE0) return token.negative = true, is(Int, static_cast<uint64_t>(static_cast<int8_t>(tag)));
    switch (tag) {
      case 0xC0: return is(Nil, 0);
      case 0xC2: case 0xC3: return is(Bool, tag & 1);
      case 0xC4: case 0xC5: case 0xC6: return sized(Bin, 1 << (tag - 0xC4));
      case 0xCB: return sized(Real, 8);
      case 0xCC: case 0xCD: case 0xCE: case 0xCF: return sized(Int, 1 << (tag - 0xCC));
      case 0xD0: case 0xD1: case 0xD2: case 0xD3: return sized(Int, 1 << (tag - 0xD0)) && sign(token, 1 << (tag - 0xD0));
      case 0xD9: case 0xDA: case 0xDB: return sized(Text, 1 << (tag - 0xD9));
      case 0xDC: case 0xDD: return sized(Array, 2 << (tag - 0xDC));
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
    if (token.kind != Array && token.kind != Map) return true;
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
  Space& multi_binary(std::string name, int n) { return multi_binary(std::move(name), std::vector<uint32_t>{static_cast<uint32_t>(n)}); }

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
    }
    return std::move(bounds.values);
  }
  Space& require_choices(const detail::Leaf& leaf) {
    for (size_t i = 0; i < leaf.n.size(); ++i)
      if (leaf.n[i] < 1 || leaf.start[i] > std::numeric_limits<int64_t>::max() - leaf.n[i]) wrong(leaf.name, "has nothing to choose from");
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
  pack.text("dtype").text(info(leaf.dtype).name);
  if (leaf.kind == Leaf::Discrete) return void(pack.text("n").integer(leaf.n[0]).text("start").integer(leaf.start[0]));
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

// == wire ===============================================================================================================

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

enum Op : uint8_t {
  KNOCK = 1, HELLO, WELCOME, READY,
  RESET = 16, STEP, SAVE, LOAD, EXPAND, ROLLOUT, DROP, EXPORT, IMPORT,
  HEARTBEAT = 32, STATS, LOG, CLOSE, ERROR
};
enum : uint16_t { REPLY = 1, FAILED = 2, META = 4, WANT_OBS = 8, AUTORESET = 16, NO_REPLY = 32, ALL_FLAGS = 63 };
enum : uint8_t { TERMINATED = 1, TRUNCATED = 2, FAULTY = 4, FIRST = 8, LIFE = 16 };
enum Status : uint16_t {
  OK, E_BAD_REQUEST, E_UNSUPPORTED, E_TOO_LARGE, E_UNKNOWN_STATE, E_DEADLINE, E_SNAPSHOT_FULL, E_ENV, E_NOT_FINITE, E_NO_EPISODE,
  E_VERSION = 32, E_AUTH, E_SPACE_MISMATCH, E_PROTOCOL, E_FULL, E_SESSION
};
constexpr size_t kMostFrames = 8, kGreetingBytes = 1 << 20, kMostMessage = 1 << 30;

inline const char* op_name(uint8_t op) {
  static const char* const names[] = {"RESET", "STEP", "SAVE", "LOAD", "EXPAND", "ROLLOUT", "DROP", "EXPORT", "IMPORT"};
  return op >= RESET && op <= IMPORT ? names[op - RESET] : op == HEARTBEAT ? "HEARTBEAT" : op == STATS ? "STATS" : "a request";
}
inline bool is_op(uint8_t op) { return (op >= KNOCK && op <= READY) || (op >= RESET && op <= IMPORT) || (op >= HEARTBEAT && op <= ERROR); }

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
  explicit BadRequest(const std::string& text, Status status = E_BAD_REQUEST) : runtime_error(text), status(status) {}
  Status status;
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
  std::atomic<Clock::duration::rep> due{};                // when this stage has taken too long; 0: never
  std::atomic<Clock::duration::rep> stuck_since{};        // when the learner stopped reading; 0: it reads
};

inline Clock::duration::rep ticks(double from_now_s = 0) {
  return (Clock::now().time_since_epoch() + std::chrono::duration_cast<Clock::duration>(Seconds(from_now_s))).count();
}

class TcpWire : public Wire {
 public:
  TcpWire(uint64_t id, int fd, bool dialled, std::string peer) : Wire(id, dialled, std::move(peer)), fd(fd) {
    int on = 1, two = 2, four = 4;
    ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &two, sizeof two);
    ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &two, sizeof two);
    ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &four, sizeof four);
  }
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
      size_t count = 0, skip = sent_;
      for (size_t i = 0; i <= packet.frames; ++i) {
        iovec part = packet.parts[i];
        size_t some = std::min(skip, part.iov_len);
        skip -= some;
        if (part.iov_len > some) parts[count++] = {static_cast<char*>(part.iov_base) + some, part.iov_len - some};
      }
      msghdr message{};
      message.msg_iov = parts, message.msg_iovlen = count;
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
    bool digits = !address.port.empty() && address.port.size() <= 5 && address.port.find_first_not_of("0123456789") == std::string::npos;
    return digits && std::stoi(address.port) <= 65535 ? std::optional<Address>(address) : std::nullopt;
  }
  std::string url(const char* as = nullptr) const {
    return say(as ? as : scheme.c_str(), "://", host.find(':') != host.npos ? say("[", host, "]") : host, ":", port);
  }
  bool everywhere() const { return host == "*" || host == "0.0.0.0" || host == "::"; }
  bool loopback() const {
    in_addr four;
    return host == "localhost" || host == "::1" || (::inet_pton(AF_INET, host.c_str(), &four) == 1 && ntohl(four.s_addr) >> 24 == 127);
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

// A connection made within two seconds, unless `wake` becomes readable.
inline int dial(const Address& address, int wake) {
  return with_address(address, false, [&](int fd, addrinfo* where) {
    ::fcntl(fd, F_SETFL, O_NONBLOCK);
    if (::connect(fd, where->ai_addr, where->ai_addrlen) == 0) return true;
    if (errno != EINPROGRESS) return false;
    pollfd both[2] = {{fd, POLLOUT, 0}, {wake, POLLIN, 0}};
    if (::poll(both, 2, 2000) <= 0 || both[1].revents) return errno = ETIMEDOUT, false;
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    return (errno = error) == 0;
  });
}

