// Starters are the processes that start workers: for each batch of them on a host one, which ends after
// them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "launch/base/child.h"
#include "launch/base/loop.h"
#include "launch/elastic/membership.h"
#include "launch/job/job_output.h"
#include "launch/plan/placement.h"
#include "launch/plan/plan.h"

namespace sirtaki::launch {

// One thread uses it, that of the loop.
class Starters {
 public:
  struct Batch {
    WorkerId first = 0;
    int count = 0;
  };

  Starters(Loop* loop, JobOutput* output, const Plan& plan, const ThisMachine& machine)
      : loop_(loop), output_(output), plan_(plan), machine_(machine) {}

  // Starts the workers of the batch on the host, by the plan's command. kBackend: it cannot.
  core::Status Start(const std::string& host, const Batch& batch,
                     const std::vector<std::pair<std::string, std::string>>& variables);
  // Kills what starts the worker, if no other of its batch `is_wanted`.
  void Kill(WorkerId id, const std::function<bool(WorkerId)>& is_wanted);
  // Asks for what they print, unless somebody reads it slowly.
  void Ask();
  // The batches whose starters have ended, and how.
  std::vector<std::pair<Batch, EndMessage>> TakeEnded();

 private:
  struct Starter;
  std::vector<std::string> WordsFor(const std::string& host, const Batch& batch) const;

  Loop* const loop_;
  JobOutput* const output_;
  const Plan& plan_;
  const ThisMachine& machine_;
  std::vector<std::shared_ptr<Starter>> all_;
};

}  // namespace sirtaki::launch
