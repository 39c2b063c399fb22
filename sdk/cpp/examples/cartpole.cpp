// CartPole: all that an author writes.  cartpole --connect tcp://127.0.0.1:5555
#include "corral.hpp"
struct Cart {                                   // copyable => save/load/expand come for free
  double x, v, th, w; int t;
  static corral::Spec spec() {
    corral::Spec s("CartPole", 1);
    s.obs.box("obs", corral::F32, {4}, -4.8, 4.8);
    s.act.discrete("force", 2);                 // hybrid: .discrete("gear",5).box("throttle",F32,{1},0,1)
    return s;
  }
  void reset(uint64_t seed, corral::Out& o) {
    corral::Rng r(seed); t = 0;
    x = r.uni(-.05,.05); v = r.uni(-.05,.05); th = r.uni(-.05,.05); w = r.uni(-.05,.05);
    observe(o);
  }
  void step(const corral::In& a, corral::Out& o) {
    double f = a.i("force") ? 10 : -10, c = cos(th), s = sin(th), m = .1, l = .5, M = 1.1;
    double k = (f + m*l*w*w*s)/M, ta = (9.8*s - c*k)/(l*(4./3 - m*c*c/M)), xa = k - m*l*ta*c/M;
    x += .02*v; v += .02*xa; th += .02*w; w += .02*ta; ++t;
    o.reward = 1; o.terminated = fabs(x) > 2.4 || fabs(th) > .2095; o.truncated = t >= 500;
    observe(o);
  }
  void observe(corral::Out& o) { float* p = o.f32("obs"); p[0]=x; p[1]=v; p[2]=th; p[3]=w; }
};
int main(int argc, char** argv) { return corral::serve<Cart>(argc, argv); }  // --connect tcp://h:5555 --envs 64 --threads 2 --token-file t
