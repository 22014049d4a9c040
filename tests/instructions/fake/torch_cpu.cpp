// libtorch_cpu.so: the parts of autograd's nodes and engine that memtrace interposes or reads. They follow
// torch/csrc/autograd/function.h and engine.h, ATen/SequenceNumber.h and ATen/record_function.h of PyTorch 2.11.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace at {

namespace sequence_number {
uint64_t get_and_increment();
}

struct RecordFunction {
    static uint64_t currentThreadId();
};

static thread_local uint64_t next_number = 0;

uint64_t sequence_number::get_and_increment() { return next_number++; }
uint64_t RecordFunction::currentThreadId() { return 1; }

} // namespace at

static void (*work)(int);

namespace torch::autograd {

struct GraphTask;
struct InputBuffer;
struct ReadyQueue;

struct Node : std::enable_shared_from_this<Node> {
    uint64_t sequence_nr_ = at::sequence_number::get_and_increment();
    uint64_t topological_nr_ = 0;
    bool has_parent_ = false;
    uint64_t thread_id_ = at::RecordFunction::currentThreadId();
    virtual ~Node() = default;
    virtual void apply() = 0;
};

namespace generated {
struct AddBackward0 : Node {
    void apply() override {
        if (work)
            work(1);
    }
};
} // namespace generated

struct Engine {
    virtual ~Engine() = default;
    void evaluate_function(std::shared_ptr<GraphTask> &, Node *, InputBuffer &, const std::shared_ptr<ReadyQueue> &);
};

void Engine::evaluate_function(std::shared_ptr<GraphTask> &, Node *node, InputBuffer &, const std::shared_ptr<ReadyQueue> &) {
    node->apply();
}

} // namespace torch::autograd

using namespace torch::autograd;

static std::vector<std::shared_ptr<Node>> graph;

// The forward pass makes nodes; the backward pass runs them, the last one first.
extern "C" void make_nodes(int count) {
    graph.reserve(graph.size() + static_cast<size_t>(count));
    for (int i = 0; i < count; i++)
        graph.push_back(std::make_shared<generated::AddBackward0>());
}

// Sets the function that a node calls when it runs; null for none.
extern "C" void nodes_work(void (*function)(int)) { work = function; }

extern "C" void run_nodes(int count) {
    static Engine engine;
    std::shared_ptr<GraphTask> task;
    std::shared_ptr<ReadyQueue> queue;
    auto *inputs = reinterpret_cast<InputBuffer *>(&queue);
    for (int i = 0; i < count; i++) {
        if (graph.empty())
            std::abort();
        engine.evaluate_function(task, graph.back().get(), *inputs, queue);
        graph.pop_back();
    }
}
