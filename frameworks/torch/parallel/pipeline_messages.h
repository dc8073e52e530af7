// What travels between the stages of a pipeline. Shapes and types of an edge are learned when the
// first tensors go over it: a message ahead of these has them.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/parallel/pipeline_plan.h"
#include "parallel/schedule_trace.h"
#include "sirtaki/messages.h"

namespace sirtaki::detail {

// A PipelineTensor is a tensor of an edge, except its values.
struct PipelineTensor {
  at::ScalarType type = at::kFloat;
  bool on_gpu = false;
  bool requires_grad = false;
  std::vector<std::int64_t> sizes;
  // Empty: it lies flat. What else is dense, as channels_last, arrives as it lay in the first micro-batch.
  std::vector<std::int64_t> strides;

  static PipelineTensor Of(const at::Tensor& tensor);
  std::string Text() const;  // "float32 [3, 4] with a gradient"
  at::Tensor NewOn(at::Device device) const;
  // The tensor as it travels: all of its memory in order, if it does not lie flat.
  at::Tensor Travelling(const at::Tensor& tensor) const;
  // Strides may differ.
  bool operator==(const PipelineTensor& other) const;
};
using PipelineTensors = std::vector<PipelineTensor>;

// Messages are sent and posted without waiting. Every wait has a deadline and says what lacks.
class PipelineMessages {
 public:
  using Tensors = std::vector<at::Tensor>;

  // The plan and the trace, which is told of waits, outlive it.
  PipelineMessages(const PipelinePlan& plan, std::chrono::milliseconds timeout,
                   parallel::ScheduleTrace& trace);

  // A batch begins. What evaluation learns is forgotten then: its batches may differ. `devices`: where
  // each stage gets tensors that come from a GPU. `rows`: of the batch's inputs, where they are known.
  void Begin(bool training, std::vector<at::Device> devices, std::int64_t rows);
  // The rows of the batch's inputs, as the first rank has told it; 0: not known.
  std::int64_t rows() const { return known_.rows; }
  // Tensors that a stage of this rank hands to an edge are as they always were. Throws
  // InvalidArgument.
  void CheckHandedOver(const parallel::Edge& edge, const Tensors& tensors);
  // Precondition of these two: the edge is known.
  const PipelineTensors& Known(const parallel::Edge& edge) const { return known_.tensors.at(edge); }

  void Post(const parallel::Instruction& receive);
  Tensors Take(const parallel::Instruction& receive);  // waits; precondition: it was posted
  // Activations: all tensors of the edge, for which CheckHandedOver was called; else the gradients of
  // those that have one. Throws InvalidArgument here or in a later call if a tensor is changed before it
  // has gone.
  void Send(const parallel::Instruction& send, const Tensors& tensors);
  // Sends or receives one tensor between ranks for the pipeline itself.
  void SendOne(const at::Tensor& tensor, int stage, int tag, const std::string& what);
  void ReceiveOne(const at::Tensor& into, int stage, int tag, const std::string& what);
  void Finish();  // waits until all that was sent may be written again
  void Forget();  // after an error

 private:
  using Message = std::shared_ptr<PendingTensor>;
  struct Sent {
    Message message;
    std::string what;
    at::Tensor tensor;  // null: nobody else has it
    std::int64_t version = 0;
  };
  struct Posted {
    bool started = false;
    Tensors tensors;
    std::vector<Message> messages;
  };

  void Start(const parallel::Instruction& receive, Posted* posted);
  at::Device DeviceFor(const parallel::Instruction& receive, std::size_t place) const;
  void StartLate(const parallel::Edge& edge);  // what was posted before the edge was known
  void TakeHeader(const parallel::Instruction& receive);
  void Await(PendingTensor& message, const std::string& what);
  void Gone(const Sent& sent);  // waits
  [[noreturn]] void RefuseOtherCall(int peer, const std::string& what) const;
  void WaitUntilDone(PendingTensor& message, const std::string& what);
  Message StartMessage(const P2POp& operation, const std::string& label);

  const PipelinePlan& plan_;
  const std::chrono::milliseconds timeout_;
  parallel::ScheduleTrace& trace_;
  std::vector<at::Device> devices_;
  bool training_ = true;
  struct Learned {
    std::int64_t rows = 0;
    std::map<parallel::Edge, PipelineTensors> tensors;
    std::set<parallel::Edge> told;  // the other end of these edges knows
    // Where the tensors were that stages of this rank have handed over: their gradients belong there.
    std::map<parallel::Edge, std::vector<at::Device>> devices;
  };
  Learned known_;
  Learned known_in_training_;  // while this evaluates
  struct Header {
    Message message;
    at::Tensor memory;
    std::string what;
  };
  std::map<parallel::Edge, Header> headers_;  // that are posted
  std::map<parallel::Instruction, Posted> posted_;
  std::deque<Sent> sent_;
};

}  // namespace sirtaki::detail
