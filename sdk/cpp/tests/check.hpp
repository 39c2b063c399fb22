// Tests without a framework: TEST(name) { ... CHECK(...); CHECK_EQ(a, b); }, and main() runs them all, or those named.
#pragma once
#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "corral.hpp"

struct Test {
  const char* name;
  void (*run)();
};
inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}
struct Failed {};

#define TEST(name)                                                      \
  static void name();                                                   \
  static const bool added_##name = (tests().push_back({#name, name}), true); \
  static void name()
#define CHECK(what)                                                          \
  do {                                                                       \
    if (!(what)) {                                                           \
      std::fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #what); \
      throw Failed();                                                        \
    }                                                                        \
  } while (0)
#define CHECK_EQ(a, b)                                                                             \
  do {                                                                                             \
    auto x = (a);                                                                                  \
    auto y = (b);                                                                                  \
    if (!(x == y)) {                                                                               \
      std::ostringstream out;                                                                      \
      out << __FILE__ << ":" << __LINE__ << ": " << #a << " is " << x << ", expected " << y << "\n"; \
      std::fputs(out.str().c_str(), stderr);                                                       \
      throw Failed();                                                                              \
    }                                                                                              \
  } while (0)
#define CHECK_THROWS(type, what)                                                            \
  do {                                                                                      \
    bool thrown = false;                                                                    \
    try {                                                                                   \
      (void)(what);                                                                         \
    } catch (const type&) {                                                                 \
      thrown = true;                                                                        \
    }                                                                                       \
    if (!thrown) {                                                                          \
      std::fprintf(stderr, "%s:%d: %s did not throw %s\n", __FILE__, __LINE__, #what, #type); \
      throw Failed();                                                                       \
    }                                                                                       \
  } while (0)

inline int run_tests(int argc, char** argv) {
  int failed = 0;
  for (const Test& test : tests()) {
    bool wanted = argc < 2;
    for (int i = 1; i < argc; ++i) wanted |= std::strcmp(argv[i], test.name) == 0;
    if (!wanted) continue;
    try {
      test.run();
      std::printf("ok      %s\n", test.name);
    } catch (const Failed&) {
      std::printf("FAILED  %s\n", test.name);
      ++failed;
    } catch (const std::exception& error) {
      std::printf("FAILED  %s: %s\n", test.name, error.what());
      ++failed;
    }
    std::fflush(stdout);
  }
  return failed ? 1 : 0;
}

inline std::string hex(std::string_view bytes) {
  std::string out;
  char two[3];
  for (char byte : bytes) std::snprintf(two, sizeof two, "%02x", static_cast<unsigned char>(byte)), out += two;
  return out;
}
