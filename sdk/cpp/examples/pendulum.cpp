// Pendulum: one continuous action, and a state that planners copy. Steps as Gymnasium's Pendulum-v1 does.
#include "corral.hpp"

struct Pendulum {
  double th = 0, w = 0;  // the angle from the top, and how fast it turns
  int t = 0;

  static corral::Spec spec() {
    corral::Spec s("Pendulum", 1);
    s.obs.box("obs", corral::F32, {3}, {-1, -1, -8}, {1, 1, 8});
    s.act.box("torque", corral::F32, {1}, -2, 2);
    s.rng_in_state = true;  // there are none after reset
    return s;
  }
  void reset(uint64_t seed, corral::Out& o) {
    corral::Rng rng(seed);
    th = rng.uni(-pi, pi), w = rng.uni(-1, 1), t = 0;
    observe(o);
  }
  void step(const corral::In& a, corral::Out& o) {
    double u = std::clamp<double>(a.f32("torque")[0], -2, 2), from_top = th - 2 * pi * std::floor((th + pi) / (2 * pi));
    o.reward = -(from_top * from_top + 0.1 * w * w + 0.001 * u * u);
    w = std::clamp(w + (15 * std::sin(th) + 3 * u) * 0.05, -8.0, 8.0);
    th += w * 0.05;
    o.truncated = ++t >= 200;
    observe(o);
  }
  void observe(corral::Out& o) const {
    float* p = o.f32("obs");
    p[0] = static_cast<float>(std::cos(th)), p[1] = static_cast<float>(std::sin(th)), p[2] = static_cast<float>(w);
  }
  static constexpr double pi = 3.141592653589793;
};

int main(int argc, char** argv) { return corral::serve<Pendulum>(argc, argv); }
