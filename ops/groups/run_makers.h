// GroupRun::Make chooses one of these runs for a group, by its kind and reduction.
#pragma once

#include <memory>

#include "ops/groups/group_run.h"

namespace sirtaki::ops {

std::unique_ptr<GroupRun> MakeReduceRun(const RunContext& context);  // all-reduce, reduce
std::unique_ptr<GroupRun> MakeReduceScatterRun(const RunContext& context);
std::unique_ptr<GroupRun> MakeAdasumRun(const RunContext& context);
std::unique_ptr<GroupRun> MakeBroadcastRun(const RunContext& context);
std::unique_ptr<GroupRun> MakeAllGatherRun(const RunContext& context);
std::unique_ptr<GroupRun> MakeAllGatherIntoRun(const RunContext& context);
// This run is for gather, scatter and all-to-all.
std::unique_ptr<GroupRun> MakeExchangeRun(const RunContext& context);

}  // namespace sirtaki::ops
