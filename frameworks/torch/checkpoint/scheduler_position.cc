#include "frameworks/torch/checkpoint/scheduler_position.h"

#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

namespace sirtaki::detail {
namespace {

using torch::optim::LRScheduler;
using Plateau = torch::optim::ReduceLROnPlateauScheduler;

// A protected member, which a derived class may name.
struct StepCount : LRScheduler {
  static unsigned& Of(LRScheduler& scheduler) { return scheduler.*(&StepCount::step_count_); }
};

// Private members. An explicit instantiation may name them ([temp.spec.general]): it defines a
// friend function that gives the pointer away. A LibTorch that calls them otherwise does not
// compile here.
template <class Tag, auto kMember>
struct Reveal {
  friend constexpr auto MemberOf(Tag) { return kMember; }
};
#define SIRTAKI_REVEAL(Tag, member)      \
  struct Tag {                           \
    friend constexpr auto MemberOf(Tag); \
  };                                     \
  template struct Reveal<Tag, &Plateau::member>
SIRTAKI_REVEAL(Best, best);
SIRTAKI_REVEAL(CooldownCounter, cooldown_counter);
SIRTAKI_REVEAL(LastEpoch, last_epoch);
SIRTAKI_REVEAL(BadEpochs, num_bad_epochs);
#undef SIRTAKI_REVEAL

}  // namespace

SchedulerPosition PositionOf(LRScheduler& scheduler) {
  return {{"step_count", StepCount::Of(scheduler)}};
}

void SetPosition(LRScheduler& scheduler, const SchedulerPosition& position) {
  StepCount::Of(scheduler) = static_cast<unsigned>(position.at("step_count"));
}

SchedulerPosition PositionOf(Plateau& scheduler) {
  return {{"best", scheduler.*MemberOf(Best())},
          {"cooldown_counter", scheduler.*MemberOf(CooldownCounter())},
          {"last_epoch", scheduler.*MemberOf(LastEpoch())},
          {"num_bad_epochs", scheduler.*MemberOf(BadEpochs())}};
}

void SetPosition(Plateau& scheduler, const SchedulerPosition& position) {
  scheduler.*MemberOf(Best()) = static_cast<float>(position.at("best"));
  scheduler.*MemberOf(CooldownCounter()) = static_cast<int>(position.at("cooldown_counter"));
  scheduler.*MemberOf(LastEpoch()) = static_cast<int>(position.at("last_epoch"));
  scheduler.*MemberOf(BadEpochs()) = static_cast<int>(position.at("num_bad_epochs"));
}

}  // namespace sirtaki::detail
