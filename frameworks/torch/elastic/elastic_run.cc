#include <algorithm>
#include <string>

#include "core/base/log.h"
#include "frameworks/torch/tensors/throw.h"
#include "session/elastic/elastic_worker.h"
#include "sirtaki/detail/elastic_calls.h"

namespace sirtaki::detail {
namespace {

// A program that fails every time would otherwise fail for ever.
constexpr int kMostFailures = 3;
// Ranks of an elastic job that hang or lose each other may fail with the others before sirtakirun gives
// them up.
constexpr int kMostFailuresOfElastic = 10;

thread_local bool is_training = false;

[[noreturn]] void RefuseRun(const std::string& text) { ThrowInvalid("elastic::run() " + text); }

}  // namespace

ElasticRun::ElasticRun() {
  if (is_training) {
    RefuseRun(
        "was called within another run(), which would not join the job again after an error of the "
        "inner one: call it after the other has returned");
  }
  if (IsElastic() && !session::ElasticWorker::OfProcess().BeginTraining()) {
    RefuseRun(
        "was called again, in an elastic job: a rank that comes later would begin with the first "
        "one, and the others do not: train in one run(), whose state says how far it is");
  }
  is_training = true;
}

ElasticRun::~ElasticRun() { is_training = false; }

bool ElasticRun::GoesOnAfterError(bool peer_lost, std::int64_t reached) {
  const bool is_elastic = IsElastic();
  const int generation = is_elastic ? ElasticGeneration() : 0;
  // In an elastic job the ends of other ranks are no failures of the program.
  const bool is_of_others = generation != generation_ &&
                            (peer_lost || !session::ElasticWorker::OfProcess().WhyOver().empty());
  generation_ = generation;
  if (is_of_others || reached > reached_) failures_ = 0;
  reached_ = std::max(reached, reached_);
  if (!is_of_others) ++failures_;
  const int most = is_elastic ? kMostFailuresOfElastic : kMostFailures;
  if (failures_ < most) return true;
  core::Log(
      core::LogLevel::kError,
      "elastic::run() gives up: it has failed " + std::to_string(failures_) +
          " times without a commit() or step() of its state or the loss of a rank in between, "
          "and would again");
  return false;
}

}  // namespace sirtaki::detail
