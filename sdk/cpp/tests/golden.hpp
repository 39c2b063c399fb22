// The golden messages of sdk/vectors.
#pragma once
#include "learner.hpp"

namespace test {

inline std::string bytes_of(const std::string& name) {
  std::string bytes, path = std::string(CORRAL_VECTORS) + "/" + name + ".bin";
  std::FILE* file = std::fopen(path.c_str(), "rb");
  CHECK(file != nullptr);
  for (int byte; (byte = std::fgetc(file)) != EOF;) bytes.push_back(static_cast<char>(byte));
  std::fclose(file);
  return bytes;
}

inline Message message_of(const std::string& bytes) {
  FrameReader reader;
  auto [at, size] = reader.room();
  CHECK(bytes.size() <= size);
  std::memcpy(at, bytes.data(), bytes.size());
  reader.took(bytes.size());
  Frames frames;
  CHECK(reader.next(frames));
  return Message::read(std::move(frames));
}

inline std::string built(const Packet& packet) {
  std::string bytes;
  for (size_t i = 0; i <= packet.frames; ++i) bytes.append(static_cast<const char*>(packet.parts[i].iov_base), packet.parts[i].iov_len);
  return bytes;
}

inline std::string built_again(const Message& message) {
  Packet packet(message.op, message.flags);
  packet.head = message;
  if (message.flags & META) packet.meta = std::string(message.frames.frame[1]);
  for (size_t i = 0; i < message.payloads(); ++i) packet.payload.emplace_back(message.payload(i));
  return built(packet.seal());
}

const std::string kToken = "0123456789abcdef0123456789abcdef";

inline std::string nonce(int from) {
  std::string out;
  for (int i = 0; i < 16; ++i) out.push_back(static_cast<char>(from + i));
  return out;
}

}  // namespace test
