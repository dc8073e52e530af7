#include "sirtaki/data_parallel.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/session/session_set.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "sirtaki/broadcast.h"
#include "sirtaki/collectives.h"
#include "sirtaki/detail/elastic_calls.h"

namespace sirtaki::detail {

namespace {

// A buffer that lies within another one's memory gets its values with that one: modules may share a
// buffer, or have a view of another's.
std::vector<at::Tensor> WithoutParts(const std::vector<at::Tensor>& buffers) {
  std::vector<std::size_t> flat;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].numel() > 0 && LiesFlat(buffers[i])) flat.push_back(i);
  }
  const auto begin = [&](std::size_t i) {
    return reinterpret_cast<std::uintptr_t>(buffers[i].const_data_ptr());
  };
  std::stable_sort(flat.begin(), flat.end(), [&](std::size_t a, std::size_t b) {
    return std::pair(begin(a), buffers[b].nbytes()) < std::pair(begin(b), buffers[a].nbytes());
  });
  std::vector<bool> is_part(buffers.size());
  std::uintptr_t known = 0;  // where the memory of those before ends
  for (const std::size_t i : flat) {
    const std::uintptr_t end = begin(i) + buffers[i].nbytes();
    is_part[i] = end <= known;
    known = std::max(known, end);
  }
  std::vector<at::Tensor> rest;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    if (!is_part[i]) rest.push_back(buffers[i]);
  }
  return rest;
}

}  // namespace

void BroadcastBuffers(const std::vector<at::Tensor>& buffers, int root_rank,
                      const BroadcastOptions& options) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors = WithoutParts(buffers);
  if (tensors.empty()) return;
  // Past autograd's version counter: the graph of a forward() before may have kept the buffer, as
  // that of batch norm does without using it.
  for (at::Tensor& tensor : tensors) tensor = tensor.variable_data();
  broadcast_(tensors, root_rank, options);
}

class ModuleSynchronizer::Impl {
 public:
  Impl(const std::shared_ptr<torch::nn::Module>& module,
       const DistributedDataParallelOptions& options)
      : module_(module),
        set_(Agreed(options)),
        reducer_(module->named_parameters().pairs(), options.gradients()),
        broadcasts_buffers_(options.broadcast_buffers() && set_.size() > 1) {}

  void BroadcastModule(bool with_buffers) {
    if (with_buffers) return broadcast_parameters(*module_, set_.first(), set_.process_set);
    broadcast_parameters(module_->named_parameters(), set_.first(), set_.process_set);
  }

  void BeforeForward() {
    if (!at::GradMode::is_enabled()) return;
    reducer_.BeforeForward(module_->is_training());
    if (broadcasts_buffers_ && scopes_ == 0 && module_->is_training()) BroadcastBuffers();
  }

  static Scope NoSync(const std::shared_ptr<Impl>& self) {
    auto hold = std::make_shared<Scope>(self->reducer_.NoSync());
    ++self->scopes_;
    return Scope([self, hold] { --self->scopes_; });
  }

 private:
  // That one, if all ranks have the options that the reducer does not compare.
  static SessionSet Agreed(const DistributedDataParallelOptions& options) {
    SessionSet set = SetOf(options.gradients().process_set());
    AgreeOnList("DistributedDataParallel",
                {options.broadcast_buffers() ? "with buffers" : "without buffers"}, "", set);
    return set;
  }

  void BroadcastBuffers() {
    const auto options =
        BroadcastOptions().name(reducer_.prefix() + "buffers").process_set(set_.process_set);
    const SessionScope scope(set_.session);
    detail::BroadcastBuffers(module_->buffers(), set_.first(), options);
  }

  const std::shared_ptr<torch::nn::Module> module_;
  const SessionSet set_;
  GradientReducer reducer_;
  const bool broadcasts_buffers_;
  int scopes_ = 0;  // of no_sync
};

ModuleSynchronizer::ModuleSynchronizer(const std::shared_ptr<torch::nn::Module>& module,
                                       const DistributedDataParallelOptions& options)
    : module_(module), options_(options) {
  if (!module) {
    ThrowInvalid("DistributedDataParallel: the module is a null pointer");
  }
  const SessionScope scope(CurrentSession());  // one for all that is made in there
  if (IsDeferred()) return;
  Renew();
  impl_->BroadcastModule(options_.broadcast_buffers());
}

ModuleSynchronizer::~ModuleSynchronizer() = default;

void ModuleSynchronizer::Leave() { impl_.reset(); }

void ModuleSynchronizer::Renew() {
  Leave();
  const SessionScope scope(CurrentSession());
  impl_ = std::make_shared<Impl>(module_, options_);
}

ModuleSynchronizer::Impl& ModuleSynchronizer::impl() const {
  if (impl_) return *impl_;
  if (IsDeferred()) {
    ThrowStatus(core::Status(core::StatusCode::kNotInitialized,
                             "in an elastic job a DistributedDataParallel is set up when "
                             "elastic::run() begins: make it part of the state, as in "
                             "State().model(module), and use it in the function that run() calls"));
  }
  ThrowInvalid(
      "the DistributedDataParallel was made before elastic::run() and is no part "
      "of its state, or could not be made again when the job was joined "
      "again");
}

void ModuleSynchronizer::BeforeForward() { impl().BeforeForward(); }
Scope ModuleSynchronizer::NoSync() {
  impl();
  return Impl::NoSync(impl_);
}

SynchronizerOwner::~SynchronizerOwner() = default;

}  // namespace sirtaki::detail
