// The golden messages of sdk/vectors: read from their bytes, and built to the same bytes.
#include "golden.hpp"

using namespace test;

namespace {

constexpr uint32_t kSession = 0x01020304, kCart = 3622282801u, kHybrid = 644058530u;

// A request or a reply as the vectors have them.
Packet message(uint8_t op, uint16_t flags, uint32_t batch, uint32_t aux, const std::vector<std::string>& payload, const std::string& meta = "",
               uint32_t layout = kCart, uint64_t seq = 7) {
  Packet packet(op, flags);
  packet.head.seq = seq, packet.head.session = kSession, packet.head.layout = layout, packet.head.batch = batch, packet.head.aux = aux;
  packet.meta = meta;
  for (const std::string& frame : payload) packet.payload.emplace_back(frame);
  return packet;
}
bool same(const char* name, Packet packet) { return built(packet.seal()) == bytes_of(name); }

corral::Spec cart() {
  corral::Spec s("CartPole", 3);
  s.obs.box("obs", corral::F32, {4}, -4.8, 4.8);
  s.act.discrete("force", 2);
  return s;
}
corral::Spec hybrid() {
  corral::Spec s("Hybrid", 3);
  s.obs.box("pose", corral::F32, {3}).box("cam", corral::U8, {2, 2, 3}, 0, 255);
  s.act.discrete("gear", 5, -2).box("throttle", corral::F32, {2}, {0.0, -1.0}, 1).multi_discrete("keys", {3, 4}).multi_binary("lamps", 3);
  return s;
}

}  // namespace

TEST(every_golden_message_is_read_and_built_again) {
  for (const char* name : {"close", "drop", "drop_generation", "drop_state", "drop_state_reply", "error", "expand", "expand_seeds", "export_reply",
                           "get", "get_reply", "get_unknown", "heartbeat", "hello_cart", "hello_hybrid", "knock", "list", "list_reply", "load",
                           "put", "put_full", "put_reply", "ready", "refused", "reset", "reset_reply", "rollout", "save", "save_reply",
                           "states_knock", "states_ready", "states_stats", "states_stats_reply", "states_welcome", "step", "step_hybrid",
                           "step_hybrid_reply", "step_raw_reply", "step_reply", "step_reply_final", "step_two_players_reply", "welcome"}) {
    std::string bytes = bytes_of(name);
    CHECK(built_again(message_of(bytes)) == bytes);
  }
}

TEST(requests_are_what_the_learner_sends) {
  uint64_t one = uint64_t(1) << 40 | 1;
  CHECK(same("reset", message(RESET, 0, 3, 30000, {slots({0, 1, 5}), u64({11, 12, ~uint64_t(0)})})));
  CHECK(same("step", message(STEP, AUTORESET, 3, 30000, {slots({0, 1, 5}), i64({0, 1, 1})})));
  CHECK(same("save", message(SAVE, 0, 2, 30000, {slots({0, 1}), u64({one, one + 1})})));
  CHECK(same("load", message(LOAD, WANT_OBS, 1, 30000, {slots({4}), u64({one})})));
  CHECK(same("expand", message(EXPAND, 0, 2, 30000, {u64({one, one}), i64({0, 1}), u64({one + 2, 0})})));
  CHECK(same("expand_seeds", message(EXPAND, 0, 1, 30000, {u64({one}), i64({1}), u64({one + 3}), u64({99})})));
  CHECK(same("rollout", message(ROLLOUT, 0, 1, 30000, {u64({one}), i64({0, 1, 0})}, Packer().map(1).text("steps").uint(3).bytes())));
  CHECK(same("drop", message(DROP, NO_REPLY, 2, 0, {u64({one, one + 1})}, "", kCart, 8)));
  CHECK(same("drop_generation", message(DROP, NO_REPLY, 0, 0, {}, Packer().map(1).text("generation").uint(1).bytes(), kCart, 9)));
  CHECK(same("heartbeat", message(HEARTBEAT, 0, 0, 0, {}, "", kCart, 10)));
}

TEST(proofs_are_those_of_the_learner) {
  std::string welcome = bytes_of("welcome"), ready = bytes_of("ready");
  Message read = message_of(welcome);
  CHECK(read.meta["nonce"].string() == nonce(16) && *read.meta["session"].uint() == kSession && !read.meta["resumed"].is_true());
  CHECK(same_secret(read.meta["proof"].string(), prove(kToken, "corral-learner", nonce(0), nonce(16))));
  CHECK(*read.meta["limits"]["message"].uint() == 64u << 20 && *read.meta["snapshots"]["bytes"].uint() == 1u << 30);
  Packet packet(READY);
  packet.meta = Packer().map(1).text("proof").bin(prove(kToken, "corral-simulator", nonce(0), nonce(16))).bytes();
  CHECK(built(packet.seal()) == ready);
}

TEST(spaces_are_described_as_the_learner_does) {
  for (auto [name, spec, layout] : {std::tuple("hello_cart", cart(), kCart), std::tuple("hello_hybrid", hybrid(), kHybrid)}) {
    CHECK_EQ(layout_hash(spec.obs, spec.act), layout);
    Packer observation, action;
    pack_space(observation.text("observation"), spec.obs);
    pack_space(action.text("action"), spec.act);
    CHECK(bytes_of(name).find(observation.bytes()) != std::string::npos);
    CHECK(bytes_of(name).find(action.bytes()) != std::string::npos);
  }
}

TEST(leaves_are_where_the_learner_puts_them) {
  corral::Spec spec = hybrid();
  Message step = message_of(bytes_of("step_hybrid"));
  Group act(spec.act, 2, step.frames.data(step.first + 1));
  CHECK_EQ(step.payload(1).size(), act.size);
  corral::In one(act, 0), two(act, 1);
  CHECK(one.i("gear") == -2 && two.i("gear") == 2 && one.f32("throttle")[0] == 0.5f && two.f32("throttle")[1] == 0.25f);
  CHECK(one.i64("keys")[1] == 3 && two.i64("keys")[1] == 1 && one.i8("lamps")[2] == 1 && two.i8("lamps")[0] == 0);
  Message reply = message_of(bytes_of("step_hybrid_reply"));
  Bytes memory = Bytes::zeros(Group(spec.obs, 2).size);
  Group obs(spec.obs, 2, memory.data());
  for (size_t row : {0, 1}) {
    double reward = 0;
    corral::Out out(obs, row, &reward);
    for (int i = 0; i < 3; ++i) out.f32("pose")[i] = 1;
    for (int i = 0; i < 12; ++i) out.u8("cam")[i] = static_cast<uint8_t>(12 * row + i);
  }
  CHECK(memory.text() == reply.payload(1));
}

TEST(rows_are_what_the_learner_reads) {
  Message reply = message_of(bytes_of("step_raw_reply"));
  Bytes memory = Bytes::zeros(Rows(1, 1).size);
  Rows rows(1, 1, memory.data());
  rows.reward[0] = 1, rows.raw[0] = 5;
  CHECK(memory.text() == reply.payload(0));
  Packer words;
  words.map(1).text("rows").map(1).text("2").text("it broke");
  CHECK(message_of(bytes_of("step_reply_final")).frames.frame[1] == words.bytes());
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
