// The client of state servers, asked of servers of a few lines that do what a good one never would. Against a real one it
// is tested by tests/link/test_cpp_states.py.
#include "golden.hpp"

using namespace test;
using corral::StateClient;
using corral::StateError;
using corral::StatesFull;

namespace {

// A server on a thread: `script` is called with each connection and its number, from 0.
class Served {
 public:
  using Script = std::function<void(Learner& client, int number)>;

  explicit Served(Script script) : door_(open_door(*Address::parse("tcp://127.0.0.1:0"))) {
    sockaddr_in where{};
    socklen_t size = sizeof where;
    ::getsockname(door_, reinterpret_cast<sockaddr*>(&where), &size);
    url = say("tcp://127.0.0.1:", int(ntohs(where.sin_port)));
    thread_ = std::thread([this, script] { run(script); });
  }
  ~Served() { end(); }
  // Nobody listens from now on.
  void end() {
    if (!thread_.joinable()) return;
    stop_ = true;
    thread_.join();
    ::close(door_);
  }

  std::string url;
  std::atomic<bool> failed{false};

 private:
  void run(const Script& script) {
    for (int number = 0; !stop_;) {
      pollfd one{door_, POLLIN, 0};
      if (::poll(&one, 1, 20) != 1) continue;
      Learner client;
      client.session = 0;
      client.adopt(::accept(door_, nullptr, nullptr));
      try {
        script(client, number++);
      } catch (const Failed&) {
        failed = true;
      }
    }
  }
  const int door_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// The server's part of the handshake; what the client's READY should prove.
std::string welcome(Learner& client, const std::string& token = "") {
  Message message;
  CHECK(client.next(message) && message.op == KNOCK && message.meta["role"].string() == "states");
  std::string theirs(message.meta["nonce"].string()), ours = "0123456789abcdef";
  Packer meta;
  meta.map(4).text("version").array(2).uint(1).uint(0).text("nonce").bin(ours);
  meta.text("proof").bin(prove(token, "corral-states", theirs, ours)).text("most_bytes").uint(kMostState);
  client.post(WELCOME, 0, 0, 0, {}, meta.bytes());
  return prove(token, "corral-client", theirs, ours);
}
void greet(Learner& client, const std::string& token = "") {
  std::string proof = welcome(client, token);
  Message message;
  CHECK(client.next(message) && message.op == READY && message.meta["proof"].string() == proof);
}
Message asked(Learner& client, uint8_t op) {
  Message message;
  CHECK(client.next(message));
  CHECK_EQ(int(message.op), int(op));
  return message;
}
void answer(Learner& client, const Message& request, const std::vector<std::string>& payload, const std::string& meta = "") {
  client.post(request.op, 0, REPLY, request.seq, payload, meta);
}
// Until the client closes the connection.
void wait_for_end(Learner& client) {
  for (Message message; !client.is_cut() && client.next(message);) {}
}

// What a call says when it fails; the call must.
template <class F>
std::string complaint(F&& call) {
  try {
    call();
  } catch (const StateError& error) {
    return error.what();
  }
  return "";
}
bool says(const std::string& text, const char* what) { return text.find(what) != std::string::npos; }

}  // namespace

TEST(a_client_sends_the_golden_messages_and_reads_the_golden_answers) {
  // With the nonces that there are now, and the proofs that follow.
  auto filled = [](const char* name, std::string_view golden, std::string_view now) {
    std::string bytes = bytes_of(name);
    size_t at = bytes.find(golden);
    CHECK(at != std::string::npos && golden.size() == now.size());
    return bytes.replace(at, now.size(), now);
  };
  { std::FILE* file = std::fopen("golden.token", "w"); std::fputs(kToken.c_str(), file); std::fclose(file); }
  const std::vector<std::pair<const char*, const char*>> told = {
      {"put", "put_reply"}, {"put", "put_full"}, {"get", "get_reply"}, {"get", "get_unknown"}, {"drop_state", "drop_state_reply"},
      {"list", "list_reply"}, {"states_stats", "states_stats_reply"}};
  Served served([&](Learner& client, int number) {
    Message knock, ready;
    CHECK(client.next(knock));
    std::string theirs(knock.meta["nonce"].string()), ours = nonce(16), golden = nonce(0);
    CHECK(built_again(knock) == filled("states_knock", golden, theirs));
    std::string welcome = filled("states_welcome", prove(kToken, "corral-states", golden, ours), prove(kToken, "corral-states", theirs, ours));
    client.write(welcome.data(), welcome.size());
    CHECK(client.next(ready));
    std::string expected = filled("states_ready", prove(kToken, "corral-client", golden, ours), prove(kToken, "corral-client", theirs, ours));
    CHECK(built_again(ready) == expected);
    for (int i = 0; i < 2; ++i) {  // the golden ones are third
      Message before;
      CHECK(client.next(before));
      Packer page;
      page.map(2).text("names").array(1).text("a/b").text("more").boolean(true);
      answer(client, before, {}, before.op == LIST ? page.bytes() : Packer().map(0).bytes());
    }
    Message request;
    CHECK(client.next(request) && built_again(request) == bytes_of(told[number].first));
    std::string reply = bytes_of(told[number].second);
    client.write(reply.data(), reply.size());
    wait_for_end(client);
  });
  const std::string name = "a/\u00e9", bits("\0bits", 5);
  const std::vector<std::function<void(StateClient&)>> calls = {
      [&](StateClient& states) { states.put(name, bits); },
      [&](StateClient& states) { CHECK_THROWS(StatesFull, (states.put(name, bits), 0)); },
      [&](StateClient& states) { CHECK(states.get(name) == bits); },
      [&](StateClient& states) { CHECK(states.get(name) == std::nullopt); },
      [&](StateClient& states) { CHECK(states.drop(name)); },
      [&](StateClient& states) { CHECK(states.names("a/") == std::vector<std::string>({"a/b", "a/c", name})); },
      [&](StateClient& states) { CHECK_EQ(states.nbytes(), 10u); }};
  for (const auto& call : calls) {
    StateClient states(served.url, "golden.token");
    states.nbytes();
    if (&call != &calls[5]) states.nbytes();  // the first page is the second message
    call(states);
  }
  CHECK(!served.failed);
}

TEST(what_was_under_way_when_the_connection_was_lost_is_asked_again) {
  std::vector<uint64_t> numbers;
  Served served([&](Learner& client, int number) {
    greet(client);
    Message put = asked(client, PUT);
    CHECK(put.meta["name"].string() == "a" && put.payload(0) == "state");
    numbers.push_back(put.seq);
    if (number < 2) return;
    answer(client, put, {});
    wait_for_end(client);
  });
  {
    StateClient states(served.url);
    states.put("a", "state");
  }
  served.end();
  CHECK(!served.failed && numbers == std::vector<uint64_t>({1, 1, 1}));
}

TEST(half_an_answer_is_none) {
  Served served([&](Learner& client, int number) {
    greet(client);
    Message get = asked(client, GET);
    Packet whole(GET, REPLY);
    whole.head.seq = get.seq;
    whole.payload.emplace_back(std::string_view("the whole state"));
    whole.seal();
    if (number == 0) return client.write(whole.parts[0].iov_base, whole.parts[0].iov_len);
    client.put(whole);
    wait_for_end(client);
  });
  StateClient states(served.url);
  CHECK(states.get("a") == "the whole state");
}

TEST(a_connection_serves_many_calls_and_a_refusal_does_not_end_it) {
  std::atomic<int> connections{0};
  Served served([&](Learner& client, int) {
    ++connections;
    greet(client);
    Message put = asked(client, PUT);
    Packet full(PUT, REPLY | FAILED);
    full.head.seq = put.seq, full.head.status = E_SNAPSHOT_FULL;
    full.meta = Packer().map(1).text("text").text("drop some").bytes();
    client.put(full.seal());
    put = asked(client, PUT);
    full.head.seq = put.seq, full.head.status = E_BAD_REQUEST;
    Packet bad(PUT, REPLY | FAILED);
    bad.head = full.head, bad.meta = full.meta;
    client.put(bad.seal());
    answer(client, asked(client, DROP_STATE), {}, Packer().map(1).text("dropped").boolean(true).bytes());
    answer(client, asked(client, LIST), {}, Packer().map(2).text("names").array(2).text("a").text("b").text("more").boolean(true).bytes());
    Message page = asked(client, LIST);
    CHECK(page.meta["prefix"].string() == "x" && page.meta["after"].string() == "b");
    answer(client, page, {}, Packer().map(2).text("names").array(1).text("c").text("more").boolean(false).bytes());
    answer(client, asked(client, STATS), {}, Packer().map(1).text("snapshot_bytes").uint(7).bytes());
    wait_for_end(client);
  });
  {
    StateClient states(served.url);
    CHECK_THROWS(StatesFull, (states.put("a", "1"), 0));
    CHECK(says(complaint([&] { states.put("a", "1"); }), "refused: drop some"));
    CHECK(states.drop("a"));
    CHECK(states.names("x") == std::vector<std::string>({"a", "b", "c"}));
    CHECK_EQ(states.nbytes(), 7u);
  }
  served.end();
  CHECK(!served.failed && connections == 1);
}

TEST(a_server_that_does_not_answer_is_an_error_at_the_deadline_and_its_late_answer_is_nobodys) {
  std::atomic<bool> late{false};
  Served served([&](Learner& client, int number) {
    greet(client);
    Message get = asked(client, GET);
    if (number == 0) {
      wait_for_end(client);
      late = true;
      return;
    }
    answer(client, get, {say("state ", number)});
    wait_for_end(client);
  });
  StateClient states(served.url, "", 0.3);
  CHECK(says(complaint([&] { states.get("a"); }), "did not answer within 0.3 s; is it running?"));
  StateClient patient(served.url);
  CHECK(patient.get("a") == "state 1");
  CHECK(late);
}

TEST(nobody_there_is_an_error_at_the_deadline) {
  Served served([](Learner&, int) {});
  served.end();
  StateClient states(served.url, "", 0.3);
  CHECK(says(complaint([&] { states.names(); }), "is it running?"));
}

TEST(who_talks_and_talks_does_not_keep_a_call_for_ever) {
  Served served([](Learner& client, int) {
    greet(client);
    asked(client, GET);
    for (int i = 0; i < 100000 && !client.is_cut(); ++i) {
      client.post(GET, 0, REPLY, 999, {"not what was asked for"});
      Message message;
      if (i % 100 == 0) client.next(message, 1);
    }
  });
  StateClient states(served.url, "", 0.3);
  CHECK(says(complaint([&] { states.get("a"); }), "is it running?"));
}

TEST(a_server_that_takes_nothing_is_an_error_at_the_deadline) {
  std::atomic<bool> done{false};
  Served served([&](Learner& client, int) {
    greet(client);
    while (!done) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  });
  StateClient states(served.url, "", 0.3);
  CHECK(says(complaint([&] { states.put("a", std::string(64 << 20, 'x')); }), "is it running?"));
  done = true;
}

TEST(who_is_no_state_server_is_named) {
  const std::string http = "HTTP/1.0 400 Bad Request\r\n\r\n", huge("CLP1\1\0\0\0\0\0\0\x7f", 12);
  for (const std::string& said : {http, huge}) {
    Served served([&](Learner& client, int) {
      client.write(said.data(), said.size());
      wait_for_end(client);
    });
    StateClient states(served.url);
    CHECK(says(complaint([&] { states.get("a"); }), "is no state server"));
  }
  Served nothing([](Learner& client, int) {
    greet(client);
    answer(client, asked(client, GET), {});
    wait_for_end(client);
  });
  StateClient states(nothing.url);
  CHECK(says(complaint([&] { states.get("a"); }), "a state in 0 frames"));
}

TEST(a_refusal_of_the_server_is_told) {
  Served served([](Learner& client, int) {
    Message message;
    client.next(message);
    Packet error(ERROR, NO_REPLY);
    error.head.status = E_AUTH, error.meta = Packer().map(1).text("text").text("not you").bytes();
    client.put(error.seal());
    wait_for_end(client);
  });
  StateClient states(served.url);
  CHECK_EQ(complaint([&] { states.get("a"); }), say("the state server at ", served.url, " refused: not you"));
}

TEST(a_server_without_the_token_is_refused_in_a_sentence) {
  { std::FILE* file = std::fopen("states.token", "w"); std::fprintf(file, " %s\n", kToken.c_str()); std::fclose(file); }
  Served good([](Learner& client, int) {
    greet(client, kToken);
    answer(client, asked(client, GET), {"secret"});
    wait_for_end(client);
  });
  Served bad([](Learner& client, int) { welcome(client, "another token, as long as it should be"); });
  StateClient states(good.url, "states.token"), wrong(bad.url, "states.token");
  CHECK(states.get("a") == "secret");
  CHECK_EQ(complaint([&] { wrong.get("a"); }),
           say("the server at ", bad.url, " did not prove that it knows the token; give it the same file"));
}

TEST(mistakes_are_found_before_anybody_is_asked) {
  for (const char* url : {"", "nonsense", "tcp://127.0.0.1", "ftp://127.0.0.1:1", "tcp://*:5560", "tcp://127.0.0.1:0"})
    CHECK_THROWS(StateError, StateClient(url));
  CHECK_THROWS(StateError, StateClient("tcp://127.0.0.1:9", "/no/such/file"));
  StateClient states("tcp://127.0.0.1:9");
  for (const std::string& name : {std::string(), std::string(513, 'x'), std::string("\xff\xfe")})
    CHECK(says(complaint([&] { states.get(name); }), "name of a state"));
  CHECK(states.names("\xff").empty());
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
