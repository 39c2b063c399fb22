// MessagePack: what is written, what is read, and what is refused.
#include "check.hpp"

using namespace corral::detail;

static std::string bytes(std::initializer_list<int> values) {
  std::string out;
  for (int value : values) out.push_back(static_cast<char>(value));
  return out;
}
static bool refused(const std::string& frame) {
  try {
    Value::read(frame);
    return false;
  } catch (const BadMessage&) {
    return true;
  }
}

TEST(numbers_take_their_shortest_form) {
  CHECK_EQ(hex(Packer().uint(0).uint(127).uint(128).uint(255).bytes()), "007fcc80ccff");
  CHECK_EQ(hex(Packer().uint(256).uint(65535).uint(65536).uint(0xFFFFFFFF).bytes()), "cd0100cdffffce00010000ceffffffff");
  CHECK_EQ(hex(Packer().uint(~uint64_t(0)).bytes()), "cfffffffffffffffff");
  CHECK_EQ(hex(Packer().integer(-1).integer(-32).integer(-33).bytes()), "ffe0d3ffffffffffffffdf");
  CHECK_EQ(hex(Packer().real(1.5).nil().boolean(true).boolean(false).bytes()), "cb3ff8000000000000c0c3c2");
}

TEST(texts_and_lists_of_all_sizes_come_back) {
  for (size_t size : {0, 1, 15, 16, 31, 32, 255, 256, 65535, 65536, 70000}) {
    std::string text(size, 'x');
    Packer pack;
    pack.map(4).text("text").text(text).text("bin").bin(text).text("list").array(size);
    for (size_t i = 0; i < size; ++i) pack.uint(i);
    pack.text("after").integer(-7);
    Value value = Value::read(pack.bytes());
    CHECK(value["text"].string() == text && value["text"].kind() == Value::Text);
    CHECK(value["bin"].string() == text && value["bin"].kind() == Value::Bin);
    CHECK_EQ(value["list"].size(), size);
    if (size) CHECK_EQ(*value["list"][size - 1].uint(), size - 1);
    CHECK(value["list"][size].kind() == Value::Absent);
    CHECK(value["after"].kind() == Value::Whole && !value["after"].uint());
  }
}

TEST(a_map_of_many_keys_is_searched_to_its_end) {
  Packer pack;
  pack.map(1000);
  for (int i = 0; i < 1000; ++i) pack.text(std::to_string(i)).map(1).text("n").uint(i);
  Value value = Value::read(pack.bytes());
  CHECK_EQ(*value["999"]["n"].uint(), 999u);
  CHECK(value["1000"].kind() == Value::Absent && value["1000"]["n"].kind() == Value::Absent);
  CHECK(value["5"]["n"]["m"].kind() == Value::Absent && value["5"][0].kind() == Value::Absent);
}

TEST(what_is_not_of_the_protocol_is_refused) {
  CHECK(refused(""));
  CHECK(refused(bytes({0xC0})));                                          // no map
  CHECK(refused(bytes({0x80, 0x00})));                                    // something behind it
  CHECK(refused(bytes({0x81, 0x01, 0x01})));                              // a key that is no text
  CHECK(refused(bytes({0x81, 0xA1, 'a'})));                               // no value
  CHECK(refused(bytes({0x81, 0xA2, 'a'})));                               // a text that is too short
  CHECK(refused(bytes({0x81, 0xA1, 0xFF, 0x00})));                        // no UTF-8
  CHECK(refused(bytes({0x81, 0xA1, 'a', 0xC1})));                         // never used
  CHECK(refused(bytes({0x81, 0xA1, 'a', 0xCA, 0, 0, 0, 0})));             // float 32
  CHECK(refused(bytes({0x81, 0xA1, 'a', 0xD4, 0, 0})));                   // an extension
  CHECK(refused(bytes({0x81, 0xA1, 'a', 0xDD, 0xFF, 0xFF, 0xFF, 0xFF})));  // four billion entries
  CHECK(refused(bytes({0x81, 0xA1, 'a', 0xDB, 0xFF, 0xFF, 0xFF, 0xFF})));  // a text of four billion bytes
  CHECK(!refused(bytes({0x81, 0xA1, 'a', 0xC0})));
}

TEST(sixteen_maps_deep_is_the_limit) {
  for (int depth : {1, 15, 16, 17, 100000}) {
    std::string frame;
    for (int i = 0; i + 1 < depth; ++i) frame += bytes({0x81, 0xA1, 'a'});
    frame += bytes({0x80});
    CHECK_EQ(refused(frame), depth > 16);
  }
}

TEST(words_of_authors_become_text) {
  CHECK_EQ(clean_text("plain", 100), "plain");
  CHECK_EQ(clean_text("\xC3\xA4\xFF\xC3", 100), "\xC3\xA4??");
  CHECK_EQ(clean_text("aa\xC3\xA4", 3), "aa");  // not half a character
  CHECK(!is_utf8("\xED\xA0\x80") && !is_utf8("\xC0\x80") && !is_utf8("\xF4\x90\x80\x80") && is_utf8("\xF0\x9F\x90\x8E"));
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
