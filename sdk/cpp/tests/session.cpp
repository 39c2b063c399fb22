// Sessions over loopback: a simulator in this process, and a learner of a few lines.
#include "envs.hpp"

using namespace test;
using std::chrono::milliseconds;

static double since(Clock::time_point start) { return Seconds(Clock::now() - start).count(); }

// -- handshake

TEST(hello_says_what_it_is) {
  Simulator<Tricky> sim(3);
  auto learner = sim.learner();
  Value hello = learner->hello().meta;
  CHECK_EQ(hello["env"].string(), "Tricky");
  CHECK(*hello["env_version"].uint() == 3 && *hello["players"].uint() == 1 && *hello["slots"].uint() == 16 && *hello["threads"].uint() == 3);
  CHECK(*hello["level"].uint() == 4 && hello["exact"].is_true() && *hello["session"].uint() == 0);
  CHECK(hello["instance"].string().size() == 16 && hello["nonce"].string().size() == 16);
  std::string all;
  for (size_t i = 0; i < hello["capabilities"].size(); ++i) all += std::string(hello["capabilities"][i].string()) + " ";
  CHECK_EQ(all, "raw_reward reseed rollout export ");
  CHECK_EQ(layout_hash(sim.model.spec.obs, sim.model.spec.act), sim.model.layout);
}

template <class Env>
static std::string level_of() {
  Simulator<Env> sim;
  auto learner = sim.learner();
  Value hello = learner->hello().meta;
  std::string all = say(*hello["level"].uint(), hello["exact"].is_true() ? " exact" : " not exact");
  for (size_t i = 0; i < hello["capabilities"].size(); ++i) all += " " + std::string(hello["capabilities"][i].string());
  return all;
}

TEST(levels_follow_from_what_an_environment_has) {
  CHECK_EQ(level_of<Tricky>(), "4 exact raw_reward reseed rollout export");
  CHECK_EQ(level_of<Hoarder>(), "3 exact raw_reward reseed rollout");
  CHECK_EQ(level_of<Saver>(), "4 exact raw_reward reseed rollout export");
  CHECK_EQ(level_of<Keyed>(), "4 not exact raw_reward reseed key_state rollout export");
  CHECK_EQ(level_of<Replayed>(), "1 exact raw_reward rollout");
  CHECK_EQ(level_of<Forgetful>(), "0 exact raw_reward reseed");
  CHECK_EQ(level_of<TwoPlayers>(), "4 exact raw_reward rng_in_state rollout export");
}

TEST(both_sides_prove_that_they_know_the_token) {
  Simulator<Tricky> sim(1, "a secret of some length");
  Manners good, wrong, none;
  good.token = "a secret of some length", wrong.token = "another secret of length";
  auto learner = sim.learner(good);
  CHECK_EQ(learner->ask(RESET, 1, {slots({0}), u64({1})}).status, GOOD);
  for (const Manners& manners : {wrong, none}) {
    Learner other;
    other.dial(sim.server.url());
    CHECK(!other.shake(manners));
    CHECK(other.last.op == ERROR && other.last.status == E_AUTH);
    CHECK(other.last.text().find("token") != std::string::npos);
    Message more;
    CHECK(!other.next(more) && other.is_cut());
  }
  CHECK_EQ(learner->ask(STEP, 1, {slots({0}), i64({ADD})}).status, GOOD);
}

TEST(another_version_is_refused) {
  Simulator<Tricky> sim;
  Learner learner;
  learner.dial(sim.server.url());
  Manners manners;
  manners.version = 2;
  CHECK(!learner.shake(manners));
  CHECK(learner.last.op == ERROR && learner.last.status == E_VERSION);
}

TEST(what_is_no_message_is_a_session_error) {
  Simulator<Tricky> sim;
  for (std::string bytes : {std::string("GET / HTTP/1.1\r\n\r\n"), std::string("CLP1\xff\xff\xff\xff", 8),
                            std::string("CLP1\1\0\0\0\xff\xff\xff\xff", 12), std::string("CLP1\1\0\0\0\4\0\0\0abcd", 16)}) {
    Learner learner;
    learner.dial(sim.server.url());
    learner.write(bytes.data(), bytes.size());
    CHECK(learner.next(learner.last) && learner.last.op == ERROR && learner.last.status == E_PROTOCOL);
    CHECK(!learner.next(learner.last) && learner.is_cut());
  }
  Learner early;  // a request before the handshake
  early.dial(sim.server.url());
  early.post(RESET, 1, 0, 1, {slots({0}), u64({1})});
  CHECK(early.next(early.last) && early.last.op == ERROR && early.last.status == E_PROTOCOL);
}

TEST(another_layout_or_session_ends_the_session) {
  Simulator<Tricky> sim;
  auto learner = sim.learner();
  learner->layout ^= 1;
  CHECK(learner->ask(RESET, 1, {slots({0}), u64({1})}).op == ERROR && learner->last.status == E_PROTOCOL);
  auto other = sim.learner();
  other->session = 5;
  CHECK(other->ask(RESET, 1, {slots({0}), u64({1})}).op == ERROR && other->last.status == E_SESSION);
}

// -- steps

TEST(episodes_follow_each_other_and_their_last_observations_are_told) {
  Simulator<Tricky> sim;
  auto learner = sim.learner();
  Reply first(learner->ask(RESET, 3, {slots({4, 0, 9}), u64({100, 200, 300})}), sim.model.spec);
  CHECK(first.obs[1] == 100 && first.obs[3] == 200 && first.obs[5] == 300 && first.rows.flags[0] == FIRST);
  Reply step(learner->ask(STEP, 3, {slots({9, 4, 0}), i64({END, ADD10, CUT_OFF})}, AUTORESET), sim.model.spec);
  CHECK_EQ(learner->last.payloads(), 3u);
  CHECK(step.rows.flags[0] == (TERMINATED | FIRST) && step.rows.flags[1] == 0 && step.rows.flags[2] == (TRUNCATED | FIRST));
  CHECK(step.rows.reward[0] == 1 && step.rows.reward[1] == 10 && step.rows.raw[1] == 10);
  CHECK(step.final[0] == 1 && step.final[1] == 300 && step.final[2] == 1 && step.final[3] == 200);
  CHECK(step.obs[0] == 0 && step.obs[1] == static_cast<float>(splitmix64(300) % 1000));
  CHECK(step.obs[2] == 10 && step.obs[3] == 100 && step.obs[5] == static_cast<float>(splitmix64(200) % 1000));
  CHECK_EQ(learner->last.payload(2).size(), 2 * 8u);
  learner->ask(STEP, 1, {slots({4}), i64({ADD})}, AUTORESET);
  CHECK_EQ(learner->last.payloads(), 2u);
}

TEST(without_autoreset_an_ended_episode_waits) {
  Simulator<Tricky> sim;
  auto learner = sim.learner();
  learner->ask(RESET, 1, {slots({0}), u64({5})});
  Reply end(learner->ask(STEP, 1, {slots({0}), i64({END})}), sim.model.spec);
  CHECK(end.rows.flags[0] == TERMINATED && end.obs[0] == 1 && learner->last.payloads() == 2);
  Reply again(learner->ask(STEP, 2, {slots({0, 3}), i64({ADD, ADD})}), sim.model.spec);
  CHECK(again.rows.status[0] == E_NO_EPISODE && again.rows.status[1] == E_NO_EPISODE && !again.rows.flags[0]);
  CHECK(!learner->words(1).empty());
  learner->ask(RESET, 1, {slots({0}), u64({5})});
  Reply good(learner->ask(STEP, 1, {slots({0}), i64({ADD})}), sim.model.spec);
  CHECK(good.rows.status[0] == GOOD && good.obs[0] == 1);
}

TEST(a_lost_life_ends_the_episode_and_the_game_goes_on) {
  Simulator<Tricky> sim;
  auto learner = sim.learner();
  learner->ask(RESET, 1, {slots({0}), u64({5})});
  Reply life(learner->ask(STEP, 1, {slots({0}), i64({LOSE_LIFE})}, AUTORESET), sim.model.spec);
  CHECK(life.rows.flags[0] == (TERMINATED | LIFE | FIRST) && life.final[0] == 1 && life.obs[0] == 1 && life.obs[1] == 5);
  Reply next(learner->ask(STEP, 1, {slots({0}), i64({ADD})}, AUTORESET), sim.model.spec);
  CHECK(next.rows.flags[0] == 0 && next.obs[0] == 2);
}

TEST(an_environment_that_fails_costs_its_row_only) {
  Simulator<Tricky> sim(2);
  auto learner = sim.learner();
  learner->ask(RESET, 4, {slots({0, 1, 2, 3}), u64({1, 2, 3, 4})});
  Reply step(learner->ask(STEP, 4, {slots({0, 1, 2, 3}), i64({THROW, ADD, NOT_A_NUMBER, INFINITE})}, AUTORESET), sim.model.spec);
  CHECK(step.rows.status[0] == E_ENV && step.rows.status[1] == GOOD && step.rows.status[2] == E_NOT_FINITE && step.rows.status[3] == E_NOT_FINITE);
  for (int row : {0, 2, 3}) CHECK(step.rows.flags[row] == (FAULTY | TRUNCATED | FIRST) && step.rows.reward[row] == 0);
  CHECK(step.rows.flags[1] == 0 && step.rows.reward[1] == 1 && learner->last.payloads() == 2);
  CHECK_EQ(learner->words(0), "thrown ? on purpose");
  CHECK(learner->words(1).empty() && learner->words(2).find("'obs'") != std::string::npos && learner->words(3).find("reward") != std::string::npos);
  CHECK(step.obs[0] == 0 && step.obs[1] == static_cast<float>(splitmix64(1) % 1000));
  Reply next(learner->ask(STEP, 4, {slots({0, 1, 2, 3}), i64({ADD, ADD, ADD, ADD})}, AUTORESET), sim.model.spec);
  for (int row : {0, 2, 3}) CHECK(next.rows.status[row] == GOOD && next.obs[2 * row] == 1);
  Reply waits(learner->ask(STEP, 1, {slots({0}), i64({THROW})}), sim.model.spec);
  CHECK(waits.rows.flags[0] == (FAULTY | TRUNCATED));
  CHECK_EQ(Reply(learner->ask(STEP, 1, {slots({0}), i64({ADD})}), sim.model.spec).rows.status[0], E_NO_EPISODE);
  Reply reset(learner->ask(RESET, 2, {slots({0, 1}), u64({13, 14})}), sim.model.spec);
  CHECK(reset.rows.status[0] == E_ENV && reset.rows.flags[0] == (FAULTY | TRUNCATED) && reset.rows.flags[1] == FIRST);
  CHECK_EQ(learner->words(0), "thirteen");
}

// Its discrete observations are those of a step's action, in their space or not; a reset with seed 13 is outside.
struct Grid {
  static Spec spec() {
    Spec s("Grid", 1);
    s.obs.discrete("cell", 5, 2).multi_discrete("gears", {3, 4}, {0, -1}).multi_binary("lamps", 3);
    s.act.box("values", corral::F64, {6}, -100, 100);
    return s;
  }
  void reset(uint64_t seed, Out& o) { o.set("cell", seed == 13 ? 1 : 2), o.i64("gears")[1] = -1; }
  void step(const In& in, Out& o) {
    const double* v = in.f64("values");
    o.set("cell", static_cast<int64_t>(v[0]));
    for (int i = 0; i < 2; ++i) o.i64("gears")[i] = static_cast<int64_t>(v[1 + i]);
    for (int i = 0; i < 3; ++i) o.i8("lamps")[i] = static_cast<int8_t>(v[3 + i]);
  }
};

TEST(a_discrete_observation_outside_its_space_costs_its_row_only) {
  Simulator<Grid> sim;
  auto learner = sim.learner();
  Reply reset(learner->ask(RESET, 2, {slots({0, 1}), u64({13, 14})}), sim.model.spec);
  CHECK(reset.rows.status[0] == E_ENV && reset.rows.status[1] == GOOD);
  CHECK_EQ(learner->words(0), "the observation's leaf 'cell' is 1, outside 2 to 6");
  learner->ask(RESET, 4, {slots({0, 1, 2, 3}), u64({1, 2, 3, 4})});
  std::vector<double> values = {7, 0, 0, 0, 0, 0, 6, 2, 2, 1, 1, 0, 2, 0, -2, 0, 0, 0, 2, 0, 0, 0, 0, -1};
  std::string action(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double));
  Reply step(learner->ask(STEP, 4, {slots({0, 1, 2, 3}), action}, AUTORESET), sim.model.spec);
  for (int row : {0, 2, 3}) CHECK(step.rows.status[row] == E_ENV && step.rows.flags[row] == (FAULTY | TRUNCATED | FIRST));
  CHECK(step.rows.status[1] == GOOD && step.rows.flags[1] == 0);
  CHECK_EQ(learner->words(0), "the observation's leaf 'cell' is 7, outside 2 to 6");
  CHECK_EQ(learner->words(2), "the observation's leaf 'gears'[1] is -2, outside -1 to 2");
  CHECK_EQ(learner->words(3), "the observation's leaf 'lamps'[2] is -1, outside 0 to 1");
}

// Cannot begin a second episode if its seed is odd; made anew it can, unless `broken` says otherwise.
struct Unlucky : Tricky {
  static inline std::atomic<bool> broken{false};
  bool second = false;
  void reset(uint64_t s, Out& o) {
    if (broken || (second && seed % 2)) throw std::runtime_error("not again");
    second = true;
    Tricky::reset(s, o);
  }
};

TEST(an_episode_that_ended_well_is_not_lost_when_the_next_begins_badly) {
  Simulator<Unlucky> sim;
  auto learner = sim.learner();
  learner->ask(RESET, 3, {slots({0, 1, 2}), u64({2, 3, 4})});
  Reply step(learner->ask(STEP, 3, {slots({0, 1, 2}), i64({END, END, THROW})}, AUTORESET), sim.model.spec);
  CHECK(step.rows.flags[1] == (TERMINATED | FIRST) && step.rows.status[1] == E_ENV && learner->words(1) == "not again");
  CHECK(step.rows.reward[1] == 1 && step.rows.raw[1] == 1 && step.obs[3] == static_cast<float>(splitmix64(splitmix64(3)) % 1000));
  CHECK(learner->last.payload(2).size() == 16 && step.final[1] == 2 && step.final[3] == 3);
  CHECK(step.rows.flags[2] == (FAULTY | TRUNCATED | FIRST) && learner->words(2) == "thrown ? on purpose");
  CHECK_EQ(Reply(learner->ask(STEP, 1, {slots({1}), i64({ADD})}, AUTORESET), sim.model.spec).obs[0], 1.0f);
}

TEST(an_environment_that_cannot_begin_another_episode_is_faulty) {
  Simulator<Unlucky> sim;
  auto learner = sim.learner();
  learner->ask(RESET, 2, {slots({0, 1}), u64({2, 3})});
  Unlucky::broken = true;
  Reply step(learner->ask(STEP, 2, {slots({0, 1}), i64({ADD, END})}, AUTORESET), sim.model.spec);
  Unlucky::broken = false;
  CHECK(step.rows.flags[0] == 0 && step.rows.flags[1] == (FAULTY | TRUNCATED) && step.rows.reward[1] == 0);
  CHECK(learner->last.payloads() == 2 && step.obs[2] == 0 && step.obs[3] == 0);
  CHECK_EQ(Reply(learner->ask(STEP, 1, {slots({1}), i64({ADD})}, AUTORESET), sim.model.spec).rows.status[0], E_NO_EPISODE);
}

TEST(several_players_have_rewards_of_their_own) {
  Simulator<TwoPlayers> sim;
  auto learner = sim.learner();
  Group act(sim.model.spec.act, 1);
  std::string action(act.size, '\0');
  float force = 0.5f;
  std::memcpy(&action[act.at[1]], &force, 4);
  learner->ask(RESET, 1, {slots({0}), u64({1})});
  Reply one(learner->ask(STEP, 1, {slots({0}), action}, AUTORESET), sim.model.spec);
  CHECK(one.rows.reward[0] == 0.5 && one.rows.reward[1] == 0 && one.rows.raw[0] == 5 && one.rows.to_play[0] == 1);
  CHECK_EQ(learner->last.payload(1).size(), 64u + 2);
  CHECK(learner->last.payload(1)[64] == 0 && learner->last.payload(1)[65] == 1);
  Reply two(learner->ask(STEP, 1, {slots({0}), action}, AUTORESET), sim.model.spec);
  CHECK(two.rows.reward[0] == 0 && two.rows.reward[1] == 0.5 && two.rows.to_play[0] == 0);
}

TEST(rows_are_shared_among_threads_where_that_is_worth_it) {
  Simulator<Slow> sim(8, "", 64);
  auto learner = sim.learner();
  std::string many, seeds, actions;
  for (uint32_t i = 0; i < 64; ++i) many += slots({i}), seeds += u64({100 + i}), actions += i64({ADD});
  learner->ask(RESET, 64, {many, seeds});
  learner->ask(STEP, 64, {many, actions});
  auto start = Clock::now();
  Reply step(learner->ask(STEP, 64, {many, actions}), sim.model.spec);
  CHECK(since(start) < 0.2);  // 256 ms on one
  for (int i = 0; i < 64; ++i) CHECK(step.obs[2 * i] == 2);
}

// -- requests that are wrong

TEST(wrong_requests_change_nothing_and_say_what_is_wrong) {
  Simulator<Tricky> sim;
  Manners manners;
  manners.limits.batch = 8, manners.limits.window = 2;
  auto learner = sim.learner(manners);
  learner->ask(RESET, 2, {slots({0, 1}), u64({1, 2})});
  auto wrong = [&](StatusCode status, const char* word) {
    bool good = learner->last.flags & FAILED && learner->last.status == status && learner->last.payloads() == 0 && learner->last.text().find(word) != std::string::npos;
    if (!good) std::fprintf(stderr, "status %d, '%s'; expected %d, '%s'\n", learner->last.status, learner->last.text().c_str(), status, word);
    return good;
  };
  learner->ask(STEP, 2, {slots({0, 1}), i64({ADD, ACTIONS})});
  CHECK(wrong(E_BAD_REQUEST, "'what'"));
  learner->ask(STEP, 1, {slots({0}), i64({-1})});
  CHECK(wrong(E_BAD_REQUEST, "'what'"));
  learner->ask(STEP, 1, {slots({16}), i64({ADD})});
  CHECK(wrong(E_BAD_REQUEST, "slot 16"));
  learner->ask(STEP, 2, {slots({0, 0}), i64({ADD, ADD})});
  CHECK(wrong(E_BAD_REQUEST, "slot 0"));
  learner->ask(STEP, 2, {slots({0}), i64({ADD, ADD})});
  CHECK(wrong(E_BAD_REQUEST, "bytes"));
  learner->ask(STEP, 1, {slots({0})});
  CHECK(wrong(E_BAD_REQUEST, "frames"));
  learner->ask(STEP, 0, {slots({}), i64({})});
  CHECK(wrong(E_BAD_REQUEST, "no rows"));
  learner->ask(RESET, 9, {std::string(36, '\0'), std::string(72, '\0')});
  CHECK(wrong(E_TOO_LARGE, "at most 8"));
  learner->ask(EXPAND, 1, {u64({1}), i64({ACTIONS}), u64({0})});
  CHECK(wrong(E_BAD_REQUEST, "'what'"));
  learner->ask(ROLLOUT, 1, {u64({1}), i64({ADD})});
  CHECK(wrong(E_BAD_REQUEST, "steps"));
  learner->ask(IMPORT, 2, {u64({1, 2}), u64({~uint64_t(0), 2}), "abc"});
  CHECK(wrong(E_BAD_REQUEST, "shorter"));
  Reply step(learner->ask(STEP, 2, {slots({0, 1}), i64({ADD, ADD})}), sim.model.spec);
  CHECK(step.obs[0] == 1 && step.obs[2] == 1);
}

TEST(floats_of_actions_are_finite) {
  Simulator<TwoPlayers> sim;
  auto learner = sim.learner();
  Group act(sim.model.spec.act, 1);
  std::string action(act.size, '\0');
  float force = NAN;
  std::memcpy(&action[act.at[1]], &force, 4);
  learner->ask(RESET, 1, {slots({0}), u64({1})});
  learner->ask(STEP, 1, {slots({0}), action});
  CHECK(learner->last.status == E_BAD_REQUEST && learner->last.text().find("'force'") != std::string::npos);
}

TEST(what_an_environment_cannot_do_is_unsupported) {
  Simulator<Forgetful> none;
  auto learner = none.learner();
  learner->ask(RESET, 1, {slots({0}), u64({1})});
  CHECK_EQ(learner->ask(SAVE, 1, {slots({0}), u64({1})}).status, E_UNSUPPORTED);
  CHECK_EQ(learner->ask(EXPAND, 1, {u64({1}), i64({ADD}), u64({2})}).status, E_UNSUPPORTED);
  Simulator<Hoarder> inside;
  auto other = inside.learner();
  CHECK_EQ(other->ask(EXPORT, 1, {u64({1})}).status, E_UNSUPPORTED);
  Simulator<Replayed> plain;
  auto third = plain.learner();
  CHECK_EQ(third->ask(EXPAND, 1, {u64({1}), i64({ADD}), u64({2}), u64({3})}).status, E_UNSUPPORTED);
}

TEST(a_reply_that_would_be_too_large_is_refused_before) {
  Simulator<Tricky> sim(1, "", 4096);
  Manners manners;
  manners.limits.message = 20000;
  auto learner = sim.learner(manners);
  std::string many, seeds;
  for (uint32_t i = 0; i < 1000; ++i) many += slots({i}), seeds += u64({i});
  learner->ask(RESET, 1000, {many, seeds});
  CHECK(learner->last.status == E_TOO_LARGE && learner->last.flags & FAILED);
  learner->write("CLP1\1\0\0\0\xff\xff\0\0", 12);  // and a message that is, ends the session
  CHECK(learner->next(learner->last) && learner->last.op == ERROR && learner->last.status == E_PROTOCOL);
}

TEST(words_fit_into_their_limits) {
  struct Chatty : Tricky {
    void step(const In&, Out&) { throw std::runtime_error(std::string(3000, 'x')); }
  };
  Simulator<Chatty> sim(1, "", 64);
  Manners manners;
  manners.limits.info = 100, manners.limits.meta = 1000;
  auto learner = sim.learner(manners);
  std::string many, seeds, actions;
  for (uint32_t i = 0; i < 64; ++i) many += slots({i}), seeds += u64({i}), actions += i64({ADD});
  learner->ask(RESET, 64, {many, seeds});
  Reply step(learner->ask(STEP, 64, {many, actions}), sim.model.spec);
  CHECK(learner->words(0).size() == 100 && learner->words(63).empty() && learner->last.frames.frame[1].size() <= 1000);
  CHECK(step.rows.status[63] == E_ENV);
}

// -- states

template <class Env>
static void saves_loads_and_expands(bool exact) {
  Simulator<Env> sim(2);
  const Spec& spec = sim.model.spec;
  auto learner = sim.learner();
  learner->ask(RESET, 2, {slots({0, 1}), u64({5, 6})});
  learner->ask(STEP, 2, {slots({0, 1}), i64({ADD10, ADD})});
  CHECK_EQ(Reply(learner->ask(SAVE, 2, {slots({0, 1}), u64({1, 2})}), spec).rows.status[1], GOOD);
  learner->ask(STEP, 2, {slots({0, 1}), i64({ADD, END})});
  Reply load(learner->ask(LOAD, 3, {slots({1, 0, 7}), u64({1, 2, 99})}, WANT_OBS), spec);
  CHECK(load.obs[0] == 10 && load.obs[1] == 5 && load.obs[2] == 1 && load.obs[3] == 6 && load.rows.status[2] == E_UNKNOWN_STATE);
  Reply step(learner->ask(STEP, 2, {slots({1, 0}), i64({ADD, ADD10})}), spec);
  CHECK(step.obs[0] == 11 && step.obs[1] == 5 && step.obs[2] == 11 && step.obs[3] == 6);
  learner->ask(LOAD, 1, {slots({3}), u64({1})});
  CHECK_EQ(learner->last.payloads(), 1u);

  Reply expand(learner->ask(EXPAND, 5, {u64({1, 1, 2, 99, 1}), i64({ADD, ADD10, END, ADD, THROW}), u64({10, 11, 12, 13, 14})}), spec);
  CHECK(expand.obs[0] == 11 && expand.obs[2] == 20 && expand.obs[4] == 2 && expand.rows.flags[2] == TERMINATED);
  CHECK(expand.rows.status[3] == E_UNKNOWN_STATE && expand.rows.status[4] == E_ENV && expand.rows.flags[4] == (FAULTY | TRUNCATED));
  CHECK(expand.rows.reward[1] == 20 && expand.rows.reward[4] == 0);
  Reply deeper(learner->ask(EXPAND, 4, {u64({10, 11, 12, 14}), i64({ADD, ADD, ADD, ADD}), u64({0, 1, 20, 21})}), spec);
  CHECK(deeper.obs[0] == 12 && deeper.obs[2] == 21 && deeper.rows.status[2] == E_NO_EPISODE && deeper.rows.status[3] == E_UNKNOWN_STATE);
  Reply replaced(learner->ask(LOAD, 1, {slots({0}), u64({1})}, WANT_OBS), spec);
  CHECK(replaced.obs[0] == 21 && replaced.obs[1] == 5);
  // The episodes after it are the same as well: the seed is part of the state.
  Reply after(learner->ask(STEP, 1, {slots({0}), i64({END})}, AUTORESET), spec);
  CHECK(after.obs[1] == static_cast<float>(splitmix64(5) % 1000) && after.final[0] == 22);
  (void)exact;
}
TEST(copies_are_saved_loaded_and_expanded) { saves_loads_and_expands<Tricky>(true); }
TEST(large_copies_are_saved_loaded_and_expanded) { saves_loads_and_expands<Hoarder>(true); }
TEST(saved_bytes_are_saved_loaded_and_expanded) { saves_loads_and_expands<Saver>(true); }
TEST(key_states_are_saved_loaded_and_expanded) { saves_loads_and_expands<Keyed>(false); }
TEST(replayed_states_are_saved_loaded_and_expanded) { saves_loads_and_expands<Replayed>(true); }

TEST(chance_seeds_change_what_is_to_come) {
  Simulator<Tricky> sim;
  auto learner = sim.learner();
  learner->ask(RESET, 1, {slots({0}), u64({5})});
  learner->ask(SAVE, 1, {slots({0}), u64({1})});
  Reply expand(learner->ask(EXPAND, 3, {u64({1, 1, 1}), i64({ADD, ADD, ADD}), u64({2, 3, 4}), u64({0, 100, 200})}), sim.model.spec);
  CHECK(expand.obs[0] == 1 && expand.obs[2] == 101 && expand.obs[4] == 201);
}

TEST(a_rollout_stops_where_its_episode_ends) {
  Simulator<Tricky> sim(2);
  auto learner = sim.learner();
  learner->ask(RESET, 1, {slots({0}), u64({5})});
  learner->ask(SAVE, 1, {slots({0}), u64({1})});
  std::string actions = i64({ADD, ADD10, ADD, ADD, END, ADD, ADD, THROW, ADD, ADD, ADD, ADD});
  std::string meta = Packer().map(1).text("steps").uint(3).bytes();
  learner->ask(ROLLOUT, 4, {u64({1, 1, 1, 9}), actions}, 0, meta);
  CHECK_EQ(learner->last.payloads(), 4u);
  const double* rewards = reinterpret_cast<const double*>(learner->last.payload(0).data());
  const uint32_t* lengths = reinterpret_cast<const uint32_t*>(learner->last.payload(1).data());
  Reply reply(learner->last, sim.model.spec, 2);
  CHECK(rewards[0] == 1 && rewards[1] == 11 && rewards[2] == 12 && lengths[0] == 3 && reply.obs[0] == 12 && reply.rows.flags[0] == 0);
  CHECK(rewards[3] == 1 && rewards[4] == 2 && rewards[5] == 0 && lengths[1] == 2 && reply.rows.flags[1] == TERMINATED && reply.obs[2] == 2);
  CHECK(rewards[6] == 1 && rewards[7] == 0 && lengths[2] == 1 && reply.rows.status[2] == E_ENV && reply.rows.flags[2] == (FAULTY | TRUNCATED));
  CHECK(lengths[3] == 0 && reply.rows.status[3] == E_UNKNOWN_STATE);
}

static std::pair<uint64_t, uint64_t> counted(Learner& learner) {
  learner.ask(STATS, 0, {});
  return {*learner.last.meta["snapshots"].uint(), *learner.last.meta["snapshot_bytes"].uint()};
}

TEST(states_fit_exactly_into_their_budget) {
  Simulator<Hoarder> sim;
  size_t each = sizeof(Hoarder) + 1000 + 8;
  Manners manners;
  manners.limits.snapshot_bytes = 3 * each + each - 1;
  auto learner = sim.learner(manners);
  learner->ask(RESET, 1, {slots({0}), u64({5})});
  for (uint64_t id : {1, 2, 3}) CHECK_EQ(Reply(learner->ask(SAVE, 1, {slots({0}), u64({id})}), sim.model.spec).rows.status[0], GOOD);
  Reply full(learner->ask(EXPAND, 2, {u64({1, 1}), i64({ADD, ADD}), u64({4, 0})}), sim.model.spec);
  CHECK(full.rows.status[0] == E_SNAPSHOT_FULL && full.obs[0] == 1 && full.rows.status[1] == GOOD);
  CHECK_EQ(Reply(learner->ask(SAVE, 1, {slots({0}), u64({2})}), sim.model.spec).rows.status[0], GOOD);  // in place of another
  CHECK((counted(*learner) == std::pair<uint64_t, uint64_t>(3, 3 * each)));
  learner->post(DROP, 2, NO_REPLY, 0, {u64({3, 1000})});
  CHECK((counted(*learner) == std::pair<uint64_t, uint64_t>(2, 2 * each)));
  CHECK_EQ(Reply(learner->ask(SAVE, 1, {slots({0}), u64({7ull << 40 | 1})}), sim.model.spec).rows.status[0], GOOD);
  learner->post(DROP, 0, NO_REPLY, 0, {}, Packer().map(1).text("generation").uint(0).bytes());
  CHECK((counted(*learner) == std::pair<uint64_t, uint64_t>(1, each)));
  CHECK_EQ(Reply(learner->ask(SAVE, 1, {slots({0}), u64({0})}), sim.model.spec).rows.status[0], E_BAD_REQUEST);

  manners.limits.snapshots = 2, manners.session = 78;  // another learner has a budget of its own
  auto other = sim.learner(manners);
  other->ask(RESET, 1, {slots({0}), u64({5})});
  Reply three(other->ask(SAVE, 1, {slots({0}), u64({1})}), sim.model.spec);
  other->ask(EXPAND, 3, {u64({1, 1, 1}), i64({ADD, ADD, ADD}), u64({2, 3, 4})});
  Reply count(other->last, sim.model.spec);
  CHECK(count.rows.status[0] == GOOD && count.rows.status[1] == E_SNAPSHOT_FULL && count.rows.status[2] == E_SNAPSHOT_FULL);
}

TEST(requests_may_name_states_that_are_not_there_yet) {
  Simulator<Slow> sim(4);
  auto learner = sim.learner();
  learner->ask(RESET, 1, {slots({0}), u64({5})});
  learner->post(SAVE, 1, 0, 101, {slots({0}), u64({1})});
  learner->post(EXPAND, 1, 0, 102, {u64({1}), i64({ADD}), u64({2})});
  learner->post(EXPAND, 1, 0, 103, {u64({2}), i64({ADD}), u64({3})});
  learner->post(DROP, 1, NO_REPLY, 0, {u64({2})});
  learner->post(EXPAND, 1, 0, 104, {u64({3}), i64({ADD}), u64({4})});
  learner->post(EXPAND, 1, 0, 105, {u64({2}), i64({ADD}), u64({5})});
  std::map<uint64_t, std::pair<int, float>> got;
  for (int i = 0; i < 5; ++i) {
    CHECK(learner->next(learner->last));
    Reply reply(learner->last, sim.model.spec);
    got[learner->last.seq] = {reply.rows.status[0], reply.obs ? reply.obs[0] : -1};
  }
  CHECK(got[101].first == GOOD && got[102].second == 1 && got[103].second == 2 && got[104].second == 3);
  CHECK_EQ(got[105].first, int(E_UNKNOWN_STATE));
}

template <class Env>
static void exports() {
  Simulator<Env> here, there;
  auto learner = here.learner(), other = there.learner();
  learner->ask(RESET, 1, {slots({0}), u64({5})});
  learner->ask(STEP, 1, {slots({0}), i64({ADD10})});
  learner->ask(SAVE, 1, {slots({0}), u64({1})});
  learner->ask(EXPORT, 2, {u64({1, 9})});
  CHECK_EQ(learner->last.payloads(), 3u);
  Reply rows(learner->last, here.model.spec);
  CHECK(rows.rows.status[0] == GOOD && rows.rows.status[1] == E_UNKNOWN_STATE);
  std::string state(learner->last.payload(2)), sizes(learner->last.payload(1));
  CHECK(sizes == u64({state.size(), 0}));

  Reply in(other->ask(IMPORT, 1, {u64({4}), u64({state.size()}), state}), there.model.spec);
  CHECK_EQ(in.rows.status[0], GOOD);
  Reply loaded(other->ask(LOAD, 1, {slots({2}), u64({4})}, WANT_OBS), there.model.spec);
  CHECK(loaded.obs[0] == 10 && loaded.obs[1] == 5);
  Reply step(other->ask(STEP, 1, {slots({2}), i64({ADD})}), there.model.spec);
  CHECK(step.obs[0] == 11 && step.obs[1] == 5);

  for (size_t cut : {size_t(0), size_t(3), size_t(20), state.size() - 1}) {
    Reply bad(other->ask(IMPORT, 1, {u64({5}), u64({cut}), state.substr(0, cut)}), there.model.spec);
    CHECK(bad.rows.status[0] == E_BAD_REQUEST && !other->words(0).empty());
  }
  for (size_t at = 0; at < state.size(); ++at) {
    std::string broken = state;
    broken[at] ^= 0x10;
    Reply bad(other->ask(IMPORT, 1, {u64({5}), u64({broken.size()}), broken}), there.model.spec);
    CHECK(bad.rows.status[0] == E_BAD_REQUEST && !other->words(0).empty());
  }
  CHECK_EQ(Reply(other->ask(LOAD, 1, {slots({2}), u64({5})}), there.model.spec).rows.status[0], E_UNKNOWN_STATE);
  Simulator<TwoPlayers> foreign;
  auto third = foreign.learner();
  CHECK_EQ(Reply(third->ask(IMPORT, 1, {u64({5}), u64({state.size()}), state}), foreign.model.spec).rows.status[0], E_BAD_REQUEST);
}
TEST(memory_is_exported) { exports<Tricky>(); }
TEST(saved_bytes_are_exported) { exports<Saver>(); }
TEST(key_states_are_exported) { exports<Keyed>(); }

// -- time

TEST(heartbeats_are_answered_during_a_long_step) {
  Simulator<Slow> sim(1);
  auto learner = sim.learner();
  learner->ask(RESET, 1, {slots({0}), u64({1})});
  auto start = Clock::now();
  uint64_t step = learner->post(STEP, 1, 0, ++learner->numbers, {slots({0}), i64({ADD10})});
  for (int i = 0; i < 3; ++i) {
    CHECK_EQ(learner->ask(HEARTBEAT, 0, {}).op, HEARTBEAT);
    CHECK(learner->last.flags == REPLY && since(start) < 0.3);
  }
  CHECK(learner->next(learner->last) && learner->last.seq == step && since(start) >= 0.4);
  CHECK(learner->last.aux > 390000 && learner->last.aux < 10000000);
}

TEST(requests_to_different_slots_run_at_once_and_within_the_window) {
  Simulator<Slow> sim(2);
  Manners manners;
  manners.limits.window = 2;
  auto learner = sim.learner(manners);
  learner->ask(RESET, 3, {slots({0, 1, 2}), u64({1, 2, 3})});
  auto start = Clock::now();
  learner->post(STEP, 1, 0, 11, {slots({0}), i64({ADD10})});
  learner->post(STEP, 1, 0, 12, {slots({0}), i64({ADD})});
  CHECK(learner->next(learner->last) && learner->last.seq == 12 && learner->last.status == E_BAD_REQUEST);
  CHECK(learner->last.text().find("slot 0") != std::string::npos);
  learner->post(STEP, 1, 0, 13, {slots({1}), i64({ADD10})});
  learner->post(STEP, 1, 0, 14, {slots({2}), i64({ADD10})});
  CHECK(learner->next(learner->last) && learner->last.seq == 14 && learner->last.status == E_TOO_LARGE);
  CHECK(learner->next(learner->last) && learner->last.status == GOOD && learner->next(learner->last) && learner->last.status == GOOD);
  CHECK(since(start) < 0.75);  // 800 ms one after the other
  Reply two(learner->ask(STEP, 1, {slots({2}), i64({ADD})}), sim.model.spec);
  CHECK(two.obs[0] == 1);
}

TEST(a_deadline_that_has_passed_in_the_queue_is_told) {
  Simulator<Slow> sim(1);
  auto learner = sim.learner();
  learner->ask(RESET, 2, {slots({0, 1}), u64({1, 2})});
  learner->post(STEP, 1, 0, 11, {slots({0}), i64({ADD10})});
  Packet late(STEP);
  late.head.seq = 12, late.head.session = learner->session, late.head.layout = learner->layout, late.head.batch = 1, late.head.aux = 50;
  late.payload.emplace_back(slots({1})), late.payload.emplace_back(i64({ADD}));
  learner->put(late.seal());
  CHECK(learner->next(learner->last) && learner->last.seq == 11);
  CHECK(learner->next(learner->last) && learner->last.seq == 12 && learner->last.status == E_DEADLINE);
}

// -- connections that are lost

TEST(a_session_goes_on_over_another_connection_and_each_request_is_carried_out_once) {
  Simulator<Slow> sim(2);
  auto learner = sim.learner();
  learner->ask(RESET, 3, {slots({0, 1, 2}), u64({1, 2, 3})});
  learner->ask(SAVE, 1, {slots({0}), u64({1})});
  uint64_t n = learner->numbers;
  learner->post(STEP, 1, 0, n + 1, {slots({0}), i64({ADD})});     // done before the cut, and its reply is lost
  std::this_thread::sleep_for(milliseconds(100));
  learner->post(STEP, 1, 0, n + 2, {slots({1}), i64({ADD10})});  // under way when it is asked for again
  std::this_thread::sleep_for(milliseconds(50));
  learner->cut();

  Manners back;
  back.knock = back.session = 77, back.resumed = true;
  learner->dial(sim.server.url());
  CHECK(learner->shake(back));
  CHECK_EQ(*learner->hello().meta["session"].uint(), 77u);
  learner->post(STEP, 1, 0, n + 1, {slots({0}), i64({ADD})});
  learner->post(STEP, 1, 0, n + 2, {slots({1}), i64({ADD10})});
  learner->post(STEP, 1, 0, n + 3, {slots({2}), i64({ADD})});  // never got there
  std::map<uint64_t, float> got;
  while (got.size() < 3) {
    CHECK(learner->next(learner->last));
    got[learner->last.seq] = Reply(learner->last, sim.model.spec).obs[0];
  }
  CHECK(got[n + 1] == 1 && got[n + 2] == 10 && got[n + 3] == 1);
  learner->numbers = n + 3;
  Reply step(learner->ask(STEP, 3, {slots({0, 1, 2}), i64({ADD, ADD, ADD})}), sim.model.spec);
  CHECK(step.obs[0] == 2 && step.obs[2] == 11 && step.obs[4] == 2);
  CHECK_EQ(Reply(learner->ask(LOAD, 1, {slots({0}), u64({1})}), sim.model.spec).rows.status[0], GOOD);
}

TEST(a_session_may_be_taken_over_before_the_cut_is_noticed) {
  Simulator<Tricky> sim;
  auto old = sim.learner();
  old->ask(RESET, 1, {slots({0}), u64({5})});
  Manners back;
  back.knock = back.session = 77, back.resumed = true;
  auto fresh = sim.learner(back);
  fresh->numbers = old->numbers;
  CHECK_EQ(Reply(fresh->ask(STEP, 1, {slots({0}), i64({ADD})}), sim.model.spec).obs[0], 1.0f);
  CHECK(!old->next(old->last) && old->is_cut());
}

TEST(a_session_that_is_not_known_is_refused) {
  Simulator<Tricky> sim;
  Learner learner;
  learner.dial(sim.server.url());
  Manners back;
  back.knock = back.session = 5, back.resumed = true;
  CHECK(!learner.shake(back));
  CHECK_EQ(*learner.hello().meta["session"].uint(), 0u);
  CHECK(learner.last.op == ERROR && learner.last.status == E_SESSION);
}

TEST(learners_do_not_see_each_other) {
  Simulator<Tricky> sim(2);
  Manners one, two;
  one.session = 1, two.session = 1;  // numbers are the learners' choice
  auto a = sim.learner(one), b = sim.learner(two);
  for (Learner* learner : {a.get(), b.get()}) {
    learner->ask(RESET, 1, {slots({0}), u64({5})});
    learner->ask(STEP, 1, {slots({0}), i64({learner == a.get() ? ADD : ADD10})});
    learner->ask(SAVE, 1, {slots({0}), u64({1})});
  }
  CHECK_EQ(Reply(a->ask(LOAD, 1, {slots({3}), u64({1})}, WANT_OBS), sim.model.spec).obs[0], 1.0f);
  CHECK_EQ(Reply(b->ask(LOAD, 1, {slots({3}), u64({1})}, WANT_OBS), sim.model.spec).obs[0], 10.0f);
  a->post(CLOSE, 0, NO_REPLY, 0, {}, Packer().map(2).text("reason").text("done").text("over").boolean(true).bytes());
  CHECK(!a->next(a->last));
  CHECK_EQ(Reply(b->ask(STEP, 1, {slots({0}), i64({ADD})}), sim.model.spec).obs[0], 11.0f);
  CHECK(!sim.server.wait(0.1));  // it listens: the next learner is welcome
  CHECK_EQ(sim.learner()->ask(STATS, 0, {}).status, GOOD);
}

// A simulator that dials, and the place where it does.
struct Dialled {
  explicit Dialled(unsigned threads = 1) : door(open_door(*Address::parse("tcp://127.0.0.1:0"))), model(Model::of<Tricky>()), server(model, options(threads)) { server.start(); }
  ~Dialled() {
    server.stop(0);
    ::close(door);
  }
  Options options(unsigned threads) {
    sockaddr_in where{};
    socklen_t size = sizeof where;
    ::getsockname(door, reinterpret_cast<sockaddr*>(&where), &size);
    Options o;
    o.connect = Address{"tcp", "127.0.0.1", std::to_string(ntohs(where.sin_port))}, o.threads = threads;
    return o;
  }
  void answer(Learner& learner) {
    pollfd one{door, POLLIN, 0};
    CHECK_EQ(::poll(&one, 1, 10000), 1);
    learner.adopt(::accept(door, nullptr, nullptr));
    learner.layout = model.layout;
  }
  int door;
  Model model;
  Server server;
};

TEST(who_dials_comes_back_and_leaves_when_the_run_is_over) {
  Dialled sim;
  Learner learner;
  sim.answer(learner);
  CHECK(learner.shake({}, false));
  learner.ask(RESET, 1, {slots({0}), u64({5})});
  learner.cut();
  sim.answer(learner);
  Manners back;
  back.resumed = true;
  CHECK(learner.shake(back, false));
  CHECK_EQ(*learner.hello().meta["session"].uint(), 77u);
  CHECK_EQ(Reply(learner.ask(STEP, 1, {slots({0}), i64({ADD})}), sim.model.spec).obs[0], 1.0f);
  learner.cut();
  sim.answer(learner);  // a learner that does not know it any more
  Manners fresh;
  fresh.session = 9;
  CHECK(learner.shake(fresh, false));
  learner.numbers = 0;
  CHECK_EQ(Reply(learner.ask(STEP, 1, {slots({0}), i64({ADD})}), sim.model.spec).rows.status[0], E_NO_EPISODE);
  learner.post(CLOSE, 0, NO_REPLY, 0, {}, Packer().map(1).text("over").boolean(false).bytes());
  sim.answer(learner);
  CHECK(learner.shake({}, false));
  learner.post(CLOSE, 0, NO_REPLY, 0, {}, Packer().map(1).text("over").boolean(true).bytes());
  CHECK_EQ(sim.server.wait(10).value_or(-1), 0);
}

TEST(who_dials_and_is_refused_for_good_ends) {
  Dialled sim;
  Learner learner;
  sim.answer(learner);
  Message hello;
  CHECK(learner.next(hello) && hello.op == HELLO);
  Packet refusal(ERROR, NO_REPLY);
  refusal.head.status = E_SPACE_MISMATCH, refusal.meta = Packer().map(1).text("text").text("not like the others").bytes();
  learner.put(refusal.seal());
  CHECK_EQ(sim.server.wait(10).value_or(-1), 1);
}

TEST(who_ends_says_goodbye) {
  auto sim = std::make_unique<Simulator<Tricky>>();
  auto learner = sim->learner();
  sim.reset();
  CHECK(learner->next(learner->last) && learner->last.op == CLOSE && !learner->last.meta["reason"].string().empty());
  CHECK(!learner->next(learner->last) && learner->is_cut());
}

struct Camera : Tricky {
  static Spec spec() {
    Spec s("Camera", 1);
    s.obs.box("image", corral::U8, {1000, 1000}, 0, 255);
    s.act.discrete("what", ACTIONS);
    return s;
  }
  void reset(uint64_t s, Out& o) { std::memset(o.u8("image"), static_cast<int>(s), 1000000); }
  void step(const In&, Out& o) { std::memset(o.u8("image"), 7, 1000000); }
};

TEST(who_does_not_read_is_dropped_and_may_come_back) {
  Simulator<Camera> sim(1, "", 64, 30, 0.4);
  auto learner = sim.learner();
  for (uint64_t i = 1; i <= 16; ++i) learner->post(RESET, 1, 0, i, {slots({uint32_t(i)}), u64({i})});
  std::this_thread::sleep_for(milliseconds(1200));
  int whole = 0;
  while (learner->next(learner->last)) ++whole;  // what was in the sockets' buffers
  CHECK(learner->is_cut() && whole < 16);
  Manners back;
  back.knock = back.session = 77, back.resumed = true;
  learner->dial(sim.server.url());
  CHECK(learner->shake(back));
  for (uint64_t i = 1; i <= 16; ++i) {
    learner->post(RESET, 1, 0, i, {slots({uint32_t(i)}), u64({i})});
    CHECK(learner->next(learner->last) && learner->last.seq == i && learner->last.payload(1)[0] == static_cast<char>(i));
  }
  learner->numbers = 16;
  CHECK_EQ(*learner->ask(STATS, 0, {}).meta["episodes"].uint(), 16u);
}

TEST(a_session_that_nobody_comes_back_for_is_freed) {
  Simulator<Tricky> sim(1, "", 16, 0.3);
  auto learner = sim.learner();
  learner->ask(RESET, 1, {slots({0}), u64({1})});
  learner->cut();
  std::this_thread::sleep_for(milliseconds(1000));
  Manners back;
  back.knock = back.session = 77, back.resumed = true;
  learner->dial(sim.server.url());
  CHECK(!learner->shake(back) && *learner->hello().meta["session"].uint() == 0 && learner->last.status == E_SESSION);
}

// Learners that step, save, expand, drop and lose connections, all at once; each knows what must come out.
static void live(const Simulator<Tricky>& sim, const std::string& url, uint32_t number, int requests) {
  Learner learner;
  learner.layout = sim.model.layout;
  Manners manners;
  manners.session = number;
  learner.dial(url);
  CHECK(learner.shake(manners));
  manners.knock = number, manners.resumed = true;
  corral::Rng rng(number);
  float counts[4] = {}, saved[4] = {};
  learner.ask(RESET, 4, {slots({0, 1, 2, 3}), u64({number, number, number, number})});
  for (uint32_t i = 0; i < 4; ++i) learner.ask(SAVE, 1, {slots({i}), u64({i + 1})});
  for (int i = 0; i < requests; ++i) {
    uint32_t slot = static_cast<uint32_t>(rng.below(4));
    switch (rng.below(8)) {
      case 0:
        CHECK_EQ(Reply(learner.ask(SAVE, 1, {slots({slot}), u64({slot + 1})}), sim.model.spec).rows.status[0], GOOD);
        saved[slot] = counts[slot];
        break;
      case 1:
        CHECK_EQ(Reply(learner.ask(LOAD, 1, {slots({slot}), u64({slot + 1})}, WANT_OBS), sim.model.spec).obs[0], saved[slot]);
        counts[slot] = saved[slot];
        break;
      case 2: {
        uint64_t id = slot + 1;
        Reply wide(learner.ask(EXPAND, 3, {u64({id, id, id}), i64({ADD, ADD10, END}), u64({101, 102, 0})}), sim.model.spec);
        CHECK(wide.obs[0] == saved[slot] + 1 && wide.obs[2] == saved[slot] + 10 && wide.rows.flags[2] == TERMINATED);
        learner.post(DROP, 2, NO_REPLY, 0, {u64({101, 102})});
        break;
      }
      case 3: CHECK_EQ(learner.ask(HEARTBEAT, 0, {}).op, HEARTBEAT); break;
      case 4: {  // the answer is lost with the connection, and asked for again
        uint64_t seq = ++learner.numbers;
        learner.post(STEP, 1, 0, seq, {slots({slot}), i64({ADD})});
        if (rng.below(2)) std::this_thread::sleep_for(milliseconds(1));
        learner.dial(url);
        CHECK(learner.shake(manners) && *learner.hello().meta["session"].uint() == number);
        learner.post(STEP, 1, 0, seq, {slots({slot}), i64({ADD})});
        do CHECK(learner.next(learner.last));
        while (learner.last.seq != seq);
        CHECK_EQ(Reply(learner.last, sim.model.spec).obs[0], ++counts[slot]);
        break;
      }
      default: CHECK_EQ(Reply(learner.ask(STEP, 1, {slots({slot}), i64({ADD})}, AUTORESET), sim.model.spec).obs[0], ++counts[slot]);
    }
  }
  CHECK_EQ(counted(learner).first, 4u);
}

TEST(many_learners_live_side_by_side) {
  Simulator<Tricky> sim(3);
  std::string url = sim.server.url();
  std::atomic<int> good{0};
  std::vector<std::thread> threads;
  for (uint32_t number = 1; number <= 6; ++number)
    threads.emplace_back([&, number] {
      try {
        live(sim, url, number, 300);
        ++good;
      } catch (const Failed&) {
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(good.load(), 6);
}

TEST(large_replies_to_a_learner_that_reads_late_arrive_whole) {
  Simulator<Camera> sim(2);
  auto learner = sim.learner();
  for (uint64_t i = 1; i <= 8; ++i) learner->post(RESET, 2, 0, i, {slots({uint32_t(2 * i - 2), uint32_t(2 * i - 1)}), u64({i, 2 * i})});
  std::this_thread::sleep_for(milliseconds(300));
  for (int i = 0; i < 8; ++i) {
    CHECK(learner->next(learner->last));
    std::string_view obs = learner->last.payload(1);
    CHECK(obs.size() == 1000000 + 1000000 + 0 && static_cast<uint64_t>(obs[0]) == learner->last.seq && static_cast<uint64_t>(obs.back()) == 2 * learner->last.seq);
  }
}

// -- simulators that own their main loop

TEST(an_owned_loop_gets_rows_and_answers_them) {
  Spec spec = counting("Owned");
  std::string program = "test", option = "--bind", url = "tcp://127.0.0.1:0", envs = "--envs=4";
  char* argv[] = {program.data(), option.data(), url.data(), envs.data()};
  corral::Client client(spec, 4, argv);
  std::thread engine([&] {
    std::vector<int> counts(4);
    corral::Request r;
    while (client.poll(r, 20)) {
      for (size_t i = 0; i < r.size(); ++i) {
        int& count = counts[r.slot(i)];
        count = r.is_reset() ? 0 : count + 1;
        r.out(i).f32("obs")[0] = static_cast<float>(count);
        r.out(i).f32("obs")[1] = r.is_reset() ? static_cast<float>(r.seed(i) % 1000) : 0;
        if (r.is_step()) r.out(i).reward = 2, r.out(i).terminated = r.in(i).i("what") == END;
        if (r.is_step() && r.in(i).i("what") == THROW) r.fail(i, "it broke");
      }
      client.reply(r);
    }
  });
  Learner learner;
  learner.layout = layout_hash(spec.obs, spec.act);
  learner.dial(client.url());
  CHECK(learner.shake({}));
  CHECK(*learner.hello().meta["level"].uint() == 0 && *learner.hello().meta["slots"].uint() == 4);
  Reply reset(learner.ask(RESET, 3, {slots({0, 1, 3}), u64({7, 8, 9})}), spec);
  CHECK(reset.obs[1] == 7 && reset.obs[5] == 9);
  Reply step(learner.ask(STEP, 3, {slots({0, 1, 3}), i64({ADD, END, THROW})}, AUTORESET), spec);
  CHECK(step.obs[0] == 1 && step.rows.reward[0] == 2 && step.rows.flags[1] == (TERMINATED | FIRST) && step.final[0] == 1);
  CHECK(step.obs[3] == static_cast<float>(splitmix64(8) % 1000));
  CHECK(step.rows.flags[2] == (FAULTY | TRUNCATED | FIRST) && learner.words(2) == "it broke");
  CHECK_EQ(learner.ask(SAVE, 1, {slots({0}), u64({1})}).status, E_UNSUPPORTED);
  Learner second;  // the slots are the first one's
  second.dial(client.url());
  CHECK(!second.shake({}) && second.last.status == E_FULL);
  client.close();
  engine.join();
  CHECK_EQ(client.exit_code(), 0);
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
