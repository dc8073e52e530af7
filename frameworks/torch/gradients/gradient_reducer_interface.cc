// The functions of the header call those of GradientReducer::Impl.
#include <memory>
#include <optional>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "frameworks/torch/gradients/gradient_reducer_impl.h"
#include "frameworks/torch/state/named_parameters.h"
#include "frameworks/torch/tensors/throw.h"
#include "sirtaki/detail/elastic_calls.h"

namespace sirtaki::detail {

struct GradientReducer::Made {
  NamedTensors names;
  DistributedOptimizerOptions options;  // as the program has given them
  const std::type_info* type;           // the class of the optimizer; null: it is of a module
};

ReducerOwner::~ReducerOwner() = default;

GradientReducer* ReducerOf(torch::optim::Optimizer& optimizer) {
  auto* const owner = dynamic_cast<ReducerOwner*>(&optimizer);
  return owner != nullptr ? &owner->reducer() : nullptr;
}

GradientReducer::GradientReducer(const torch::optim::Optimizer& optimizer,
                                 NamedTensors named_parameters,
                                 const DistributedOptimizerOptions& options)
    : made_(std::make_shared<const Made>(
          Made{std::move(named_parameters), options, &typeid(optimizer)})) {
  (void)CurrentSession();
  if (IsDeferred()) {
    const std::string error = MatchNames(optimizer, made_->names).error;
    if (!error.empty()) ThrowInvalid(error);
    return;
  }
  Make(optimizer, made_->names);
}

GradientReducer::GradientReducer(NamedTensors parameters,
                                 const DistributedOptimizerOptions& options)
    : made_(std::make_shared<const Made>(Made{parameters, options, nullptr})),
      impl_(std::make_shared<Impl>(std::move(parameters), options, /*optimizer=*/nullptr,
                                   /*type=*/nullptr, CurrentSession())) {
  impl_->TakeAll();
}

GradientReducer::GradientReducer(GradientReducer&&) noexcept = default;
GradientReducer& GradientReducer::operator=(GradientReducer&&) noexcept = default;
GradientReducer::~GradientReducer() = default;

GradientReducer::Impl& GradientReducer::impl() const {
  if (impl_) return *impl_;
  if (made_ && IsDeferred()) {
    ThrowStatus(core::Status(core::StatusCode::kNotInitialized,
                             "in an elastic job an optimizer is set up when elastic::run() begins: "
                             "make it part of the state, as in State().optimizer(optimizer), and "
                             "use it in the function that run() calls"));
  }
  ThrowInvalid(
      "the optimizer is empty: it was moved from, was made before "
      "elastic::run() and is no part of its state, or could not be made again "
      "when the job was joined again");
}

void GradientReducer::Renew(const torch::optim::Optimizer& optimizer) {
  if (!made_) impl();
  // A rank that comes later has those parameters as well that the program has added before run().
  NamedTensors names = made_->names;
  NameAdded(optimizer, &names);
  Make(optimizer, names);
}

void GradientReducer::Make(const torch::optim::Optimizer& optimizer, const NamedTensors& names) {
  Leave();
  const Shard shard = ShardOfJob(made_->options.shard());
  auto impl =
      std::make_shared<Impl>(names, DistributedOptimizerOptions(made_->options).shard(shard),
                             &optimizer, made_->type, CurrentSession());
  impl->Scan(optimizer);
  if (impl->shards()) impl->shards()->Share(optimizer);
  impl_ = std::move(impl);
}

void GradientReducer::Leave() { impl_.reset(); }

const DistributedOptimizerOptions& GradientReducer::options() const {
  if (!made_) impl();
  return made_->options;
}

at::Tensor GradientReducer::Step(torch::optim::Optimizer& optimizer, LossClosure closure,
                                 const BaseStep& base_step) {
  impl().CheckSession();
  impl_->BeginStep();
  const BaseStep fused_step = impl_->FusedStepFor(optimizer);
  const BaseStep& own_step = fused_step ? fused_step : base_step;
  const BaseStep make_step = [this, &own_step](LossClosure wrapped) {
    ++steps_begun_;
    return own_step(std::move(wrapped));
  };
  at::Tensor loss = impl_->active() ? impl_->Step(optimizer, std::move(closure), make_step)
                                    : make_step(std::move(closure));
  impl_->steps().EndStep();
  return loss;
}

void GradientReducer::SkipStep() {
  if (impl().active()) impl_->AfterStep();
}

void GradientReducer::Synchronize(const torch::optim::Optimizer& optimizer) {
  impl().CheckSession();
  if (!impl_->active()) return;
  impl_->Scan(optimizer);
  impl_->SynchronizeUnlessDone(/*in_step=*/false);
}

void GradientReducer::BeforeZeroGrad(const torch::optim::Optimizer& optimizer) {
  impl().CheckSession();
  if (impl_->active()) impl_->BeforeZeroGrad(optimizer);
}

Scope GradientReducer::NoSync() { return impl().NoSync(); }
Scope GradientReducer::SkipSynchronize() { return impl().SkipSynchronize(); }
void GradientReducer::BeforeForward(bool training) {
  impl().CheckSession();
  impl_->BeforeForward(training);
}
void GradientReducer::BeginBackward() { impl().BeginBackward(); }
const std::string& GradientReducer::prefix() const { return impl().prefix(); }
std::shared_ptr<SessionState> GradientReducer::session() const { return impl().set().session; }
ProcessSet GradientReducer::process_set() const { return impl().set().process_set; }
ProcessSet GradientReducer::shard_set() const {
  return impl().shards() ? impl_->shards()->set().process_set : impl_->set().process_set;
}
bool GradientReducer::is_reducing() const { return impl().is_reducing(); }
bool GradientReducer::has_local_gradients() const { return impl().has_local_gradients(); }
bool GradientReducer::is_sharded() const { return impl().shards() != nullptr; }

std::optional<std::vector<at::Tensor>> GradientReducer::gradient_shards() const {
  if (!impl().shards() || !impl_->shards()->of_gradients()) return std::nullopt;
  return impl_->shards()->Gradients();
}

// An optimizer that has left its job may get its state back before it is in another one.
bool GradientReducer::has_sharded_state() const {
  return impl_ && impl_->shards() && impl_->shards()->is_cut();
}

void GradientReducer::set_sharded_state(bool sharded) {
  if (impl_ && impl_->shards()) impl_->shards()->SetCut(sharded);
}

void GradientReducer::CheckStateIsWhole() const {
  if (!has_sharded_state()) return;
  ThrowInvalid(
      "a sharded optimizer cannot be saved after its first step: this rank "
      "has the state of its shards only. save_checkpoint() saves it on all "
      "ranks");
}

void GradientReducer::SaveShards(torch::optim::Optimizer& optimizer,
                                 torch::serialize::OutputArchive& archive) {
  impl().shards()->Save(optimizer, archive);
}

void GradientReducer::CutParameters(const torch::optim::Optimizer& optimizer) {
  impl().CutParameters(optimizer);
}

std::vector<ShardOfParameter> GradientReducer::shards() const { return impl().shards()->Mine(); }

}  // namespace sirtaki::detail
