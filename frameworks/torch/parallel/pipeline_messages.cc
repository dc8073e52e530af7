#include "frameworks/torch/parallel/pipeline_messages.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "core/base/text.h"
#include "frameworks/torch/calls/message_call.h"
#include "frameworks/torch/calls/tensor_call.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {
namespace {

using parallel::At;
using parallel::Edge;
using parallel::Instruction;

// The message ahead of the first tensors of an edge: whether the batch trains, the rows of its inputs, the
// number of the tensors; of each its type, whether it is on a GPU, whether it has a gradient, its
// dimensions, sizes, how many strides follow, and strides.
constexpr std::int64_t kHeaderNumbers = 512;

std::string OverText(const Edge& edge) {
  return edge.name.empty() ? "" : " over the skip connection " + core::Quoted(edge.name);
}

// "activations of micro-batch 3"
std::string LoadText(const Instruction& message) {
  return std::string(message.carries_gradient() ? "gradients" : "activations") +
         " of micro-batch " + std::to_string(message.micro_batch);
}

// "activations of micro-batch 3 from stage 0 to stage 1"
std::string LabelOf(const Instruction& message) {
  const bool sends = message.kind == parallel::InstructionKind::kSend;
  return LoadText(message) + " from stage " + std::to_string(sends ? message.stage : message.peer) +
         " to stage " + std::to_string(sends ? message.peer : message.stage) +
         OverText(message.edge());
}

std::string ReceiveText(const PipelinePlan& plan, const Instruction& receive) {
  return StageText(plan, receive.stage) + " waits for " + LoadText(receive) + " from " +
         StageText(plan, receive.peer) + OverText(receive.edge());
}

std::string SendText(const PipelinePlan& plan, const Instruction& send) {
  return StageText(plan, send.stage) + " waits until " + StageText(plan, send.peer) + " takes " +
         LoadText(send) + OverText(send.edge());
}

// An EdgeHeader is what the header's numbers say.
struct EdgeHeader {
  bool training = false;
  std::int64_t rows = 0;
  PipelineTensors tensors;
};

at::Tensor Encoded(const EdgeHeader& told, const Edge& edge) {
  at::Tensor header = at::zeros({kHeaderNumbers}, at::kLong);
  std::int64_t* const numbers = header.mutable_data_ptr<std::int64_t>();
  std::int64_t at = 0;
  const auto add = [&](std::int64_t number) {
    if (at == kHeaderNumbers) {
      ThrowInvalid("stage " + std::to_string(edge.from) + " hands too many tensors to stage " +
                   std::to_string(edge.to) + "; stack some of them into one");
    }
    numbers[at++] = number;
  };
  add(told.training ? 1 : 0);
  add(told.rows);
  add(static_cast<std::int64_t>(told.tensors.size()));
  for (const PipelineTensor& tensor : told.tensors) {
    add(static_cast<std::int64_t>(tensor.type));
    add(tensor.on_gpu ? 1 : 0);
    add(tensor.requires_grad ? 1 : 0);
    add(static_cast<std::int64_t>(tensor.sizes.size()));
    for (const std::int64_t size : tensor.sizes) add(size);
    add(static_cast<std::int64_t>(tensor.strides.size()));
    for (const std::int64_t stride : tensor.strides) add(stride);
  }
  return header;
}

EdgeHeader Decoded(const at::Tensor& header) {
  const std::int64_t* number = header.const_data_ptr<std::int64_t>();
  EdgeHeader told{.training = *number++ != 0, .rows = *number++, .tensors = {}};
  told.tensors.resize(static_cast<std::size_t>(*number++));
  for (PipelineTensor& tensor : told.tensors) {
    tensor.type = static_cast<at::ScalarType>(*number++);
    tensor.on_gpu = *number++ != 0;
    tensor.requires_grad = *number++ != 0;
    tensor.sizes.resize(static_cast<std::size_t>(*number++));
    for (std::int64_t& size : tensor.sizes) size = *number++;
    tensor.strides.resize(static_cast<std::size_t>(*number++));
    for (std::int64_t& stride : tensor.strides) stride = *number++;
  }
  return told;
}

const char* CallName(bool training) { return training ? "train_batch()" : "evaluate_batch()"; }

}  // namespace

PipelineTensor PipelineTensor::Of(const at::Tensor& tensor) {
  std::vector<std::int64_t> strides;
  const bool has_strides = tensor.layout() == at::kStrided && !tensor.is_contiguous();
  if (has_strides && tensor.is_non_overlapping_and_dense()) strides = tensor.strides().vec();
  return {tensor.scalar_type(), tensor.is_cuda(), tensor.requires_grad(), tensor.sizes().vec(),
          std::move(strides)};
}

bool PipelineTensor::operator==(const PipelineTensor& other) const {
  return type == other.type && on_gpu == other.on_gpu && requires_grad == other.requires_grad &&
         sizes == other.sizes;
}

at::Tensor PipelineTensor::NewOn(at::Device device) const {
  const auto options = at::TensorOptions().dtype(type).device(device);
  return strides.empty() ? at::empty(sizes, options) : at::empty_strided(sizes, strides, options);
}

at::Tensor PipelineTensor::Travelling(const at::Tensor& tensor) const {
  if (strides.empty()) return tensor.detach();
  const at::NoGradGuard no_grad;
  const bool lies_so = LiesWith(tensor, strides);
  const at::Tensor lying = lies_so ? tensor.detach() : NewOn(tensor.device()).copy_(tensor);
  return lying.as_strided({lying.numel()}, {1});
}

std::string PipelineTensor::Text() const {
  const auto known = DTypeOf(type);
  return std::string(known ? core::DTypeName(*known) : at::toString(type)) + " " +
         core::ShapeText(sizes) + (on_gpu ? " on a GPU" : "") +
         (requires_grad ? " with a gradient" : "");
}

PipelineMessages::PipelineMessages(const PipelinePlan& plan, std::chrono::milliseconds timeout,
                                   parallel::ScheduleTrace& trace)
    : plan_(plan), timeout_(timeout), trace_(trace) {}

void PipelineMessages::Begin(bool training, std::vector<at::Device> devices, std::int64_t rows) {
  if (devices != devices_) known_.devices = known_in_training_.devices = {};
  devices_ = std::move(devices);
  if (training_) known_in_training_ = std::exchange(known_, {});
  training_ = training;
  known_ = training ? std::exchange(known_in_training_, {}) : Learned();
  if (rows != 0) known_.rows = rows;
}

void PipelineMessages::CheckHandedOver(const Edge& edge, const Tensors& tensors) {
  PipelineTensors now;
  std::vector<at::Device> devices;
  for (const at::Tensor& tensor : tensors) {
    const std::string number = "tensor " + std::to_string(now.size());
    if (!tensor.defined()) {
      ThrowInvalid(StageText(plan_, edge.from) + " hands an undefined tensor to stage " +
                   std::to_string(edge.to) + OverText(edge) + " (" + number + ")");
    }
    now.push_back(PipelineTensor::Of(tensor));
    devices.push_back(tensor.device());
  }
  known_.devices[edge] = std::move(devices);
  const auto [known, is_new] = known_.tensors.emplace(edge, now);
  if (is_new || known->second == now) return;
  const PipelineTensors& before = known->second;
  std::string what = StageText(plan_, edge.from) + " hands other tensors to stage " +
                     std::to_string(edge.to) + OverText(edge) + " than in its first micro-batch: ";
  if (before.size() != now.size()) {
    what += std::to_string(now.size()) + " in place of " + std::to_string(before.size());
  } else {
    const auto differ = std::mismatch(before.begin(), before.end(), now.begin());
    what += "tensor " + std::to_string(differ.first - before.begin()) + " was " +
            differ.first->Text() + " and is " + differ.second->Text();
  }
  const auto is_alike = [](PipelineTensor a, const PipelineTensor& b) {
    a.requires_grad = b.requires_grad;
    return a == b;
  };
  if (std::equal(before.begin(), before.end(), now.begin(), now.end(), is_alike)) {
    ThrowInvalid(what +
                 "; where all that a stage computes is frozen or unfrozen, make the pipeline anew");
  }
  ThrowInvalid(what +
               "; give batches of one size (leave out a last one that is "
               "smaller), and make shapes depend on nothing else");
}

PipelineMessages::Message PipelineMessages::StartMessage(const P2POp& operation,
                                                         const std::string& label) {
  const auto& session = plan_.row().set.session;
  ThrowIfError(session->Check());
  CheckMessage(operation, {}, *session);
  return detail::StartMessage(operation, {}, /*will_wait=*/false, session, label);
}

void PipelineMessages::Post(const Instruction& receive) {
  Posted& posted = posted_[receive];
  const Edge edge = receive.edge();
  if (known_.tensors.contains(edge)) return Start(receive, &posted);
  if (receive.carries_gradient() || headers_.contains(edge)) return;
  // The first receive over the edge; its tag is that of the header, which goes first.
  const at::Tensor header = at::empty({kHeaderNumbers}, at::kLong);
  const Instruction first = {receive.kind, receive.stage, 0, receive.peer, receive.name};
  headers_[edge] = {
      StartMessage(P2POp::receive(header, plan_.RankOf(receive.peer), plan_.TagOf(first)),
                   LabelOf(receive)),
      header, ReceiveText(plan_, receive)};
}

void PipelineMessages::Start(const Instruction& receive, Posted* posted) {
  const bool gradients = receive.carries_gradient();
  posted->started = true;
  std::size_t place = 0;
  for (const PipelineTensor& tensor : Known(receive.edge())) {
    const at::Device device = DeviceFor(receive, place++);
    if (gradients && !tensor.requires_grad) continue;
    posted->tensors.push_back(tensor.NewOn(tensor.on_gpu ? device : at::Device(at::kCPU)));
    posted->messages.push_back(
        StartMessage(P2POp::receive(tensor.Travelling(posted->tensors.back()),
                                    plan_.RankOf(receive.peer), plan_.TagOf(receive)),
                     LabelOf(receive)));
  }
}

// Where a tensor of the edge is on a GPU. A stage with several GPUs hands tensors over from each.
at::Device PipelineMessages::DeviceFor(const Instruction& receive, std::size_t place) const {
  const auto given = known_.devices.find(receive.edge());
  const bool is_known = receive.carries_gradient() && given != known_.devices.end();
  return is_known ? given->second[place] : devices_[At(receive.stage)];
}

void PipelineMessages::StartLate(const Edge& edge) {
  for (auto& [receive, posted] : posted_) {
    if (!posted.started && receive.edge() == edge) Start(receive, &posted);
  }
}

void PipelineMessages::TakeHeader(const Instruction& receive) {
  const Edge edge = receive.edge();
  const auto header = headers_.find(edge);
  try {
    Await(*header->second.message, header->second.what);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::Mismatch) throw;
    RefuseOtherCall(receive.peer, header->second.what);  // it trains, and told the shapes long ago
  }
  EdgeHeader told = Decoded(header->second.memory);
  known_.tensors.emplace(edge, std::move(told.tensors));
  if (told.training != training_) RefuseOtherCall(receive.peer, header->second.what);
  if (told.rows != 0) known_.rows = told.rows;
  headers_.erase(header);
}

void PipelineMessages::RefuseOtherCall(int peer, const std::string& what) const {
  const core::Status why(core::StatusCode::kMismatch,
                         what + ": " + StageText(plan_, peer) + " is in " + CallName(!training_) +
                             ", and this rank in " + CallName(training_) +
                             "; call the same function on all ranks of the pipeline");
  ThrowStatus(why);
}

PipelineMessages::Tensors PipelineMessages::Take(const Instruction& receive) {
  const Edge edge = receive.edge();
  if (!known_.tensors.contains(edge)) TakeHeader(receive);
  StartLate(edge);
  const auto found = posted_.find(receive);
  const std::string what = ReceiveText(plan_, receive);
  try {
    for (const Message& message : found->second.messages) Await(*message, what);
  } catch (const Error& error) {
    // Shapes were compared before they were known: what else comes is a header, of the other call.
    if (error.code() != ErrorCode::Mismatch || receive.carries_gradient()) throw;
    RefuseOtherCall(receive.peer, what);
  }
  Tensors tensors = std::move(found->second.tensors);
  posted_.erase(found);
  return tensors;
}

void PipelineMessages::Send(const Instruction& send, const Tensors& tensors) {
  const Edge edge = send.edge();
  const std::string what = SendText(plan_, send);
  const int to = plan_.RankOf(send.peer);
  // What has gone is let go, also behind what a slow rank has not taken yet.
  std::erase_if(sent_, [this](const Sent& sent) {
    if (!sent.message->Poll()) return false;
    Gone(sent);
    return true;
  });
  if (!send.carries_gradient() && known_.told.insert(edge).second) {
    const at::Tensor header = Encoded({training_, known_.rows, Known(edge)}, edge);
    const Instruction first = {send.kind, send.stage, 0, send.peer, send.name};
    sent_.push_back(
        {StartMessage(P2POp::send(header, to, plan_.TagOf(first)), LabelOf(send)), what, {}, 0});
  }
  auto tensor = tensors.begin();
  for (const PipelineTensor& known : Known(edge)) {
    if (send.carries_gradient() && !known.requires_grad) continue;
    const at::Tensor travelling = known.Travelling(*tensor++);
    sent_.push_back({StartMessage(P2POp::send(travelling, to, plan_.TagOf(send)), LabelOf(send)),
                     what, send.carries_gradient() ? at::Tensor() : travelling,
                     VersionOf(travelling)});
  }
}

void PipelineMessages::SendOne(const at::Tensor& tensor, int stage, int tag,
                               const std::string& what) {
  sent_.push_back({StartMessage(P2POp::send(tensor, plan_.RankOf(stage), tag), what), what, {}, 0});
}

void PipelineMessages::ReceiveOne(const at::Tensor& into, int stage, int tag,
                                  const std::string& what) {
  Await(*StartMessage(P2POp::receive(into, plan_.RankOf(stage), tag), what), what);
}

void PipelineMessages::Finish() {
  for (; !sent_.empty(); sent_.pop_front()) Gone(sent_.front());
}

void PipelineMessages::Gone(const Sent& sent) {
  Await(*sent.message, sent.what);
  if (!sent.tensor.defined() || VersionOf(sent.tensor) == sent.version) return;
  ThrowInvalid(sent.what +
               ": the tensor was changed in place before it had gone; let the stage return a "
               "clone() of memory that it writes again");
}

void PipelineMessages::Forget() {
  posted_.clear();
  headers_.clear();
  sent_.clear();
}

void PipelineMessages::Await(PendingTensor& message, const std::string& what) {
  if (!message.handle()->done()) WaitUntilDone(message, what);
  try {
    message.Results();
  } catch (const Error& error) {
    throw Error(error.code(),
                "the pipeline " + core::Quoted(plan_.name()) + ": " + what + ": " + error.what(),
                error.origin());
  }
}

void PipelineMessages::WaitUntilDone(PendingTensor& message, const std::string& what) {
  const parallel::ScheduleTrace::Wait told(trace_, what);
  session::Session& session = plan_.row().set.session->session();
  const core::TimePoint begin = core::Clock::now();
  const core::TimePoint deadline = DeadlineAfter(timeout_);  // which may be a very long one
  core::Duration patience = session.config().stall_warning;
  while (!message.handle()->done()) {
    const bool warns = patience > core::Duration::zero();
    const core::TimePoint next = warns ? std::min(deadline, begin + patience) : deadline;
    const core::Status waited = session.Wait(*message.handle(), next);
    if (message.handle()->done()) return;
    if (waited.code() != core::StatusCode::kTimedOut) ThrowIfError(waited);
    const core::Duration so_far = core::Clock::now() - begin;
    if (begin + so_far >= deadline) {
      const std::string text = "the pipeline " + core::Quoted(plan_.name()) + ": " + what +
                               ", for " + core::DurationText(so_far) +
                               ", which is the timeout of the pipeline";
      session.Abort(text);
      ThrowStatus(core::Status(core::StatusCode::kTimedOut, text));
    }
    trace_.Stalled(what, so_far);
    patience *= 2;
  }
}

}  // namespace sirtaki::detail
