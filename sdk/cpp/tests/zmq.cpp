// What libzmq tells of connections, and when. The binding is without threads here: it looks when it is told to.
#include "envs.hpp"

using namespace test;

namespace {

void a_moment() { std::this_thread::sleep_for(std::chrono::milliseconds(200)); }

// A learner's socket.
class Dealer {
 public:
  Dealer() : context_(zmq_ctx_new()), socket_(zmq_socket(context_, kDealer)) { zmq_option(socket_, 17, 0); }
  ~Dealer() { zmq_close(socket_), zmq_ctx_term(context_); }
  void connect(const Address& address) { zmq_connect(socket_, address.url("tcp").c_str()); }
  void knock() {
    Packet packet(KNOCK);
    packet.meta = Packer().map(3).text("versions").array(1).array(2).uint(1).uint(0).text("role").text("learner").text("session").uint(0).bytes();
    packet.seal();
    for (size_t i = 1; i <= packet.frames; ++i)
      zmq_send(socket_, packet.parts[i].iov_base, packet.parts[i].iov_len, i < packet.frames ? kMore : 0);
  }
  // The op of the next message that it gets while the binding looks and looks.
  int next(ZmqBinding& binding) {
    std::deque<ZmqPart> parts(1);
    for (int i = 0; i < 1000 && zmq_msg_recv(&parts.back().message, socket_, kDontWait) < 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      binding.happened(0, 0);
    }
    while (zmq_msg_more(&parts.back().message)) {
      parts.emplace_back();
      zmq_msg_recv(&parts.back().message, socket_, kDontWait);
    }
    return Message::read(frames_of(parts, kGreetingBytes)).op;
  }

 private:
  void *context_, *socket_;
};

}  // namespace

TEST(who_gets_the_descriptor_of_a_connection_that_was_lost_is_not_lost) {
  Model model = Model::of<Tricky>();
  Options options;
  Server server(model, options);
  ZmqBinding binding(server, *Address::parse("zmq://127.0.0.1:0"), true);
  Address address = *Address::parse(binding.url());
  Dealer dealer;
  binding.happened(0, 0);
  int somebody = dial(address, -1);
  a_moment();  // until it is accepted
  ::close(somebody);
  a_moment();  // until that is noticed: its two descriptors are the next ones to be had
  dealer.connect(address);
  dealer.knock();
  a_moment();
  CHECK_EQ(dealer.next(binding), int(HELLO));
  dealer.knock();
  CHECK_EQ(dealer.next(binding), int(ERROR));  // who was taken for another could begin anew
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
