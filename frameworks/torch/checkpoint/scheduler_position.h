// How far a learning-rate scheduler is. LibTorch's have no save and load.
#pragma once

#include <map>
#include <string>

namespace torch::optim {
class LRScheduler;
class ReduceLROnPlateauScheduler;
}  // namespace torch::optim

namespace sirtaki::detail {

// A position is what its members hold, by their names: floats and ints, which doubles hold exactly.
using SchedulerPosition = std::map<std::string, double>;

SchedulerPosition PositionOf(torch::optim::LRScheduler& scheduler);
SchedulerPosition PositionOf(torch::optim::ReduceLROnPlateauScheduler& scheduler);

// Precondition: the position has the names that PositionOf() gives for this kind.
void SetPosition(torch::optim::LRScheduler& scheduler, const SchedulerPosition& position);
void SetPosition(torch::optim::ReduceLROnPlateauScheduler& scheduler,
                 const SchedulerPosition& position);

}  // namespace sirtaki::detail
