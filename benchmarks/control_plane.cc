// What the negotiation of a step of training costs at sizes that no machine here has: negotiators
// in one thread, their messages encoded and decoded. Steps after the first, in which tensors have
// ids.
//
//   control_plane [--ranks 16,256,...] [--tensors N] [--arity K] [--ranks-per-host N]
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "benchmarks/support/measure.h"
#include "tests/support/negotiation_sim.h"

namespace sirtaki::benchmarks {
namespace {

struct Setup {
  int tensors = 161;
  int arity = 8;
  int ranks_per_host = 1;
};

struct Traffic {
  double messages = 0;  // sent and received, of the busiest rank
  double bytes = 0;
  double mean_messages = 0;  // sent
  double mean_bytes = 0;
  double seconds = 0;  // CPU time of a rank on average, messages encoded and decoded
  int depth = 0;       // links between the root and the leaf that is farthest from it
};

// A tree's last rank is as deep as any.
int DepthOf(const core::Tree& tree) {
  int depth = 0;
  for (int node = tree.size() - 1; (node = tree.NodeOf(node).parent) >= 0;) ++depth;
  return depth;
}

void SubmitStep(const Setup& setup, const std::vector<core::SignaturePtr>& shapes,
                tests::NegotiationSim* sim) {
  for (int rank = 0; rank < sim->size(); ++rank) {
    std::vector<core::Request> requests;
    for (int t = 0; t < setup.tensors; ++t) {
      requests.push_back(
          tests::RequestOf(core::Key::Named(core::kWorldSet, "gradient/" + std::to_string(t)),
                           shapes[static_cast<std::size_t>(t)]));
    }
    for (const auto& request : requests) sim->node(rank).Submit(request, sim->now());
  }
  sim->Settle();
}

Traffic Simulate(const Setup& setup, int ranks) {
  tests::SimOptions options;
  options.host_of_rank.clear();
  for (int r = 0; r < ranks; ++r) options.host_of_rank.push_back(r / setup.ranks_per_host);
  options.arity = setup.arity;
  tests::NegotiationSim sim(options);
  std::vector<core::SignaturePtr> shapes;
  for (int t = 0; t < setup.tensors; ++t) shapes.push_back(tests::AllReduceOf({t + 1, 3, 3}));
  SubmitStep(setup, shapes, &sim);  // teaches the ids
  struct Load {
    double messages = 0;
    double bytes = 0;
  };
  std::vector<Load> loads(static_cast<std::size_t>(ranks));
  Load sent;
  sim.on_send = [&](int from, int to, const core::MessageBody& body) {
    const auto bytes = static_cast<double>(core::EncodeFrame({1, body}).size());
    for (const int rank : {from, to}) {
      Load& load = loads[static_cast<std::size_t>(rank)];
      ++load.messages;
      load.bytes += bytes;
    }
    ++sent.messages;
    sent.bytes += bytes;
  };
  SubmitStep(setup, shapes, &sim);
  Traffic traffic;
  sim.on_send = [](int, int, const core::MessageBody&) {};
  const double cpu = CpuSeconds();
  SubmitStep(setup, shapes, &sim);
  traffic.seconds = (CpuSeconds() - cpu) / ranks;
  for (const Load& load : loads) {
    traffic.messages = std::max(traffic.messages, load.messages);
    traffic.bytes = std::max(traffic.bytes, load.bytes);
  }
  traffic.mean_messages = sent.messages / ranks;
  traffic.mean_bytes = sent.bytes / ranks;
  traffic.depth = DepthOf(sim.tree());
  return traffic;
}

int Main(int argc, char** argv) {
  Setup setup;
  setup.tensors = std::stoi(Flag(argc, argv, "tensors", "161"));
  setup.arity = std::stoi(Flag(argc, argv, "arity", "8"));
  setup.ranks_per_host = std::stoi(Flag(argc, argv, "ranks-per-host", "1"));
  const std::vector<std::string> sizes = ListFlag(argc, argv, "ranks", "16,256,4096,65536");
  Traffic first;
  for (const std::string& size : sizes) {
    const int ranks = std::stoi(size);
    const Traffic traffic = Simulate(setup, ranks);
    if (size == sizes.front()) first = traffic;
    const std::string work =
        "negotiation of a step of " + std::to_string(setup.tensors) + " tensors, ";
    const std::string reference = sizes.front() + " ranks";
    const auto emit = [&](const char* what, const char* unit, double value, double base) {
      Emit(Row{work + what, ranks, value, unit, reference, base});
    };
    emit("busiest rank", "messages", traffic.messages, first.messages);
    emit("bytes of the busiest rank", "bytes", traffic.bytes, first.bytes);
    emit("sent by a rank on average", "messages", traffic.mean_messages, first.mean_messages);
    emit("bytes sent by a rank on average", "bytes", traffic.mean_bytes, first.mean_bytes);
    emit("CPU of a rank on average", "us", traffic.seconds * 1e6, first.seconds * 1e6);
    emit("depth of the tree", "links", traffic.depth, first.depth);
  }
  return 0;
}

}  // namespace
}  // namespace sirtaki::benchmarks

int main(int argc, char** argv) {
  using namespace sirtaki::benchmarks;
  return Guarded("control_plane", [&] { return Main(argc, argv); });
}
