#include "frameworks/torch/parallel/pipeline_run.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "session/session_observability.h"
#include "sirtaki/recompute.h"

namespace sirtaki::detail {
namespace {

using parallel::At;
using parallel::InstructionKind;
using torch::autograd::Node;
using torch::autograd::variable_list;

// A PipelineInput stands in the graph for a tensor that another stage has made, and takes its gradient.
// The tensor is no leaf, so that a stage that is not recomputed may change it in place.
class PipelineInput : public Node {
 public:
  PipelineInput(std::shared_ptr<std::vector<at::Tensor>> gradients, std::size_t place)
      : gradients_(std::move(gradients)), place_(place) {}
  std::string name() const override { return "PipelineInput"; }
  variable_list apply(variable_list&& gradients) override {
    (*gradients_)[place_] = std::move(gradients.front());
    return {};
  }

 private:
  const std::shared_ptr<std::vector<at::Tensor>> gradients_;
  const std::size_t place_;
};

at::Tensor InGraph(const at::Tensor& tensor, bool requires_grad,
                   const std::shared_ptr<std::vector<at::Tensor>>& gradients, std::size_t place) {
  at::Tensor input = tensor.detach();
  if (!requires_grad) return input;
  const std::shared_ptr<PipelineInput> node(new PipelineInput(gradients, place),
                                            torch::autograd::deleteNode);
  torch::autograd::set_history(input, node);
  return input;
}

// The names of the skip connections that begin at a stage, each once.
std::vector<std::string> SkipNames(const std::vector<parallel::Edge>& edges) {
  std::vector<std::string> names;
  for (const parallel::Edge& edge : edges) {
    if (edge.name.empty()) continue;
    if (std::find(names.begin(), names.end(), edge.name) == names.end()) names.push_back(edge.name);
  }
  return names;
}

std::map<int, PipelineCore::Stage> ByNumber(const PipelinePlan& plan,
                                            std::vector<PipelineCore::Stage> stages) {
  std::map<int, PipelineCore::Stage> by_number;
  const std::vector<int> numbers = plan.shape().StagesOf(plan.row().place);
  for (std::size_t i = 0; i < numbers.size(); ++i) by_number[numbers[i]] = std::move(stages[i]);
  return by_number;
}

// Where a stage gets tensors that come from a GPU: where its parameters are on one, else on the CPU with
// these; without any, on the current GPU.
at::Device DeviceOf(const PipelineCore::Stage& stage) {
  for (const auto& [name, parameter] : stage.parameters) {
    if (parameter.is_cuda()) return parameter.device();
  }
  return stage.parameters.empty() && at::hasCUDA() ? at::kCUDA : at::kCPU;
}

std::vector<at::Device> DevicesOf(const PipelinePlan& plan,
                                  const std::map<int, PipelineCore::Stage>& stages) {
  std::vector<at::Device> devices(At(plan.shape().stages), at::Device(at::kCPU));
  for (const auto& [number, stage] : stages) devices[At(number)] = DeviceOf(stage);
  return devices;
}

// Gives the memory of a tensor; null: it has none of its own, as a sparse one.
const void* MemoryOf(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// Returns the outputs of a stage that somebody else has and may write again: a module's buffer, or a view
// of it. Results of operators are not among them; the graph keeps some of these for itself.
std::set<const void*> HeldElsewhere(const std::vector<at::Tensor>& outputs) {
  std::map<const void*, std::size_t> here;  // references that are the outputs' own
  for (const at::Tensor& output : outputs) {
    if (!output.defined()) continue;
    ++here[output.unsafeGetTensorImpl()];
    if (output.is_view()) ++here[output._base().unsafeGetTensorImpl()];
  }
  std::set<const void*> held;
  for (const at::Tensor& output : outputs) {
    const auto is_held = [&](const at::TensorBase& tensor) {
      return tensor.use_count() > here[tensor.unsafeGetTensorImpl()];
    };
    const bool others_have = output.defined() && !output.requires_grad() &&
                             (is_held(output) || (output.is_view() && is_held(output._base())));
    if (others_have) held.insert(output.unsafeGetTensorImpl());
  }
  return held;
}

std::int64_t RowsOf(const std::vector<at::Tensor>& tensors) {
  return tensors.empty() || tensors.front().dim() == 0 ? 0 : tensors.front().size(0);
}

}  // namespace

struct PipelineRun::Kept {
  struct Root {
    torch::autograd::Edge edge;
    Edge over;          // that brings its gradient
    std::size_t place;  // among those of this edge that have one
  };
  std::vector<Root> roots;
  at::Tensor loss;
  Gradients gradients = std::make_shared<Tensors>();  // of the inputs, in their order
  // Where each input came from: an edge, and how many there are that have a gradient or not.
  struct Origin {
    Edge edge;
    std::vector<PipelineTensor> tensors;
  };
  std::vector<Origin> origins;
  std::vector<at::Device> devices;  // of the inputs
};

PipelineRun::PipelineRun(const PipelinePlan& plan, std::vector<PipelineCore::Stage> stages,
                         PipelineLoss::Function loss, const PipelineOptions& options)
    : plan_(plan),
      stages_(ByNumber(plan, stages)),
      loss_(std::move(loss)),
      trace_(plan.row().set.session->session().observation().observer(),
             {.name = options.name(),
              .micro_batches = options.micro_batches(),
              .bubble = plan.facts().bubble}),
      messages_(plan, options.timeout(), trace_) {}

void PipelineRun::Replace(const at::Tensor& before, const at::Tensor& now) {
  for (auto& [number, stage] : stages_) {
    for (auto& [name, parameter] : stage.parameters) {
      if (parameter.is_same(before)) parameter = now;
    }
  }
}

void PipelineRun::Reset() {
  kept_.clear();
  activations_.clear();
  gradients_.clear();
  inputs_.clear();
  targets_.clear();
  losses_.clear();
  reduce_tied_ = nullptr;
}

double PipelineRun::Run(bool training, const Tensors& inputs, const Tensors& targets,
                        Tensors* outputs,
                        const std::function<void(const std::string& tie)>& reduce_tied) {
  Reset();  // of a batch that has thrown
  training_ = training;
  reduce_tied_ = &reduce_tied;
  wants_outputs_ = outputs != nullptr;
  outputs_.clear();
  if (training) most_kept_ = 0;
  if (training && c10::InferenceMode::is_enabled()) {
    ThrowInvalid(
        "train_batch() is called in inference mode, which has no gradients; leave that, or "
        "call evaluate_batch()");
  }
  const at::AutoGradMode with_graph(training);
  const bool has_first = stages_.count(0) != 0;
  const bool has_last = stages_.count(plan_.shape().stages - 1) != 0;
  if (has_first) CutBatch(inputs, "inputs", &inputs_);
  if (has_last && (training || !targets.empty())) CutBatch(targets, "targets", &targets_);
  // The model may have been moved since the last batch.
  messages_.Begin(training, DevicesOf(plan_, stages_), has_first ? RowsOf(inputs) : 0);
  for (const Instruction& instruction : plan_.Instructions(training)) {
    trace_.Begin(instruction);
    Do(instruction);
    trace_.End();
  }
  if (wants_outputs_ && !outputs_.empty()) {
    outputs->clear();
    for (std::size_t i = 0; i < outputs_.front().size(); ++i) {
      Tensors parts;
      for (const Tensors& of : outputs_) parts.push_back(of[i]);
      outputs->push_back(parts.front().dim() == 0 ? at::stack(parts) : at::cat(parts));
    }
  }
  outputs_.clear();
  const double loss = MeanLoss();
  Reset();
  return loss;
}

void PipelineRun::CutBatch(const Tensors& tensors, const std::string& what,
                           std::vector<Tensors>* parts) const {
  const std::int64_t count = plan_.shape().micro_batches;
  std::size_t number = 0;
  const std::string stage = StageText(plan_, what == "inputs" ? 0 : plan_.shape().stages - 1);
  if (tensors.empty()) ThrowInvalid(stage + " needs the " + what + " of the batch");
  parts->assign(static_cast<std::size_t>(count), {});
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) ThrowInvalid(stage + " needs the " + what + " of the batch");
    if (tensor.dim() == 0 || tensor.size(0) % count != 0 || tensor.size(0) == 0) {
      ThrowInvalid("the " + what + " of " + stage + " have " +
                   (tensor.dim() == 0 ? "no" : std::to_string(tensor.size(0))) +
                   " samples, which cannot be cut into " + std::to_string(count) +
                   " micro-batches of one size; use a batch size that is a multiple of " +
                   std::to_string(count) + ", and leave out a last batch that is smaller");
    }
    if (tensor.size(0) != tensors.front().size(0)) {
      ThrowInvalid("the " + what + " of " + stage + " differ in samples: " +
                   std::to_string(tensors.front().size(0)) + " in tensor 0, " +
                   std::to_string(tensor.size(0)) + " in tensor " + std::to_string(number) +
                   "; all of them are cut along dimension 0, so give the stage itself what is not "
                   "of the batch, as a buffer for instance");
    }
    ++number;
    const std::int64_t size = tensor.size(0) / count;
    for (std::int64_t i = 0; i < count; ++i) {
      (*parts)[static_cast<std::size_t>(i)].push_back(tensor.narrow(0, i * size, size));
    }
  }
}

// The first rank has told how many samples there are.
void PipelineRun::CheckRows(std::int64_t of_targets) const {
  const std::int64_t of_inputs = messages_.rows();
  if (of_inputs == 0 || of_inputs == of_targets) return;
  ThrowInvalid("the batch has " + std::to_string(of_inputs) + " samples in the inputs of " +
               StageText(plan_, 0) + ", and " + std::to_string(of_targets) + " in the targets of " +
               StageText(plan_, plan_.shape().stages - 1) +
               "; give both as many rows, and let the loss flatten them");
}

double PipelineRun::MeanLoss() const {
  const bool has_last = stages_.count(plan_.shape().stages - 1) != 0;
  if (losses_.empty()) return has_last ? std::numeric_limits<double>::quiet_NaN() : 0;
  // A GPU is read once for all of them.
  const at::Tensor losses = at::stack(losses_).cpu().to(at::kDouble);
  const auto count = static_cast<std::size_t>(losses.numel());
  const double* const first = losses.const_data_ptr<double>();
  return std::accumulate(first, first + count, 0.0) / static_cast<double>(count);
}

void PipelineRun::Do(const Instruction& instruction) {
  switch (instruction.kind) {
    case InstructionKind::kForward:
      return Forward(instruction);
    case InstructionKind::kBackward:
      return Backward(instruction);
    case InstructionKind::kReceive:
      return messages_.Post(instruction);
    case InstructionKind::kSend: {
      auto& made = instruction.carries_gradient() ? gradients_ : activations_;
      const auto found = made.find({instruction.edge(), instruction.micro_batch});
      messages_.Send(instruction, TakeOver(found->second, instruction));
      made.erase(found);
      return;
    }
    case InstructionKind::kReduceTied:
      return (*reduce_tied_)(instruction.name);
    case InstructionKind::kAverage:  // the optimizer's hooks have begun it, and step() ends it
    case InstructionKind::kStep:     // the program's
      return;
  }
}

// What an edge brings to a pass: the message, or what another stage of this rank has made.
PipelineRun::Tensors PipelineRun::Arriving(const Edge& edge, const Instruction& pass) {
  const bool forward = pass.kind == InstructionKind::kForward;
  const int peer = forward ? edge.from : edge.to;
  if (plan_.shape().RankOf(peer) != plan_.row().place) {
    return messages_.Take(
        {InstructionKind::kReceive, pass.stage, pass.micro_batch, peer, edge.name});
  }
  auto& made = forward ? activations_ : gradients_;
  const auto found = made.find({edge, pass.micro_batch});
  Tensors tensors = TakeOver(found->second, pass);
  made.erase(found);
  return tensors;
}

PipelineRun::Tensors PipelineRun::TakeOver(const HandedOver& handed, const Instruction& to) const {
  for (std::size_t i = 0; i < handed.versions.size(); ++i) {
    if (VersionOf(handed.tensors[i]) == handed.versions[i]) continue;
    ThrowInvalid("tensor " + std::to_string(i) + " of micro-batch " +
                 std::to_string(to.micro_batch) + ", which a stage of rank " +
                 std::to_string(plan_.row().set.rank()) +
                 " has returned, was changed in place before " + StageText(plan_, to.stage) +
                 " took it; let the stage return a clone() of memory that it writes again");
  }
  return handed.tensors;
}

PipelineRun::Tensors PipelineRun::InputsOf(const Instruction& pass, Kept* kept) {
  if (pass.stage == 0) {
    Tensors inputs = std::move(inputs_[At(pass.micro_batch)]);
    // Parts of a batch count by themselves how often they are changed.
    for (at::Tensor& input : inputs) {
      input = input.is_inference() ? input.detach() : input.variable_data();
    }
    return inputs;
  }
  Tensors inputs;
  std::vector<bool> with_gradient;
  for (const Edge& edge : plan_.shape().InputsOf(pass.stage)) {
    for (at::Tensor& tensor : Arriving(edge, pass)) inputs.push_back(std::move(tensor));
    kept->origins.push_back({edge, messages_.Known(edge)});
    for (const PipelineTensor& tensor : messages_.Known(edge)) {
      with_gradient.push_back(training_ && tensor.requires_grad);
    }
  }
  kept->gradients->resize(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    kept->devices.push_back(inputs[i].device());
    inputs[i] = InGraph(inputs[i], with_gradient[i], kept->gradients, i);
  }
  return inputs;
}

PipelineRun::Tensors PipelineRun::Call(int stage, const Tensors& inputs) const {
  const PipelineStage::Function& forward = stages_.at(stage).forward;
  if (!training_ || !plan_.shape().Recomputes(stage)) return forward(inputs);
  try {
    return recompute(forward, inputs);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::InvalidArgument) throw;
    const std::string text = error.what();
    const bool in_place = text.find("must clone it first") != std::string::npos;
    throw Error(
        error.code(),
        StageText(plan_, stage) + ", which is recomputed: " + text +
            (in_place ? "; or leave the stage out of the option recompute, or let its first "
                        "layer return new memory, as without inplace"
                      : ""),
        error.origin());
  }
}

void PipelineRun::Forward(const Instruction& pass) {
  const auto kept = std::make_shared<Kept>();
  Tensors outputs;
  {
    const Tensors inputs = InputsOf(pass, kept.get());
    trace_.Arrived();
    outputs = Call(pass.stage, inputs);
  }
  if (pass.stage + 1 == plan_.shape().stages) {
    TakeLoss(pass, outputs, kept.get());
  } else {
    HandOn(pass, outputs, kept.get());
  }
  if (!training_) return;
  kept_[{pass.stage, pass.micro_batch}] = kept;
  most_kept_ = std::max(most_kept_, static_cast<int>(kept_.size()));
}

void PipelineRun::TakeLoss(const Instruction& pass, const Tensors& outputs, Kept* kept) {
  if (outputs.empty()) ThrowInvalid(StageText(plan_, pass.stage) + " returns no tensor");
  if (wants_outputs_) {
    Tensors detached;
    const auto held = HeldElsewhere(outputs);
    for (const at::Tensor& output : outputs) {
      detached.push_back(output.detach());
      if (held.contains(output.unsafeGetTensorImpl())) detached.back() = output.detach().clone();
    }
    outputs_.push_back(std::move(detached));
  }
  if (targets_.empty()) return;
  CheckRows(plan_.shape().micro_batches * RowsOf(targets_[At(pass.micro_batch)]));
  const at::Tensor loss = loss_(outputs, std::exchange(targets_[At(pass.micro_batch)], {}));
  if (!loss.defined() || loss.numel() != 1) {
    ThrowInvalid("the loss of " + StageText(plan_, pass.stage) +
                 " has to be one number, a mean over the micro-batch");
  }
  if (training_ && !loss.requires_grad()) {
    ThrowInvalid(
        "the loss of " + StageText(plan_, pass.stage) +
        " has no gradient: no parameter before it requires one, or something cuts it off, as "
        "detach() and no_grad do");
  }
  losses_.push_back(loss.detach().reshape({}));
  if (training_) kept->loss = loss;
}

void PipelineRun::HandOn(const Instruction& pass, const Tensors& outputs, Kept* kept) {
  const std::vector<Edge> edges = plan_.shape().OutputsOf(pass.stage);
  const std::vector<std::string> names = SkipNames(edges);
  if (outputs.size() <= names.size()) {
    ThrowInvalid(
        StageText(plan_, pass.stage) + " returns " + std::to_string(outputs.size()) +
        " tensors; it has to return some for the next stage, and behind them one for each of " +
        std::to_string(names.size()) + " skip connections");
  }
  const std::size_t main = outputs.size() - names.size();
  const auto held = HeldElsewhere(outputs);
  std::map<Edge, Tensors> over;
  std::map<const void*, std::set<Edge>> edges_with;  // this memory
  for (const Edge& edge : edges) {
    Tensors handed(outputs.begin(), outputs.begin() + static_cast<std::ptrdiff_t>(main));
    if (!edge.name.empty()) {
      const auto name = std::find(names.begin(), names.end(), edge.name);
      handed = {outputs[main + static_cast<std::size_t>(name - names.begin())]};
    }
    messages_.CheckHandedOver(edge, handed);
    for (const at::Tensor& tensor : handed) edges_with[MemoryOf(tensor)].insert(edge);
    over[edge] = std::move(handed);
  }
  for (const Edge& edge : edges) {
    Tensors handed = std::move(over.at(edge));
    const bool stays = plan_.shape().RankOf(edge.to) == plan_.row().place;
    std::size_t place = 0;
    HandedOver& made = activations_[{edge, pass.micro_batch}];
    for (at::Tensor& tensor : handed) {
      const void* const memory = MemoryOf(tensor);
      // A module writes its buffers again, and a stage of this rank may change it in place, while it is
      // on its way or waits for another stage.
      const bool clones = held.contains(tensor.unsafeGetTensorImpl()) ||
                          (stays && memory != nullptr && edges_with[memory].size() > 1);
      if (training_ && tensor.requires_grad()) {
        kept->roots.push_back({torch::autograd::impl::gradient_edge(tensor), edge, place++});
      }
      tensor = clones ? tensor.detach().clone() : tensor.detach();
      made.versions.push_back(VersionOf(tensor));
    }
    made.tensors = std::move(handed);
  }
}

void PipelineRun::Backward(const Instruction& pass) {
  const auto found = kept_.find({pass.stage, pass.micro_batch});
  const std::shared_ptr<Kept> kept = std::move(found->second);
  std::map<Edge, Tensors> arrived;
  for (const Edge& edge : plan_.shape().OutputsOf(pass.stage)) arrived[edge] = Arriving(edge, pass);
  trace_.Arrived();
  torch::autograd::edge_list roots;
  variable_list gradients;
  for (Kept::Root& root : kept->roots) {
    roots.push_back(std::move(root.edge));
    gradients.push_back(std::move(arrived.at(root.over)[root.place]));
  }
  if (kept->loss.defined()) {
    // The loss of the batch is the mean of those of its micro-batches.
    roots.push_back(torch::autograd::impl::gradient_edge(kept->loss));
    gradients.push_back(at::ones_like(kept->loss).div_(plan_.shape().micro_batches));
    kept->loss.reset();
  }
  kept->roots.clear();
  arrived.clear();
  if (!roots.empty()) {
    // Autograd takes the thread's state: autocast would compute in half what a stage has computed in
    // float32.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    torch::autograd::Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/false,
                                                          /*create_graph=*/false,
                                                          /*accumulate_grad=*/true);
  }
  kept_.erase(found);
  std::size_t input = 0;
  for (const Kept::Origin& origin : kept->origins) {
    Tensors back;
    for (const PipelineTensor& tensor : origin.tensors) {
      at::Tensor& gradient = (*kept->gradients)[input];
      const at::Device device = kept->devices[input++];
      if (!tensor.requires_grad) continue;
      // A stage that does not use an input gives it no gradient; the one before expects one.
      if (!gradient.defined()) {
        gradient = at::zeros(tensor.sizes, at::TensorOptions().dtype(tensor.type).device(device));
      }
      // The memory may be that of a parameter's gradient as well, to which the next micro-batch
      // adds in place while this is on its way.
      if (gradient.has_storage() && gradient.storage().use_count() > 1) gradient = gradient.clone();
      back.push_back(std::move(gradient));
    }
    gradients_[{origin.edge, pass.micro_batch}] = {std::move(back), {}};
  }
}

}  // namespace sirtaki::detail
