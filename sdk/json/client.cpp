// A simulator that drives the loop, for corral.make_vec("zmq+json://127.0.0.1:5555"): CartPole and about 20 lines.
//
//     g++ -O2 -std=c++17 client.cpp -lzmq -o client && ./client tcp://127.0.0.1:5555 [env_id] [episodes]
//
// Needs libzmq, not Corral. What the messages say is in docs/json_loop.md.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include <unistd.h>

#if __has_include(<zmq.h>)
#include <zmq.h>
#else  // the part of libzmq that is used here
extern "C" {
void* zmq_ctx_new(void);
void* zmq_socket(void* context, int type);
int zmq_setsockopt(void* socket, int option, const void* value, size_t length);
int zmq_connect(void* socket, const char* url);
int zmq_send(void* socket, const void* data, size_t length, int flags);
int zmq_recv(void* socket, void* data, size_t length, int flags);
int zmq_close(void* socket);
int zmq_ctx_term(void* context);
}
enum { ZMQ_REQ = 3, ZMQ_LINGER = 17, ZMQ_RCVTIMEO = 27 };
#endif

struct CartPole {  // as Gymnasium's CartPole-v1
    double x[4];   // position, velocity, angle, angular velocity
    int steps;
    std::mt19937_64 random;

    void reset() {
        std::uniform_real_distribution<double> small(-0.05, 0.05);
        for (double& value : x) value = small(random);
        steps = 0;
    }
    bool fallen() const { return std::fabs(x[0]) > 2.4 || std::fabs(x[2]) > 12 * 2 * M_PI / 360; }
    bool late() const { return steps >= 500; }
    void step(int action) {
        const double force = action == 1 ? 10.0 : -10.0, sine = std::sin(x[2]), cosine = std::cos(x[2]);
        const double pull = (force + 0.05 * x[3] * x[3] * sine) / 1.1;
        const double turn = (9.8 * sine - cosine * pull) / (0.5 * (4.0 / 3.0 - 0.1 * cosine * cosine / 1.1));
        const double push = pull - 0.05 * turn * cosine / 1.1;
        x[0] += 0.02 * x[1], x[1] += 0.02 * push, x[2] += 0.02 * x[3], x[3] += 0.02 * turn;
        ++steps;
    }
};

// Where the value of a key of a small JSON object begins, or null: enough for what a learner answers.
const char* find(const char* json, const char* key) {
    const char* at = std::strstr(json, (std::string("\"") + key + "\":").c_str());
    return at ? at + std::strlen(key) + 3 : nullptr;
}

int main(int argc, char** argv) {
    std::string url = argc > 1 ? argv[1] : "tcp://127.0.0.1:5555";
    if (url.rfind("zmq+json://", 0) == 0) url.replace(0, 8, "tcp");
    const std::string env_id = argc > 2 ? argv[2] : "cartpole-" + std::to_string(getpid());
    const int episodes = argc > 3 ? std::atoi(argv[3]) : 0;  // then leave; 0: stay until the run is over
    const int patience_ms = 600000, linger_ms = 0;           // a learner that is gone does not answer
    void* context = zmq_ctx_new();
    void* socket = zmq_socket(context, ZMQ_REQ);
    zmq_setsockopt(socket, ZMQ_RCVTIMEO, &patience_ms, sizeof patience_ms);
    zmq_setsockopt(socket, ZMQ_LINGER, &linger_ms, sizeof linger_ms);
    if (zmq_connect(socket, url.c_str()) != 0) return std::fprintf(stderr, "cannot dial %s\n", url.c_str()), 1;

    CartPole env;
    env.random.seed(std::random_device{}());
    env.reset();
    const char *command = "reset", *instance = std::getenv("CORRAL_INSTANCE");  // set by a learner that starts this
    char message[1024], answer[1024];
    for (int ended = 0, code = 0;;) {
        int size = std::snprintf(
            message, sizeof message,
            "{\"command\":\"%s\",\"env_id\":\"%s\",\"obs\":[%.9g,%.9g,%.9g,%.9g],\"reward\":1.0,\"terminated\":%s,"
            "\"truncated\":%s,\"seeded\":true,\"action_space\":2,\"instance\":\"%s\"}",
            command, env_id.c_str(), env.x[0], env.x[1], env.x[2], env.x[3], env.fallen() ? "true" : "false",
            env.late() ? "true" : "false", instance ? instance : "");
        if (size >= int(sizeof message) || zmq_send(socket, message, size, 0) < 0) code = 1;
        if ((size = zmq_recv(socket, answer, sizeof answer - 1, 0)) < 0) code = 1;
        answer[size < 0 ? 0 : size < 1023 ? size : 1023] = 0;
        if (find(answer, "error")) code = std::fprintf(stderr, "%s\n", answer) > 0;
        if (code || find(answer, "terminate") || !std::strcmp(command, "terminate")) {
            zmq_close(socket);
            zmq_ctx_term(context);
            return code;
        }
        const char *action = find(answer, "action"), *seed = find(answer, "seed");
        if (action && std::strncmp(action, "null", 4)) {
            env.step(std::atoi(action));
            command = "step";
            ended += env.fallen() || env.late();
        } else {  // the episode has ended, or the learner wants another
            if (seed) env.random.seed(std::strtoull(seed, nullptr, 10));
            env.reset();
            command = !seed && episodes && ended >= episodes ? "terminate" : "reset";
        }
    }
}
