#include "sirtaki/recompute.h"

#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_set>

#include "frameworks/torch/session/session_scope.h"
#include "frameworks/torch/tensors/generators.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

[[noreturn]] void Refuse(const std::string& why) { ThrowInvalid("recompute: " + why); }

std::string ShapeText(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.dtype().name() << tensor.sizes();
  return text.str();
}

// Tensors that have to be the same in both runs.
class Unchanged {
 public:
  void Add(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_inference()) return;  // those have no versions
    known_.push_back({tensor, tensor._version()});
  }
  // Throws if one was written since it was added.
  void Check(const char* what_to_do) const {
    for (const auto& [tensor, version] : known_) {
      if (tensor._version() == version) continue;
      Refuse(
          "a tensor that the function uses, " + ShapeText(tensor) +
          ", was changed in place after its first run began, so that the run in backward() would "
          "give something else; " +
          what_to_do);
    }
  }

 private:
  struct Known {
    at::Tensor tensor;
    std::int64_t version;
  };
  std::vector<Known> known_;
};

// Autocast keeps the weights that it has converted, and whether it does decides which graph a run
// makes: so in both runs it keeps none.
class NoKeptWeights {
 public:
  NoKeptWeights() { at::autocast::set_autocast_cache_enabled(false); }
  ~NoKeptWeights() { at::autocast::set_autocast_cache_enabled(before_); }
  NoKeptWeights(const NoKeptWeights&) = delete;
  NoKeptWeights& operator=(const NoKeptWeights&) = delete;

 private:
  const bool before_ = at::autocast::is_autocast_cache_enabled();
};

// A thread's results depend on its surroundings beside its inputs: random numbers and autocast.
class Surroundings {
 public:
  // Those of this thread now.
  explicit Surroundings(std::vector<at::Generator> generators) : random_(std::move(generators)) {
    for (std::size_t i = 0; i < kDevices.size(); ++i) {
      autocast_[i] = {at::autocast::is_autocast_enabled(kDevices[i]),
                      at::autocast::get_autocast_dtype(kDevices[i])};
    }
  }
  void PutInForce() {
    random_.PutInForce();
    for (std::size_t i = 0; i < kDevices.size(); ++i) {
      at::autocast::set_autocast_enabled(kDevices[i], autocast_[i].enabled);
      at::autocast::set_autocast_dtype(kDevices[i], autocast_[i].type);
    }
  }
  const std::vector<at::Generator>& generators() const { return random_.generators(); }

 private:
  static constexpr std::array<at::DeviceType, 2> kDevices = {at::kCPU, at::kCUDA};
  struct Autocast {
    bool enabled = false;
    at::ScalarType type{};
  };
  GeneratorStates random_;
  std::array<Autocast, kDevices.size()> autocast_;
};

// Other surroundings, until it is destroyed.
class Elsewhere {
 public:
  explicit Elsewhere(Surroundings there) : before_(there.generators()) { there.PutInForce(); }
  ~Elsewhere() { before_.PutInForce(); }
  Elsewhere(const Elsewhere&) = delete;
  Elsewhere& operator=(const Elsewhere&) = delete;

 private:
  Surroundings before_;
};

// The part of autograd's graph that a run makes, told by the numbers that its thread gives to nodes.
class Made {
 public:
  bool By(const at::Tensor& output) const {
    return output.defined() && output.grad_fn() != nullptr && By(*output.grad_fn());
  }

  // Calls leave(edge, node, number) for each edge that leads from a node of the part to what is outside
  // of it; the number is the edge's in the node.
  template <class Leave>
  void ForEachWayOut(const std::vector<at::Tensor>& outputs, Leave leave) const {
    std::vector<Node*> ahead;
    std::unordered_set<Node*> seen;
    const auto visit = [&](Node* node) {
      if (seen.insert(node).second) ahead.push_back(node);
    };
    for (const at::Tensor& output : outputs) {
      if (By(output)) visit(output.grad_fn().get());
    }
    while (!ahead.empty()) {
      Node* const node = ahead.back();
      ahead.pop_back();
      edge_list& edges = node->next_edges();
      for (std::size_t i = 0; i < edges.size(); ++i) {
        if (!edges[i].is_valid()) continue;
        if (By(*edges[i].function)) {
          visit(edges[i].function.get());
        } else {
          leave(edges[i], *node, i);
        }
      }
    }
  }

 private:
  bool By(const Node& node) const {
    return node.thread_id() == thread_ && node.sequence_nr() >= first_ &&
           node.sequence_nr() != std::numeric_limits<std::uint64_t>::max();  // a leaf's
  }

  const std::uint64_t thread_ = at::RecordFunction::currentThreadId();
  const std::uint64_t first_ = at::sequence_number::peek();
};

// Stands in a graph for what is outside of it, and takes the gradient that comes there.
class WayOut : public Node {
 public:
  WayOut(const Edge& outside, std::shared_ptr<variable_list> gradients, std::size_t index)
      : Node(std::numeric_limits<std::uint64_t>::max()),
        gradients_(std::move(gradients)),
        index_(index) {
    input_metadata_.emplace_back(outside.function->input_metadata(outside.input_nr));
  }
  variable_list apply(variable_list&& gradients) override {
    (*gradients_)[index_] = std::move(gradients.front());
    return {};
  }

 private:
  const std::shared_ptr<variable_list> gradients_;
  const std::size_t index_;
};

// The edges that lead out of the second run's graph lead to WayOuts meanwhile. What they led to would
// be called too early otherwise: the outer backward() has to add up first what comes from elsewhere.
class Detour {
 public:
  // `known`: the ways out of the first run, by which `node` stands in the graph for it.
  // Whatever it throws, the edges are as they were.
  Detour(const Made& made, const std::vector<at::Tensor>& outputs, const edge_list& known,
         const Node& node, const std::shared_ptr<variable_list>& gradients)
      : Detour() {
    edge_list ways(known.size());
    std::size_t met = 0;
    made.ForEachWayOut(outputs, [&](Edge& edge, Node& from, std::size_t number) {
      const auto at = std::find(known.begin(), known.end(), edge);
      if (at == known.end()) Differ();
      const std::size_t index = static_cast<std::size_t>(at - known.begin());
      Edge& way = ways[index];
      if (!way.is_valid()) {
        ++met;
        way = Edge(std::make_shared<WayOut>(edge, gradients, index), 0);
      }
      const Edge instead = node.task_should_compute_output(index) ? way : Edge();
      // The node of a view that was changed in place has another within, whose edges, except the first,
      // are the same, and are compared.
      auto* const copy = dynamic_cast<torch::autograd::CopySlices*>(&from);
      if (copy != nullptr && copy->fn != nullptr && number > 0) {
        Replace(copy->fn->next_edges()[number], instead, copy->fn);
      }
      Replace(edge, instead, nullptr);
    });
    if (met != known.size()) Differ();
  }
  ~Detour() {
    for (Taken& taken : taken_) *taken.edge = std::move(taken.before);
  }
  Detour(const Detour&) = delete;
  Detour& operator=(const Detour&) = delete;

 private:
  [[noreturn]] static void Differ() {
    Refuse(
        "the function has used other tensors that require gradients in backward() than at first; "
        "it must do the same whenever it runs, on its own thread, and make no parameters");
  }

  Detour() = default;

  void Replace(Edge& edge, const Edge& instead, std::shared_ptr<Node> keeps) {
    taken_.push_back({&edge, edge, std::move(keeps)});
    edge = instead;
  }

  struct Taken {
    Edge* edge;
    Edge before;
    std::shared_ptr<Node> keeps;  // the edge, if nothing else does
  };
  std::vector<Taken> taken_;
};

class RecomputeBackward : public Node {
 public:
  RecomputeBackward(Segment segment, Surroundings surroundings, Unchanged unchanged,
                    const edge_list& ways, std::size_t outputs)
      : Node(edge_list(ways)),
        segment_(std::move(segment)),
        surroundings_(std::move(surroundings)),
        unchanged_(std::move(unchanged)),
        ways_(ways),
        places_(outputs, -1) {}

  // The output at this place of the function's results is an input of this node.
  void Take(std::size_t place, at::Tensor& output) {
    places_[place] = static_cast<int>(num_inputs());
    torch::autograd::create_gradient_edge(output, shared_from_this());
  }

  std::string name() const override { return "RecomputeBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    segment_ = nullptr;
    unchanged_ = {};
    ways_.clear();
  }

  variable_list apply(variable_list&& gradients) override {
    const bool create_graph = at::GradMode::is_enabled();
    const Made made;
    edge_list ways;
    const std::vector<at::Tensor> outputs = RunAgain(&ways);
    edge_list roots;
    variable_list given;
    for (std::size_t i = 0; i < places_.size(); ++i) {
      if (places_[i] < 0) continue;
      const auto place = static_cast<std::size_t>(places_[i]);
      CheckOutput(made, outputs[i], place);
      if (!gradients[place].defined()) continue;
      roots.push_back(torch::autograd::impl::gradient_edge(outputs[i]));
      given.push_back(std::move(gradients[place]));
    }
    const auto results = std::make_shared<variable_list>(num_outputs());
    const Detour detour(made, outputs, ways, *this, results);
    if (!roots.empty()) {
      torch::autograd::Engine::get_default_engine().execute(roots, given, create_graph,
                                                            create_graph, true);
    }
    return std::move(*results);
  }

 private:
  // Calls the function; gives the ways out of its first run too.
  std::vector<at::Tensor> RunAgain(edge_list* ways) {
    Segment segment;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      segment = segment_;
      *ways = ways_;
      if (segment) unchanged_.Check("clone it before the change, or change it after backward()");
    }
    if (!segment) {
      Refuse(
          "backward() comes a second time, and the first has let go of the function and its "
          "inputs: give the first retain_graph");
    }
    const SessionScope scope(given_);  // on a GPU this is a thread of autograd's own
    const at::AutoGradMode with_graph(true);
    const Elsewhere elsewhere(surroundings_);
    const NoKeptWeights no_kept_weights;
    std::vector<at::Tensor> outputs = segment();
    if (outputs.size() != places_.size()) {
      Refuse("the function has returned " + std::to_string(outputs.size()) +
             " tensors in backward(), and at first " + std::to_string(places_.size()) +
             "; it must do the same whenever it runs");
    }
    return outputs;
  }

  void CheckOutput(const Made& made, const at::Tensor& output, std::size_t place) const {
    const auto& first = input_metadata(place);
    const bool fits = made.By(output) && first.is_same_shape(output) &&
                      first.dtype() == output.dtype() && first.device() == output.device();
    if (fits) return;
    std::ostringstream before;
    before << first.dtype().name() << first.shape_as_dim_vector();
    const std::string now = output.defined() ? ShapeText(output) : "an undefined tensor";
    Refuse("the function has returned " + now + (made.By(output) ? "" : " without a graph") +
           " in backward(), and " + before.str() +
           " at first; it must do the same whenever it runs");
  }

  const std::shared_ptr<SessionState> given_ = SessionScope::Given();  // in the first run
  Segment segment_;
  Surroundings surroundings_;
  Unchanged unchanged_;
  edge_list ways_;           // next_edges(), which a Detour of the segment around this one changes
  std::vector<int> places_;  // of each output, the input of this node that it is; -1: none
};

// The edges by which backward() leaves the segment, each once.
edge_list WaysOut(const Made& made, const std::vector<at::Tensor>& outputs) {
  edge_list ways;
  std::unordered_set<Edge> known;
  made.ForEachWayOut(outputs, [&](const Edge& edge, const Node&, std::size_t) {
    if (known.insert(edge).second) ways.push_back(edge);
  });
  return ways;
}

// Whether the output, which the first run has made, shares memory with a tensor that it has not made,
// or with another output.
bool SharesMemory(const at::Tensor& output, const Made& made,
                  const std::vector<at::Tensor>& others) {
  if (output.is_view() && !made.By(at::Tensor(output._base()))) return true;
  return std::any_of(others.begin(), others.end(), [&output](const at::Tensor& other) {
    return other.defined() && other.has_storage() && output.has_storage() &&
           output.is_alias_of(other);
  });
}

}  // namespace

std::vector<at::Tensor> Recompute(Segment segment, const std::vector<at::Tensor>& inputs) {
  if (!at::GradMode::is_enabled()) return segment();
  Unchanged unchanged;
  for (const at::Tensor& input : inputs) {
    unchanged.Add(input);
    // A view whose base was changed gets its node now, which is none of the segment's.
    if (input.defined()) (void)input.grad_fn();
  }
  // A function may draw on a GPU that none of its inputs is on: where it takes these there itself.
  Surroundings surroundings(GeneratorsInUse());
  const Made made;
  std::vector<at::Tensor> outputs;
  {
    const NoKeptWeights no_kept_weights;
    outputs = segment();
  }
  const edge_list ways = WaysOut(made, outputs);
  if (ways.empty()) return outputs;
  unchanged.Check("the function itself has: it must clone it first");
  for (const Edge& way : ways) {
    const auto* const leaf = dynamic_cast<const AccumulateGrad*>(way.function.get());
    if (leaf != nullptr) unchanged.Add(leaf->variable);
  }
  const std::shared_ptr<RecomputeBackward> node(
      new RecomputeBackward(std::move(segment), std::move(surroundings), std::move(unchanged), ways,
                            outputs.size()),
      torch::autograd::deleteNode);
  std::vector<at::Tensor> taken = inputs;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!made.By(outputs[i])) continue;
    // An output that is changed in place must change nothing else, since autograd would not know.
    at::Tensor output = outputs[i].detach();
    if (SharesMemory(outputs[i], made, taken)) output = output.clone();
    node->Take(i, output);
    taken.push_back(outputs[i] = std::move(output));
  }
  return outputs;
}

}  // namespace sirtaki::detail
