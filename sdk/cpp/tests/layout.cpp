// Spaces: how they are described, where leaves are, and how authors get at them. Numbers are those of the Python side.
// Macros of X11 and curses, which simulators include.
#define None 0L
#define Bool int
#define Status int
#define Success 0
#define OK (0)
#define ERR (-1)
#include "check.hpp"

using namespace corral;
using namespace corral::detail;

static Spec cart() {
  Spec s("CartPole", 1);
  s.obs.box("obs", F32, {4}, -4.8, 4.8);
  s.act.discrete("force", 2);
  return s;
}
static Spec many() {
  Spec s("Many", 1);
  s.obs.box("cam", U8, {3, 5}, 0, 255).box("x", F64, {3}).discrete("d", 5, -2).multi_discrete("m", {3, 4});
  s.obs.multi_binary("b", 7).multi_binary("mb", std::vector<uint32_t>{2, 3});
  s.act.box("by", F32, {1}, -1, 1).discrete("shoot", 2);
  return s;
}

TEST(layout_hash_is_that_of_the_learner) {
  CHECK_EQ(layout_hash(cart().obs, cart().act), 0xd7e7a631u);
  CHECK_EQ(layout_hash(many().obs, many().act), 0x950e4eecu);
}

TEST(leaves_begin_at_multiples_of_64) {
  Spec s = many();
  CHECK((Group(s.obs, 1).at == std::vector<size_t>{0, 64, 128, 192, 256, 320}) && Group(s.obs, 1).size == 326);
  CHECK((Group(s.obs, 3).at == std::vector<size_t>{0, 64, 192, 256, 320, 384}) && Group(s.obs, 3).size == 402);
  CHECK((Group(s.obs, 256).at == std::vector<size_t>{0, 3840, 9984, 12032, 16128, 17920}) && Group(s.obs, 256).size == 19456);
  CHECK_EQ(row_bytes(s.obs), 15u + 24 + 8 + 16 + 7 + 6);
}

TEST(rows_are_laid_out_as_the_protocol_says) {
  Bytes memory(8192);
  auto at = [&](const void* leaf) { return static_cast<const char*>(leaf) - memory.data(); };
  Rows one(1, 3, memory.data()), two(2, 100, memory.data());
  CHECK(at(one.raw) == 64 && at(one.flags) == 128 && at(one.status) == 192 && one.size == 198 && !one.to_play);
  CHECK(at(two.raw) == 1600 && at(two.flags) == 3200 && at(two.status) == 3328 && at(two.to_play) == 3584 && two.size == 3684);
}

TEST(a_single_leaf_is_described_bare_and_several_as_a_dict) {
  Packer one, several;
  pack_space(one, cart().act);
  Value bare = Value::read(one.bytes());
  CHECK_EQ(bare["type"].string(), "discrete");
  CHECK(*bare["n"].uint() == 2 && *bare["start"].uint() == 0 && bare["dtype"].string() == "int64");
  pack_space(several, many().obs);
  Value dict = Value::read(several.bytes());
  CHECK_EQ(dict["type"].string(), "dict");
  CHECK_EQ(dict["spaces"].size(), 6u);
  CHECK_EQ(dict["spaces"][1][0].string(), "x");
  CHECK_EQ(dict["spaces"][1][1]["low"].string(), "-inf");
  CHECK_EQ(*dict["spaces"][size_t(0)][1]["high"].uint(), 255u);
  CHECK_EQ(*dict["spaces"][4][1]["n"].uint(), 7u);
  CHECK_EQ(dict["spaces"][5][1]["n"].size(), 2u);
}

TEST(bounds_are_kept_within_their_dtype) {
  Space space;
  space.box("a", I64, {1}).box("b", U64, {1}).box("c", U8, {2}, {-5.0, 3.0}, 300).box("d", BOOL, {1}).box("e", F32, {2}, Bounds{0, -1}, 5);
  Packer pack;
  pack_space(pack, space);
  Value spaces = Value::read(pack.bytes())["spaces"];
  CHECK_EQ(*spaces[size_t(0)][1]["high"].uint(), 0x7FFFFFFFFFFFFFFFu);
  CHECK_EQ(*spaces[1][1]["high"].uint(), ~uint64_t(0));
  CHECK(*spaces[2][1]["low"][size_t(0)].uint() == 0 && *spaces[2][1]["low"][1].uint() == 3 && *spaces[2][1]["high"].uint() == 255);
  CHECK(*spaces[3][1]["high"].uint() == 1 && spaces[4][1]["low"][1].kind() == Value::Real);
}

TEST(wrong_spaces_are_refused_when_they_are_made) {
  CHECK_THROWS(std::invalid_argument, Space().box("", F32, {1}));
  CHECK_THROWS(std::invalid_argument, Space().discrete("a", 0));
  CHECK_THROWS(std::invalid_argument, Space().discrete("a", 2).discrete("a", 2));
  CHECK_THROWS(std::invalid_argument, Space().box("a", F32, {2, 0}));
  CHECK_THROWS(std::invalid_argument, Space().box("a", F32, {1u << 31, 1u << 31, 1u << 31}));
  CHECK_THROWS(std::invalid_argument, Space().box("a", F32, {3}, {0.0, 1.0}, 1));
  CHECK_THROWS(std::invalid_argument, Space().box("\xff", F32, {3}));
  CHECK_THROWS(std::invalid_argument, Model{Spec("empty")});
}

TEST(authors_read_and_write_rows_by_name) {
  Spec s = many();
  Bytes memory = Bytes::zeros(Group(s.obs, 3).size), actions = Bytes::zeros(Group(s.act, 3).size);
  Group obs(s.obs, 3, memory.data()), act(s.act, 3, actions.data());
  double rewards[2] = {0, 0};
  Out out(obs, 1, rewards);
  CHECK_EQ(out.f64("x")[2], 0.0);
  out.f64("x")[2] = 4.5, out.u8("cam")[14] = 9, out.i64("m")[1] = 3, out.i8("b")[6] = 1;
  out.set("d", -2), out.reward = 2;
  CHECK_EQ(reinterpret_cast<double*>(memory.data() + 64)[5], 4.5);
  CHECK_EQ(memory.data()[29], 9);
  CHECK_EQ(reinterpret_cast<int64_t*>(memory.data() + 192)[1], -2);
  CHECK_EQ(rewards[0], 2.0);
  std::string packed;
  obs.read_row(1, packed);
  CHECK_EQ(packed.size(), row_bytes(s.obs));
  obs.zero_row(1);
  CHECK_EQ(out.f64("x")[2], 0.0);
  obs.write_row(1, packed);
  CHECK_EQ(out.f64("x")[2], 4.5);

  reinterpret_cast<float*>(actions.data())[2] = 0.5f;
  reinterpret_cast<int64_t*>(actions.data() + 64)[2] = 1;
  In in(act, 2);
  CHECK(in.f32("by")[0] == 0.5f && in.i("shoot") == 1);
}

TEST(a_wrong_name_or_type_says_what_there_is) {
  Spec s = many();
  Bytes actions = Bytes::zeros(Group(s.act, 1).size);
  Group act(s.act, 1, actions.data());
  In in(act, 0);
  try {
    in.i("jump");
    CHECK(false);
  } catch (const std::invalid_argument& error) {
    CHECK_EQ(std::string(error.what()), "there is no leaf 'jump'; there is 'by', 'shoot'");
  }
  CHECK_THROWS(std::invalid_argument, in.f64("by"));
  CHECK_THROWS(std::invalid_argument, in.i("by"));
}

TEST(numbers_that_are_none_are_found_by_their_bits) {
  float f[3] = {1, 2, 3};
  double d[2] = {1e308, -1};
  CHECK(is_finite(f, 3) && is_finite(d, 2));
  f[1] = std::nanf(""), d[1] = -HUGE_VAL;
  CHECK(!is_finite(f, 3) && !is_finite(d, 2) && is_finite(f, 1) && is_finite(d, 1));
}

TEST(bytes_come_back_as_they_were_written) {
  Buf buf;
  buf.put(int32_t(7)), buf.put(std::string("abc")), buf.put(std::vector<double>{1, 2});
  std::string bytes = buf.take();
  View view(bytes);
  std::string text;
  std::vector<double> values;
  CHECK_EQ(view.get<int32_t>(), 7);
  view.get(text), view.get(values);
  CHECK(text == "abc" && values.size() == 2 && values[1] == 2 && view.size() == 0);
  CHECK_THROWS(std::out_of_range, view.get<char>());
  View huge(std::string_view("\xff\xff\xff\xff\xff\xff\xff\xff....", 12));
  CHECK_THROWS(std::out_of_range, huge.get(values));
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
