// A choice and a number, of which both have to be right: the task of corral/testing/tasks.py.
#include "corral.hpp"

// Hit a target on a line: move until it is within range, then aim and shoot. A move goes `by` times 0.25 and costs 0.05;
// a shot lands `by` times 0.3 from where one stands, ends the episode with 1 when it is within 0.05 of the target, and
// costs 0.1 when it is not. After 20 steps the episode is cut off.
struct MoveOrShoot {
  double place = 0, target = 0;
  int t = 0;

  static corral::Spec spec() {
    corral::Spec s("MoveOrShoot", 1);
    s.obs.box("way", corral::F32, {2}, -2, 2);
    s.act.box("by", corral::F32, {1}, -1, 1).discrete("shoot", 2);
    return s;
  }
  void reset(uint64_t seed, corral::Out& o) {
    corral::Rng rng(seed);
    place = rng.uni(-1, 1), target = rng.uni(-1, 1), t = 0;
    observe(o);
  }
  void step(const corral::In& a, corral::Out& o) {
    double by = a.f32("by")[0];
    ++t;
    if (a.i("shoot")) {
      o.terminated = std::fabs(place + 0.3 * by - target) <= 0.05;
      o.reward = o.terminated ? 1 : -0.1;
    } else {
      place = std::min(1.0, std::max(-1.0, place + 0.25 * by));
      o.reward = -0.05;
    }
    o.truncated = t >= 20 && !o.terminated;
    observe(o);
  }
  void observe(corral::Out& o) const {
    float* way = o.f32("way");
    way[0] = static_cast<float>(target - place), way[1] = static_cast<float>(place);
  }
};

int main(int argc, char** argv) { return corral::serve<MoveOrShoot>(argc, argv); }
