// Pays 1 for the number that its dice show next. They are part of a snapshot and there is no reseed(), so a planner
// that copies it always wins, where one in five is to be had.
#include "corral.hpp"

struct Guess {
  corral::Rng dice{0};
  int t = 0;

  static corral::Spec spec() {
    corral::Spec s("Guess", 1);
    s.obs.box("t", corral::F32, {1}, 0, 20);
    s.act.discrete("number", 5);
    s.rng_in_state = true;
    return s;
  }
  void reset(uint64_t seed, corral::Out& o) {
    dice = corral::Rng(seed), t = 0;
    o.f32("t")[0] = 0;
  }
  void step(const corral::In& a, corral::Out& o) {
    o.reward = a.i("number") == static_cast<int64_t>(dice.below(5)) ? 1 : 0;
    o.f32("t")[0] = static_cast<float>(++t);
    o.terminated = t >= 20;
  }
};

int main(int argc, char** argv) { return corral::serve<Guess>(argc, argv); }
