// A simulator that owns its main loop, as game engines do: the world goes on between two requests.
#include "corral.hpp"

// A lander of one dimension: touch the ground gently.
struct Lander {
  double height = 0, speed = 0;
  int t = 0;

  void place(uint64_t seed) {
    corral::Rng rng(seed);
    height = rng.uni(5, 10), speed = 0, t = 0;
  }
  void advance(bool thrust) { speed += 0.1 * (thrust ? 1.0 : -1.0), height += 0.1 * speed, ++t; }
  void observe(corral::Out& o) const {
    float* obs = o.f32("state");
    obs[0] = static_cast<float>(height), obs[1] = static_cast<float>(speed);
  }
};

int main(int argc, char** argv) {
  corral::Spec spec("Lander", 1);
  spec.obs.box("state", corral::F32, {2});
  spec.act.discrete("thrust", 2);
  corral::Client client(spec, argc, argv);
  corral::Request r;
  std::vector<Lander> landers;
  long frames = 0;
  while (client.poll(r, 10)) {  // an empty request after 10 ms: draw, play sounds, look at the keyboard
    ++frames;
    for (size_t i = 0; i < r.size(); ++i) {
      if (r.slot(i) >= landers.size()) landers.resize(r.slot(i) + 1);
      Lander& lander = landers[r.slot(i)];
      corral::Out& out = r.out(i);
      if (r.is_reset()) {
        lander.place(r.seed(i));
      } else {
        lander.advance(r.in(i).i("thrust") != 0);
        out.terminated = lander.height <= 0;
        out.truncated = lander.t >= 300;
        out.reward = out.terminated ? (lander.speed > -0.5 ? 1 : -1) : 0;
      }
      lander.observe(out);
    }
    client.reply(r);
  }
  std::fprintf(stderr, "%ld frames\n", frames);
  return client.exit_code();
}
