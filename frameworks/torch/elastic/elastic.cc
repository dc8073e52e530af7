#include "sirtaki/elastic.h"

#include <memory>
#include <string>
#include <utility>

#include "core/base/log.h"
#include "frameworks/torch/elastic/state_impl.h"
#include "frameworks/torch/elastic/state_parts.h"
#include "frameworks/torch/session/session_scope.h"
#include "sirtaki/detail/elastic_calls.h"
#include "sirtaki/session.h"

namespace sirtaki::elastic {

using detail::ElasticPart;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

bool is_elastic() { return detail::IsElastic(); }

int generation() { return is_elastic() ? detail::ElasticGeneration() : 0; }

HostsUpdated::HostsUpdated()
    : std::runtime_error("ranks of the elastic job are to come or to go: train in elastic::run()") {
}
HostsUpdated::HostsUpdated(const HostsUpdated&) noexcept = default;
HostsUpdated& HostsUpdated::operator=(const HostsUpdated&) noexcept = default;
HostsUpdated::~HostsUpdated() = default;

State::State() : impl_(std::make_shared<Impl>()) {}

State& State::Add(ElasticPart part) {
  for (const ElasticPart& other : impl_->parts) {
    if (other.name == part.name) {
      RefuseState(core::StatusCode::kInvalidArgument,
                  "the " + part.name + " is there already: give this one another name");
    }
  }
  impl_->parts.push_back(std::move(part));
  impl_->has_copy = impl_->knows_steps = false;
  impl_->stepped_at = -1;
  return *this;
}

State& State::AddObject(const char* kind, const std::string& name, detail::ArchivedObject object,
                        std::function<void()> renew) {
  ElasticPart part = PartOfArchive(kind, name, object.save, object.load);
  part.renew = std::move(renew);
  return Add(std::move(part));
}

State& State::model(torch::nn::Module& module, const std::string& name) {
  Add(PartOfModel(name, module, &impl_->of_optimizers));
  impl_->models.emplace_back(impl_->parts.back().name, &module);
  return *this;
}

State& State::optimizer(torch::optim::Optimizer& optimizer, const std::string& name) {
  Add(PartOfOptimizer(name, optimizer));
  impl_->optimizers.emplace_back(impl_->parts.back().name, &optimizer);
  return *this;
}

State& State::scheduler(torch::optim::LRScheduler& scheduler, const std::string& name) {
  return Add(PartOfScheduler(name, scheduler));
}

State& State::scheduler(torch::optim::ReduceLROnPlateauScheduler& scheduler,
                        const std::string& name) {
  return Add(PartOfScheduler(name, scheduler));
}

State& State::sampler(DistributedSampler& sampler, const std::string& name) {
  detail::ArchivedObject archived;
  archived.save = [&sampler](OutputArchive& archive) { sampler.save(archive); };
  archived.load = [&sampler](InputArchive& archive) { sampler.load(archive); };
  return AddObject("sampler", name, std::move(archived),
                   [&sampler] { sampler.take_ranks_of_job(); });
}

State& State::on_change(std::function<void()> callback) {
  impl_->callbacks.push_back(std::move(callback));
  return *this;
}

State& State::keep_random_state(bool keeps) {
  impl_->keeps_random = keeps;
  impl_->random_at_step = impl_->random_at_commit = impl_->random_before = {};
  return *this;
}

State& State::copy_shards(std::int64_t every_steps) {
  if (every_steps < -1) {
    RefuseState(core::StatusCode::kInvalidArgument,
                "copy_shards(" + std::to_string(every_steps) +
                    "): it is a number of steps, 0 for each commit() alone, or -1 for no copies");
  }
  impl_->copy_every = every_steps;
  return *this;
}

void State::step() {
  if (impl_->copy_every > 0 && impl_->HasShards()) {
    if (++impl_->steps_since_commit < impl_->copy_every) return;
    impl_->Commit(impl_->place + 1);
    return impl_->ConfirmCopies();
  }
  if (impl_->has_warned && impl_->NeverKnowsSteps()) return;
  const std::string why = impl_->LookAtOptimizers();
  if (why.empty()) return impl_->KeepStep();
  if (std::exchange(impl_->has_warned, true) || rank() != 0) return;
  core::Log(
      core::LogLevel::kWarning,
      "elastic::State: step() keeps nothing, and a loss goes back to the last commit(): " + why);
}

void State::commit() {
  impl_->Commit(impl_->place + 1);
  ++impl_->commits;
  if (impl_->IsToChange()) impl_->LeaveForChange();
}

void State::check_changes() {
  if (impl_->IsToChange()) impl_->LeaveForChange();
}

void State::restore() {
  if (!impl_->has_copy) {
    RefuseState(core::StatusCode::kInvalidArgument,
                "restore() was called before commit(), sync() or run()");
  }
  impl_->RestoreCommit();
  impl_->RestoreShards();
}

void State::sync() { impl_->Sync(/*from_newest=*/false); }

std::int64_t State::commits() const { return impl_->commits; }

}  // namespace sirtaki::elastic

namespace sirtaki::detail {
namespace {

bool EndsTheJob(const Error& error) {
  // The job cannot be joined again with as many ranks as before where one has ended.
  if (!elastic::is_elastic() &&
      std::string(error.what()).find("the program exited") != std::string::npos) {
    return false;
  }
  switch (error.code()) {
    case ErrorCode::PeerLost:
    case ErrorCode::TimedOut:
    case ErrorCode::Aborted:
    case ErrorCode::Backend:
    case ErrorCode::Protocol:
    case ErrorCode::ShutDown:
      return true;
    default:
      return false;
  }
}

// Rethrows the error, by which ranks found that they cannot go on together: PeerLost where another rank
// has come without the state. That one is dropped then, and the others go on. Only within a handler.
[[noreturn]] void RethrowForOthers(const Error& error) {
  if (!elastic::is_elastic() || EndsTheJob(error)) throw;
  // Ranks that come in the place of these would train from nothing, or fail in the same way.
  const int rank = error.origin().rank;
  TellElasticCannotGoOn(error.what(), rank);
  const bool is_other = rank >= 0 && rank != sirtaki::rank();
  if (!is_other || elastic::generation() == 1) throw;  // nobody has trained yet
  throw Error(ErrorCode::PeerLost,
              "peer lost: rank " + std::to_string(rank) +
                  " cannot take the state of the others: " + error.what(),
              error.origin());
}

}  // namespace

// The state that run() begins with is there to go back to, too.
ElasticAttempts::ElasticAttempts(elastic::State state) : state_(std::move(state)) {
  elastic::State::Impl& made = *state_.impl_;
  made.WarnOfMissingModels();
  made.NoteCommit(made.Copy(&ElasticPart::commit), 0, {});
}

void ElasticAttempts::Begin() {
  elastic::State::Impl& state = *state_.impl_;
  if (joins_again_) {
    shutdown();
    InitAgain();
  }
  if (joins_again_ || sets_up_) {
    for (const ElasticPart& part : state.parts) {
      if (part.leave) part.leave();
    }
    // The state is restored here, when nothing of the job before writes to it any more.
    // Where ranks are only to come or to go it is that of the last commit() already, unless the program
    // has thrown HostsUpdated itself: shards are those of the commit(), and so is all else then.
    if (restores_ || (joins_again_ && state.HasShards())) state.GoBack();
    restores_ = false;
    try {
      for (const ElasticPart& part : state.parts) {
        if (part.renew) part.renew();
      }
    } catch (const Error& error) {
      // An error of this rank alone names none, and is no concern of the others.
      if (error.origin().rank >= 0) RethrowForOthers(error);
      throw;
    }
  }
  if (joins_again_) {
    for (const auto& callback : state.callbacks) callback();
  }
  joins_again_ = sets_up_ = false;
  try {
    state.Sync(/*from_newest=*/true);
  } catch (const Error& error) {
    RethrowForOthers(error);
  }
}

bool ElasticAttempts::NoteError(const Error& error) {
  if (!EndsTheJob(error)) return false;
  if (!run_.GoesOnAfterError(error.code() == ErrorCode::PeerLost, state_.impl_->place))
    return false;
  joins_again_ = restores_ = true;
  return true;
}

}  // namespace sirtaki::detail
