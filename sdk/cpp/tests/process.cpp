// Simulators as processes: command lines, signals, exit codes. Runs ./cartpole and ./owned_loop of the build.
#include <sys/wait.h>

#include "envs.hpp"

using namespace test;

namespace {

class Process {
 public:
  explicit Process(std::vector<std::string> args, const std::string& program = "./cartpole", const std::string& instance = "") {
    int pipes[2];
    CHECK_EQ(::pipe(pipes), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(pipes[1], 2), ::dup2(pipes[1], 1);
      ::close(pipes[0]), ::close(pipes[1]);
      if (!instance.empty()) ::setenv("CORRAL_INSTANCE", instance.c_str(), 1);
      std::vector<char*> argv{const_cast<char*>(program.c_str())};
      for (std::string& arg : args) argv.push_back(arg.data());
      argv.push_back(nullptr);
      ::execv(program.c_str(), argv.data());
      std::_Exit(99);
    }
    ::close(pipes[1]);
    out_ = pipes[0];
  }
  ~Process() {
    kill(SIGKILL);
    code();
    ::close(out_);
  }
  void kill(int signal) {
    if (pid_ > 0) ::kill(pid_, signal);
  }
  // Its exit code; -1 when it goes on for ten seconds more.
  int code() {
    int status = 0;
    for (int i = 0; pid_ > 0 && i < 1000; ++i) {
      if (::waitpid(pid_, &status, WNOHANG) == pid_) {
        pid_ = -1;
        code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    }
    return pid_ > 0 ? -1 : code_;
  }
  // What it has said, up to and with `until`.
  std::string said(const char* until = nullptr) {
    char byte;
    while ((!until || text_.find(until) == std::string::npos) && ::read(out_, &byte, 1) == 1) text_.push_back(byte);
    return text_;
  }
  std::string url() {
    said("listening for learners at tcp://");
    std::string text = said("\n");
    size_t at = text.find("tcp://");
    return text.substr(at, text.find('\n', at) - at);
  }

 private:
  pid_t pid_ = -1;
  int out_ = -1, code_ = -1;
  std::string text_;
};

std::string door_url(int door) {
  sockaddr_in where{};
  socklen_t size = sizeof where;
  ::getsockname(door, reinterpret_cast<sockaddr*>(&where), &size);
  return say("tcp://127.0.0.1:", int(ntohs(where.sin_port)));
}
void answer(int door, Learner& learner) {
  pollfd one{door, POLLIN, 0};
  CHECK_EQ(::poll(&one, 1, 10000), 1);
  learner.adopt(::accept(door, nullptr, nullptr));
}
constexpr uint32_t kCartPole = 0xd7e7a631u;

}  // namespace

TEST(a_bad_command_line_is_one_sentence_and_exit_code_2) {
  const std::vector<std::vector<std::string>> wrong = {
      {}, {"--connect"}, {"--connect", "5555"}, {"--connect", "ftp://h:1"}, {"--connect", "tcp://h:99999"}, {"--connect", "tcp://*:5555"},
      {"--bind", "tcp://127.0.0.1:0", "--connect", "tcp://127.0.0.1:1"}, {"--bind", "tcp://0.0.0.0:0"}, {"--bind", "tcp://127.0.0.1:0", "--envs", "0"},
      {"--bind", "tcp://127.0.0.1:0", "--threads", "two"}, {"--bind", "tcp://127.0.0.1:0", "--token-file", "/nowhere"}, {"--frobnicate"},
      {"--bind", "tcp://127.0.0.1:0", "--patience", "-1"}, {"--bind=tcp://127.0.0.1:0", "more"}};
  for (const auto& args : wrong) {
    Process process(args);
    std::string text = process.said();
    CHECK_EQ(process.code(), 2);
    CHECK(text.rfind("corral: ", 0) == 0 && std::count(text.begin(), text.end(), '\n') == 1);
  }
}

TEST(help_lists_all_options) {
  Process process({"--help"});
  std::string text = process.said();
  CHECK_EQ(process.code(), 0);
  for (const char* option : {"--connect", "--bind", "--envs", "--threads", "--token-file", "--patience", "--insecure", "CartPole"})
    CHECK(text.find(option) != std::string::npos);
}

TEST(insecure_or_a_token_opens_the_door_to_others) {
  { std::FILE* file = std::fopen("test.token", "w"); std::fputs("  0123456789abcdef0123\n", file); std::fclose(file); }
  for (std::vector<std::string> args : {std::vector<std::string>{"--bind", "tcp://0.0.0.0:0", "--insecure"},
                                        std::vector<std::string>{"--bind", "tcp://0.0.0.0:0", "--token-file", "test.token"}}) {
    Process process(args);
    std::string url = process.url();
    Learner learner;
    learner.layout = kCartPole;
    learner.dial(say("tcp://127.0.0.1", url.substr(url.rfind(':'))));
    Manners manners;
    if (args.size() == 4) manners.token = "0123456789abcdef0123";
    CHECK(learner.shake(manners));
  }
}

TEST(a_signal_ends_it_with_a_goodbye) {
  for (int signal : {SIGTERM, SIGINT}) {
    Process process({"--bind", "tcp://127.0.0.1:0"}, "./cartpole", "00112233445566778899aabbccddeeFF");
    Learner learner;
    learner.layout = kCartPole;
    learner.dial(process.url());
    CHECK(learner.shake({}));
    CHECK_EQ(hex(learner.hello().meta["instance"].string()), "00112233445566778899aabbccddeeff");
    learner.ask(RESET, 1, {slots({1023}), u64({1})});
    CHECK_EQ(learner.last.status, GOOD);
    process.kill(signal);
    CHECK(learner.next(learner.last) && learner.last.op == CLOSE);
    CHECK_EQ(process.code(), 0);
  }
}

TEST(a_signal_ends_an_owned_loop) {
  Process process({"--bind", "tcp://127.0.0.1:0"}, "./owned_loop");
  process.url();
  process.kill(SIGTERM);
  CHECK_EQ(process.code(), 0);
}

TEST(who_finds_no_learner_loses_patience) {
  int door = open_door(*Address::parse("tcp://127.0.0.1:0"));
  std::string url = door_url(door);
  ::close(door);
  Process process({"--connect", url, "--patience", "0.5"});
  std::string text = process.said();
  CHECK_EQ(process.code(), 1);
  CHECK(text.find("no learner") != std::string::npos);
}

TEST(the_learner_may_start_later_and_ends_it) {
  int door = open_door(*Address::parse("tcp://127.0.0.1:0"));
  std::string url = door_url(door);
  ::close(door);
  for (const char* program : {"./cartpole", "./owned_loop"}) {
    Process process({"--connect", url}, program);
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    door = open_door(*Address::parse(url));
    CHECK(door >= 0);
    Learner learner;
    answer(door, learner);
    CHECK(learner.shake({}, false));
    learner.post(CLOSE, 0, NO_REPLY, 0, {}, Packer().map(1).text("over").boolean(true).bytes());
    CHECK_EQ(process.code(), 0);
    ::close(door);
  }
}

TEST(told_to_bind_where_a_learner_listens_it_dials) {
  int door = open_door(*Address::parse("tcp://127.0.0.1:0"));
  Process process({"--bind", door_url(door)});
  Learner learner;
  answer(door, learner);
  CHECK(learner.shake({}, false));
  ::close(door);
}

TEST(told_to_bind_it_stays_for_the_next_learner_though_it_had_to_dial_the_first) {
  for (const char* program : {"./cartpole", "./owned_loop"}) {
    int door = open_door(*Address::parse("tcp://127.0.0.1:0"));
    std::string url = door_url(door);
    Process process({"--bind", url}, program);
    Learner first, second;
    answer(door, first);
    CHECK(first.shake({}, false));
    ::close(door);
    first.post(CLOSE, 0, NO_REPLY, 0, {}, Packer().map(1).text("over").boolean(true).bytes());
    process.said(say("listening for learners at ", url, "\n").c_str());
    second.dial(url);
    CHECK(second.shake({}));
    process.kill(SIGTERM);
    CHECK_EQ(process.code(), 0);
  }
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
