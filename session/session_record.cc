// A session tells of its rank: the flight record, and the table at its end.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/machine/fork_guard.h"
#include "core/trace/summary.h"
#include "session/session.h"
#include "session/session_impl.h"
#include "session/session_observability.h"
#include "session/version_text.h"

namespace sirtaki::session {

using core::Status;
using core::trace::Metrics;

namespace {

void Print(const std::vector<Metrics>& ranks) {
  std::fputs(("sirtaki: what the ranks have done\n" + core::trace::SummaryText(ranks)).c_str(),
             stderr);
}

}  // namespace

core::trace::FlightRecord Session::Describe(std::string why, core::Duration patience) const {
  core::trace::FlightRecord record;
  if (core::ForkGeneration() == fork_generation_) {
    const Call call(*this);
    if (const core::Engine* const engine = call.engine()) record = engine->Describe(patience);
    for (auto& pending : record.pending) pending.key = observation_->KeyText(pending.key);
    if (topology_.size == 1) {
      observation_->observer()->recorder.Read(0, /*to_the_end=*/true, &record.events, &record.lost);
    }
  }
  record.rank = topology_.rank;
  record.size = topology_.size;
  record.host = topology_.host;
  record.pid = getpid();
  record.version = VersionText();
  record.session = observation_->session();
  record.why = std::move(why);
  record.fault = fault();
  record.now = core::Clock::now();
  record.offset = observation_->offset();
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  record.unix_us = std::chrono::duration_cast<std::chrono::microseconds>(since).count();
  return record;
}

std::function<void()> Session::BeginSummary() {
  if (!fault().ok()) return nullptr;
  struct Gathered {  // which a thread that is left behind may go on to use
    Metrics own;
    std::vector<Metrics> told;
    std::vector<std::int64_t> rows;
  };
  auto gathered = std::make_shared<Gathered>();
  gathered->own = observation_->observer()->metrics.Read();
  if (topology_.size == 1) return [gathered] { Print({gathered->own}); };
  auto signature = std::make_shared<core::Signature>();
  signature->kind = core::OpKind::kAllGather;
  signature->dtype = core::DType::kU8;
  signature->shape = {static_cast<std::int64_t>(sizeof(Metrics))};
  auto work = std::make_shared<core::Work>();
  work->request.key = core::Key::Named(core::kWorldSet, "#the table at the end");
  work->request.asked = std::move(signature);
  work->rows = 1;
  work->input = &gathered->own;
  work->allocate_output = [gathered](const std::vector<std::int64_t>& rows) -> void* {
    gathered->rows = rows;
    gathered->told.resize(static_cast<std::size_t>(std::accumulate(rows.begin(), rows.end(), 0)));
    return gathered->told.data();
  };
  work->keep_alive = gathered;
  // A rank that leaves early, without a table, must not be waited for: its leaving fails this.
  if (!Submit(work, /*will_wait=*/true).ok()) return nullptr;
  return [this, gathered, handle = work->handle] {
    const bool came = handle->done() && handle->status().ok();
    handle->Observe();
    if (!came || topology_.rank != 0) return;
    std::vector<Metrics> all(static_cast<std::size_t>(topology_.size));
    auto next = gathered->told.begin();
    for (std::size_t rank = 0; rank < gathered->rows.size(); ++rank) {
      if (gathered->rows[rank] == 1) all[rank] = *next++;  // not that of one which has joined
    }
    Print(all);
  };
}

}  // namespace sirtaki::session
