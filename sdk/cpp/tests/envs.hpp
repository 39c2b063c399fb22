// Environments that do what tests need.
#pragma once
#include "learner.hpp"

namespace test {

using corral::In;
using corral::Out;
using corral::Spec;

enum Action : int64_t { ADD, ADD10, END, THROW, NOT_A_NUMBER, INFINITE, LOSE_LIFE, CUT_OFF, ACTIONS };

inline Spec counting(const char* name) {
  Spec s(name, 3);
  s.obs.box("obs", corral::F32, {2});
  s.act.discrete("what", ACTIONS);
  return s;
}

// Counts, and fails in all ways that there are. Trivially copyable.
struct Tricky {
  uint64_t seed = 0;
  int64_t n = 0;
  uint64_t chance = 0;
  static Spec spec() { return counting("Tricky"); }
  void reset(uint64_t s, Out& o) {
    if (s == 13) throw std::runtime_error("thirteen");
    seed = s, n = 0, chance = 0;
    observe(o);
  }
  void step(const In& in, Out& o) {
    int64_t what = in.i("what");
    n = static_cast<int64_t>(static_cast<uint64_t>(n) + (what == ADD10 ? 10 : 1) + chance);
    o.reward = static_cast<double>(n);
    observe(o);
    if (what == THROW) throw std::runtime_error("thrown \xff on purpose");
    if (what == NOT_A_NUMBER) o.f32("obs")[1] = NAN;
    if (what == INFINITE) o.reward = HUGE_VAL;
    o.terminated = what == END, o.life_lost = what == LOSE_LIFE, o.truncated = what == CUT_OFF;
  }
  void reseed(uint64_t s) { chance = s; }
  void observe(Out& o) const { o.f32("obs")[0] = static_cast<float>(n), o.f32("obs")[1] = static_cast<float>(seed % 1000); }
};

// The same without a copy constructor; what a snapshot is, others add.
struct Uncopyable : Tricky {
  Uncopyable() = default;
  Uncopyable(const Uncopyable&) = delete;
};
struct Saver : Uncopyable {
  static Spec spec() { return counting("Saver"); }
  void save(corral::Buf& b) const { b.put(seed), b.put(n), b.put(chance), b.put(std::string("more")); }
  void load(corral::View v) {
    std::string more;
    v.get(seed), v.get(n), v.get(chance), v.get(more);
    if (more != "more") throw std::runtime_error("not mine");
  }
};
struct Keyed : Uncopyable {
  static Spec spec() { return counting("Keyed"); }
  void get_key_state(corral::Buf& b) const { b.put(n); }
  void set_key_state(corral::View v) { v.get(n); }
};
struct Replayed : Uncopyable {
  static Spec spec() { return counting("Replayed"); }
};
struct Forgetful : Tricky {
  static constexpr bool corral_snapshots = false;
};
// Copied, and its copies can be larger than it says.
struct Hoarder : Tricky {
  std::vector<char> hoard = std::vector<char>(1000);
  static Spec spec() { return counting("Hoarder"); }
  size_t snapshot_bytes() const { return sizeof *this + hoard.size(); }
};

// Takes its time: ADD10 for long.
struct Slow : Tricky {
  static Spec spec() { return counting("Slow"); }
  void step(const In& in, Out& o) {
    std::this_thread::sleep_for(std::chrono::milliseconds(in.i("what") == ADD10 ? 400 : 4));
    Tricky::step(in, o);
  }
};

struct TwoPlayers {
  int turn = 0;
  static Spec spec() {
    Spec s("TwoPlayers", 1);
    s.obs.box("board", corral::F32, {1}).box("action_mask", corral::U8, {2}, 0, 1);
    s.act.discrete("move", 2).box("force", corral::F32, {1}, -1, 1);
    s.players = 2, s.rng_in_state = true;
    return s;
  }
  void reset(uint64_t, Out& o) { turn = 0, o.to_play = 0; }
  void step(const In& in, Out& o) {
    o.rewards[turn % 2] = in.f32("force")[0];
    o.raw_reward = 5;
    ++turn;
    o.to_play = turn % 2;
    o.u8("action_mask")[1] = 1;
    o.terminated = turn == 4;
  }
};

}  // namespace test
